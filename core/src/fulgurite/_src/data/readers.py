"""How each kind of source is read: its batches in order, each with the position right after it."""

import json
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from itertools import islice, repeat
from operator import length_hint
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from fulgurite._src.data.leaves import as_arrays
from fulgurite._src.data.seekable import Seed, SeekableSource
from fulgurite._src.data.sources import DataSource, StatefulSource, iter_batches
from fulgurite._src.data.unread import Unread, get_unread
from fulgurite._src.sharding import ProcessShard
from fulgurite._src.tree.specs import is_array, is_real_dtype, shape_signature
from fulgurite.errors import DataError, exit_as_error

Position = dict[str, Any]
"""A JSON value: the number of the epoch, that of the next batch in it, and perhaps the state of the
source."""


class BatchItem(NamedTuple):
    """One step's data.

    Example:
        from fulgurite.plugins import BatchIterator

        with BatchIterator(data, seed=0, epochs=1) as batches:
            for item in batches:
                print(item.batch["x"].shape, item.epoch_end)

    Attributes:
        batch: a pytree of arrays.
        epoch_end: whether it is the last batch of its epoch.
        position: the position right after it.
    """

    batch: Any
    epoch_end: bool
    position: Position


Items = Generator[BatchItem, None, None]


@runtime_checkable
class SeededSource(Protocol):
    """A source with an order that follows from the seed of the run, as that of `ArrayData` does."""

    def set_run_seed(self, seed: int) -> None:
        """Take the seed of the run, before each pass."""
        ...


class BatchReader(Protocol):
    """How the items of one kind of source are read, and where the source is left."""

    epoch_length: int | None
    is_resumable: bool
    is_exact: bool
    description: str

    def iter_items(self, position: Position) -> Items:
        """Yield the items from a position on."""
        ...

    def get_position(self) -> Position:
        """Return where the source is now, as far as it holds a position itself."""
        ...

    def set_position(self, position: Position) -> None:
        """Put the source back to a position, if it holds one itself."""
        ...

    def note_consumed(self, item: BatchItem) -> None:
        """Note that an item was consumed; all of them are, in order."""
        ...

    def iter_known_batches(self) -> Iterator[tuple[int, Any]]:
        """Yield one batch of each kind of shapes that is known before it is read, with its number
        in the epoch."""
        ...


class SeekableReader(BatchReader):
    """A `SeekableSource`: any batch of any epoch can be read at once."""

    is_resumable = True
    is_exact = True

    def __init__(
        self,
        source: SeekableSource,
        seed: Seed,
        limit: int | None,
        epochs: int | None,
        process: ProcessShard,
    ) -> None:
        self._source = source
        self._seed = seed
        self._epochs = epochs
        self._process = process
        self.epoch_length = min(len(source), limit or len(source))
        self.description = repr(source)
        identity = list(source.get_identity())
        self._common: Position = {"identity": identity} if identity else {}

    def iter_items(self, position: Position) -> Items:
        epoch = position["epoch"]
        start = position["batch"]
        length = self.epoch_length or 0
        while self._epochs is None or epoch < self._epochs:
            batches = self._source.iter_epoch(
                epoch, seed=self._seed, start=start, process=self._process
            )
            for number, batch in enumerate(islice(batches, length - start), start + 1):
                is_last = number == length
                place = _make_position(epoch, number, is_last)
                yield BatchItem(batch, is_last, place | self._common)
            epoch += 1
            start = 0

    def get_position(self) -> Position:
        return {}

    def set_position(self, position: Position) -> None:
        pass

    def note_consumed(self, item: BatchItem) -> None:
        pass

    def iter_known_batches(self) -> Iterator[tuple[int, Any]]:
        length = self.epoch_length or 0
        for number, batch in self._source.iter_known_batches(self._process):
            if number < length:
                yield number, batch


