"""One pass over the data of an evaluation, which adds its batches to totals."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fulgurite._src.data.batch import as_batch
from fulgurite._src.evaluation.feed import BatchFeed, EvalBatch
from fulgurite._src.evaluation.program import Carry, EvaluationProgram, EvaluationProgramCache
from fulgurite._src.evaluation.target import EvalTarget
from fulgurite._src.evaluation.totals import EvaluationTotals, Pending
from fulgurite._src.execution.dispatch import MAX_IN_FLIGHT


class EvaluationPass:
    """Adds the batches of one pass to the totals of an evaluation.

    Only collected arrays are read from the device, and only once more than `MAX_IN_FLIGHT` batches
    are pending.

    Args:
        programs: of the evaluation.
        feed: places the batches.
        target: the module and what belongs to it.
        totals: those of the previous batches.
    """

    def __init__(
        self,
        programs: EvaluationProgramCache[EvaluationProgram],
        feed: BatchFeed,
        target: EvalTarget,
        totals: EvaluationTotals,
    ) -> None:
        self._programs = programs
        self._feed = feed
        self._target = target
        self._totals = totals
        self._num_batches = totals.num_batches
        # By structure of the batches.
        self._carries: dict[Any, Carry] = dict(totals.carries)
        # By signature of a batch, its structure, its program and the executable.
        self._prepared: dict[Any, tuple[Any, EvaluationProgram, Callable[..., Any]]] = {}
        self._in_flight = deque(totals.pending)
        self._parts = list(totals.parts)
        self._shown = totals.shown

    def add(self, batch: EvalBatch, patience: float | None) -> None:
        """Run the step on one more batch and merge its metrics into those of the others.

        Args:
            batch: the batch.
            patience: the seconds after a signal for which to wait for the compiler, as of `Wait`.
        """
        arguments = self._feed.make_arguments(batch)
        if batch.signature not in self._prepared:
            self._prepared[batch.signature] = self._prepare(batch, arguments, patience)
        structure, program, executable = self._prepared[batch.signature]
        carry = self._carries[structure]
        arrays, collected, media = program.run(executable, (*arguments, carry.arrays))
        self._carries[structure] = Carry(arrays, carry.layout)
        if batch.index == 0:
            self._shown = program.media_treedef.unflatten(media)
        for array in collected:
            array.copy_to_host_async()
        self._in_flight.append(Pending(arrays[-1], collected, program.collected_treedef))
        if len(self._in_flight) > MAX_IN_FLIGHT:
            self._parts.append(self._in_flight.popleft().read())
        self._num_batches = batch.index + 1

    def get_totals(self) -> EvaluationTotals:
        """Return the totals with the batches that were added."""
        return replace(
            self._totals,
            num_batches=self._num_batches,
            carries=self._carries,
            parts=tuple(self._parts),
            pending=tuple(self._in_flight),
            shown=self._shown,
        )

    def _prepare(
        self, batch: EvalBatch, arguments: tuple[Any, ...], patience: float | None
    ) -> tuple[Any, EvaluationProgram, Callable[..., Any]]:
        """Return the structure of a batch of new shapes, its program, and the executable.

        Args:
            batch: the batch.
            arguments: of the program, but for the carry.
            patience: as of `add`.
        """
        structure = as_batch(batch.value).structure
        program = self._programs.get(self._target, batch.value)
        if structure not in self._carries:
            self._carries[structure] = program.init_carry(arguments)
        carry = self._carries[structure]
        name = self._totals.evaluation.name
        program.continue_carry(carry, f"the metrics of batch {batch.index} of {name!r}")
        arguments = (*arguments, carry.arrays)
        executable = self._programs.prepare(
            self._target, batch.index, program.jitted, arguments, patience
        )
        return structure, program, executable
