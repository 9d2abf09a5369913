"""What is read of a traced program before it is executed operation by operation."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal


def find_needed_variables(program: Jaxpr, results: Sequence[bool]) -> set[Any]:
    """Return the variables that some results of a program are computed from, and these results.

    Args:
        program: the program.
        results: True for these results.
    """
    pairs = zip(program.outvars, results, strict=True)
    needed = {var for var, flag in pairs if flag and not isinstance(var, Literal)}
    for equation in reversed(program.eqns):
        if not needed.isdisjoint(equation.outvars):
            needed |= {var for var in equation.invars if not isinstance(var, Literal)}
    return needed


def find_last_uses(program: Jaxpr) -> dict[int, list[Any]]:
    """Return the variables of which an operation is the last to need them, by its index."""
    last: dict[Any, int] = {}
    for index, equation in enumerate(program.eqns):
        for variable in (*equation.invars, *equation.outvars):
            if not isinstance(variable, Literal):
                last[variable] = index
    for variable in program.outvars:
        if not isinstance(variable, Literal):
            last.pop(variable, None)
    uses: dict[int, list[Any]] = {}
    for variable, index in last.items():
        uses.setdefault(index, []).append(variable)
    return uses


def split_scan(params: dict[str, Any]) -> tuple[int, int]:
    """Return the number of constants and of carried arrays of a scan, in any version of jax."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, *_ = params["ft_in"].unpack()
    return len(constants), len(carry)
