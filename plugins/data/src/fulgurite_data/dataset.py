"""Examples, and what is made of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, get_args

import numpy as np
from fulgurite.errors import (
    DataError,
    as_int,
    check_callable,
    check_one_of,
    check_positive_int,
)
from fulgurite.plugins import Seed

from fulgurite_data.batches import Batches
from fulgurite_data.bucketing import Bucketed, make_sizes
from fulgurite_data.examples import split_rows
from fulgurite_data.filtering import Filtered
from fulgurite_data.grouping import Grouped
from fulgurite_data.identity import describe_function
from fulgurite_data.indexing import IndexMap
from fulgurite_data.mapping import Mapped
from fulgurite_data.nodes import Indexed, Node, iter_chunks
from fulgurite_data.normalizing import Normalized, Statistics
from fulgurite_data.ordering import make_repeat, make_shard, make_shuffle, make_skip, make_take
from fulgurite_data.packing import Packed, PackMethod
from fulgurite_data.padding import Padded
from fulgurite_data.passes import start_pass
from fulgurite_data.windows import Windowed

_CHUNK = 256
"""Examples that an iteration reads at once."""


class Dataset:
    """Examples, each a function of seed, epoch and its number. It is immutable: each method returns
    another one, and reads nothing unless it says so.

    A fit reads batches, which `batch` makes. `Arrays`, `Items` and `Tokens` are datasets.

    Example:
        from fulgurite_data import Arrays

        dataset = Arrays({"x": np.arange(100), "y": np.ones(100)})
        batches = dataset.filter(lambda example: example["x"] % 2).shuffle().batch(10)
        len(batches)  # 5

    Attributes:
        node: what reads them.
    """

    def __init__(self, node: Node) -> None:
        self.node = node

    def __len__(self) -> int:
        """Return the number of examples an epoch."""
        return self.node.length

    def read(self, indices: Any, *, seed: Seed = 0, epoch: int = 0) -> Any:
        """Return examples as one pytree of arrays `(k, ...)`, and of `Ragged` where they have
        unequal lengths.

        Args:
            indices: their numbers, `(k,)`, at least one.
            seed: of the run.
            epoch: the number of the epoch.

        Raises:
            DataError: there is no such example.
        """
        numbers = np.asarray(indices).reshape(-1)
        if not len(numbers):
            raise DataError("read: give the number of at least one example")
        if numbers.dtype.kind not in "iu":
            raise DataError(
                f"read: the numbers of examples are {numbers.dtype}, such as {numbers[0]!r:.60}; "
                "they must be integers. Of a mask, give np.flatnonzero(mask)"
            )
        if numbers.min() < 0 or numbers.max() >= len(self):
            raise DataError(
                f"read: there are {len(self)} examples, from 0, and not all of {numbers.min()} to "
                f"{numbers.max()}"
            )
        return self.node.read(numbers.astype(np.int64), start_pass(seed, epoch))

    def get(self, index: int, *, seed: Seed = 0, epoch: int = 0) -> Any:
        """Return an example.

        Args:
            index: its number; negative to count from the end.
            seed: of the run.
            epoch: the number of the epoch.
        """
        if not -len(self) <= index < len(self):
            raise DataError(f"get: there are {len(self)} examples, and no number {index}")
        number = index + len(self) if index < 0 else index
        return split_rows(self.read([number], seed=seed, epoch=epoch))[0]

    def iter_examples(self, *, seed: Seed = 0, epoch: int = 0) -> Iterator[Any]:
        """Yield the examples of an epoch, to look at them.

        Args:
            seed: of the run.
            epoch: the number of the epoch.
        """
        at = start_pass(seed, epoch)
        for indices in iter_chunks(len(self), _CHUNK):
            yield from split_rows(self.node.read(indices, at))

    def shuffle(self, seed: int | None = None, *, reshuffle: bool = True) -> "Dataset":
        """Return the examples in a random order, which takes no memory.

        Args:
            seed: for the order; by default the seed of the run.
            reshuffle: whether each epoch has another order. Without, the order is one for all
                epochs and runs, such as that by which a test set is split off.
        """
        return self._reorder(make_shuffle(self.node, seed, reshuffle))

    def repeat(self, times: int | None = None) -> "Dataset":
        """Return the examples several times, each time as another epoch of what comes before.

        Args:
            times: how often; endlessly by default.
        """
        return self._reorder(make_repeat(self.node, times))

    def take(self, count: int) -> "Dataset":
        """Return the first examples.

        Args:
            count: how many; all of them if there are fewer.
        """
        return self._reorder(make_take(self.node, count))

    def skip(self, count: int) -> "Dataset":
        """Return the examples without the first ones.

        Args:
            count: how many to leave out.
        """
        return self._reorder(make_skip(self.node, count))

    def shard(
        self, index: int, count: int, *, remainder: Literal["keep", "drop"] = "keep"
    ) -> "Dataset":
        """Return one of several contiguous parts. A fit with several processes needs none: each
        reads its part of every batch.

        Args:
            index: the number of the part.
            count: how many parts there are.
            remainder: `keep`: the sizes of parts differ by one at most. `drop`: they are equal.
        """
        return self._reorder(make_shard(self.node, index, count, remainder))

    def map(
        self,
        function: Callable[..., Any],
        *,
        rng: bool = False,
        threads: int = 0,
        processes: int = 0,
    ) -> "Dataset":
        """Return examples that a function has changed.

        Args:
            function: called with an example, a pytree of arrays and numbers that it may write to;
                returns another one. With `rng`, called with a `numpy.random.Generator` too. It
                returns the dtypes that it returns for example 0, for which it is called once more.
            rng: whether it draws random numbers. They follow from seed, epoch and the number of the
                example. A `shuffle` after it has another order than one before it: put it last,
                `shuffle().map(function, rng=True)`.
            threads: how many threads read batches ahead, each a whole batch with all its stages;
                for functions that leave Python, such as decoders of images. Changes no batch.
            processes: how many processes do so, for functions in Python. They are started by
                `spawn`: a program needs `if __name__ == "__main__":`, and the function is
                importable.
        """
        check_callable(function, "map: function")
        node = Mapped(self.node, function, describe_function(function), rng)
        node.use_workers(threads, processes)
        return Dataset(node)

    def filter(
        self, predicate: Callable[[Any], Any], *, path: str | PathLike[str] | None = None
    ) -> "Dataset":
        """Return the examples for which a function is true. It is called with all of them, here and
        now.

        Args:
            predicate: called with an example.
            path: of a file to keep their numbers in. If it is there already, they are read from it,
                and nothing is called: remove it after a change of the function.
        """
        check_callable(predicate, "filter: predicate")
        return Dataset(Filtered(self.node, predicate, describe_function(predicate), path))

    def normalize(self, statistics: Statistics) -> "Dataset":
        """Return dictionaries with arrays of mean 0 and standard deviation 1, float32. What does
        not vary becomes 0; arrays without statistics stay.

        Args:
            statistics: of this or another dataset, see `compute_statistics`.
        """
        return Dataset(Normalized(self.node, statistics))

    def window(self, size: int, *, stride: int | None = None) -> "Dataset":
        """Return windows of consecutive examples, stacked along an axis in front. Examples at the
        end that do not fill one are left out.

        Args:
            size: how many examples are in a window.
            stride: how many examples a window begins after the one before; by default `size`.
        """
        size, stride = check_window(size, stride)
        return Dataset(Windowed(self.node, size, stride))

    def pad(
        self, length: int, *, truncate: bool = False, length_of: str | None = None
    ) -> "Dataset":
        """Return dictionaries whose arrays are padded with zeros to one length, and `mask`, bool
        `(length,)`, True for what is not padding. Numbers in them stay.

        Args:
            length: of all arrays, along their first axis.
            truncate: whether longer ones are cut; otherwise each of them is an error.
            length_of: the array whose length `mask` tells, where they differ within an example.
        """
        length = as_int(length)
        check_positive_int(length, "pad: length")
        return Dataset(Padded(self.node, length, truncate, length_of))

    def pack(
        self,
        length: int,
        *,
        how: PackMethod = "first_fit",
        open_rows: int = 64,
        mask_first: bool = False,
        length_of: str | None = None,
        path: str | PathLike[str] | None = None,
    ) -> "Dataset":
        """Return rows of a fixed length that hold several examples each.

        Examples are dictionaries of arrays of one length. A row has them one after the other, zeros
        at the end, and three arrays more: `segments`, int32 `(length,)`, counts the examples of the
        row from 1, 0 for padding; `positions`, int32, counts from 0 within each, or within its part
        that is in this row; `mask`, bool, is False for padding. Asks all examples for their
        lengths, here and now.

        Args:
            length: of a row.
            how: `first_fit` puts an example into the first open row with room for it, `best_fit`
                into the one with least room, `split` lays all of them one after the other and cuts.
            open_rows: how many rows are open at once; when none has room, all of them are done.
            mask_first: whether `mask` is False for the first element of each segment as well, which
                nothing comes before.
            length_of: the array that has the length, where asking it alone is enough.
            path: of a file to keep the plan in. If it is there already, it is read, and no example
                is asked for its length. Worth it from a million examples on.
        """
        length, open_rows = as_int(length), as_int(open_rows)
        check_positive_int(length, "pack: length")
        check_positive_int(open_rows, "pack: open_rows")
        check_one_of(how, get_args(PackMethod), "pack: how")
        node = Packed(
            self.node,
            length,
            how=how,
            num_open=open_rows,
            mask_first=mask_first,
            length_of=length_of,
            path=path,
        )
        return Dataset(node)

    def batch(self, size: int, *, remainder: Literal["keep", "drop", "pad"] = "keep") -> Batches:
        """Return batches of consecutive examples.

        Args:
            size: examples in a batch, over all processes.
            remainder: examples that do not fill a batch make a smaller one (`keep`), none (`drop`),
                or one padded with zeros (`pad`); then every batch is an `fg.Batch` with a mask.

        Raises:
            DataError: there is no batch.
        """
        size = as_int(size)
        check_positive_int(size, "batch: size")
        check_one_of(remainder, ("keep", "drop", "pad"), "batch: remainder")
        return Batches(Grouped(self.node, size, remainder))

    def bucket(
        self,
        lengths: Sequence[int] | Mapping[int, int],
        batch_size: int | None = None,
        *,
        remainder: Literal["keep", "drop", "pad"] = "keep",
        length_of: str | None = None,
    ) -> Batches:
        """Return batches of examples of similar lengths, padded as by `pad`: each example to the
        smallest of `lengths` that it fits. Asks all examples for their lengths, here and now.

        Args:
            lengths: that examples are padded to, rising; or the size of a batch for each. Each
                length is a program of its own.
            batch_size: examples in a batch, where all have one size.
            remainder: as of `batch`, for each length.
            length_of: as of `pack`. Another array that is longer than what its batch is padded to
                is an error when it is read.
        """
        check_one_of(remainder, ("keep", "drop", "pad"), "bucket: remainder")
        sizes = make_sizes(lengths, as_int(batch_size))
        return Batches(Bucketed(self.node, sizes, remainder, length_of))

    def __repr__(self) -> str:
        """Return the stages."""
        return ".".join(self.node.stages)

    def _reorder(self, index_map: IndexMap) -> "Dataset":
        return Dataset(Indexed(self.node, index_map))


def check_window(size: Any, stride: Any) -> tuple[int, int]:
    """Return the size and the stride of windows.

    Args:
        size: as of `Dataset.window`.
        stride: as of `Dataset.window`.

    Raises:
        ConfigurationError: one of them is not a positive integer.
    """
    size = as_int(size)
    check_positive_int(size, "window: size")
    stride = size if stride is None else as_int(stride)
    check_positive_int(stride, "window: stride")
    return size, stride
