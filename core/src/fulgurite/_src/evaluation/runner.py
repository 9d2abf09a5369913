"""Evaluations of a module: each batch runs one program, the metrics are merged on the device and
read once."""

from collections.abc import Iterator
from operator import length_hint
from typing import Any, NoReturn

import jax
import numpy as np

from fulgurite._src.callbacks import callback_error_context
from fulgurite._src.data.sources import StatefulSource, as_data
from fulgurite._src.evaluation.evaluation import (
    Evaluation,
    EvaluationResult,
    ShouldStop,
    never_stop,
)
from fulgurite._src.evaluation.evaluation_pass import EvaluationPass
from fulgurite._src.evaluation.feed import BatchFeed, EvalBatch
from fulgurite._src.evaluation.program import (
    EvaluationCarry,
    EvaluationProgram,
    EvaluationProgramCache,
)
from fulgurite._src.evaluation.step import EvaluationStep
from fulgurite._src.evaluation.target import EvalTarget
from fulgurite._src.evaluation.totals import EvaluationTotals
from fulgurite._src.evaluation.trials import ResultWarnings
from fulgurite._src.execution.executables import CompilationQueue
from fulgurite._src.metrics.basic import is_over_nothing
from fulgurite._src.training.services import Services
from fulgurite._src.waits import WaitAbandoned
from fulgurite.errors import DataError, EvaluationInterrupted


class EvaluationRunner:
    """Runs evaluations as an `Evaluation` says, on any module and data.

    The program is compiled once for each structure of them.

    Args:
        services: what the engine provides.
        evaluation: what to evaluate; its data is not looked at.
    """

    def __init__(self, services: Services, evaluation: Evaluation) -> None:
        self._services = services
        self._evaluation = evaluation
        self._step = EvaluationStep(services, evaluation, "validation_step")
        self._programs = EvaluationProgramCache(
            services, f"evaluate.{evaluation.name}", self._make_program
        )
        self._warnings = ResultWarnings(self._step, services.compilations)
        self._has_told_of_nothing = False

    def evaluate(
        self,
        target: EvalTarget,
        data: Any,
        num_batches: int | None,
        should_stop: ShouldStop = never_stop,
        totals: EvaluationTotals | None = None,
    ) -> EvaluationTotals:
        """Return the metrics over one epoch, summed up on the device.

        Args:
            target: the module and what belongs to it.
            data: any data source.
            num_batches: use at most this many batches.
            should_stop: called before each batch.
            totals: those of the previous batches.

        Raises:
            EvaluationInterrupted: `should_stop()` was true.
        """
        totals = totals or EvaluationTotals(self._evaluation)
        # XLA may take minutes, and an evaluation that may be given up is done again.
        patience = None if should_stop is never_stop else 0.0
        with callback_error_context(lambda: self._step.failed_batch_name):
            feed = BatchFeed(self._step, target, data)
            evaluation_pass = EvaluationPass(self._programs, feed, target, totals)
            with (
                feed.open(num_batches, totals.num_batches) as batches,
                self._services.timings.describe(
                    f"evaluating {self._evaluation.name}", feed.num_batches, "batches"
                ) as activity,
            ):
                for batch in batches:
                    if should_stop():
                        self._give_up(batch)
                    self._warnings.try_bare_numbers(target, feed, batch)
                    try:
                        evaluation_pass.add(batch, patience)
                    except WaitAbandoned:
                        if patience is None:
                            raise
                        self._give_up(batch)
                    # After the step itself, whose own errors come first.
                    self._warnings.try_padding(target, feed, batch)
                    activity.done += 1
            self._warnings.tell(target)
            return evaluation_pass.get_totals()

    def get_result(self, totals: EvaluationTotals) -> EvaluationResult:
        """Return the results of a whole evaluation, and tell the user, once, if its loss is NaN
        because it is 0 / 0."""
        result = totals.get_result()
        if self._has_told_of_nothing or not np.isnan(result.metrics.get("loss", 0)).any():
            return result
        metrics = totals.read_metrics()
        if all(is_over_nothing(metrics.get(name)) for name in self._evaluation.losses or ("loss",)):
            self._has_told_of_nothing = True
            self._services.compilations.notify(
                f"the loss of evaluation {self._evaluation.name!r} is NaN, because it is a mean "
                "over nothing: none of its batches weighs anything, as where all tokens or "
                "examples are masked"
            )
        return result

    def _give_up(self, batch: EvalBatch) -> NoReturn:
        raise EvaluationInterrupted(
            f"evaluation {self._evaluation.name!r} was given up before batch {batch.index}: "
            "training is to stop"
        )

    def trace_metric_types(
        self,
        target: EvalTarget,
        data: Any,
        num_batches: int | None,
        queue: CompilationQueue | None = None,
    ) -> dict[str, type]:
        """Trace an evaluation by shape, on the first batch of `data`, and return the types of its
        metrics by name.

        The program that is traced is the one that the evaluation runs, so this is work done earlier
        and not twice. A source with a state is left as it was; from any other, a new pass begins.

        Args:
            target: the module and what belongs to it.
            data: any data source.
            num_batches: how many batches of it are evaluated at most; None for all.
            queue: where the program is to be compiled behind other work; None if it is not.

        Raises:
            DataError: the data is an iterator, which the first evaluation would use up.
        """
        source = as_data(data).source
        if isinstance(source, Iterator) and not isinstance(source, StatefulSource):
            raise DataError(
                f"the data of evaluator {self._evaluation.name!r} is an iterator "
                f"({type(source).__name__}), which its first evaluation uses up: pass what can be "
                "iterated again, such as fg.ArrayData, a list, or an object with __iter__"
            )
        metric_types: dict[str, type] = {}
        feed = BatchFeed(self._step, target, data)
        with feed.open(1) as batches:
            for batch in batches:
                program = self._programs.get(target, batch.value)
                arguments = feed.make_arguments(batch)
                carry, collected, _ = jax.eval_shape(program.jitted, *arguments, None)
                # Once more with the carry, as every batch runs it: only then are metrics merged.
                if queue is None:
                    jax.eval_shape(program.jitted, *arguments, carry)
                else:
                    zeros = program.init_carry(arguments).arrays
                    self._programs.compile_ahead(queue, target, program.jitted, (*arguments, zeros))
                    if length_hint(source) > 1 and num_batches != 1:
                        self._warnings.compile_ahead(queue, target, feed, batch)
                assert program.carry_layout is not None
                spec: EvaluationCarry = program.carry_layout.spec
                collected = program.collected_treedef.unflatten(collected)
                metrics = spec.accumulator.by_name | collected
                metric_types = {name: type(metric) for name, metric in metrics.items()}
        return metric_types

    def _make_program(self, target: EvalTarget) -> EvaluationProgram:
        return EvaluationProgram(
            lambda leaves, *rest: self._step.evaluate(target.join(leaves), *rest),
            self._step.sharding.replicated,
        )
