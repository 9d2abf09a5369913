"""Write `api.md`, the reference of all public names, from their docstrings.

The sources are parsed, not imported.

python docs/generate_api.py
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeGuard

PAGE = Path(__file__).with_name("api.md")
ROOT = Path(__file__).parents[1]

INTRODUCTION = """\
# API

<!-- Written by docs/generate_api.py from docstrings: change them there. -->

Everything that a user calls: `import fulgurite as fg`, and each plugin by its package. `help()` shows the same text.
The methods that a plugin implements are in [Hooks](hooks.md).

A test runs the examples. They use `fg`, `jax`, `jnp`, `np`, `eqx` and `optax` as these are usually imported, a small `model` with
its `data`, an `engine`, and for metrics `logits`, `labels`, `preds`, `targets` and a `mask`.
"""

CORE = [
    "fulgurite",
    "fulgurite.metrics",
    "fulgurite.fit.monitor",
    "fulgurite.tree.paths",
    "fulgurite.errors",
    "fulgurite_logging.media",
]
# Its package imports the public names from another module when the first one is used.
SOURCES = {"fulgurite_testing": "fulgurite_testing.api"}
# What a reader looks for first; the others follow in the order of their imports.
FIRST = ["Module", "Engine"]
SECTION = re.compile(r"(Args|Attributes|Example|Raises|Returns|Yields):")
Node = ast.ClassDef | ast.FunctionDef


class Definition(NamedTuple):
    """A class or function, and the module that defines it."""

    module: str
    node: Node


def page() -> str:
    """Return the text of the page."""
    parts = [INTRODUCTION]
    for title in [*CORE, *_list_plugin_packages()]:
        # What the core's own docstring says stands in the introduction.
        about = None if title == "fulgurite" else ast.get_docstring(_parse(title))
        parts.append(f"## {title}\n\n{_format_docstring(about)}")
        entries = list(_iter_public(SOURCES.get(title, title)))
        entries.sort(key=lambda entry: FIRST.index(entry[0]) if entry[0] in FIRST else len(FIRST))
        for name, definition in entries:
            parts.append(_format_entry(name, definition))
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _list_plugin_packages() -> list[str]:
    folders = sorted(ROOT.glob("plugins/*/src/*/"))
    return [folder.name for folder in folders if (folder / "__init__.py").is_file()]


# --- finding definitions ---


def _iter_public(module: str) -> Iterator[tuple[str, Definition]]:
    """Yield the public names of a module: what it re-exports, or else what it defines."""
    tree = _parse(module)
    exported = next((ast.literal_eval(node.value) for node in tree.body if _is_all(node)), [])
    # A package that imports lazily names its imports for type checkers only.
    branches = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [
        (node.module, alias.name)
        for node in [*tree.body, *(node for branch in branches for node in branch.body)]
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.asname == alias.name or alias.name in exported
    ]
    for source, name in imports:
        definition = _find_definition(source, name)
        if definition is not None:
            yield name, definition
    if not imports:
        for node in tree.body:
            if isinstance(node, Node) and not node.name.startswith("_"):
                yield node.name, Definition(module, node)


def _find_definition(module: str, name: str) -> Definition | None:
    """Return where a name is defined, or None if it is not ours. Follows re-exports."""
    for node in _parse(module).body:
        if isinstance(node, Node) and node.name == name:
            return Definition(module, node)
        if isinstance(node, ast.ImportFrom) and node.module:
            if any(alias.name == name for alias in node.names):
                is_ours = re.match(r"fulgurite[._]", node.module)
                return _find_definition(node.module, name) if is_ours else None
    return None


@cache
def _parse(module: str) -> ast.Module:
    package, _, rest = module.partition(".")
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent
    if rest:
        path = path.joinpath(*rest.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _list_bases(definition: Definition) -> list[Definition]:
    """Return a class and those of its bases that are ours, the class itself first."""
    bases = [definition]
    assert isinstance(definition.node, ast.ClassDef)
    for expression in definition.node.bases:
        path = ast.unparse(expression).split("[")[0]
        if path.startswith("fg."):
            base = _find_definition("fulgurite", path.removeprefix("fg."))
        else:
            base = _find_definition(definition.module, path)
        if base is not None and isinstance(base.node, ast.ClassDef):
            bases += _list_bases(base)
    return bases


def _iter_methods(definition: Definition) -> Iterator[ast.FunctionDef]:
    """Yield the methods of a class, and of its bases that are not public themselves."""
    names = set[str]()
    for base in _list_bases(definition):
        if base.node is not definition.node and not base.node.name.startswith("_"):
            continue
        for method in base.node.body:
            if isinstance(method, ast.FunctionDef) and method.name not in names:
                names.add(method.name)
                yield method


# --- one entry ---


def _format_entry(name: str, definition: Definition) -> str:
    """Return the heading, signature and docstring of a name; of a class with its methods."""
    parts = [
        f"### {name}\n\n```python\n{_format_signature(name, definition)}\n```\n\n"
        + _format_docstring(ast.get_docstring(definition.node))
    ]
    if isinstance(definition.node, ast.ClassDef):
        for method in _iter_methods(definition):
            about = ast.get_docstring(method)
            is_private = method.name.startswith("_") and method.name != "__call__"
            if about and not is_private and not _is_hook(method):
                signature = _format_function(method.name, method)
                parts.append(
                    f"#### {name}.{method.name}\n\n```python\n{signature}\n```\n\n"
                    + _format_docstring(about)
                )
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _format_signature(name: str, definition: Definition) -> str:
    """Return how it is called: a class by `__init__`, or by the fields of a dataclass or module."""
    if isinstance(definition.node, ast.FunctionDef):
        return _format_function(name, definition.node)
    bases = [base.node for base in _list_bases(definition)]
    for base in bases:
        for node in base.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                return _wrap_signature(name, _list_arguments(node), "")
    fields = {}
    for base in reversed(bases):
        assert isinstance(base, ast.ClassDef)
        for field in _list_fields(base):
            fields[field.partition(":")[0]] = field
    return _wrap_signature(name, list(fields.values()), "")


def _format_function(name: str, function: ast.FunctionDef) -> str:
    decorators = {ast.unparse(decorator) for decorator in function.decorator_list}
    returns = _format_annotation(function.returns) if function.returns else ""
    if decorators & {"property", "cached_property"}:
        return f"{name}: {returns}"
    return _wrap_signature(name, _list_arguments(function), f" -> {returns}" if returns else "")


def _wrap_signature(name: str, arguments: list[str], returns: str) -> str:
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) <= 100:
        return line
    return "\n".join([f"{name}(", *(f"    {argument}," for argument in arguments), f"){returns}"])


def _list_arguments(function: ast.FunctionDef) -> list[str]:
    """Return the arguments of a function as they are written, without `self` and `cls`."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    arguments = [
        _format_argument(arg, default) for arg, default in zip(positional, defaults, strict=True)
    ]
    if positional and positional[0].arg in ("self", "cls"):
        arguments = arguments[1:]
    if args.vararg:
        arguments.append(f"*{_format_argument(args.vararg, None)}")
    elif args.kwonlyargs:
        arguments.append("*")
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        arguments.append(_format_argument(arg, default))
    if args.kwarg:
        arguments.append(f"**{_format_argument(args.kwarg, None)}")
    return arguments


