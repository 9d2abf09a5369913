"""The inside of batches: which examples make which batch."""

from typing import Any

import fulgurite as fg
import jax
import numpy as np
from fulgurite.errors import ConfigurationError, DataError, error_context
from fulgurite.plugins import ProcessShard

from fulgurite_data.examples import Ragged
from fulgurite_data.identity import PipelineStage
from fulgurite_data.indexing import ENDLESS, IndexMap
from fulgurite_data.nodes import Node
from fulgurite_data.passes import Pass

_MAX_SEARCHED = 1_000_000
"""Batches of an epoch among which those of other shapes are looked for."""


class BatchNode(PipelineStage):
    """Batches that are functions of a pass and of their numbers.

    Attributes:
        pads: whether batches are `fg.Batch` with a mask.
        num_varied: among how many batches, from the first, all sizes occur.
        is_random: whether their order differs from epoch to epoch.
    """

    pads: bool = False
    is_random: bool = False
    num_varied: int

    def read_batch(self, number: int, at: Pass, process: ProcessShard) -> Any:
        """Return a batch, or the part of it that a process reads.

        Args:
            number: of the batch.
            at: the pass.
            process: index and number of the processes that share it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no read_batch: define it")

    def check_process(self, process: ProcessShard) -> None:
        """Raise `ConfigurationError` if processes cannot have equal parts of each batch."""
        raise NotImplementedError(f"{type(self).__name__} has no check_process: define it")

    def measure(self, numbers: np.ndarray, at: Pass) -> np.ndarray:
        """Return the sizes of batches, int64 `(k, 3)`: the length that examples are padded to, 0
        for none; the number of rows; and how many of these are examples, and not padding.

        Args:
            numbers: of the batches, int64 `(k,)`.
            at: the pass.
        """
        raise NotImplementedError(f"{type(self).__name__} has no measure: define it")

    def find_sizes(self, at: Pass) -> list[int]:
        """Return the number of the first batch of each size that `measure` tells, as far as they
        are known."""
        return find_first(self.measure(np.arange(min(self.num_varied, _MAX_SEARCHED)), at))

    def find_kinds(self, at: Pass) -> np.ndarray:
        """Return the sizes that `measure` tells of the batches of any epoch, int64 `(k, 3)`, as far
        as they are known."""
        return self.measure(np.array(self.find_sizes(at)), at)

    def trace(self, number: int, at: Pass) -> str:
        """Return where a batch comes from, in words."""
        return f"batch {number} of {self.stages[-1]}"

    def trace_row(self, number: int, row: int, at: Pass) -> str:
        """Return where a row of a batch comes from, in words.

        Args:
            number: of the batch.
            row: its number in the batch.
            at: the pass.
        """
        return f"row {row} of {self.trace(number, at)}"


class Grouped(BatchNode):
    """Consecutive examples, a fixed number of them in a batch.

    Args:
        parent: the examples.
        size: of a batch.
        remainder: what becomes of the last ones: `keep`, `drop` or `pad`.

    Raises:
        DataError: there is no batch.
        ConfigurationError: a mixture has a schedule for batches of another size.
    """

    def __init__(self, parent: Node, size: int, remainder: str) -> None:
        self.follow(parent, f"batch({size}, {remainder!r})")
        if parent.batch_size not in (None, size):
            raise ConfigurationError(
                f"batch: size is {size}, and mix(schedule=..., batch_size={parent.batch_size}) "
                "counts steps of another size, so that weights would change at other steps"
            )
        self.parent = parent
        self.size = size
        self.remainder = remainder
        self.pads = remainder == "pad"
        self.num_left = 0 if parent.length >= ENDLESS else parent.length % size
        has_short_batch = self.num_left > 0 and remainder != "drop"
        is_endless = parent.length >= ENDLESS
        self.length = ENDLESS if is_endless else parent.length // size + has_short_batch
        self.num_varied = self.length if has_short_batch else 1
        if not self.length:
            raise DataError(
                f"{parent.length} examples do not fill a batch of {size} ({'.'.join(self.stages)})"
            )

    def read_batch(self, number: int, at: Pass, process: ProcessShard) -> Any:
        index, count = process
        first = number * self.size
        num_known = min(self.size, self.parent.length - first)
        num_rows = (self.size if self.pads else num_known) // count
        low = first + index * num_rows
        indices = np.arange(low, low + num_rows)
        if not self.pads:
            return self.parent.read(indices, at)
        mask = indices < self.parent.length
        # A process whose part is all padding has a row of another one for its shapes.
        present = indices[mask] if mask.any() else np.array([first])
        value = jax.tree.map(lambda leaf: pad_with_zeros(leaf, mask), self.parent.read(present, at))
        return fg.Batch(value, mask)

    def check_process(self, process: ProcessShard) -> None:
        index, count = process
        num_left = self.num_left if self.remainder == "keep" else 0
        if not 0 <= index < count or self.size % count or num_left % count:
            advice = "remainder='drop' or 'pad'"
            if self.size % count:
                advice = f"a size that divides by {count}"
            raise ConfigurationError(
                f"{self.stages[-1]}: process {index} of {count} cannot have an equal part of each "
                f"batch: {self.size} examples are in one, and {num_left} are left for a last one "
                f"(choose {advice})"
            )

    def measure(self, numbers: np.ndarray, at: Pass) -> np.ndarray:
        num_real = np.minimum(self.size, self.parent.length - numbers * self.size)
        num_rows = np.full_like(num_real, self.size) if self.pads else num_real
        return np.stack([np.zeros_like(num_real), num_rows, num_real], axis=1)

    def find_sizes(self, at: Pass) -> list[int]:
        has_other = self.num_varied > 1
        return [0, self.length - 1] if has_other else [0]

    def trace_row(self, number: int, row: int, at: Pass) -> str:
        return self.parent.trace(number * self.size + row, at)


class IndexedBatches(BatchNode):
    """Other batches in another order, or a part of them, or repeated.

    Args:
        parent: the other batches.
        index_map: where each batch comes from.

    Raises:
        DataError: there is no batch.
    """

    def __init__(self, parent: BatchNode, index_map: IndexMap) -> None:
        self.follow(parent, index_map.describe())
        self.parent = parent
        self.index_map = index_map
        self.pads = parent.pads
        self.length = index_map.length
        self.is_fixed = parent.is_fixed and index_map.is_fixed
        self.level = parent.level + index_map.num_random
        self.num_varied = self._count_varied()
        self.is_random = parent.is_random or not index_map.is_fixed
        if not self.length:
            raise DataError(f"there are no batches ({'.'.join(self.stages)})")

    def read_batch(self, number: int, at: Pass, process: ProcessShard) -> Any:
        before, at = self._locate(number, at)
        return self.parent.read_batch(before, at, process)

    def check_process(self, process: ProcessShard) -> None:
        self.parent.check_process(process)

    def measure(self, numbers: np.ndarray, at: Pass) -> np.ndarray:
        places = self.index_map.locate(numbers, at, self.parent.level)
        if places.epochs is None:
            return self.parent.measure(places.indices, at)
        sizes = np.empty((len(numbers), 3), np.int64)
        for epoch in np.unique(places.epochs):
            is_there = places.epochs == epoch
            sizes[is_there] = self.parent.measure(places.indices[is_there], at.at_epoch(int(epoch)))
        return sizes

    def find_kinds(self, at: Pass) -> np.ndarray:
        # Which of the batches a part of a random order has differs from epoch to epoch.
        return self.parent.find_kinds(at) if self.is_random else super().find_kinds(at)

    def trace(self, number: int, at: Pass) -> str:
        return self.parent.trace(*self._locate(number, at))

    def trace_row(self, number: int, row: int, at: Pass) -> str:
        before, at = self._locate(number, at)
        return self.parent.trace_row(before, row, at)

    def _count_varied(self) -> int:
        if self.parent.num_varied == 1:
            return 1
        if self.index_map.num_random:
            return self.length
        # Of a repetition, any run of that many batches has a whole round.
        return min(self.length, 2 * self.parent.num_varied)

    def _locate(self, number: int, at: Pass) -> tuple[int, Pass]:
        places = self.index_map.locate(np.array([number]), at, self.parent.level)
        if places.epochs is not None:
            at = at.at_epoch(int(places.epochs[0]))
        return int(places.indices[0]), at


def find_first(sizes: np.ndarray) -> list[int]:
    """Return the first row of each kind, in order.

    Args:
        sizes: int64 `(k, n)`.
    """
    firsts = []
    left = np.arange(len(sizes))
    while len(left):  # once for each of a few kinds, where `np.unique` would sort all rows
        first = int(left[0])
        firsts.append(first)
        left = left[(sizes[left] != sizes[first]).any(axis=1)]
    return firsts


def pad_with_zeros(leaf: Any, mask: np.ndarray) -> Any:
    """Return a leaf with rows of zeros where a mask is False; of `Ragged`, with empty ones.

    Args:
        leaf: an array, or `Ragged`, with as many rows as the mask is True, or more.
        mask: bool `(rows,)`, True for the first rows.
    """
    num_real = int(mask.sum())
    if isinstance(leaf, Ragged):
        lengths = np.zeros(len(mask), np.int64)
        lengths[mask] = leaf.lengths[:num_real]
        return Ragged(leaf.values[: lengths.sum()], lengths)
    padded = np.zeros((len(mask), *leaf.shape[1:]), leaf.dtype)
    padded[mask] = leaf[:num_real]
    return padded


def read_batch(node: BatchNode, number: int, at: Pass, process: ProcessShard) -> Any:
    """Return a batch, or the part of it that a process reads; a plain pytree of arrays, or an
    `fg.Batch` of one.

    Args:
        node: what reads it.
        number: of the batch.
        at: the pass.
        process: as of `BatchNode.read_batch`.

    Raises:
        DataError: examples have unequal lengths.
    """
    with error_context(lambda: f"while batch {number} of {node.stages[-1]} was read"):
        batch = node.read_batch(number, at, process)
        value = batch.value if isinstance(batch, fg.Batch) else batch
        # Without paths, which take ten times as long.
        if any(isinstance(leaf, Ragged) for leaf in jax.tree.leaves(value)):
            raise _make_ragged_error(value, node)
    return batch


def _make_ragged_error(value: Any, node: BatchNode) -> DataError:
    leaves = jax.tree_util.tree_leaves_with_path(value)
    path, leaf = next((path, leaf) for path, leaf in leaves if isinstance(leaf, Ragged))
    return DataError(
        f"data{jax.tree_util.keystr(path)} has examples of {leaf.lengths.min()} to "
        f"{leaf.lengths.max()} rows, which do not make an array ({'.'.join(node.stages)}). Before "
        "batch(): pad(length) them, pack(length) several into a row, or use bucket(lengths) "
        "instead of batch()"
    )
