"""Batches of examples of similar lengths."""

from collections.abc import Mapping, Sequence
from typing import Any

import fulgurite as fg
import jax
import numpy as np
from fulgurite.errors import ConfigurationError, DataError, as_int
from fulgurite.plugins import ProcessShard

from fulgurite_data.grouping import BatchNode, pad_with_zeros
from fulgurite_data.nodes import Node, check_fixed, measure_lengths
from fulgurite_data.packing import find_lengths
from fulgurite_data.padding import check_lengths, pad_rows
from fulgurite_data.passes import Pass, start_pass


class Bucketed(BatchNode):
    """Batches, each of examples that are padded to the same length. They come in the order in which
    they are complete; those that stay incomplete come last. 16 bytes for each example are kept.

    Args:
        parent: the examples: dictionaries of arrays.
        sizes: the number of examples in a batch, by the length that they are padded to.
        remainder: as of `Dataset.batch`.
        length_of: as of `Dataset.pack`.

    Raises:
        DataError: an example is longer than all of them, or there is no batch.
    """

    def __init__(
        self, parent: Node, sizes: Mapping[int, int], remainder: str, length_of: str | None
    ) -> None:
        counted = "" if length_of is None else f", length_of={length_of!r}"
        self.follow(parent, f"bucket({dict(sizes)}, {remainder!r}{counted})")
        check_fixed(parent, "bucket", "bucket() first, and shuffle() the batches")
        self.parent = parent
        self.length_of = length_of
        self.remainder = remainder
        self.pads = remainder == "pad"
        self.lengths = np.array([*sizes])
        self.sizes = np.array([*sizes.values()])
        lengths = find_lengths(parent, length_of)
        self._check_lengths(lengths)
        buckets = np.searchsorted(self.lengths, lengths)
        self._plan(buckets)
        self.length = len(self.buckets)
        self.num_varied = self.length
        if not self.length:
            raise DataError(f"no bucket has a full batch ({'.'.join(self.stages)})")

    def read_batch(self, number: int, at: Pass, process: ProcessShard) -> Any:
        index, count = process
        bucket = self.buckets[number]
        num_real = int(self.counts[number])
        num_rows = (int(self.sizes[bucket]) if self.pads else num_real) // count
        places = np.arange(index * num_rows, (index + 1) * num_rows)
        mask = places < num_real
        # A process whose part is all padding has a row of another one for its shapes.
        real = places[mask] if mask.any() else np.array([0])
        indices = self.order[self.starts[number] + real]
        rows = self.parent.read(indices, at)
        lengths = measure_lengths(rows, self.length_of, self.parent.stages)
        size = int(self.lengths[bucket])
        check_lengths(
            rows, size, self.stages[-1], lambda row: self.parent.trace(int(indices[row]), at)
        )
        value = pad_rows(rows, size, lengths, self.stages[-1])
        if not self.pads:
            return value
        return fg.Batch(jax.tree.map(lambda leaf: pad_with_zeros(leaf, mask), value), mask)

    def check_process(self, process: ProcessShard) -> None:
        index, count = process
        sizes = self.sizes if self.pads else np.concatenate([self.sizes, self.counts])
        uneven = sizes[sizes % count > 0]
        if not 0 <= index < count or len(uneven):
            raise ConfigurationError(
                f"{self.stages[-1]}: process {index} of {count} cannot have an equal part of each "
                f"batch: some have {uneven[:1].sum()} examples. Choose other sizes, and "
                "remainder='drop' or 'pad'"
            )

    def measure(self, numbers: np.ndarray, at: Pass) -> np.ndarray:
        buckets, num_real = self.buckets[numbers], self.counts[numbers]
        num_rows = self.sizes[buckets] if self.pads else num_real
        return np.stack([self.lengths[buckets], num_rows, num_real], axis=1)

    def trace_row(self, number: int, row: int, at: Pass) -> str:
        return self.parent.trace(int(self.order[self.starts[number] + row]), at)

    def _plan(self, buckets: np.ndarray) -> None:
        """Choose the batches: for each its bucket, the number of its examples, and where these
        stand in `order`."""
        self.order = np.argsort(buckets, kind="stable")
        starts, counts, numbers = [], [], []
        first = 0
        for bucket, size in enumerate(self.sizes.tolist()):
            length = int((buckets == bucket).sum())
            low = np.arange(0, length, size)
            sizes = np.minimum(size, length - low)
            if self.remainder == "drop":
                low, sizes = low[sizes == size], sizes[sizes == size]
            starts.append(first + low)
            counts.append(sizes)
            numbers.append(np.full(len(low), bucket))
            first += length
        self.starts, self.counts, self.buckets = map(np.concatenate, (starts, counts, numbers))
        last = self.order[self.starts + self.counts - 1]
        is_partial = self.counts < self.sizes[self.buckets]
        turns = np.lexsort((last, is_partial))
        self.starts, self.counts, self.buckets = (
            field[turns] for field in (self.starts, self.counts, self.buckets)
        )

    def _check_lengths(self, lengths: np.ndarray) -> None:
        longest = int(self.lengths[-1])
        if len(lengths) and lengths.max() > longest:
            number = int(np.argmax(lengths > longest))
            raise DataError(
                f"{self.stages[-1]}: {self.parent.trace(number, start_pass(0))} has "
                f"{lengths[number]} elements, more than the longest bucket: add one, cut examples "
                "with map(), or leave them out with filter()"
            )


def make_sizes(lengths: Sequence[int] | Mapping[int, int], batch_size: Any) -> dict[int, int]:
    """Return the number of examples in a batch by the length of a bucket.

    Args:
        lengths: as of `Dataset.bucket`.
        batch_size: as of `Dataset.bucket`.

    Raises:
        ConfigurationError: they are not positive integers that rise.
    """
    if not isinstance(lengths, Mapping):
        sizes: dict[int, Any] = dict.fromkeys(lengths, batch_size)
        if len(sizes) < len(lengths):
            raise ConfigurationError(f"bucket: some of the lengths {[*lengths]} are equal")
    elif batch_size is None:
        sizes = dict(lengths)
    else:
        raise ConfigurationError(
            "bucket: the sizes of batches are in lengths already: leave batch_size out"
        )
    sizes = {as_int(length): as_int(size) for length, size in sizes.items()}
    numbers = [*sizes, *sizes.values()]
    is_valid = all(type(number) is int and number > 0 for number in numbers)
    if not sizes or not is_valid or [*sizes] != sorted(sizes):
        raise ConfigurationError(
            f"bucket: lengths and sizes of batches are {sizes}; they must be positive integers, "
            "and lengths must rise"
        )
    return sizes
