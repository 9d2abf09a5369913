"""The inside of a dataset: a chain of nodes, each of which reads any of its examples from those of
the node before it."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from fulgurite.errors import ConfigurationError, DataError, as_int
from jax.tree_util import keystr

from fulgurite_data.examples import (
    Ragged,
    as_ragged,
    find_rows,
    merge_rows,
)
from fulgurite_data.identity import PipelineStage
from fulgurite_data.indexing import ENDLESS, IndexMap, Slice
from fulgurite_data.passes import Pass


class Node(PipelineStage):
    """Examples that are functions of a pass and of their numbers.

    Attributes:
        batch_size: how many examples a batch must have; None for any number.
    """

    batch_size: int | None = None

    def read(self, indices: np.ndarray, at: Pass) -> Any:
        """Return examples as one pytree of arrays and `Ragged` with a first axis `(k, ...)`.

        Args:
            indices: their numbers, int64 `(k,)`, at least one, in any order.
            at: the pass.
        """
        raise NotImplementedError(f"{type(self).__name__} has no read: define it")

    def read_lengths(self, indices: np.ndarray, at: Pass, leaf: str | None) -> np.ndarray:
        """Return the lengths of examples, int64 `(k,)`.

        Args:
            indices: as of `read`.
            at: as of `read`.
            leaf: the name of the array that has the length, where examples are dictionaries; None
                where all arrays have one.
        """
        return measure_lengths(self.read(indices, at), leaf, self.stages)

    def read_pieces(
        self,
        indices: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        planned: np.ndarray,
        at: Pass,
    ) -> Any:
        """Return pieces of examples, one after the other: a pytree of arrays whose first axis is
        that of all pieces.

        Args:
            indices: the example of each piece, int64 `(k,)`.
            starts: its first element within the example, int64 `(k,)`.
            lengths: the number of its elements, int64 `(k,)`.
            planned: how many elements the whole example had when it was planned, int64 `(k,)`.
            at: the pass.

        Raises:
            DataError: an example has another number of elements now.
        """
        numbers, places = np.unique(indices, return_inverse=True)
        rows = self.read(numbers, at)
        totals = _find_common_lengths(rows, self.stages[-1])
        self.check_planned(indices, totals[places], planned, at)
        firsts = np.cumsum(totals) - totals
        elements = find_rows(firsts[places] + starts, lengths)
        return jax.tree.map(lambda leaf: as_ragged(leaf).values[elements], rows)

    def check_planned(
        self, indices: np.ndarray, lengths: np.ndarray, planned: np.ndarray, at: Pass
    ) -> None:
        """Raise unless examples have the lengths that they had when their rows were planned.

        Args:
            indices: of the examples, int64 `(k,)`.
            lengths: that they have, int64 `(k,)`.
            planned: that they had, int64 `(k,)`.
            at: the pass.

        Raises:
            DataError: one has another length.
        """
        if np.array_equal(lengths, planned):
            return
        place = int(np.argmax(lengths != planned))
        raise DataError(
            f"{self.trace(int(indices[place]), at)} has {lengths[place]} elements, and "
            f"{planned[place]} when rows were planned: the data changed, or differs from read to "
            "read. Make the dataset again, without the file of its old plan"
        )

    def trace(self, index: int, at: Pass) -> str:
        """Return where an example comes from, in words.

        Args:
            index: its number.
            at: the pass.
        """
        return f"example {index} of {self.stages[-1]}"

    def use_workers(self, threads: Any, processes: Any) -> None:
        """Ask for workers that read batches.

        Args:
            threads: how many at least.
            processes: how many at least.

        Raises:
            ConfigurationError: a number is negative, or both are asked for.
        """
        for name, number in (("threads", threads), ("processes", processes)):
            if type(as_int(number)) is not int or number < 0:
                raise ConfigurationError(
                    f"{self.stages[-1]}: {name} is {number!r}; it must be 0 or a positive integer"
                )
        self.num_threads = max(self.num_threads, as_int(threads))
        self.num_processes = max(self.num_processes, as_int(processes))
        self.check_workers()


class Indexed(Node):
    """The examples of another node in another order, or a part of them, or repeated.

    Args:
        parent: the other node.
        index_map: where each example comes from.
    """

    def __init__(self, parent: Node, index_map: IndexMap) -> None:
        self.follow(parent, index_map.describe())
        self.parent = parent
        self.index_map = index_map
        self.length = index_map.length
        self.is_fixed = parent.is_fixed and index_map.is_fixed
        self.level = parent.level + index_map.num_random
        if isinstance(index_map, Slice) and not index_map.start:
            self.batch_size = parent.batch_size  # each example has the number that it had

    def read(self, indices: np.ndarray, at: Pass) -> Any:
        return self._gather(self.parent.read, indices, at)

    def read_lengths(self, indices: np.ndarray, at: Pass, leaf: str | None) -> np.ndarray:
        def read(indices: np.ndarray, at: Pass) -> np.ndarray:
            return self.parent.read_lengths(indices, at, leaf)

        return self._gather(read, indices, at)

    def trace(self, index: int, at: Pass) -> str:
        places = self.index_map.locate(np.array([index]), at, self.parent.level)
        if places.epochs is not None:
            at = at.at_epoch(int(places.epochs[0]))
        return self.parent.trace(int(places.indices[0]), at)

    def _gather(
        self, read: Callable[[np.ndarray, Pass], Any], indices: np.ndarray, at: Pass
    ) -> Any:
        places = self.index_map.locate(indices, at, self.parent.level)
        if places.epochs is None:
            return read(places.indices, at)
        epochs = np.unique(places.epochs)
        orders = [np.flatnonzero(places.epochs == epoch) for epoch in epochs]
        parts = [
            read(places.indices[order], at.at_epoch(int(epoch)))
            for order, epoch in zip(orders, epochs, strict=True)
        ]
        return merge_rows(parts, orders, lambda: self.stages[-1])


def measure_lengths(rows: Any, leaf: str | None, stages: tuple[str, ...]) -> np.ndarray:
    """Return the lengths of examples, int64 `(k,)`.

    Args:
        rows: the examples.
        leaf: as of `Node.read_lengths`.
        stages: of the node that they come from, for an error.

    Raises:
        ConfigurationError: there is no such array, or several.
    """
    if leaf is not None:
        if not isinstance(rows, dict) or leaf not in rows:
            keys = ", ".join(rows) if isinstance(rows, dict) else type(rows).__name__
            raise ConfigurationError(
                f"{stages[-1]} has no array {leaf!r} whose length counts; there is: {keys}"
            )
        return _get_lengths(rows[leaf])
    # Of all arrays, also where those of one batch have equal lengths by chance.
    sequences = [x for x in jax.tree.leaves(rows) if isinstance(x, Ragged) or x.ndim > 1]
    if not sequences:
        raise ConfigurationError(f"{stages[-1]} has no arrays, only numbers: nothing has a length")
    lengths = [_get_lengths(sequence) for sequence in sequences]
    if any(not np.array_equal(lengths[0], other) for other in lengths[1:]):
        raise ConfigurationError(
            f"{stages[-1]} has several arrays of unequal lengths: say which one counts, "
            "length_of='tokens'"
        )
    return lengths[0]


def check_fixed(parent: Node, stage: str, advice: str) -> None:
    """Raise unless all examples are the same in each pass, as a plan over them needs.

    Args:
        parent: the node that is planned over.
        stage: what needs the plan.
        advice: what to do.

    Raises:
        ConfigurationError: they change from epoch to epoch, or never end.
    """
    if parent.length >= ENDLESS:
        raise ConfigurationError(
            f"{stage} looks at all examples once, and {parent.stages[-1]} never ends: put repeat() "
            f"after it"
        )
    if not parent.is_fixed:
        raise ConfigurationError(
            f"{stage} looks at all examples once, and these change from epoch to epoch "
            f"({' '.join(parent.stages)}): {advice}"
        )


def iter_chunks(length: int, size: int) -> Iterator[np.ndarray]:
    """Yield the numbers below a length in parts, as int64 arrays.

    Args:
        length: the number of numbers.
        size: of a part.
    """
    for low in range(0, length, size):
        yield np.arange(low, min(low + size, length))


def _find_common_lengths(rows: Any, stage: str) -> np.ndarray:
    """Return the lengths of examples, int64 `(k,)`; raise unless all their arrays have these."""
    leaves = jax.tree_util.tree_leaves_with_path(rows)
    for path, leaf in leaves:
        if not isinstance(leaf, Ragged) and leaf.ndim < 2:
            raise ConfigurationError(
                f"data{keystr(path)} of {stage} is a number, which cannot be packed: leave it out "
                "with map()"
            )
    first_path, first = leaves[0]
    lengths = _get_lengths(first)
    for path, leaf in leaves[1:]:
        if not np.array_equal(_get_lengths(leaf), lengths):
            raise ConfigurationError(
                f"data{keystr(first_path)} and data{keystr(path)} of {stage} have unequal lengths, "
                "and arrays that are packed together have one: leave one of them out with map()"
            )
    return lengths


def _get_lengths(leaf: Any) -> np.ndarray:
    if isinstance(leaf, Ragged):
        return leaf.lengths
    if leaf.ndim < 2:
        raise ConfigurationError("length_of names a number, which has no length: name an array")
    return np.full(len(leaf), leaf.shape[1], np.int64)