def _format_argument(argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg
    if argument.annotation:
        text += f": {_format_annotation(argument.annotation)}"
    return text if default is None else f"{text} = {_format_code(default)}"


def _list_fields(node: ast.ClassDef) -> list[str]:
    """Return the fields of a dataclass or Equinox module as arguments of its constructor."""
    fields = []
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name = statement.target.id
        annotation = _format_annotation(statement.annotation)
        default = "" if statement.value is None else _format_code(statement.value)
        if name == "_":
            fields.append("*")
        elif not name.startswith("_") and "ClassVar" not in annotation:
            if "init=False" not in default:
                fields.append(f"{name}: {annotation}{_format_default(default)}")
    return fields


def _format_default(default: str) -> str:
    """Return ` = VALUE` for a field; of `field(default=...)` the value, of a factory an ellipsis."""
    if "field(" not in default:
        return f" = {default}" if default else ""
    value = re.search(r"[( ]default=([^,()]+)[,)]", default)
    if value:
        return f" = {value[1]}"
    return " = ..." if "default" in default else ""


def _format_annotation(annotation: ast.expr | None) -> str:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return "None" if annotation is None else _format_code(annotation)


def _format_code(node: ast.expr) -> str:
    """Return an expression with double quotes."""
    text = ast.unparse(node)
    return text if '"' in text else text.replace("'", '"')


# --- docstrings ---


def _format_docstring(docstring: str | None) -> str:
    """Return a docstring as Markdown: sections become lists, examples become code blocks."""
    lines: list[str] = []
    section: list[str] = []
    title = ""
    for line in (docstring or "").splitlines():
        heading = SECTION.fullmatch(line)
        if title and (heading or (line and not line.startswith(" "))):
            lines += _format_section(title, section)
            title = ""
        if heading:
            title = heading[1]
            section = []
        elif title:
            section.append(line)
        else:
            lines.append(line)
    if title:
        lines += _format_section(title, section)
    return "\n".join(lines).rstrip() + "\n"


def _format_section(title: str, lines: list[str]) -> list[str]:
    text = textwrap.dedent("\n".join(lines)).strip("\n")
    if title == "Example":
        return ["```python", *text.splitlines(), "```", ""]
    items = [f"*{'Arguments' if title == 'Args' else title}*", ""]
    for line in text.splitlines():
        name, colon, about = line.partition(": ")
        if line.startswith(" "):
            items.append(f"  {line.strip()}")
        elif title in ("Returns", "Yields"):
            items.append(line)
        elif colon:
            items.append(f"- `{name}`: {about}")
        elif line:
            items.append(f"- {line}")
    return [*items, ""]


def _is_hook(method: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).endswith("hookimpl") for decorator in method.decorator_list)


def _is_all(node: ast.stmt) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
