"""The endless sequence of batches that a loop consumes, and the position in it from which another
loop continues.

A `DataSource` or `ArrayData` describes where batches come from and holds no position. A
`BatchIterator` is one walk through it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from fulgurite._src.data.prefetch import prefetch
from fulgurite._src.data.readers import (
    BatchItem,
    Position,
    SeekableReader,
    StatefulReader,
    make_reader,
)
from fulgurite._src.data.resume_hints import get_resume_hint
from fulgurite._src.data.seekable import Seed, SeekableSource, find_changes
from fulgurite._src.data.sources import ResumePromise, as_data
from fulgurite._src.sharding import ProcessShard
from fulgurite._src.waits import Wait, WaitAbandoned
from fulgurite.errors import DataError, exit_as_error


class BatchIterator(Iterator[BatchItem], AbstractContextManager["BatchIterator", None]):
    """One walk through a source, batch by batch, over one or more epochs.

    A source that is not in memory is read by a thread; its exceptions arrive as they are, after the
    batches before them.

    From the `position` of an item, a `SeekableSource` such as `ArrayData` seeks, and a
    `StatefulSource` gets its state back. Any other source is *replayed*: a new pass begins, without
    its first batches. Where `DataSource.resume` is `restart`, the position does not count.

    What was read ahead is not lost to the next walk: a `StatefulSource` is left right after the
    batch consumed last, and the next walk through an iterator begins with what was read of it and
    not consumed.

    Example:
        from fulgurite.plugins import BatchIterator

        with BatchIterator(data, seed=0, epochs=1) as batches:
            for item in batches:
                print(item.batch, item.epoch_end)

    Attributes:
        data: what it walks through.
        epoch_length: batches in the last epoch that ended, before that what `len()` says, or None.
        description: what the source is, in words.
        label: what errors call the source.
        is_resumable: whether a walk can begin at a position. An iterator can if it is a
            `StatefulSource`, and a `StatefulSource` if it has no limit.
        resume: whether it then continues with the same batches, as `DataSource.resume` says; None
            where nobody knows.
        resume_hint: what is known of sources of this library; empty if nothing is.
        process: which part of each batch is read, and how many parts there are.
        is_shared: whether the position is that of all processes together, as for a
            `SeekableSource`; in other sources each process has its own.
    """

    def __init__(
        self,
        data: Any,
        *,
        seed: Seed,
        position: Position | None = None,
        limit: int | None = None,
        epochs: int | None = None,
        process: ProcessShard = (0, 1),
        restore_on_close: bool = False,
    ) -> None:
        """Begin a walk.

        Args:
            data: an `ArrayData`, a `DataSource`, or any iterable of batches.
            seed: for the order of a `SeekableSource`, or of a source with `set_run_seed`, that has
                no seed of its own.
            position: where to begin; the beginning by default.
            limit: the largest number of batches an epoch.
            epochs: the number of epochs; without end by default.
            process: which part of each batch of a `SeekableSource` is read. Any other source yields
                what is for its own process.
            restore_on_close: leave a `StatefulSource` as it was at the beginning, instead of after
                the batch consumed last.

        Raises:
            DataError: the position does not fit the data. While iterating: an epoch is empty, or a
                batch holds anything but numbers.
        """
        self.data = data
        self.process = process
        options = as_data(data)
        if options.resume == "restart":
            position = None
        position = position or {"epoch": 0, "batch": 0}
        self._reader = make_reader(options, seed, limit, epochs, process)
        self.epoch_length = self._reader.epoch_length
        self.is_resumable = self._reader.is_resumable
        known: ResumePromise | None = "exact" if self._reader.is_exact else None
        # A limit cuts off a source that would be exact otherwise.
        self.resume = known if options.resume in (None, "exact") else options.resume
        self.resume_hint = get_resume_hint(options.source)
        self.is_shared = isinstance(self._reader, SeekableReader)
        self.description = self._reader.description
        self.label = "the data source"
        if options.name is not None:
            self.label += f" {options.name!r}"
            self.description = f"{options.name}: {self.description}"
        self._check_position(position, options.source)
        items = self._reader.iter_items(position)
        self._items = prefetch(items, options.prefetch) if options.prefetch else items
        self._wait = Wait(self.label)
        self._is_abandoned = False
        self._ahead: deque[BatchItem] = deque()
        self._num_consumed: int = position["batch"]
        self._restore_on_close = restore_on_close
        self._observers: list[Callable[[BatchItem], object]] = []
        # Where the source is left by `close`.
        self._final_position = self._reader.get_position()

    def __next__(self) -> BatchItem:
        item = self._ahead.popleft() if self._ahead else self._read_item()
        if item is None:
            raise StopIteration
        self._note_consumed(item)
        return item

    def look_ahead(self, number: int = 0) -> BatchItem | None:
        """Return an item that is not consumed yet, or None after the last one.

        Args:
            number: how many items come before it.
        """
        while len(self._ahead) <= number:
            item = self._read_item()
            if item is None:
                return None
            self._ahead.append(item)
        return self._ahead[number]

    def consume(self, count: int = 1) -> None:
        """Take items that were looked at: the next walk begins after them.

        Args:
            count: how many.
        """
        for _ in range(count):
            self._note_consumed(self._ahead.popleft())

    def observe(self, observer: Callable[[BatchItem], object]) -> None:
        """Have a function called with each item that is consumed from now on, on the thread that
        consumes it; what it takes delays every step."""
        self._observers.append(observer)

    def iter_known_batches(self) -> Iterator[tuple[int, Any]]:
        """Yield batches of which the shapes are known before they are read, one of each kind, each
        with the number of batches that come before it. Nothing is consumed.

        These are the batches of a list, and those that a `SeekableSource` knows of.
        """
        for number, batch in self._reader.iter_known_batches():
            yield (number - self._num_consumed) % (self.epoch_length or 1), batch

    def peek(self) -> Any:
        """Return the next batch, which stays the next; raise a DataError if the data has ended."""
        item = self.look_ahead()
        if item is None:
            raise DataError("the data has ended: there is no next batch.")
        return item.batch

    def close(self) -> None:
        """End the walk and its thread.

        Waits at most a few seconds for a source that is busy with a batch. One that was abandoned
        is left as it is.
        """
        self._ahead.clear()
        self._items.close()
        if not self._is_abandoned:
            self._reader.set_position(self._final_position)
        self._final_position = {}

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note_consumed(self, item: BatchItem) -> None:
        self._reader.note_consumed(item)
        for observer in self._observers:
            observer(item)
        if not self._restore_on_close:
            self._final_position = item.position
        self._num_consumed += 1
        if item.epoch_end:
            self.epoch_length = self._num_consumed
            self._num_consumed = 0

    def _read_item(self) -> BatchItem | None:
        """Return the next item, or None at the end."""
        try:
            with self._wait, exit_as_error(DataError, self.label):
                return next(self._items, None)
        except WaitAbandoned:
            self._is_abandoned = True
            raise

    def _check_position(self, position: Position, source: Any) -> None:
        start = f"the data ({type(source).__name__}) cannot resume from {position}"
        is_seekable = isinstance(source, SeekableSource)
        current = list(source.get_identity()) if is_seekable else []
        changes = find_changes(position.get("identity", current), current)
        if changes:
            raise DataError(
                f"the data ({type(source).__name__}) is not that of the run: {'; '.join(changes)}. "
                "Its batches would be others: resume with the data that the run had"
            )
        # An empty epoch is reported when it is read, not as a position past its end.
        is_beyond_end = self.epoch_length is not None and position["batch"] >= max(
            self.epoch_length, 1
        )
        if is_beyond_end:
            raise DataError(
                f"{start}: its epochs have {self.epoch_length} batches. Give the run's data, with "
                f"the batch size, number of examples and limit that it had; this is "
                f"{self.description}"
            )
        needs_state = "source" in position and not isinstance(self._reader, StatefulReader)
        needs_resume = any(position.values()) and not self.is_resumable
        if needs_state or needs_resume:
            raise DataError(
                f"{start}. It must be the run's data, and iterable again or with get_state(), "
                "set_state(state) and no limit."
            )
