"""Batches of a dataset: what a fit reads."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from weakref import finalize

import fulgurite as fg
import numpy as np
from fulgurite.errors import DataError, as_int, check_callable, error_context
from fulgurite.plugins import ProcessShard, Seed, as_arrays

from fulgurite_data.batch_mapping import MappedBatches
from fulgurite_data.counting import TOKENS, count_examples, count_tokens
from fulgurite_data.grouping import BatchNode, IndexedBatches, find_first, read_batch
from fulgurite_data.identity import describe_function, shorten_identity
from fulgurite_data.indexing import IndexMap
from fulgurite_data.ordering import make_repeat, make_shuffle, make_skip, make_take
from fulgurite_data.passes import start_pass
from fulgurite_data.workers import Job, WorkerPool, iter_in_threads


class Batches:
    """Batches of examples, which are functions of seed, epoch and number: a
    `fulgurite.plugins.SeekableSource`. `Dataset.batch` makes one.

    Example:
        from fulgurite_data import Arrays

        batches = Arrays({"x": np.arange(10)}).shuffle().batch(4, remainder="drop").repeat(2)
        len(batches)  # 4
        batches.read(3, seed=0)["x"]  # the second batch of the second order

    Attributes:
        node: what reads them.
    """

    def __init__(self, node: BatchNode) -> None:
        self.node = node
        # Processes that wait for the next epoch, because it takes seconds to start them.
        self._idle_pools: list[WorkerPool] = []
        finalize(self, _close, self._idle_pools)

    def __len__(self) -> int:
        """Return the number of batches an epoch."""
        return self.node.length

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of epoch 0 with seed 0."""
        return self.iter_epoch(0, seed=0)

    def read(self, number: int, *, seed: Seed = 0, epoch: int = 0) -> Any:
        """Return a batch.

        Args:
            number: its number in the epoch.
            seed: of the run.
            epoch: the number of the epoch.
        """
        number = as_int(number)
        if type(number) is not int or not 0 <= number < len(self):
            raise DataError(f"there is no batch {number!r}: an epoch has {len(self)}, from 0")
        at = start_pass(seed, epoch)
        return _finish(self.node, read_batch(self.node, number, at, (0, 1)))

    def trace_row(self, number: int, row: int, *, seed: Seed = 0, epoch: int = 0) -> str:
        """Return where a row of a batch comes from, in words, such as `line 12 of a.jsonl`.

        Args:
            number: of the batch in the epoch.
            row: its number in the batch; one of padding comes from nowhere.
            seed: of the run.
            epoch: the number of the epoch.
        """
        return self.node.trace_row(number, row, start_pass(seed, epoch))

    def iter_epoch(
        self, number: int, *, seed: Seed, start: int = 0, process: ProcessShard = (0, 1)
    ) -> Iterator[Any]:
        """Yield the batches of an epoch.

        Args:
            number: that of the epoch, from 0.
            seed: what everything random follows from, but for stages with a seed of their own.
            start: the first batch.
            process: index and number of the processes that share each batch.
        """
        self.node.check_process(process)
        at = start_pass(seed, number)
        jobs = (Job(index, at, process) for index in range(start, len(self)))
        for batch in self._iter_jobs(jobs):
            yield _finish(self.node, batch)

    def iter_known_batches(self, process: ProcessShard) -> Iterator[tuple[int, Any]]:
        """Yield one batch of each further kind of shapes, with its number in epoch 0.

        Args:
            process: as of `iter_epoch`.
        """
        at = start_pass(0)
        numbers = self.node.find_sizes(at)
        shapes = self.node.measure(np.array(numbers), at)[:, :2]
        for place in find_first(shapes)[1:]:
            number = numbers[place]
            yield number, _finish(self.node, read_batch(self.node, number, at, process))

    def has_unequal_batches(self) -> bool:
        """Return whether some batches have fewer examples than others, padding left out."""
        return len({num_real for _, _, num_real in self._measure()}) > 1

    def has_padding(self) -> bool:
        """Return whether some batches have rows of padding."""
        return any(num_rows > num_real for _, num_rows, num_real in self._measure())

    def depends_on_epoch(self) -> bool:
        """Return whether the batches differ from epoch to epoch, and with the seed."""
        return not self.node.is_fixed

    def get_identity(self) -> tuple[str, ...]:
        """Return the stages, line by line, in less than 1 kB, with a hash of what is seen of
        content and functions. A run resumes only with these."""
        return shorten_identity(self.node.identify().lines)

    def count_per_batch(self) -> tuple[int, str]:
        """Return how much is in a batch, and of what, for the display of a run: tokens, where rows
        are full of them, or else examples. The first batch is read."""
        batch = self.read(0)
        tokens = count_tokens(batch)
        # Of rows with padding, each batch has another number of tokens.
        if tokens is not None and isinstance(batch, dict) and tokens == batch[TOKENS].size:
            return tokens, "tokens"
        return count_examples(batch), "examples"

    def shuffle(self, seed: int | None = None, *, reshuffle: bool = True) -> "Batches":
        """Return the batches in a random order.

        Args:
            seed: as of `Dataset.shuffle`.
            reshuffle: as of `Dataset.shuffle`.
        """
        return self._reorder(make_shuffle(self.node, seed, reshuffle))

    def repeat(self, times: int | None = None) -> "Batches":
        """Return the batches several times, each time as another epoch.

        Args:
            times: how often; endlessly by default.
        """
        return self._reorder(make_repeat(self.node, times))

    def take(self, count: int) -> "Batches":
        """Return the first batches.

        Args:
            count: how many; all of them if there are fewer.
        """
        return self._reorder(make_take(self.node, count))

    def skip(self, count: int) -> "Batches":
        """Return the batches without the first ones.

        Args:
            count: how many to leave out.
        """
        return self._reorder(make_skip(self.node, count))

    def map(self, function: Callable[[Any], Any]) -> "Batches":
        """Return batches that a function has changed, each as a whole.

        With several processes it gets the part of one of them, so it must treat each example by
        itself. What draws random numbers is a `map` of the dataset, before `batch`.

        Args:
            function: called with a batch, without its mask; returns another one of as many
                examples, or an `fg.Batch` where that says how many or has a `spec`. It returns
                the keys and dtypes that it returns for batch 0, for which it is called once more.
        """
        check_callable(function, "Batches.map: function")
        return Batches(MappedBatches(self.node, function, describe_function(function)))

    def __repr__(self) -> str:
        """Return the stages, for the description of a run."""
        return ".".join(self.node.stages)

    def _measure(self) -> list[list[int]]:
        return self.node.find_kinds(start_pass(0)).tolist()

    def _iter_jobs(self, jobs: Iterator[Job]) -> Iterator[Any]:
        """Yield batches in order, read here, or by threads or processes."""
        num_threads = self.node.num_threads or self.node.default_threads
        if self.node.num_processes:
            yield from self._iter_in_processes(jobs)
        elif num_threads:
            yield from iter_in_threads(self.node, jobs, num_threads)
        else:
            for job in jobs:
                yield read_batch(self.node, *job)

    def _iter_in_processes(self, jobs: Iterator[Job]) -> Iterator[Any]:
        try:
            pool = self._idle_pools.pop()
        except IndexError:
            pool = WorkerPool(self.node, self.node.num_processes)
        try:
            yield from pool.iter_batches(jobs)
        except GeneratorExit:
            self._idle_pools.append(pool)
            raise
        except BaseException:
            pool.close()
            raise
        self._idle_pools.append(pool)

    def _reorder(self, index_map: IndexMap) -> "Batches":
        return Batches(IndexedBatches(self.node, index_map))


def _finish(node: BatchNode, batch: Any) -> Any:
    """Return a batch as a fit reads it: arrays of numbers in dtypes that jax keeps."""
    with error_context(lambda: f"in a batch of {'.'.join(node.stages)}"):
        if isinstance(batch, fg.Batch):
            value, num_examples = as_arrays(batch.value), as_arrays(batch.num_examples)
            return replace(batch, value=value, num_examples=num_examples)
        return as_arrays(batch)


def _close(pools: list[WorkerPool]) -> None:
    while pools:
        pools.pop().close()
