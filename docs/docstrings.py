"""How the site reads docstrings: an extension of griffe, which mkdocstrings asks for them."""

import importlib
import inspect
import re
import textwrap
from typing import Any

import griffe

LOSS = "fulgurite_losses.signature.loss"
EXAMPLE = re.compile(r"^Example:\n(?P<code>(?: {4,}.*\n|\n)+)", re.MULTILINE)


class DocstringExtension(griffe.Extension):
    """Shows `Example:` as Python code, the arguments of a class that defines `__new__`, those that
    all losses share, and what a package without `__all__` imports from its own modules."""

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

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Give losses the arguments that their decorator adds.

        Args:
            pkg: the package that was read.
            kwargs: what else griffe says about it.
        """
        for module in pkg.modules.values():
            for function in module.functions.values():
                if any(decorator.callable_path == LOSS for decorator in function.decorators):
                    complete_loss(function)

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


def complete_loss(function: griffe.Function) -> None:
    """Replace `**options` of a loss by what it stands for.

    Args:
        function: as its source has it; what its decorator made of it is imported.
    """
    loss = getattr(importlib.import_module(function.module.path), function.name)
    assert function.docstring is not None
    function.docstring.value = fence_examples(loss.__doc__)
    options = next(
        parameter
        for parameter in function.parameters
        if parameter.kind is griffe.ParameterKind.var_keyword
    )
    del function.parameters[options.name]
    attributes = function.package["signature.LossOptions"].attributes
    for name, attribute in attributes.items():
        default = repr(inspect.signature(loss).parameters[name].default)
        kind = griffe.ParameterKind.keyword_only
        function.parameters.add(
            griffe.Parameter(name, annotation=attribute.annotation, kind=kind, default=default)
        )


def fence_examples(docstring: str) -> str:
    """Return a docstring whose examples are code of Markdown.

    Args:
        docstring: as `inspect.cleandoc` returns it, or as it stands in the source.
    """

    def fence(match: re.Match[str]) -> str:
        code = textwrap.dedent(match["code"]).strip()
        return f"**Example**\n\n```python\n{code}\n```\n\n"

    return EXAMPLE.sub(fence, inspect.cleandoc(docstring) + "\n")
