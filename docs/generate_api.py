"""Writes `api.md`, the reference of all public names, from their docstrings. It reads the sources
and imports none.

python docs/generate_api.py
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TypeGuard

PAGE = Path(__file__).with_name("api.md")
ROOT = Path(__file__).parents[1]

INTRODUCTION = """\
# API

<!-- Written by docs/generate_api.py from docstrings: change them there. -->

Everything that a user calls: `import fulgurite as fg`, and each plugin by its package. `help()` shows the same text.
The methods that a plugin implements are in [Hooks](hooks.md).
"""

CORE = {
    "fulgurite": "fulgurite",
    "fulgurite.metrics": "fulgurite.metrics",
    "fulgurite.tree.paths": "fulgurite.tree.paths",
    "fulgurite.errors": "fulgurite.errors",
    "fulgurite_logging.media": "fulgurite_logging.media",
}
SECTION = re.compile(r"(Arguments|Attributes|Raises):")
Definition = ast.ClassDef | ast.FunctionDef


def page() -> str:
    """The text of the page."""
    parts = [INTRODUCTION]
    for module, title in (CORE | _plugins()).items():
        parts.append(
            f"## {title}\n\n{_text(ast.get_docstring(_tree(title)) if title != 'fulgurite' else None)}"
        )
        parts += [_entry(name, *found) for name, found in _public(module)]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _plugins() -> dict[str, str]:
    """The packages of the plugins."""
    packages = [
        folder.name
        for folder in sorted(ROOT.glob("plugins/*/src/*/"))
        if (folder / "__init__.py").is_file()
    ]
    return {f"{name}.api" if name == "fulgurite_testing" else name: name for name in packages}


def _public(module: str) -> Iterator[tuple[str, tuple[str, Definition]]]:
    """What a module has for others: what it imports under the same name, else what it defines."""
    tree = _tree(module)
    exported = next((ast.literal_eval(node.value) for node in tree.body if _is_all(node)), [])
    imports = [
        (node.module, alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.asname == alias.name or alias.name in exported
    ]
    if imports:
        yield from (
            (name, found)
            for source, name in imports
            if (found := _definition(source, name)) is not None
        )
    else:
        for node in tree.body:
            if isinstance(node, Definition) and not node.name.startswith("_"):
                yield node.name, (module, node)


def _definition(module: str, name: str) -> tuple[str, Definition] | None:
    """Where a name is defined, through modules that import it."""
    for node in _tree(module).body:
        if isinstance(node, Definition) and node.name == name:
            return module, node
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and any(alias.name == name for alias in node.names)
        ):
            return (
                _definition(node.module, name) if re.match(r"fulgurite[._]", node.module) else None
            )
    return None


@cache
def _tree(module: str) -> ast.Module:
    package, _, rest = module.partition(".")
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent.joinpath(*rest.split(".")) if rest else Path(spec.origin).parent
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _entry(name: str, module: str, node: Definition) -> str:
    parts = [
        f"### {name}\n\n```python\n{_signature(name, node, module)}\n```\n\n{_text(ast.get_docstring(node))}"
    ]
    for method in _methods(module, node) if isinstance(node, ast.ClassDef) else ():
        if (method.name.startswith("_") and method.name != "__call__") or _is_hook(method):
            continue
        about = ast.get_docstring(method)
        if about or method.name == "of":
            parts.append(
                "####"
                f" {name}.{method.name}\n\n```python\n{_signature(method.name, method)}\n```\n\n{_text(about)}"
            )
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _bases(module: str, node: ast.ClassDef) -> list[tuple[str, ast.ClassDef]]:
    """A class and those that it derives from, as far as they are ours, the class itself first."""
    bases = [(module, node)]
    for base in node.bases:
        path = ast.unparse(base).split("[")[0]
        found = (
            _definition("fulgurite", path[3:])
            if path.startswith("fg.")
            else _definition(module, path)
        )
        if found is not None and isinstance(found[1], ast.ClassDef):
            bases += _bases(found[0], found[1])
    return bases


def _methods(module: str, node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Those of the class, and of a base that is not public itself."""
    seen = set[str]()
    for _, base in _bases(module, node):
        for method in base.body if base is node or base.name.startswith("_") else ():
            if isinstance(method, ast.FunctionDef) and method.name not in seen:
                seen.add(method.name)
                yield method


