"""Arrays in the middle of a step, and what made them not finite."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from fulgurite_replay.culprits import Culprit, as_numbers
from fulgurite_replay.example_axes import NO_AXES, Axes


@dataclass(frozen=True, eq=False)
class Value:
    """An array in the middle of a step.

    Attributes:
        array: the array.
        has_nan: whether an element is NaN.
        has_inf: whether an element is infinite.
        culprit: what made it not finite; None if it is finite.
        label: what it is called, if it is an array of the state or of the batch.
        example_axes: along which of its axes examples of the batch are.
    """

    array: Any
    has_nan: bool = False
    has_inf: bool = False
    culprit: Culprit | None = None
    label: str | None = None
    example_axes: Axes = NO_AXES

    @property
    def is_finite(self) -> bool:
        return not (self.has_nan or self.has_inf)


def look_at(array: Any, label: str | None = None) -> Value:
    """Return an array with what of it is not finite."""
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return Value(array, label=label)
    if bool(jnp.isfinite(array).all()) if not _is_on_host(array) else _is_finite_on_host(array):
        return Value(array, label=label)
    has_nan = bool(jnp.isnan(array).any())
    return Value(array, has_nan, bool(jnp.isinf(array).any()), label=label)


def _is_on_host(array: Any) -> bool:
    return isinstance(array, np.ndarray) or all(
        device.platform == "cpu" for device in array.devices()
    )


def _is_finite_on_host(array: Any) -> bool:
    # Without a program of its own for each shape.
    numbers = as_numbers(array)
    return numbers is None or bool(np.isfinite(numbers).all())


def get_first(culprits: Iterable[Culprit | None]) -> Culprit:
    """Return the one that was executed first."""
    known = [culprit for culprit in culprits if culprit is not None]
    return min(known, key=lambda culprit: culprit.number)


def stack(values: Sequence[Value]) -> Value:
    """Return the results of all iterations as one array."""
    culprits = [value.culprit for value in values if value.culprit is not None]
    stacked = look_at(jnp.stack([value.array for value in values]))
    return replace(stacked, culprit=get_first(culprits) if culprits else None)
