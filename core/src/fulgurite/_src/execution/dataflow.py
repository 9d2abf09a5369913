"""Which results of a traced program are computed from which of its arguments."""

from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

# The operations that run one program, once, with their own arguments and results.
_CALLS = {"jit", "pjit", "closed_call", "remat2", "checkpoint", "custom_jvp_call"}
_CALLS |= {"custom_vjp_call"}


def find_dependent_results(program: ClosedJaxpr, arguments: Sequence[bool]) -> list[bool]:
    """Return which results of a program are computed from some of its arguments.

    Args:
        program: the program.
        arguments: True for these arguments.
    """
    return _spread(program.jaxpr, arguments)


def find_needed_arguments(
    program: ClosedJaxpr, results: Sequence[bool], *, blocked: str | None = None
) -> list[bool]:
    """Return from which arguments of a program some of its results are computed.

    Args:
        program: the program.
        results: True for these results.
        blocked: the name of an operation whose arguments do not count, such as `stop_gradient`.
    """
    return _trace_back(program.jaxpr, results, blocked)


def _spread(program: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    marked = {var for var, is_marked in zip(program.invars, inputs, strict=True) if is_marked}
    for equation in program.eqns:
        flags = [isinstance(var, Var) and var in marked for var in equation.invars]
        if any(flags):
            inner = _get_called_program(equation)
            outputs = [True] * len(equation.outvars) if inner is None else _spread(inner, flags)
            marked |= {var for var, flag in zip(equation.outvars, outputs, strict=True) if flag}
    return [isinstance(var, Var) and var in marked for var in program.outvars]


def _trace_back(program: Jaxpr, outputs: Sequence[bool], blocked: str | None) -> list[bool]:
    pairs = zip(program.outvars, outputs, strict=True)
    needed = {var for var, is_needed in pairs if is_needed and isinstance(var, Var)}
    for equation in reversed(program.eqns):
        flags = [var in needed for var in equation.outvars]
        if not any(flags) or equation.primitive.name == blocked:
            continue
        inner = _get_called_program(equation)
        inputs = [True] * len(equation.invars)
        if inner is not None:
            inputs = _trace_back(inner, flags, blocked)
        pairs = zip(equation.invars, inputs, strict=True)
        needed |= {var for var, is_needed in pairs if is_needed and isinstance(var, Var)}
    return [var in needed for var in program.invars]


def _get_called_program(equation: JaxprEqn) -> Jaxpr | None:
    """Return the program that an operation runs on its own arguments; None for any other, all
    results of which count as computed from all arguments."""
    programs = [
        value.jaxpr if isinstance(value, ClosedJaxpr) else value
        for value in equation.params.values()
        if isinstance(value, ClosedJaxpr | Jaxpr)
    ]
    if equation.primitive.name not in _CALLS or len(programs) != 1:
        return None
    (program,) = programs
    has_same_arguments = len(program.invars) == len(equation.invars)
    return program if has_same_arguments else None