def _signature(name: str, node: Definition, module: str = "") -> str:
    """How it is called: a class by its `__init__`, or by the fields of a dataclass or module."""
    if isinstance(node, ast.ClassDef):
        bases = [base for _, base in _bases(module, node)]
        for base in bases:
            for one in base.body:
                if isinstance(one, ast.FunctionDef) and one.name == "__init__":
                    return _wrapped(name, _arguments(one), "")
        fields = {
            field.partition(":")[0]: field for base in reversed(bases) for field in _fields(base)
        }
        return _wrapped(name, list(fields.values()), "")
    returns = f" -> {_written(node.returns)}" if node.returns else ""
    if any(ast.unparse(one) in ("property", "cached_property") for one in node.decorator_list):
        return f"{name}{returns.replace(' -> ', ': ')}"
    return _wrapped(name, _arguments(node), returns)


def _wrapped(name: str, arguments: list[str], returns: str) -> str:
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) <= 100:
        return line
    return "\n".join([f"{name}(", *(f"    {argument}," for argument in arguments), f"){returns}"])


def _arguments(function: ast.FunctionDef) -> list[str]:
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    arguments = [_argument(one, default) for one, default in zip(positional, defaults, strict=True)]
    arguments = arguments[1:] if positional and positional[0].arg in ("self", "cls") else arguments
    if given.vararg:
        arguments.append(f"*{_argument(given.vararg, None)}")
    elif given.kwonlyargs:
        arguments.append("*")
    arguments += [
        _argument(one, default)
        for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return arguments + ([f"**{_argument(given.kwarg, None)}"] if given.kwarg else [])


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg + (f": {_written(argument.annotation)}" if argument.annotation else "")
    return text if default is None else f"{text} = {_code(default)}"


def _fields(node: ast.ClassDef) -> list[str]:
    fields = []
    for one in node.body:
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
            continue
        text = f"{one.target.id}: {_written(one.annotation)}"
        default = "" if one.value is None else _code(one.value)
        if one.target.id == "_":
            fields.append("*")
        elif (
            not one.target.id.startswith("_")
            and "ClassVar" not in text
            and "init=False" not in default
        ):
            made = "field(" in default
            plain = re.search(r"[( ]default=([^,()]+)[,)]", default)
            shown = f" = {default}" if default and not made else f" = {plain[1]}" if plain else ""
            shown = " = ..." if made and not plain and "default" in default else shown
            fields.append(text + shown)
    return fields


def _written(annotation: ast.expr | None) -> str:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return "None" if annotation is None else _code(annotation)


def _code(node: ast.expr) -> str:
    """An expression, with the quotes that this project writes."""
    text = ast.unparse(node)
    return text if '"' in text else text.replace("'", '"')


def _text(docstring: str | None) -> str:
    """A docstring as Markdown: what is listed under `Arguments:` and the like becomes a list."""
    lines: list[str] = []
    listed = False
    for line in (docstring or "").splitlines():
        if SECTION.fullmatch(line):
            listed = True
            lines += [f"*{line[:-1]}*", ""]
        elif listed and re.match(r" {4}\S", line):
            names, colon, about = line.strip().partition(": ")
            lines.append(f"- `{names}`: {about}" if colon else f"- {line.strip()}")
        elif listed and line.strip():
            lines.append(f"  {line.strip()}" if line.startswith(" ") else line)
            listed = line.startswith(" ")
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _is_hook(method: ast.FunctionDef) -> bool:
    return any(ast.unparse(one).endswith("hookimpl") for one in method.decorator_list)


def _is_all(node: ast.stmt) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
