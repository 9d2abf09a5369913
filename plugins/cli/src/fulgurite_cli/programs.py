"""Program files: what their text says, before anything heavy is imported."""

import ast
import os
from pathlib import Path
from typing import Any

from fulgurite_config.errors import suggest

FUNCTION = "experiment"
"""The function of a program that returns what it trains."""


def find_mistyped_argument(path: str, overrides: list[str]) -> str | None:
    """Return what is wrong with the first override that a program has no argument for.

    Only the text of the program is read, because importing it imports jax: a mistake is answered
    in a tenth of the time. What the text does not tell is left to the program itself.

    Args:
        path: of the program.
        overrides: texts `name=value`.

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
        if name not in names:
            return f"{FUNCTION} has no argument {name!r}. {suggest(name, names)}"
    return None


def read_argument_names(path: str) -> list[str] | None:
    """Return the names of the arguments of a program's function `experiment`.

    Returns:
        None if the file cannot be read, or does not define the function plainly at its top level.
    """
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    functions = [
        statement
        for statement in tree.body
        if isinstance(statement, ast.FunctionDef) and statement.name == FUNCTION
    ]
    if len(functions) != 1 or functions[0].decorator_list or functions[0].args.kwarg:
        return None
    arguments = functions[0].args
    return [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]


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
