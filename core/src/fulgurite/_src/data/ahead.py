"""Batches that are on their way to a device while a loop computes with others."""

from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from fulgurite._src.data.unread import Unread, get_unread

_BATCHES_AHEAD = 2
"""One that the device copies while it computes with the other."""


def iter_ahead(
    source: Any,
    make_iterator: Callable[[], Iterator[Any]],
    convert: Callable[[Any], Any],
    place: Callable[[Any], Any],
    *,
    has_state: bool,
) -> Iterator[Any]:
    """Yield the batches of a source, each of them placed two batches earlier.

    Args:
        source: what is iterated.
        make_iterator: returns the iterator over it.
        convert: called with each batch that the iterator yields.
        place: called with each converted batch; returns what is yielded.
        has_state: whether the source has `get_state` and `set_state`. It is left right after the
            batch yielded last; what is left of an iterator waits for the next walk.
    """
    get_state = source.get_state if has_state else lambda: None
    state = deepcopy(get_state())
    iterator = make_iterator()
    unread = Unread() if has_state else get_unread(source, iterator)
    # Each batch with the state of the source right after it.
    on_the_way: deque[tuple[Any, Any]] = deque()
    batches = unread.read(iterator, convert, is_new_walk=True)
    try:
        for batch in batches:
            on_the_way.append((place(batch), deepcopy(get_state())))
            if len(on_the_way) > _BATCHES_AHEAD:
                placed, state = on_the_way.popleft()
                unread.waiting.popleft()
                yield placed
        while on_the_way:
            placed, state = on_the_way.popleft()
            unread.waiting.popleft()
            yield placed
    finally:
        if has_state and on_the_way:
            source.set_state(state)
