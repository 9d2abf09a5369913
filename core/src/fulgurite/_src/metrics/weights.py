"""What a number that a step computes is a mean over.

A mean over tokens, or over examples of unequal weight, cannot be averaged over batches without the
sum of its weights. `Mean.compute` and the functions of `fulgurite_losses` return plain numbers,
with which one can calculate as with any other. So they note the weight of what they return, and the
engine looks it up for the very number that a step returns. A number that is computed from it, such
as a multiple, is another one, of which nothing is known.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class _Notes:
    """What was noted while a step is traced. Objects are kept, so that no other gets the identity
    of one.

    Attributes:
        means: each with its weight.
        shared: the objects and the hashable value that a weight belongs to, with the weight.
    """

    means: list[tuple[Any, Any]] = field(default_factory=list)
    shared: list[tuple[tuple[Any, ...], Any, Any]] = field(default_factory=list)


_notes: ContextVar[_Notes | None] = ContextVar("fulgurite_weights", default=None)


@contextmanager
def collect_weights() -> Iterator[None]:
    """Let `find_weight` know what `note_weight` is told within the block."""
    token = _notes.set(_Notes())
    try:
        yield
    finally:
        _notes.reset(token)


def note_weight(mean: Any, weight: Any) -> Any:
    """Note the weight of a mean, if a step is being traced, and return the mean.

    Args:
        mean: a scalar, which a loss or metric returns.
        weight: a scalar: the number or the total weight of the values.
    """
    notes = _notes.get()
    if notes is not None:
        notes.means.append((mean, weight))
    return mean


def find_weight(value: Any) -> Any:
    """Return the weight that was noted for this very object, or None."""
    notes = _notes.get()
    for mean, weight in reversed(notes.means if notes else []):
        if mean is value:
            return weight
    return None


def share_weight(objects: tuple[Any, ...], key: Any, compute: Callable[[], Any]) -> Any:
    """Return the weight that was computed for the same objects before in this step, or a new one.

    Terms of a loss that are means over one object are differentiated together.

    Args:
        objects: what the weight is computed from, such as a mask; compared by identity.
        key: what else it depends on; compared by `==`.
        compute: returns the weight, where there is none yet.
    """
    notes = _notes.get()
    for others, other_key, weight in notes.shared if notes else []:
        if key == other_key and all(a is b for a, b in zip(objects, others, strict=True)):
            return weight
    weight = compute()
    if notes is not None:
        notes.shared.append((objects, key, weight))
    return weight
