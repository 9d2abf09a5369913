"""What a number that a step computes is a mean over.

A mean over tokens, or over examples of unequal weight, cannot be averaged over batches without the
sum of its weights. `Mean.compute` and the functions of `fulgurite_losses` return plain numbers,
with which one can calculate as with any other. So they note the weight of what they return, and the
engine looks it up for the very number that a step returns. A number that is computed from it, such
as a multiple, is another one, of which nothing is known.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jaxtyping import Array

_weights: ContextVar[list[tuple[Any, Array]] | None] = ContextVar("fulgurite_weights", default=None)
"""Means and their weights. The means are kept, so that no other object gets the identity of one."""


@contextmanager
def collect_weights() -> Iterator[None]:
    """Let `find_weight` know what `note_weight` is told within the block."""
    token = _weights.set([])
    try:
        yield
    finally:
        _weights.reset(token)


def note_weight(mean: Any, weight: Any) -> Any:
    """Note the weight of a mean, if a step is being traced, and return the mean.

    Args:
        mean: a scalar.
        weight: a scalar: the number or the total weight of the values.
    """
    notes = _weights.get()
    if notes is not None:
        notes.append((mean, weight))
    return mean


def find_weight(value: Any) -> Any:
    """Return the weight that was noted for this very object, or None."""
    for mean, weight in reversed(_weights.get() or []):
        if mean is value:
            return weight
    return None
