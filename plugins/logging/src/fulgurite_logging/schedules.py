"""The learning rates of optax's optimizers, as the functions that make them hold them.

An optimizer of optax is a pair of functions. Its learning rate is a constant or a schedule that the
last function of the chain has in its closure; the state holds no more than a count. So this looks
into closures, which works for what optax itself provides: chains, `masked`, `partition`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

Schedule = Callable[[Any], Any]


def find_rates(optimizer: optax.GradientTransformation, opt_state: PyTree) -> dict[str, Array]:
    """Return the learning rates of an optimizer's last update, by the name of the parameter group,
    which is empty where there is one group.

    Args:
        optimizer: the optimizer.
        opt_state: its state after the update, possibly after those of other transformations.

    Returns:
        Nothing, if the optimizer does not show its rates.
    """
    multipliers = list(_walk(optimizer.update, ""))
    counts = [
        state.count for state in jax.tree.leaves(opt_state, is_leaf=_is_count) if _is_count(state)
    ]
    num_schedules = sum(callable(rate) for _, rate in multipliers)
    if num_schedules > len(counts):
        return {}
    remaining: Iterator[Any] = iter(counts[len(counts) - num_schedules :])
    rates: dict[str, Array] = {}
    for group, rate in multipliers:
        if callable(rate):
            # The count is that of the next update.
            rate = rate(jnp.maximum(next(remaining) - 1, 0))
        rates[_make_unique(group, rates)] = -jnp.asarray(rate, jnp.float32)
    return rates


def _walk(function: Any, group: str) -> Iterator[tuple[str, Any]]:
    """Yield what an update function multiplies updates with, a number or a schedule.

    Args:
        function: the function; what it calls is yielded in the order of the states.
        group: the name of the parameter group.
    """
    function = getattr(function, "__func__", function)
    cells = _read_closure(function)
    name = getattr(function, "__qualname__", "")
    if name.startswith("scale_by_schedule."):
        yield group, cells["step_size_fn"]
    elif name.startswith("scale."):
        step_size = cells["step_size"]
        # A learning rate flips the sign.
        if isinstance(step_size, int | float) and step_size < 0:
            yield group, step_size
    elif name.startswith("partition."):
        transforms = cells["transforms"]
        # A tree of states holds the entries of a dictionary in this order.
        for label in sorted(transforms):
            yield from _walk(transforms[label].update, f"{group}/{label}" if group else f"{label}")
    else:
        for value in cells.values():
            yield from _walk_value(value, group)


def _walk_value(value: Any, group: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, optax.GradientTransformation):
        yield from _walk(value.update, group)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _walk_value(item, group)
    elif "update" in getattr(value, "__name__", ""):
        yield from _walk(value, group)


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
