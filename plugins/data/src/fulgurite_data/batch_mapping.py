"""Batches that a function has changed as a whole."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fulgurite as fg
import numpy as np
from fulgurite.errors import DataError, error_context
from fulgurite.plugins import ProcessShard
from jax.tree_util import keystr, tree_leaves_with_path

from fulgurite_data.content import Mark, look_at
from fulgurite_data.examples import Ragged, count_rows
from fulgurite_data.grouping import BatchNode
from fulgurite_data.passes import Pass, start_pass


class MappedBatches(BatchNode):
    """Other batches, each changed by a function. Batch 0 says which arrays a batch has, and their
    dtypes: otherwise the step would be compiled again for what a batch happens to hold.

    Args:
        parent: the other batches.
        function: called with a batch, without its mask.
        name: what errors and the identity of the dataset call it.
    """

    _dtypes: dict[str, np.dtype] | None = None

    def __init__(self, parent: BatchNode, function: Callable[[Any], Any], name: str) -> None:
        self.follow(parent, f"map({name})")
        self.parent = parent
        self.function = function
        self.length = parent.length
        self.pads = parent.pads
        self.is_random = parent.is_random
        self.num_varied = parent.num_varied

    def look(self) -> Mark:
        return look_at(self.function)

    def read_batch(self, number: int, at: Pass, process: ProcessShard) -> Any:
        batch = self._change(number, at, process)
        if self._dtypes is None:
            with error_context(
                lambda: f"in batch 0 of {self.stages[-1]}, which decides the dtypes"
            ):
                self._dtypes = _find_dtypes(self._change(0, start_pass(0), process))
        self._check_dtypes(_find_dtypes(batch), self._dtypes, lambda: self.trace(number, at))
        return batch

    def check_process(self, process: ProcessShard) -> None:
        self.parent.check_process(process)

    def measure(self, numbers: np.ndarray, at: Pass) -> np.ndarray:
        return self.parent.measure(numbers, at)

    def find_sizes(self, at: Pass) -> list[int]:
        return self.parent.find_sizes(at)

    def find_kinds(self, at: Pass) -> np.ndarray:
        return self.parent.find_kinds(at)

    def trace(self, number: int, at: Pass) -> str:
        return self.parent.trace(number, at)

    def trace_row(self, number: int, row: int, at: Pass) -> str:
        return self.parent.trace_row(number, row, at)

    def _change(self, number: int, at: Pass, process: ProcessShard) -> Any:
        """Return a changed batch of as many examples as before."""
        before = self.parent.read_batch(number, at, process)
        value = _get_value(before)
        num_examples = count_rows(value)  # now, because the function may write to it
        with error_context(lambda: f"in {self.stages[-1]}, of {self.trace(number, at)}"):
            changed = self.function(value)
        if changed is None:
            raise DataError(
                f"{self.stages[-1]} returned None for {self.trace(number, at)}: return the changed "
                "batch"
            )
        batch = self._add_mask(before, changed, lambda: self.trace(number, at))
        self._check_rows(batch, num_examples, lambda: self.trace(number, at))
        return batch

    def _add_mask(self, before: Any, changed: Any, trace: Callable[[], str]) -> Any:
        """Return what the function returned for a batch, with the mask of this batch."""
        if isinstance(before, fg.Batch):
            if isinstance(changed, fg.Batch):
                raise DataError(
                    f"{self.stages[-1]} returned an fg.Batch for {trace()}, which is one already: "
                    "the function is called without the mask, which stays. Return the arrays alone"
                )
            return replace(before, value=changed)
        if isinstance(changed, fg.Batch) and changed.mask is not None:
            raise DataError(
                f"{self.stages[-1]} returned an fg.Batch with a mask for {trace()}, and nothing "
                "else knows of this padding: let batch(remainder='pad') pad"
            )
        return changed

    def _check_rows(self, batch: Any, num_examples: int, trace: Callable[[], str]) -> None:
        """Raise unless each array has a row for each example."""
        leaves = tree_leaves_with_path(_get_value(batch))
        if not leaves:
            raise DataError(
                f"{self.stages[-1]} returned {batch!r:.60} for {trace()}, which holds no array: "
                "return the changed batch"
            )
        if isinstance(batch, fg.Batch) and batch.num_examples is not None:
            return  # arrays that begin with other axes
        for path, leaf in leaves:
            shape = leaf.lengths.shape if isinstance(leaf, Ragged) else np.shape(leaf)
            if shape[:1] != (num_examples,):
                raise DataError(
                    f"{self.stages[-1]}: data{keystr(path)} of what it returned for {trace()} is "
                    f"of shape {shape}, and the batch has {num_examples} examples: return a row "
                    "for each. Where arrays begin with another axis, as those of a graph, return "
                    "fg.Batch(value, num_examples=...)"
                )

    def _check_dtypes(
        self,
        dtypes: dict[str, np.dtype],
        expected: dict[str, np.dtype],
        trace: Callable[[], str],
    ) -> None:
        if dtypes == expected:
            return
        if [*dtypes] != [*expected]:
            raise DataError(
                f"{self.stages[-1]}: batches have several structures: {trace()} has "
                f"data{', data'.join(dtypes)}, and batch 0 has data{', data'.join(expected)}. "
                "Return the same keys for every batch"
            )
        path = next(path for path in dtypes if dtypes[path] != expected[path])
        raise DataError(
            f"{self.stages[-1]}: data{path} is {dtypes[path]} in {trace()}, and {expected[path]} "
            "in batch 0. Return arrays of one dtype, such as x.astype(np.float32)"
        )


def _get_value(batch: Any) -> Any:
    return batch.value if isinstance(batch, fg.Batch) else batch


def _find_dtypes(batch: Any) -> dict[str, np.dtype]:
    """Return the dtype of each array by its path."""
    dtypes = {}
    for path, leaf in tree_leaves_with_path(_get_value(batch)):
        values = leaf.values if isinstance(leaf, Ragged) else leaf
        dtypes[keystr(path)] = np.dtype(getattr(values, "dtype", None) or np.asarray(values).dtype)
    return dtypes
