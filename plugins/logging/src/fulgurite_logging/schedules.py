"""The learning rates of optax's optimizers, as the functions that make them hold them.

An optimizer of optax is a pair of functions. Its learning rate is what all together the updates are
multiplied with: constants and schedules that functions of the chain have in their closures, such as
a schedule and the -1 behind it; the state holds no more than a count. So this looks into closures,
which works for what optax itself provides: chains, `masked`, `partition`.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

Schedule = Callable[[Any], Any]


class Multiplier(NamedTuple):
    """What an update function multiplies updates with.

    Attributes:
        scope: the labels of parameter groups, and the numbers of masks, within which it is: it
            multiplies the updates of this scope and of those in it.
        value: a number or a schedule.
    """

    scope: tuple[str | int, ...]
    value: Any

    @property
    def is_rate(self) -> bool:
        """Whether it may be a learning rate, which flips the sign. A schedule says that only when
        it is called; -1 is a sign alone, but for an optimizer that has nothing else."""
        return callable(self.value) or (self.is_negative and not self.is_sign)

    @property
    def is_negative(self) -> bool:
        """Whether it is a number below 0."""
        return not callable(self.value) and bool(np.all(np.asarray(self.value) < 0))

    @property
    def is_sign(self) -> bool:
        """Whether it is -1."""
        return not callable(self.value) and bool(np.all(np.asarray(self.value) == -1))


def find_rates(optimizer: optax.GradientTransformation, opt_state: PyTree) -> dict[str, Array]:
    """Return the learning rates of an optimizer's last update, by the name of the parameter group,
    which is empty where there is one group.

    Args:
        optimizer: the optimizer.
        opt_state: its state after the update, possibly after those of other transformations.

    Returns:
        Nothing, if the optimizer does not show its rates.
    """
    multipliers = list(_walk(optimizer.update, ()))
    counts = [
        state.count for state in jax.tree.leaves(opt_state, is_leaf=_is_count) if _is_count(state)
    ]
    num_schedules = sum(callable(multiplier.value) for multiplier in multipliers)
    if num_schedules > len(counts):
        return {}
    remaining: Iterator[Any] = iter(counts[len(counts) - num_schedules :])
    values = []
    for _, value in multipliers:
        if callable(value):
            # The count is that of the next update.
            value = value(jnp.maximum(next(remaining) - 1, 0))
        values.append(jnp.asarray(value, jnp.float32))
    rates: dict[str, Array] = {}
    for scope in _list_rate_scopes(multipliers):
        factors = [
            value
            for multiplier, value in zip(multipliers, values, strict=True)
            if scope[: len(multiplier.scope)] == multiplier.scope
        ]
        group = "/".join(part for part in scope if isinstance(part, str))
        rates[_make_unique(group, rates)] = -math.prod(factors, start=jnp.float32(1))
    return rates


def _list_rate_scopes(multipliers: list[Multiplier]) -> list[tuple[str | int, ...]]:
    """Return the scopes that have a learning rate of their own, in the order of their states."""
    scopes = [multiplier.scope for multiplier in multipliers if multiplier.is_rate]
    for multiplier in multipliers:
        scope = multiplier.scope
        if multiplier.is_sign and not any(other[: len(scope)] == scope for other in scopes):
            scopes.append(scope)
    return list(dict.fromkeys(scopes))


def _walk(function: Any, scope: tuple[str | int, ...]) -> Iterator[Multiplier]:
    """Yield what an update function multiplies updates with.

    Args:
        function: the function; what it calls is yielded in the order of the states.
        scope: in which it is.
    """
    function = getattr(function, "__func__", function)
    cells = _read_closure(function)
    name = getattr(function, "__qualname__", "")
    if name.startswith("scale_by_schedule."):
        yield Multiplier(scope, cells["step_size_fn"])
    elif name.startswith("scale."):
        if _is_number(cells["step_size"]):
            yield Multiplier(scope, cells["step_size"])
    elif name.startswith("partition."):
        transforms = cells["transforms"]
        # A tree of states holds the entries of a dictionary in this order.
        for label in sorted(transforms):
            yield from _walk(transforms[label].update, (*scope, f"{label}"))
    else:
        if name.startswith("masked."):
            scope = (*scope, id(function))
        for value in cells.values():
            yield from _walk_value(value, scope)


def _walk_value(value: Any, scope: tuple[str | int, ...]) -> Iterator[Multiplier]:
    if isinstance(value, optax.GradientTransformation):
        yield from _walk(value.update, scope)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _walk_value(item, scope)
    elif "update" in getattr(value, "__name__", ""):
        yield from _walk(value, scope)


def _is_number(value: Any) -> bool:
    """Return whether a value is a real number, or an array of them, that is known now."""
    if isinstance(value, jax.core.Tracer):
        return False
    return isinstance(value, int | float | np.number | np.ndarray | jax.Array)


def _read_closure(function: Any) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    if code is None or not function.__closure__:
        return {}
    return {
        name: cell.cell_contents
        for name, cell in zip(code.co_freevars, function.__closure__, strict=True)
    }


def _make_unique(name: str, taken: dict[str, Any]) -> str:
    """Return a name that is not taken, with a number if need be."""
    if name not in taken:
        return name
    number = 2
    while (candidate := f"{name}/{number}" if name else f"{number}") in taken:
        number += 1
    return candidate


def _is_count(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)
