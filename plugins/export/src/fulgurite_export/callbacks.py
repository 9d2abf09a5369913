"""Operations that call back into Python, which no exported program can do."""

import os
from collections.abc import Iterator
from typing import Any

from fulgurite.errors import ModelError
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

_LIBRARIES = ("equinox", "jax", "jaxlib", "fulgurite")
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in _LIBRARIES)


def check_no_callbacks(program: ClosedJaxpr, name: str) -> None:
    """Raise `ModelError` if a traced function calls back into Python, with the place in the model
    and the remedy.

    Args:
        program: the traced function.
        name: of the function.
    """
    for equations in _iter_equations(program.jaxpr, ()):
        primitive = equations[-1].primitive.name
        if "callback" not in primitive and "debug_print" not in primitive:
            continue
        remedy = "leave it out of what is exported"
        if any("error_if" in str(equation.params.get("name", "")) for equation in equations):
            primitive = "eqx.error_if"
            remedy = (
                "export with the environment variable EQX_ON_ERROR=nan, by which the result is "
                "NaN instead of an error, or leave the check out"
            )
        raise ModelError(
            f"{name}: {_find_place(equations)} calls back into Python ({primitive}), which "
            f"an exported program cannot do: {remedy}"
        )


def _iter_equations(program: Jaxpr, outer: tuple[JaxprEqn, ...]) -> Iterator[tuple[JaxprEqn, ...]]:
    """Yield each operation of a program, after those that it is within."""
    for equation in program.eqns:
        chain = (*outer, equation)
        yield chain
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(part, "jaxpr", part)  # of JAX 0.10 with its constants
                if isinstance(inner, Jaxpr):
                    yield from _iter_equations(inner, chain)


def _find_place(equations: tuple[JaxprEqn, ...]) -> str:
    """Return the innermost line of the user that led to an operation."""
    for equation in reversed(equations):
        traceback: Any = equation.source_info.traceback
        for frame in [] if traceback is None else traceback.frames:
            if not any(package in frame.file_name for package in _PACKAGES):
                return f"{frame.function_name} ({frame.file_name}:{frame.line_num})"
    return "the model"
