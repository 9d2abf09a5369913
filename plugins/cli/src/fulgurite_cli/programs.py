"""Program files: what their text says, before anything heavy is imported."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fulgurite_config import (
    Name,
    Node,
    get_node_state,
    iter_nodes_by_path,
    normalize_path,
    suggest_name,
)

from fulgurite_cli.sources import read_parameters

FUNCTION = "experiment"
"""The function of a program that returns what it trains."""
NODES = ("L", "L.partial")
"""What is called for a part of a configuration."""
# In bytes; the tree of a program takes up to 100 times as much memory.
_MAX_SIZE = 4 * 2**20


def find_mistyped_argument(path: str, overrides: list[str]) -> str | None:
    """Return what is wrong with the first override that a program has no argument for.

    Only the text of the program is read, because importing it imports jax: a mistake is answered
    in a tenth of the time. What the text does not tell is left to the program itself.

    Args:
        path: of the program.
        overrides: strings `name=value`.

    Returns:
        The error, or None.
    """
    names = read_argument_names(path)
    if not names:  # it has none, or returns a configuration
        return None
    for override in overrides:
        name, equals, _ = override.partition("=")
        if not equals:
            return f"{override!r} is not an argument: write name=value"
        name = normalize_path(name)
        if name not in names:
            return f"{FUNCTION} has no argument {name!r}. {suggest_name(name, names)}"
    return None


def find_mistyped_path(config: Node, override: str) -> str | None:
    """Return what is wrong with an override that sets an argument which a call does not have. What
    is called is not imported; its source is read.

    Args:
        config: the configuration.
        override: a string `path=value`.

    Returns:
        The error, or None if there is none, or the source does not tell.
    """
    text = normalize_path(override.partition("=")[0])
    place, _, name = text.rpartition(".")
    node = dict(iter_nodes_by_path(config)).get(place)
    target = None if node is None else get_node_state(node).target
    if not isinstance(target, Name):
        return None
    names = read_parameters(target.text)
    if names is None or name in names:
        return None
    public = [other for other in names if not other.startswith("_")]
    return f"{text} matches nothing: {place} has no {name!r}. {suggest_name(name, public)}"


def read_argument_names(path: str) -> list[str] | None:
    """Return the names of the arguments of a program's function `experiment`.

    Returns:
        None if the file cannot be read, or does not define the function plainly at its top level.
    """
    function = _read_function(path)
    if function is None or function.decorator_list or function.args.kwarg:
        return None
    return [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]


def _read_function(path: str) -> ast.FunctionDef | None:
    try:
        if Path(path).stat().st_size > _MAX_SIZE:
            return None
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    functions = [
        statement
        for statement in tree.body
        if isinstance(statement, ast.FunctionDef) and statement.name == FUNCTION
    ]
    return functions[0] if len(functions) == 1 else None


def read_config_paths(path: str) -> list[str]:
    """Return the paths of values in the configuration that a program's function returns, as far as
    its text tells: what `cfg.name = ...` and the arguments of `L(...)` set.

    Args:
        path: of the program.
    """
    function = _read_function(path)
    if function is None:
        return []
    assignments = list(_iter_assignments(function))
    variables = {target.id: value for target, value in assignments if isinstance(target, ast.Name)}
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    paths = [path for value in returned if value for path in _iter_paths(value, "", variables)]
    roots = [value.id for value in returned if isinstance(value, ast.Name)]
    for target, value in assignments:
        root, _, path = ast.unparse(target).partition(".")
        if root in roots and path:
            paths += _iter_paths(value, path, variables)
    return list(dict.fromkeys(paths))


def _iter_assignments(function: ast.FunctionDef) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets of assignments in a function, each with what is assigned to it."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            yield node.target, node.value


def _iter_paths(value: ast.expr, path: str, variables: dict[str, ast.expr]) -> Iterator[str]:
    """Yield the paths that a value in a configuration brings.

    Args:
        value: the expression that makes it.
        path: where it stands; empty for the whole configuration.
        variables: what the local variables are set to.
    """
    if isinstance(value, ast.Name) and value.id in variables:
        # Without itself: what is set to something of itself would have no end.
        others = {name: other for name, other in variables.items() if name != value.id}
        yield from _iter_paths(variables[value.id], path, others)
        return
    if isinstance(value, ast.Call) and ast.unparse(value.func) in NODES:
        for keyword in value.keywords:
            if keyword.arg is not None:
                name = f"{path}.{keyword.arg}" if path else keyword.arg
                yield from _iter_paths(keyword.value, name, variables)
        return
    if path:
        yield path
    for index, item in enumerate(value.elts if isinstance(value, ast.List) else ()):
        if isinstance(item, ast.Call):
            yield from _iter_paths(item, f"{path}[{index}]", variables)


def find_program(manifest: dict[str, Any]) -> str | None:
    """Return the file in the current directory that has the name of a run's program, and defines
    `experiment`; None if there is none. The file is not imported.

    Args:
        manifest: of the run.
    """
    program = manifest.get("program")
    name = program.get("file") if isinstance(program, dict) else None
    if not isinstance(name, str) or os.path.basename(name) != name:
        return None
    return None if read_argument_names(name) is None else name
