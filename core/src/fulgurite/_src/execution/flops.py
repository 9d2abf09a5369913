"""Count the floating-point operations of a traced program.

XLA's own estimate (`compiled.cost_analysis()`) counts the body of a loop once and, with several
devices, one device's part: with 16 microbatches it said 108 MFLOP of 1.72 GFLOP. A jaxpr has the
trip counts of its scans and is the program of the whole mesh.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from fulgurite._src.training.nonfinite import FINITE_CHECK

_PER_ELEMENT = frozenset(
    "abs acos acosh add add_any asin asinh atan atan2 atanh cbrt ceil clamp cos cosh cumlogsumexp "
    "cummax cummin cumprod cumsum digamma div erf erf_inv erfc exp exp2 expm1 floor integer_pow "
    "lgamma log log1p logistic max min mul neg nextafter pow rem round rsqrt sign sin sinh sqrt "
    "square sub tan tanh".split()
)
"""Primitives of one operation for each element of their result."""

_PER_OPERAND_ELEMENT = frozenset(
    "argmax argmin reduce_max reduce_min reduce_prod reduce_sum reduce_window_sum".split()
)
"""Primitives of one operation for each element of their operand."""


_NOT_OF_MODEL = (FINITE_CHECK, "rematted_computation")
"""Scopes of equations: the second is JAX's for what `jax.checkpoint` computes a second time."""


def count_flops(program: ClosedJaxpr) -> float:
    """Return the floating-point operations of one run of a program, on all devices together.

    A multiplication and an addition are two operations, so that a product of matrices of shapes
    (m, k) and (k, n) has 2·m·k·n; each element of any other arithmetic is one. The body of a scan
    counts as often as it runs, the body of a `while` loop once, because its trips are known only
    when it runs; the dearest branch of a condition counts. Moving data counts nothing, and neither
    does arithmetic of integers. A step in a dispatch of several is the body of a `while` loop: the
    count is that of one step.

    Args:
        program: such as the `jaxpr` of the hook `on_compile`.

    Example:
        from fulgurite.plugins import count_flops


        def multiply(a, b):
            return a @ b


        program = jax.make_jaxpr(multiply)(jnp.ones((2, 3)), jnp.ones((3, 5)))
        flops = count_flops(program)  # 60.0
    """
    return _sum_equations(program.jaxpr, _count_arithmetic)


def count_model_flops(program: ClosedJaxpr) -> float:
    """Return the floating-point operations that the model FLOPs utilization (MFU) is made of.

    They are those of `count_flops`, with two differences: only products of matrices and
    convolutions count, and what `jax.checkpoint` computes again for the backward pass does not.

    Args:
        program: such as the `jaxpr` of the hook `on_compile`.

    Example:
        from fulgurite.plugins import count_model_flops


        def add_product(a, b):
            return a @ b + 1


        program = jax.make_jaxpr(add_product)(jnp.ones((2, 3)), jnp.ones((3, 5)))
        flops = count_model_flops(program)  # 60.0, without the 10 additions
    """
    return _sum_equations(program.jaxpr, _count_new_product)


def contains_primitive(program: ClosedJaxpr, name: str) -> bool:
    """Return whether a program, or one that it calls, has an operation of this name.

    Args:
        program: such as the `jaxpr` of the hook `on_compile`.
        name: of the primitive, such as `conv_general_dilated`.
    """
    return _has_equation(program.jaxpr, name)


def uses_low_precision(program: ClosedJaxpr) -> bool:
    """Return whether a program computes anything in floating-point numbers of less than 32 bits.

    Args:
        program: such as the `jaxpr` of the hook `on_compile`.
    """
    return _has_low_precision(program.jaxpr)


