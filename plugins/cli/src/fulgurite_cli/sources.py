"""What the source of installed modules says. They are not imported: that often takes seconds,
because they import jax."""

import ast
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

Definition = ast.FunctionDef | ast.ClassDef

_FLAGS = ("store_true", "store_false", "count", "help", "version")
"""The actions of options that no value follows."""
_TRANSPARENT_DECORATORS = {"hide_internal_frames"}
"""Those of Fulgurite that leave the arguments of a function as they are."""


def read_description(entry: EntryPoint) -> str:
    """Return the first paragraph of the docstring of a command, on one line; an empty string where
    there is no source to read."""
    tree = _parse(entry.module)
    definition = _get_definitions(tree).get(entry.attr) if tree else None
    if definition is None:
        return ""
    paragraph, *_ = (ast.get_docstring(definition) or "").split("\n\n")
    return " ".join(paragraph.split()).removesuffix(".")


def read_options(entry: EntryPoint) -> dict[str, bool]:
    """Return the options, such as `--run`, that a command adds to its parser, each with whether a
    value follows it: in its function, in those of its module that it calls, and in functions
    `add_...` that the module imports."""
    options = {"--help": False, **dict(_iter_options(entry.module, entry.attr, set()))}
    return dict(sorted(options.items()))


def _iter_options(
    module: str, name: str, visited: set[tuple[str, str]]
) -> Iterator[tuple[str, bool]]:
    """Yield the options that a function adds, each with whether a value follows it.

    Args:
        module: of the function.
        name: of the function.
        visited: modules and names of functions that were read already; it grows.
    """
    tree = _parse(module)
    definition = _get_definitions(tree).get(name) if tree else None
    if tree is None or definition is None or (module, name) in visited:
        return
    visited.add((module, name))
    imports = _get_imports(tree)
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            yield from _iter_option_names(node)
        if isinstance(node, ast.Name):
            yield from _iter_options(module, node.id, visited)
            if node.id.startswith("add_") and node.id in imports:
                yield from _iter_options(*imports[node.id], visited)


def _iter_option_names(call: ast.Call) -> Iterator[tuple[str, bool]]:
    actions = [keyword.value for keyword in call.keywords if keyword.arg == "action"]
    is_flag = any(isinstance(node, ast.Constant) and node.value in _FLAGS for node in actions)
    for argument in call.args:
        if isinstance(argument, ast.Constant) and str(argument.value).startswith("--"):
            yield str(argument.value), not is_flag


def read_parameters(target: str) -> set[str] | None:
    """Return the names of the arguments of a function or a class.

    Args:
        target: `module:name`.

    Returns:
        None if the source does not say it plainly: there are decorators, or classes above it that
        are not found.
    """
    module, _, name = target.partition(":")
    return _read_parameters(module, name, frozenset())


def _read_parameters(
    module: str, name: str, visited: frozenset[tuple[str, str]]
) -> set[str] | None:
    tree = _parse(module)
    if tree is None or (module, name) in visited:
        return None
    visited |= {(module, name)}
    definition = _get_definitions(tree).get(name)
    if definition is None:
        origin = _get_imports(tree).get(name)
        return _read_parameters(*origin, visited) if origin else None
    if isinstance(definition, ast.FunctionDef):
        return _get_arguments(definition)
    methods = {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef)}
    if "__init__" in methods:
        return _get_arguments(methods["__init__"])
    decorators = [ast.unparse(node) for node in definition.decorator_list]
    is_plain = all(text.partition("(")[0] == "dataclass" for text in decorators)
    if "__new__" in methods or definition.keywords or not is_plain:
        return None
    # Fields that are not arguments are among them: what sets those is answered after the imports.
    names = {
        node.target.id
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for base in definition.bases:
        inherited = _read_parameters(module, ast.unparse(base), visited)
        if inherited is None:
            return None
        names |= inherited
    return names


def _get_arguments(function: ast.FunctionDef) -> set[str] | None:
    decorators = {ast.unparse(node) for node in function.decorator_list}
    if decorators - _TRANSPARENT_DECORATORS:
        return None
    arguments = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    return arguments - {"self"}


def _parse(module: str) -> ast.Module | None:
    source = _find_source(module)
    if source is None:
        return None
    try:
        return ast.parse(source.read_bytes())
    except (OSError, ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _get_definitions(tree: ast.Module) -> dict[str, Definition]:
    return {node.name: node for node in tree.body if isinstance(node, Definition)}


def _get_imports(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Return module and name of what a module imports from others, by the name that it has."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0
        for alias in node.names
    }


def _find_source(module: str) -> Path | None:
    """Return the file of a module, which is not imported; `find_spec` of a module in a package
    would import the package."""
    package, *parts = module.split(".")
    try:
        spec = find_spec(package)
    except ValueError:  # the main program has none
        return None
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin)
    if parts:
        folder = source.parent.joinpath(*parts)
        source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    return source if source.is_file() else None
