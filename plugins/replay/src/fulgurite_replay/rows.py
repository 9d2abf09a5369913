"""Where the data has an example of a batch, and which later steps train on it again."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fulgurite as fg
import jax
import numpy as np
from fulgurite.plugins import BatchItem, Seed

from fulgurite_replay.skipping import SkippedBatches

_MAX_SEARCHED = 20_000_000
"""The most rows of later epochs among which an example is looked for."""
_MAX_SHOWN = 5


@dataclass(frozen=True)
class _BatchPlace:
    """Which batch of the data it is.

    Attributes:
        source: of the batches, without options.
        epoch: the number of the epoch, from 0.
        number: of the batch in the epoch, from 0.
        length: batches in an epoch.
        seed: from which the order of the data follows.
    """

    source: Any
    epoch: int
    number: int
    length: int
    seed: Seed


def describe_batch(run: fg.Run, item: BatchItem) -> str | None:
    """Return which batch of the data the next one of a fit is; None where that is not known.

    Args:
        run: the fit.
        item: its next batch.
    """
    place = _find_place(run, item)
    if place is None:
        return None
    if isinstance(place.source, list | tuple):
        return f"the batch is data[{place.number}]"
    return f"the batch is number {place.number} of epoch {place.epoch}, both from 0"


def describe_example(run: fg.Run, item: BatchItem, index: int) -> str | None:
    """Return which row of the data an example of the next batch is; None where the data does not
    know.

    Args:
        run: the fit.
        item: its next batch.
        index: of the example in the batch.
    """
    place = _find_place(run, item)
    if place is None:
        return None
    names = list(_iter_names(place, range(index, index + 1)))
    if not names:
        return None
    steps: list[int] = []
    if isinstance(place.source, fg.ArrayData):
        steps = list(_iter_later_steps(run, place, int(_find_rows(place)[index])))
    return f"the example is {names[0]}{_format_steps(steps)}"


def list_examples(run: fg.Run, item: BatchItem) -> list[str]:
    """Return what the data calls the examples of a batch of a fit, in order, without padding; none
    where it does not know them.

    Args:
        run: the fit.
        item: the batch.
    """
    place = _find_place(run, item)
    if place is None:
        return []
    return list(_iter_names(place, range(_count_examples(item.batch))))


def _iter_names(place: _BatchPlace, indices: range) -> Iterator[str]:
    """Yield what the data calls examples of a batch, without those of padding; nothing where it
    does not know them.

    Args:
        place: of the batch.
        indices: of the examples in the batch.
    """
    if isinstance(place.source, fg.ArrayData):
        rows = _find_rows(place)[indices.start : indices.stop]
        yield from (f"row {row} of the arrays" for row in rows)
        return
    # Batches of fulgurite-data, and sources of one's own that know it.
    trace = getattr(place.source, "trace_row", None)
    if trace is not None:
        for index in indices:
            yield trace(place.number, index, seed=place.seed, epoch=place.epoch)


def _count_examples(batch: Any) -> int:
    """Return the number of examples of a batch up to the last that is not padding."""
    if isinstance(batch, fg.Batch) and batch.mask is not None:
        return int(np.max(np.flatnonzero(batch.mask), initial=-1)) + 1
    return len(jax.tree.leaves(batch)[0])


def _find_place(run: fg.Run, item: BatchItem) -> _BatchPlace | None:
    source, position, length = run.data, item.position, run.data_iterator.epoch_length
    source = source.source if isinstance(source, fg.DataSource) else source
    if isinstance(source, SkippedBatches):
        position = position["source"]["position"]
        source = source.data.source if isinstance(source.data, fg.DataSource) else source.data
        length = len(source) if hasattr(source, "__len__") else None
    if length is None:
        return None
    # The position is that after the batch.
    epoch, number = position["epoch"], position["batch"] - 1
    if number < 0:
        epoch, number = epoch - 1, length - 1
    start = run.step_range.start
    seed = (run.engine.seed, start) if start else run.engine.seed
    return _BatchPlace(source, epoch, number, length, seed)


def _find_rows(place: _BatchPlace) -> np.ndarray:
    """Return the rows of arrays that a batch has, without padding."""
    return next(_iter_row_numbers(place, place.epoch, place.number), np.empty(0, np.int32))


def _iter_row_numbers(place: _BatchPlace, epoch: int, start: int = 0) -> Iterator[np.ndarray]:
    """Yield the rows of the arrays that the batches of an epoch have."""
    data: fg.ArrayData = place.source
    numbers = fg.ArrayData(
        np.arange(data.num_examples, dtype=np.int32),
        data.batch_size,
        shuffle=data.shuffle,
        seed=data.seed,
        remainder="drop" if data.remainder == "drop" else "keep",
    )
    yield from numbers.iter_epoch(epoch, seed=place.seed, start=start)


def _iter_later_steps(run: fg.Run, place: _BatchPlace, row: int) -> Iterator[int]:
    """Yield the later steps of a run that train on a row again, as far as they are known
    cheaply."""
    stop = run.step_range.stop
    first = run.step + 1 - place.number + place.length
    if stop is None or not isinstance(run.data, fg.ArrayData):
        return
    num_epochs = max(stop - first, -1) // place.length + 1
    if num_epochs * place.source.num_examples > _MAX_SEARCHED:
        return
    for index in range(num_epochs):
        batches = _iter_row_numbers(place, place.epoch + 1 + index)
        number = next((number for number, rows in enumerate(batches) if row in rows), place.length)
        step = first + index * place.length + number
        # A limit of batches an epoch may leave it out.
        if number < place.length and step <= stop:
            yield step


def _format_steps(steps: list[int]) -> str:
    if not steps:
        return ""
    shown = ", ".join(map(str, steps[:_MAX_SHOWN]))
    others = len(steps) - _MAX_SHOWN
    more = f" and {others} more" if others > 0 else ""
    return f"; the run trains on it again at step {shown}{more}"