def _has_low_precision(jaxpr: Jaxpr) -> bool:
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            dtype = getattr(variable.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
                return True
        if any(map(_has_low_precision, _iter_jaxprs(equation))):
            return True
    return False


def _has_equation(jaxpr: Jaxpr, name: str) -> bool:
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            return True
        if any(_has_equation(inner, name) for inner in _iter_jaxprs(equation)):
            return True
    return False


Count = Callable[[JaxprEqn], float | None]
"""The operations of an equation; None where those of the programs in it are its own."""


def _sum_equations(jaxpr: Jaxpr, count: Count) -> float:
    return sum((_sum_equation(equation, count) for equation in jaxpr.eqns), start=0.0)


def _sum_equation(equation: JaxprEqn, count: Count) -> float:
    flops = count(equation)
    if flops is not None:
        return flops
    add_up = _STRUCTURES.get(equation.primitive.name, _sum_inner)
    return add_up(equation, count)


def _sum_inner(equation: JaxprEqn, count: Count) -> float:
    return sum((_sum_equations(inner, count) for inner in _iter_jaxprs(equation)), start=0.0)


def _count_arithmetic(equation: JaxprEqn) -> float | None:
    name = equation.primitive.name
    count = _PRODUCTS.get(name)
    if count is not None:
        return count(equation)
    if name in ("scatter-add", "scatter-mul"):
        return _count_elements([equation.invars[2]])
    if name in _PER_ELEMENT:
        return _count_elements(equation.outvars[:1])
    if name in _PER_OPERAND_ELEMENT:
        return _count_elements(equation.invars[:1])
    return None


def _count_new_product(equation: JaxprEqn) -> float | None:
    """Count a product of the model, computed for the first time."""
    scopes = str(equation.source_info.name_stack)
    if any(scope in scopes for scope in _NOT_OF_MODEL):
        return 0.0
    count = _PRODUCTS.get(equation.primitive.name)
    return None if count is None else count(equation)


def _count_elements(variables: Any) -> float:
    """Return the number of elements that are floating-point or complex numbers."""
    total = 0.0
    for variable in variables:
        aval = variable.aval
        if hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact):
            total += math.prod(aval.shape)
    return total


def _iter_jaxprs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield the programs that an equation calls, such as those of `jit` and `checkpoint`."""
    for name, value in equation.params.items():
        # The rules for derivatives run only where a derivative is taken, and are then equations.
        if name in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd"):
            continue
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


def _count_dot_general(equation: JaxprEqn) -> float:
    (contracting, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape  # pyright: ignore[reportAttributeAccessIssue]
    contracted = math.prod(shape[axis] for axis in contracting)
    return 2.0 * contracted * _count_elements(equation.outvars)


def _count_convolution(equation: JaxprEqn) -> float:
    kernel = equation.invars[1].aval.shape  # pyright: ignore[reportAttributeAccessIssue]
    out_axis = equation.params["dimension_numbers"].rhs_spec[0]
    # The kernel holds the input features of one group, and the result the examples of one.
    per_output = math.prod(size for axis, size in enumerate(kernel) if axis != out_axis)
    return 2.0 * per_output * _count_elements(equation.outvars)


_PRODUCTS: dict[str, Callable[[JaxprEqn], float]] = {
    "dot_general": _count_dot_general,
    "conv_general_dilated": _count_convolution,
}


def _sum_scan(equation: JaxprEqn, count: Count) -> float:
    return equation.params["length"] * _sum_equations(equation.params["jaxpr"].jaxpr, count)


def _sum_while(equation: JaxprEqn, count: Count) -> float:
    return _sum_equations(equation.params["body_jaxpr"].jaxpr, count)


def _find_dearest_branch(equation: JaxprEqn, count: Count) -> float:
    return max(_sum_equations(branch.jaxpr, count) for branch in equation.params["branches"])


def _sum_shard_map(equation: JaxprEqn, count: Count) -> float:
    """Return the count of all devices: the inner program is that of one."""
    mesh = equation.params["mesh"]
    axes = equation.params.get("manual_axes", mesh.axis_names)
    num_devices = math.prod(mesh.shape[axis] for axis in axes)
    return num_devices * _sum_inner(equation, count)


_STRUCTURES: dict[str, Callable[[JaxprEqn, Count], float]] = {
    "scan": _sum_scan,
    "while": _sum_while,
    "cond": _find_dearest_branch,
    "shard_map": _sum_shard_map,
}
