"""What was read from an iterator and not consumed: the next walk begins with it.

A thread reads ahead, and the end of an epoch is only known once the batch after it was asked for.
What was read that way can be put back into no iterator, so it waits here.
"""

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any, NamedTuple


class Unread:
    """The batches of one iterator that were read and not consumed, in order.

    Whoever reads it adds batches; whoever consumes them takes them away.

    Attributes:
        waiting: the batches.
    """

    def __init__(self) -> None:
        self.waiting: deque[Any] = deque()
        # A walk that was abandoned may have left a thread that still waits for a batch.
        self._reading = threading.Lock()

    def read(
        self, iterator: Iterator[Any], convert: Callable[[Any], Any], *, is_new_walk: bool
    ) -> Iterator[Any]:
        """Yield the batches of the iterator, converted; in a new walk first those that wait here.

        Args:
            iterator: the one that these are the batches of.
            convert: called with each batch that the iterator yields.
            is_new_walk: False for another pass of the walk that read those that wait here.
        """
        if is_new_walk:
            with self._reading:
                first_batches = self.waiting.copy()
            while first_batches:
                yield first_batches.popleft()
        while True:
            with self._reading:
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                batch = convert(batch)
                self.waiting.append(batch)
            yield batch


class _Entry(NamedTuple):
    """The batches of an iterator that others hold.

    Attributes:
        iterator: a weak reference to it, or itself where there can be none.
        unread: its batches.
    """

    iterator: Any
    unread: Unread


_entries: dict[int, _Entry] = {}
"""By the id of the iterator. Not by its hash, which it may define in its own way."""


def get_unread(source: Any, iterator: Iterator[Any]) -> Unread:
    """Return what waits of an iterator, for as long as anyone holds it.

    Args:
        source: what was iterated.
        iterator: what `iter(source)` returned.
    """
    # Another walk may begin with the same iterator: with a source that is one, or with the
    # generator that a source returns every time. Other iterators may be reset in between, such as
    # that of a torch DataLoader with persistent workers.
    if iterator is not source and not isinstance(iterator, GeneratorType):
        return Unread()
    _forget_iterators_without_owner()
    key = id(iterator)
    entry = _entries.get(key)
    if entry is None:
        entry = _Entry(_refer_to(iterator), Unread())
        _entries[key] = entry
    return entry.unread


def _refer_to(iterator: Iterator[Any]) -> Any:
    key = id(iterator)
    try:
        return weakref.ref(iterator, lambda _: _entries.pop(key, None))
    except TypeError:
        return iterator


def _forget_iterators_without_owner() -> None:
    """Remove the iterators that nobody but this module holds.

    Those of built-in types, such as `zip` and `iter(list)`, take no weak reference.
    """
    for key, entry in list(_entries.items()):
        # One reference is the entry's, and one the argument's.
        is_strong = not isinstance(entry.iterator, weakref.ref)
        if is_strong and sys.getrefcount(entry.iterator) <= 2:
            _entries.pop(key, None)
