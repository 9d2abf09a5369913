"""The check of a data source: that a run that resumes gets the batches of one that continued."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import fulgurite as fg
import jax
import numpy as np
from fulgurite.errors import FulguriteError
from fulgurite.plugins import BatchItem, BatchIterator

from fulgurite_testing.compare import find_difference

_AFTER = 3
"""How many batches are compared after each position: the one after it, and some more, because a
source may keep what it had read ahead."""


class SourceFailure(AssertionError):
    """A data source that does not keep what it promises."""


def check_source(build_source: Callable[[], Any], *, num_batches: int = 12) -> None:
    """Raise if a run could not resume on a data source as the source promises.

    A source that promises `exact` or `replay` must give the same batches each time it is built, and
    from each position on, in a new source, as a new process would have it. Of one that promises
    `restart` only what it yields is looked at. See `fulgurite.DataSource`.

    Example:
        import fulgurite as fg
        from fulgurite_testing import check_source


        def build_source():
            return fg.DataSource([{"x": np.ones((4, 2))}] * 5, prefetch=2)


        check_source(build_source)

    Args:
        build_source: called without arguments; returns the source as it is in a new process, or a
            `fg.DataSource` that holds it.
        num_batches: how many batches to look at. They should be more than an epoch has, and more
            than a shuffle buffer holds.

    Raises:
        SourceFailure: it names the batch, and the position that it was resumed from.
    """
    # A thread that reads ahead writes before and after the copies are made, as it comes.
    _check_not_overwritten(*_read(lambda: _read_nothing_ahead(build_source), None, num_batches))
    items, copies = _read(build_source, None, num_batches)
    promise = _get_promise(build_source)
    if promise is None:
        raise SourceFailure(
            "the source promises nothing, so that no run can resume on it: give it get_state() and "
            "set_state(state), or say fg.DataSource(source, resume='replay') or 'restart'"
        )
    if promise == "restart":
        return
    for number, item in enumerate(items[:-1]):
        remaining = min(_AFTER, len(items) - number - 1)
        where = f"resumed after batch {number} of {len(items)}, at {item.position}"
        try:
            resumed = _read(build_source, item.position, remaining)[0]
        except FulguriteError as error:
            raise SourceFailure(f"{where}: {error}") from error
        if len(resumed) < remaining:
            raise SourceFailure(f"{where}, the source ends after {len(resumed)} batches")
        for index, (resumed_item, expected) in enumerate(
            zip(resumed, copies[number + 1 :], strict=False), number + 1
        ):
            difference = find_difference(resumed_item.batch, expected)
            if difference is not None:
                raise SourceFailure(
                    f"{where}, the source gives another batch {index}: {difference}. It promises "
                    f"{promise!r}: its state must say everything, shuffle buffers and random "
                    "numbers included, and each pass must be the same where there is none"
                )


def _read(
    build_source: Callable[[], Any], position: Any, num_batches: int
) -> tuple[list[BatchItem], list[Any]]:
    """Return the next items of a new source from a position on, and copies of their batches."""
    items: list[BatchItem] = []
    copies: list[Any] = []
    with BatchIterator(build_source(), seed=0, position=position) as batches:
        for item in islice(batches, num_batches):
            items.append(item)
            copies.append(jax.tree.map(np.array, item.batch))
    return items, copies


def _read_nothing_ahead(build_source: Callable[[], Any]) -> fg.DataSource:
    source = build_source()
    data = source if isinstance(source, fg.DataSource) else fg.DataSource(source)
    return replace(data, prefetch=0)


def _get_promise(build_source: Callable[[], Any]) -> str | None:
    with BatchIterator(build_source(), seed=0) as batches:
        return batches.resume


def _check_not_overwritten(items: list[BatchItem], copies: list[Any]) -> None:
    for number, (item, copy) in enumerate(zip(items, copies, strict=True)):
        if find_difference(item.batch, copy) is not None:
            raise SourceFailure(
                f"batch {number} was written to after it had been yielded, while jax may still use "
                "its memory: yield new arrays, or say fg.DataSource(source, copy=True)"
            )
