"""What is read of a traced program that is executed operation by operation, and one operation."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""The names under which operations hold the program that they run once."""
CALLS = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "remat2",
        "checkpoint",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
    }
)
"""The operations that run a program once."""


def get_called_program(equation: JaxprEqn) -> Jaxpr | ClosedJaxpr:
    """Return the program that one of `CALLS` runs."""
    return next(equation.params[name] for name in _CALLED if name in equation.params)


def find_needed_variables(
    program: Jaxpr,
    results: Sequence[bool],
    ends_at: Callable[[JaxprEqn], bool] = lambda equation: False,
) -> set[Any]:
    """Return the variables that some results of a program are computed from, and these results.

    Args:
        program: the program.
        results: True for these results.
        ends_at: True for operations whose inputs do not count.
    """
    pairs = zip(program.outvars, results, strict=True)
    needed = {var for var, flag in pairs if flag and not isinstance(var, Literal)}
    for equation in reversed(program.eqns):
        if not needed.isdisjoint(equation.outvars) and not ends_at(equation):
            needed |= {var for var in equation.invars if not isinstance(var, Literal)}
    return needed


def find_needed_carry(
    body: Jaxpr,
    results: Sequence[bool],
    num_constants: int,
    num_carry: int,
    ends_at: Callable[[JaxprEqn], bool],
) -> tuple[bool, ...]:
    """Return which results of an iteration some results of a whole loop are computed from, in that
    iteration or through later ones.

    Args:
        body: takes constants, what is carried, and slices; gives what is carried, and rows.
        results: True for these results of the loop.
        num_constants: how many constants there are.
        num_carry: how many arrays are carried.
        ends_at: as of `find_needed_variables`.
    """
    carried = body.invars[num_constants : num_constants + num_carry]
    flags = tuple(results)
    while True:
        variables = find_needed_variables(body, flags, ends_at)
        needed_next = (*(var in variables for var in carried), *([False] * len(flags)))
        wider = tuple(flag or needed_next[index] for index, flag in enumerate(flags))
        if wider == flags:
            return flags
        flags = wider


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


def execute_equation(program: Jaxpr, equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Return the results of one operation of a program, as jax computes them.

    Args:
        program: the program.
        equation: the operation.
        inputs: what it receives.
    """
    arrays = {
        variable: array
        for variable, array in zip(equation.invars, inputs, strict=True)
        if not isinstance(variable, Literal)
    }
    single = Jaxpr(
        (), list(arrays), equation.outvars, [equation], equation.effects, program.debug_info
    )
    return jaxpr_as_fun(ClosedJaxpr(single, ()))(*arrays.values())


def is_empty_loop(equation: JaxprEqn) -> bool:
    """Return whether an operation is a loop of no iterations, which makes no number itself."""
    return equation.primitive.name == "scan" and equation.params["length"] == 0


def split_scan(params: dict[str, Any]) -> tuple[int, int]:
    """Return the number of constants and of carried arrays of a scan, in any version of jax."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, *_ = params["ft_in"].unpack()
    return len(constants), len(carry)