class ReplayedReader(BatchReader):
    """Any iterable: its passes are read from the beginning, and the first batches left out.

    An iterator has one pass only, and cannot be replayed. It continues where the previous walk
    ended.
    """

    def __init__(
        self, options: DataSource, seed: Seed, limit: int | None, epochs: int | None
    ) -> None:
        self._source = options.source
        # Without the step of a fit that continues: the source itself knows in which pass it is.
        self._run_seed = seed[0] if isinstance(seed, tuple) else seed
        self._copies = options.copy
        self._limit = limit
        self._epochs = epochs
        self._is_one_pass = isinstance(self._source, Iterator)
        length = -1 if self._is_one_pass else length_hint(self._source, -1)
        self.epoch_length = None if length < 0 else min(length, limit or length)
        self.is_resumable = not self._is_one_pass
        self.is_exact = isinstance(self._source, Sequence)
        self.description = type(self._source).__name__
        # Of each pass that is read, from the one that is being consumed on.
        self._unread: deque[Unread] = deque()
        self._has_begun = False

    def iter_items(self, position: Position) -> Items:
        epoch = position["epoch"]
        number = position["batch"]
        num_skipped = self._seek(position)
        may_be_empty = self._may_begin_with_empty_pass(position)
        while self._epochs is None or epoch < self._epochs:
            start = number
            batches = self._add_states(self._iter_pass(num_skipped))
            for (batch, state), is_last in _mark_last(batches):
                number += 1
                yield BatchItem(batch, is_last, _make_position(epoch, number, is_last) | state)
            if number == start and not (may_be_empty and start == 0):
                raise DataError(
                    f"the data ({self.description}) has no batch {start} in epoch {epoch}: it is "
                    "empty, is shorter than it was, or can be iterated only once."
                )
            if self._is_one_pass:
                return
            if number > start:
                epoch += 1
            else:
                self._unread.pop()
            number = 0
            num_skipped = 0
            may_be_empty = False

    def get_position(self) -> Position:
        return {}

    def set_position(self, position: Position) -> None:
        pass

    def note_consumed(self, item: BatchItem) -> None:
        self._unread[0].waiting.popleft()
        if item.epoch_end:
            self._unread.popleft()

    def iter_known_batches(self) -> Iterator[tuple[int, Any]]:
        if not isinstance(self._source, list | tuple):
            return
        signatures = set()
        for number, batch in enumerate(self._source[: self._limit]):
            # What else there is in a batch is converted, or refused, when it is read.
            if not all(map(is_array, jax.tree.leaves(batch))):
                continue
            signature = shape_signature(batch)
            if signature not in signatures:
                signatures.add(signature)
                yield number, batch

    def _iter_pass(self, num_skipped: int) -> Iterator[Any]:
        """Return the batches of one pass, but for the first ones."""
        if isinstance(self._source, SeededSource):
            # At each pass: an evaluation may have read the source in between.
            self._source.set_run_seed(self._run_seed)
        iterator = iter_batches(self._source)
        unread = self._get_unread(iterator)
        convert = partial(as_arrays, copy=self._copies)
        batches = unread.read(iterator, convert, is_new_walk=not self._has_begun)
        batches = islice(batches, self._limit)
        self._has_begun = True
        for _ in islice(batches, num_skipped):
            unread.waiting.popleft()
        self._unread.append(unread)
        return batches

    def _seek(self, position: Position) -> int:
        """Go to a position and return how many batches of the next pass come before it."""
        return position["batch"]

    def _may_begin_with_empty_pass(self, position: Position) -> bool:
        return False

    def _get_unread(self, iterator: Iterator[Any]) -> Unread:
        """Return where the batches of an iterator wait to be consumed."""
        return get_unread(self._source, iterator)

    def _add_states(self, batches: Iterator[Any]) -> Iterator[tuple[Any, Position]]:
        """Return each batch with what the position right after it says besides its number."""
        return zip(batches, repeat({}), strict=False)


class StatefulReader(ReplayedReader):
    """A `StatefulSource`, such as an iterator of grain: it resumes from its own state."""

    def __init__(
        self, options: DataSource, seed: Seed, limit: int | None, epochs: int | None
    ) -> None:
        super().__init__(options, seed, limit, epochs)
        # What is left of a pass after its limit would come first in the next one.
        self.is_resumable = limit is None
        self.is_exact = self.is_resumable

    def get_position(self) -> Position:
        try:
            return {"source": _copy_state(self._source.get_state())}
        except (TypeError, ValueError) as error:
            raise DataError(
                f"get_state() of the data ({self.description}) cannot be saved: {error}. Return "
                "numbers, strings, bytes, NumPy arrays, lists and dictionaries of them"
            ) from error

    def set_position(self, position: Position) -> None:
        if "source" in position:
            self._source.set_state(position["source"])

    def _seek(self, position: Position) -> int:
        self.set_position(position)
        return 0 if "source" in position else position["batch"]

    def _may_begin_with_empty_pass(self, position: Position) -> bool:
        # A source restored to the end of an epoch, now or by a walk before, may first give the rest
        # of it, which is nothing.
        return "source" in position or not self._is_one_pass

    def _get_unread(self, iterator: Iterator[Any]) -> Unread:
        return Unread()  # its state says what comes next

    def _add_states(self, batches: Iterator[Any]) -> Iterator[tuple[Any, Position]]:
        for batch in batches:
            yield batch, self.get_position()


def _copy_state(state: Any) -> Any:
    """Return a copy of a source's state, which the source may change after it has returned it.

    Raises:
        TypeError: it holds what no checkpoint can.
    """
    try:
        # Many times faster than a walk in Python, and asked for with every batch.
        return json.loads(json.dumps(state))
    except TypeError:
        return _copy_state_value(state)


def _copy_state_value(value: Any) -> Any:
    """Return a copy of a state with bytes or arrays in it, such as that of grain's `DataLoader`."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if is_array(value) and is_real_dtype(value.dtype):
        return np.array(value)
    if isinstance(value, list | tuple):
        return [_copy_state_value(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _copy_state_value(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__}: {value!r}")


def make_reader(
    options: DataSource,
    seed: Seed,
    limit: int | None,
    epochs: int | None,
    process: ProcessShard,
) -> SeekableReader | ReplayedReader:
    """Return what reads a source.

    Args:
        options: the source, with its options.
        seed: as of `BatchIterator`.
        limit: likewise.
        epochs: likewise.
        process: likewise.
    """
    if isinstance(options.source, SeekableSource):
        return SeekableReader(options.source, seed, limit, epochs, process)
    if isinstance(options.source, StatefulSource) and options.resume != "replay":
        return StatefulReader(options, seed, limit, epochs)
    return ReplayedReader(options, seed, limit, epochs)


def _make_position(epoch: int, number: int, is_last: bool) -> Position:
    """Return the position after batch `number` (from 1) of an epoch."""
    if is_last:
        return {"epoch": epoch + 1, "batch": 0}
    return {"epoch": epoch, "batch": number}


def _mark_last(items: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield each item with whether it is the last one.

    Looking one ahead tells the end of an epoch *at* its last batch. An exception from looking ahead
    waits for the item before it.
    """
    following = next(items, None)
    while following is not None:
        item = following
        try:
            with exit_as_error(DataError, "the data source"):
                following = next(items, None)
        except Exception:
            yield item, False
            raise
        yield item, following is None
