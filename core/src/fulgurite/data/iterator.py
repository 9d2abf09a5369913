"""The endless sequence of batches that a loop consumes, and the place in it from which another loop
goes on."""

import json
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from operator import length_hint
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax
import numpy as np

from fulgurite.data.sources import ArrayData, Seed, Stateful, as_array, as_data
from fulgurite.errors import DataError

Place = dict[str, Any]
Share = tuple[int, int]


class BatchItem(NamedTuple):
    """A batch, whether it is the last of its epoch, and the place right after it, as a JSON
    value."""

    batch: Any
    epoch_end: bool
    position: Place


Items = Generator[BatchItem, None, None]


class BatchIterator(Iterator[BatchItem], AbstractContextManager["BatchIterator", None]):
    """The items of a source, at most `limit` an epoch and `epochs` epochs in all. `seed` and
    `process` are for `ArrayData`; any other source yields what is for its own process.

    An epoch's end is known at its last batch, because the feed looks one batch ahead. A source that
    is not in memory is read by a thread; its exceptions arrive as they are, after the batches
    before them.

    From the `position` of an item, `ArrayData` seeks, and a `Stateful` source is restored if there
    is no limit. Another
    one is *replayed*: a new pass begins, without its first batches. An iterator is `resumable` only
    if `Stateful`. What goes on with the same batches for certain is `exact`; a replayed source is
    where it is a list or tuple. The place in a source that is `shared`, an `ArrayData`, is that of
    all processes together; in others each has its own; `told` is what the source is, in words. A
    `Stateful` source is left right after the batch consumed last, and not where reading ahead came
    to; with `keep`, as it was found.

    `epoch_length` is that of the last epoch that ended, before that what `len()` says, or None. A
    `DataError` is raised for a position that does not fit the data, an empty epoch, and anything
    but numbers in a batch."""

    def __init__(
        self,
        data: Any,
        *,
        seed: Seed,
        position: Place | None = None,
        limit: int | None = None,
        epochs: int | None = None,
        process: Share = (0, 1),
        restore_on_close: bool = False,
    ) -> None:
        data = as_data(data)
        source, at = data.source, position or {"epoch": 0, "batch": 0}
        stateful, once = isinstance(source, Stateful), isinstance(source, Iterator)
        length = -1 if once else length_hint(source, -1)
        self.epoch_length = None if length < 0 else min(length, limit or length)
        self.resumable = limit is None if stateful else not once
        self.exact = self.resumable and (stateful or isinstance(source, ArrayData | Sequence))
        self.shared = isinstance(source, ArrayData)
        self.description = repr(source) if self.shared else type(source).__name__
        self._number: int = at["batch"]
        beyond = self.epoch_length is not None and at["batch"] >= max(self.epoch_length, 1)
        if ("source" in at and not stateful) or (any(at.values()) and not self.resumable) or beyond:
            need = "It must be the run's data, and iterable again or with get_state(), set_state(state) and no limit."
            raise DataError(f"the data ({type(source).__name__}) cannot resume from {at}. {need}")
        if isinstance(source, ArrayData):
            items = _iter_arrays(source, seed, at, self.epoch_length or 0, epochs, process)
        else:
            items = _iter_source(source, at, limit, epochs, data.copy)
        self._items = _prefetch(items, data.prefetch) if data.prefetch else items
        self._ahead: BatchItem | None = None
        self._source: Any = source
        self._restore_on_close = restore_on_close
        self._left: Any = (
            {"source": _get_source_state(self._source)} if stateful and restore_on_close else {}
        )

    def __next__(self) -> BatchItem:
        item = next(self._items) if self._ahead is None else self._ahead
        self._ahead = None
        self._left = self._left if self._restore_on_close else item.position
        self._number += 1
        if item.epoch_end:
            self.epoch_length, self._number = self._number, 0
        return item

    def peek(self) -> Any:
        """The next batch, which stays the next. A `DataError` if the data has ended."""
        self._ahead = self._ahead or next(self._items, None)
        if self._ahead is None:
            raise DataError("the data has ended: there is no next batch.")
        return self._ahead.batch

    def close(self) -> None:
        """Ends the feed and its thread; waits at most a few seconds for a source that is busy with
        a batch."""
        self._ahead = None
        self._items.close()
        if "source" in self._left:
            self._source.set_state(self._left["source"])
        self._left = {}

    def __exit__(self, *_: object) -> None:
        self.close()


