"""The batches of one pass over the data of an evaluation or a prediction, checked and placed on the
devices."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fulgurite._src.data.batch import Batch, as_batch
from fulgurite._src.data.iterator import BatchIterator
from fulgurite._src.data.sources import (
    get_batch_examples,
    get_device_arrays,
    get_shared_batch_spec,
)
from fulgurite._src.evaluation.step import EvaluationStep
from fulgurite._src.evaluation.target import EvalTarget
from fulgurite._src.tree.specs import (
    describe_structures,
    format_tree,
    shape_signature,
    shape_spec,
)
from fulgurite.errors import DataError, mark_as_shared


@dataclass(frozen=True, eq=False)
class EvalBatch:
    """A batch of an evaluation or a prediction.

    Attributes:
        index: its number.
        value: as the data source yields it.
        signature: of its shapes.
    """

    index: int
    value: Any
    signature: Any


class BatchFeed:
    """Feeds one pass over data to the programs of a target.

    Attributes:
        device_arrays: the arrays of data that stays on the device; None for any other.
        num_batches: of the newest pass, as far as that is known before its end.

    Args:
        step: what the batches are for; it is told which of them is at hand.
        target: the module and what belongs to it.
        data: any data source.
    """

    def __init__(self, step: EvaluationStep, target: EvalTarget, data: Any) -> None:
        self._step = step
        self._sharding = step.sharding
        self._data = data
        self._leaves = self._sharding.put_on_mesh(target.leaves)
        self.device_arrays = self._sharding.replicate(get_device_arrays(data))
        self.num_batches: int | None = None

    @contextmanager
    def open(self, num_batches: int | None, first_index: int = 0) -> Iterator[Iterator[EvalBatch]]:
        """Give an iterator over one epoch of the part of the data that this process reads.

        Args:
            num_batches: at most this many batches; None for all.
            first_index: the number of the first batch.
        """
        shard = self._sharding.process_shard(lambda: get_shared_batch_spec(self._data))
        with (
            self._sharding.mesh_context(),
            BatchIterator(
                self._data,
                seed=0,
                limit=num_batches,
                epochs=1,
                process=shard,
                restore_on_close=True,
            ) as data_iterator,
        ):
            self.num_batches = data_iterator.epoch_length
            yield self._iter_checked(data_iterator, first_index)

    def make_arguments(self, batch: EvalBatch) -> tuple[Any, ...]:
        """Return what a program is called with: the leaves of the target, the batch on the devices,
        the arrays of data that stays there, and the number of the batch."""
        value = self._sharding.shard_eval_batch(batch.value, beside=self._leaves)
        return self._leaves, value, self.device_arrays, np.int32(batch.index)

    def _iter_checked(self, data_iterator: BatchIterator, first_index: int) -> Iterator[EvalBatch]:
        """Yield the batches. All of them must have the structure of the first, or one that the
        source declares; some may be masked only.

        Args:
            data_iterator: gives the batches.
            first_index: the number of the first batch.
        """
        known = [as_batch(example) for example in get_batch_examples(self._data)]
        signatures: set[Any] = set()
        for index, batch in enumerate(self._iter_aligned(data_iterator), first_index):
            self._step.batch_index = index
            signature = shape_signature(batch)
            if signature not in signatures:
                parts = as_batch(batch)
                known = known or [replace(parts, value=shape_spec(parts.value))]
                self._check_structure(parts, known)
                signatures.add(signature)
            yield EvalBatch(index, batch, signature)

    def _check_structure(self, parts: Batch, known: list[Batch]) -> None:
        """Raise a `DataError` for a batch whose structure is not one of those known."""
        if parts.structure in [other.structure for other in known]:
            return
        text, known_text = describe_structures(parts.value, known[0].value)
        if parts.spec != known[0].spec:
            text = f"{format_tree(parts.value)} of spec {parts.spec!r}"
            known_text = f"{format_tree(known[0].value)} of spec {known[0].spec!r}"
        raise DataError(
            f"{self._step.batch_name} has another structure than those before: {text}, not "
            f"{known_text}. Give all of them one, or declare a batch of each: "
            "fg.DataSource(source, batch_examples=(...))"
        )

    def _iter_aligned(self, data_iterator: BatchIterator) -> Iterator[Any]:
        """Yield the batches, equally many on each process; a failure of one is raised on all."""
        # Processes agree before every batch: nothing else is right for sources of unknown length.
        try:
            yield from self._sharding.align_batches(item.batch for item in data_iterator)
        except Exception as error:
            mark_as_shared(error)
            raise
