"""Along which axes of the arrays of a step the examples of its batch are.

An array may have as many rows as there are examples and none of them: a weight, or its gradient, in
which the examples are summed up. So the axis is followed from the batch through each operation.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from fulgurite_replay.jaxprs import CALLS, get_called_program, split_scan

Axes = frozenset[int]
"""The axes of an array along which examples are: one, none, or the several into which that one was
divided."""
NO_AXES: Axes = frozenset()


def find_axes(equation: JaxprEqn, inputs: Sequence[Axes]) -> list[Axes]:
    """Return the axes of examples of the results of an operation.

    Args:
        equation: the operation.
        inputs: those of what it receives.
    """
    if not any(inputs):
        return [NO_AXES] * len(equation.outvars)
    name = equation.primitive.name
    if name in CALLS:
        return _follow(get_called_program(equation), inputs)
    match name:
        case "scan":
            return _follow_scan(equation, inputs)
        case "while":
            return _follow_while(equation, inputs)
        case "cond":
            branches = [_follow(each, inputs[1:]) for each in equation.params["branches"]]
            return [frozenset().union(*each) for each in zip(*branches, strict=True)]
    rule = _RULES.get(name, _keep)
    return [rule(equation, inputs, _get_shape(variable)) for variable in equation.outvars]


def _follow(program: Jaxpr | ClosedJaxpr, inputs: Sequence[Axes]) -> list[Axes]:
    """Return the axes of the results of a program."""
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    axes: dict[Any, Axes] = dict(zip(jaxpr.invars, inputs, strict=True))

    def get(variable: Any) -> Axes:
        return NO_AXES if isinstance(variable, Literal) else axes.get(variable, NO_AXES)

    for equation in jaxpr.eqns:
        results = find_axes(equation, [get(variable) for variable in equation.invars])
        axes |= zip(equation.outvars, results, strict=True)
    return [get(variable) for variable in jaxpr.outvars]


def _follow_scan(equation: JaxprEqn, inputs: Sequence[Axes]) -> list[Axes]:
    params = equation.params
    num_constants, num_carry = split_scan(params)
    constants = inputs[:num_constants]
    carry = list(inputs[num_constants : num_constants + num_carry])
    xs = inputs[num_constants + num_carry :]
    slices = [drop_first(axes) for axes in xs]

    def follow_once(carry: Sequence[Axes]) -> list[Axes]:
        return _follow(params["jaxpr"], [*constants, *carry, *slices])

    carry = _repeat(lambda carry: follow_once(carry)[:num_carry], carry)
    is_over_examples = any(0 in axes for axes in xs) and not params["reverse"]
    first = frozenset({0}) if is_over_examples else NO_AXES
    rows = follow_once(carry)[num_carry:]
    return [*carry, *(first | {axis + 1 for axis in axes} for axes in rows)]


def _follow_while(equation: JaxprEqn, inputs: Sequence[Axes]) -> list[Axes]:
    params = equation.params
    num_constants = params["cond_nconsts"] + params["body_nconsts"]
    constants = inputs[params["cond_nconsts"] : num_constants]
    carry = list(inputs[num_constants:])
    return _repeat(lambda carry: _follow(params["body_jaxpr"], [*constants, *carry]), carry)


def _repeat(follow: Callable[[list[Axes]], list[Axes]], carry: list[Axes]) -> list[Axes]:
    """Return the axes of what a loop carries, after as many iterations as change them."""
    while True:
        after = [axes | new for axes, new in zip(carry, follow(carry), strict=True)]
        if after == carry:
            return carry
        carry = after


def drop_first(axes: Axes) -> Axes:
    """Return the axes of the parts of an array along its first one."""
    return frozenset(axis - 1 for axis in axes if axis > 0)


Shape = tuple[int, ...]


def _keep(equation: JaxprEqn, inputs: Sequence[Axes], shape: Shape) -> Axes:
    """Axes stay where they are, as far as they are as long as before."""
    same_axes: set[int] = set()
    for variable, axes in zip(equation.invars, inputs, strict=True):
        before = _get_shape(variable)
        if len(before) == len(shape):
            same_axes |= {axis for axis in axes if before[axis] == shape[axis]}
    return frozenset(same_axes - _list_mixed(equation))


def _list_mixed(equation: JaxprEqn) -> set[int]:
    """Return the axes along which an operation changes the order of rows, or computes one from
    others."""
    params = equation.params
    match equation.primitive.name:
        case "rev":
            return {*params["dimensions"]}
        case "sort":
            return {params["dimension"]}
        case "cumsum" | "cumprod" | "cummax" | "cummin" | "cumlogsumexp":
            return {params["axis"]}
    return set()


def _keep_first(equation: JaxprEqn, inputs: Sequence[Axes], shape: Shape) -> Axes:
    """What is written into an array says nothing of its axes."""
    return inputs[0]


def _reduce(equation: JaxprEqn, inputs: Sequence[Axes], shape: Shape) -> Axes:
    params = equation.params
    reduced = params["axes"] if "axes" in params else params["dimensions"]
    return _renumber(inputs[0], reduced)


def _squeeze(equation: JaxprEqn, inputs: Sequence[Axes], shape: Shape) -> Axes:
    return _renumber(inputs[0], equation.params["dimensions"])


def _renumber(axes: Axes, removed: Sequence[int]) -> Axes:
    """Return what axes are called once others are removed."""
    remaining = axes - {*removed}
    return frozenset(axis - sum(other < axis for other in removed) for axis in remaining)


def _transpose(equation: JaxprEqn, inputs: Sequence[Axes], shape: Shape) -> Axes:
    permutation = equation.params["permutation"]
    return frozenset(new for new, old in enumerate(permutation) if old in inputs[0])


def _broadcast(equation: JaxprEqn, inputs: Sequence[Axes], shape: Shape) -> Axes:
    new_axes = equation.params["broadcast_dimensions"]
    before = _get_shape(equation.invars[0])
    return frozenset(new_axes[axis] for axis in inputs[0] if shape[new_axes[axis]] == before[axis])


def _reshape(equation: JaxprEqn, inputs: Sequence[Axes], shape: Shape) -> Axes:
    before = _get_shape(equation.invars[0])
    return frozenset().union(*(_divide(axis, before, shape) for axis in inputs[0]))


def _divide(axis: int, before: Shape, after: Shape) -> Axes:
    """Return the axes into which a reshape divides one; none if it joins it with others."""
    start, length = math.prod(before[:axis]), before[axis]
    if length == 1:
        return NO_AXES  # a single example, which may be anywhere
    parts: set[int] = set()
    for new, size in enumerate(after):
        place = math.prod(after[:new])
        if place >= start and place * size <= start * length and size > 1:
            parts.add(new)
    return frozenset(parts) if math.prod(after[new] for new in parts) == length else NO_AXES


def _dot(equation: JaxprEqn, inputs: Sequence[Axes], shape: Shape) -> Axes:
    contracted, batched = equation.params["dimension_numbers"]
    new_axes: set[int] = set()
    num_batched = len(batched[0])
    first_free = num_batched
    for variable, axes, summed, shared in zip(
        equation.invars, inputs, contracted, batched, strict=True
    ):
        ndim = len(_get_shape(variable))
        free = [axis for axis in range(ndim) if axis not in {*summed, *shared}]
        new_axes |= {new for new, axis in enumerate(shared) if axis in axes}
        new_axes |= {first_free + new for new, axis in enumerate(free) if axis in axes}
        first_free += len(free)
    return frozenset(new_axes)


def _convolve(equation: JaxprEqn, inputs: Sequence[Axes], shape: Shape) -> Axes:
    numbers = equation.params["dimension_numbers"]
    new_axes = set()
    if numbers.lhs_spec[0] in inputs[0] and equation.params["batch_group_count"] == 1:
        new_axes.add(numbers.out_spec[0])
    if numbers.rhs_spec[0] in inputs[1]:
        new_axes.add(numbers.out_spec[1])
    return frozenset(new_axes)


def _gather(equation: JaxprEqn, inputs: Sequence[Axes], shape: Shape) -> Axes:
    numbers = equation.params["dimension_numbers"]
    sizes = equation.params["slice_sizes"]
    before = _get_shape(equation.invars[0])
    of_indices = [axis for axis in range(len(shape)) if axis not in numbers.offset_dims]
    new_axes = {of_indices[axis] for axis in inputs[1] if axis < len(of_indices)}
    left_out = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    in_slices = [axis for axis in range(len(before)) if axis not in left_out]
    for new, axis in zip(numbers.offset_dims, in_slices, strict=True):
        if axis in inputs[0] and sizes[axis] == before[axis]:
            new_axes.add(new)
    batched = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    new_axes |= {of_indices[index] for axis, index in batched if axis in inputs[0]}
    return frozenset(new_axes)


def _get_shape(variable: Any) -> Shape:
    return variable.aval.shape


Rule = Callable[[JaxprEqn, Sequence[Axes], Shape], Axes]
"""Gives the axes of a result of an operation, from those of what it receives and its shape."""
_REDUCTIONS = ("sum", "max", "min", "prod", "and", "or", "xor")
_SCATTERS = ("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter-sub")
_RULES: dict[str, Rule] = {
    **{f"reduce_{name}": _reduce for name in _REDUCTIONS},
    **dict.fromkeys(("reduce", "argmax", "argmin"), _reduce),
    **dict.fromkeys((*_SCATTERS, "scatter_min", "scatter_max", "scatter_sub"), _keep_first),
    "squeeze": _squeeze,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "dot_general": _dot,
    "conv_general_dilated": _convolve,
    "gather": _gather,
}