def _iter_arrays(
    data: ArrayData, seed: Seed, at: Place, length: int, epochs: int | None, process: Share
) -> Items:
    epoch, start = at["epoch"], at["batch"]
    while epochs is None or epoch < epochs:
        batches = data.iter_epoch(epoch, seed=seed, start=start, process=process)
        for number, batch in enumerate(islice(batches, length - start), start + 1):
            last = number == length
            yield BatchItem(batch, last, {"epoch": epoch + last, "batch": 0 if last else number})
        epoch, start = epoch + 1, 0


def _iter_source(
    source: Any, at: Place, limit: int | None, epochs: int | None, copy: bool
) -> Items:
    epoch, number, restored = at["epoch"], at["batch"], "source" in at
    stateful, once = isinstance(source, Stateful), isinstance(source, Iterator)
    rest = restored or (stateful and not once)
    if restored:
        source.set_state(at["source"])
    while epochs is None or epoch < epochs:
        start = number
        batches = islice(iter(source), 0 if restored else start, limit)
        prepared = (
            (_as_arrays(batch, copy), _get_source_state(source) if stateful else None)
            for batch in batches
        )
        for (batch, state), last in _mark_last(prepared):
            number += 1
            place = {"epoch": epoch + last, "batch": 0 if last else number}
            yield BatchItem(batch, last, {**place, "source": state} if stateful else place)
        # A source restored to the end of an epoch, now or by a feed before, may first give the rest
        # of it, nothing.
        if number == start and not (rest and start == 0):
            why = "it is empty, is shorter than it was, or can be iterated only once"
            raise DataError(
                f"the data ({type(source).__name__}) has no batch {start} in epoch {epoch}: {why}."
            )
        if once:
            return
        epoch += number > start
        number, restored, rest = 0, False, False


def _mark_last(items: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item with whether it is the last one. An exception from looking ahead waits for the item
    before it."""
    following = next(items, None)
    while following is not None:
        item = following
        try:
            following = next(items, None)
        except Exception:
            yield item, False
            raise
        yield item, following is None


def _as_arrays(batch: Any, copy: bool) -> Any:
    """The batch with an array for every leaf."""
    if not all(
        type(leaf) is np.ndarray and leaf.dtype.kind in "biufc" for leaf in jax.tree.leaves(batch)
    ):
        for path, node in jax.tree_util.tree_leaves_with_path(batch, is_leaf=_is_numbers):
            if _is_numbers(node):
                gap = f"data{jax.tree_util.keystr(path)} is a list of {len(node)} numbers"
                raise DataError(f"{gap}, each an array of its own: give one array, np.asarray(...)")
        batch = jax.tree_util.tree_map_with_path(as_array, batch)
    return jax.tree.map(lambda array: array.copy(), batch) if copy else batch


def _is_numbers(node: Any) -> bool:
    return (
        isinstance(node, list)
        and len(node) > 1
        and all(isinstance(one, int | float) for one in node)
    )


def _get_source_state(source: Stateful) -> Any:
    """The source's state, as a value that the source cannot change any more."""
    try:
        return json.loads(json.dumps(source.get_state()))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"get_state() of the data ({type(source).__name__}) is not a JSON value: {error}"
        ) from error


def _prefetch(items: Items, depth: int) -> Items:
    """The same items, made by a thread that is at most `depth` of them ahead."""
    queue: SimpleQueue[BatchItem | BaseException | None] = SimpleQueue()
    free, stopped = threading.Semaphore(depth), threading.Event()

    def produce() -> None:
        try:
            for item in items:
                free.acquire()
                if stopped.is_set():
                    return
                queue.put(item)
            queue.put(None)
        except BaseException as error:
            queue.put(error)
        finally:
            items.close()

    thread = threading.Thread(target=produce, name="fulgurite-data", daemon=True)
    thread.start()
    try:
        while (item := queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            free.release()
            yield item
    finally:
        stopped.set()
        free.release()
        thread.join(timeout=5.0)
