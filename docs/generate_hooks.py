"""Write `hooks.md`, the reference of all hooks, from their specifications.

python docs/generate_hooks.py
"""

import ast
import inspect
import textwrap
from pathlib import Path

from fulgurite._src.plugins.markers import HookMetadata
from fulgurite.plugins import find_hookspecs, hookspecs

PAGE = Path(__file__).with_name("hooks.md")
EXAMPLES = Path(__file__).with_name("hook_examples.py")

INTRODUCTION = """\
# Hooks

<!-- Written by docs/generate_hooks.py from the hook specifications: change the text there. -->

A plugin is an object whose methods carry `@fg.hookimpl` and have the names of hooks. A method takes the arguments that
it needs, by name, and may leave out the others. Hooks are called in the order of the plugins: as listed, unless
`after`, `before` or `requires` says otherwise. A hook that no plugin implements costs nothing.
[Writing a plugin](writing-a-plugin.md) shows hooks at work.
"""

KINDS = {
    "build": "Called before anything is compiled.",
    "traced": (
        "Pure functions that become part of the compiled step. They run while it is traced, perhaps"
        " several times, and cost nothing else afterwards. `ctx` gives each plugin random keys of"
        " its own."
    ),
    "event": (
        "Called on the host, between steps. An exception ends the run, after `on_exception` of"
        " every plugin, unless `around_fit` or `fit_context` raises it."
    ),
    "logger": (
        "Receive the records of a run, in step order. If a logger raises, there is one message, it"
        " gets no more records, and it is listed in `result.failures`; it ends the run only if it"
        " has `required = True`."
    ),
    "persistence": "Save and restore a run.",
}


def page() -> str:
    """Return the text of the page."""
    metadata = find_hookspecs(hookspecs)
    functions = [
        node
        for node in ast.parse(inspect.getsource(hookspecs)).body
        if isinstance(node, ast.FunctionDef)
    ]
    parts = [INTRODUCTION]
    for kind, about in KINDS.items():
        parts.append(f"## {kind.capitalize()} hooks\n\n{about}\n")
        for function in functions:
            if metadata[function.name].kind == kind:
                parts.append(_write_entry(function, metadata[function.name]))
    return "\n".join(parts)


def _write_entry(function: ast.FunctionDef, metadata: HookMetadata) -> str:
    name = function.name
    arguments = [f"{arg.arg}: {_format_annotation(arg.annotation)}" for arg in function.args.args]
    signature = ", ".join(["self", *arguments])
    description, _, listed = (ast.get_docstring(function) or "").partition("\n\nArgs:\n")
    return (
        f"### {name}\n\n```python\ndef {name}({signature}) -> {_format_annotation(function.returns)}\n"
        f"```\n\n{description}\n\n{_write_arguments(listed)}\n"
        f"*Kind:* {metadata.kind}. *Called:* {metadata.when} "
        f"*Several plugins:* {metadata.combine.value}\n\n"
        f"```python\n{_example(name)}\n```\n"
    ).replace("\n\n\n", "\n\n")


def _write_arguments(text: str) -> str:
    """Turn the lines of an `Args:` section into a list."""
    items: list[str] = []
    for line in textwrap.dedent(text).splitlines():
        if line.startswith(" "):
            items[-1] += f" {line.strip()}"
        elif line:
            name, _, about = line.partition(": ")
            items.append(f"- `{name}`: {about}")
    return "".join(f"{item}\n" for item in items)


def _example(hook: str) -> str:
    """Return the first implementation of a hook among the examples, with the line of its class."""
    lines = EXAMPLES.read_text(encoding="utf-8").splitlines()
    classes = [node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.ClassDef)]
    for plugin in classes:
        for method in plugin.body:
            if isinstance(method, ast.FunctionDef) and method.name == hook:
                start = method.decorator_list[0].lineno - 1
                return "\n".join([lines[plugin.lineno - 1], *lines[start : method.end_lineno]])
    raise LookupError(f"{EXAMPLES.name} has no example of {hook}")


def _format_annotation(annotation: ast.expr | None) -> str:
    """Return an annotation without the quotes of a forward reference."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return "None" if annotation is None else ast.unparse(annotation)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
