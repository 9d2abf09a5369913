"""How the site reads docstrings: an extension of griffe, which mkdocstrings asks for them."""

import inspect
import re
import textwrap
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Example:\n(?P<code>(?: {4,}.*\n|\n)+)", re.MULTILINE)


class DocstringExtension(griffe.Extension):
    """Shows `Example:` as Python code, the arguments of a class that defines `__new__`, and what a
    package without `__all__` imports from its own modules."""

    def on_module(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        """Export the names that a package imports from its own modules.

        Args:
            mod: the module that was read.
            kwargs: what else griffe says about it.
        """
        if mod.is_init_module and mod.exports is None:
            mod.exports = [
                name
                for name, path in mod.imports.items()
                if path.startswith(f"{mod.path}.") and not name.startswith("_")
            ]

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change one object after it was read.

        Args:
            obj: a module, class, function or attribute.
            kwargs: what else griffe says about it.
        """
        if obj.docstring is not None:
            obj.docstring.value = fence_examples(obj.docstring.value)
        if obj.is_class and "__new__" in obj.members and "__init__" not in obj.members:
            obj.set_member("__init__", obj.members["__new__"])


def fence_examples(docstring: str) -> str:
    """Return a docstring whose examples are code of Markdown.

    Args:
        docstring: as `inspect.cleandoc` returns it, or as it stands in the source.
    """

    def fence(match: re.Match[str]) -> str:
        code = textwrap.dedent(match["code"]).strip()
        return f"**Example**\n\n```python\n{code}\n```\n\n"

    return EXAMPLE.sub(fence, inspect.cleandoc(docstring) + "\n")
