"""Trials of a step on a few examples: whether its numbers are means over examples, and whether
padding counts in them."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fulgurite._src.data.batch import Batch
from fulgurite._src.data.sources import ArrayData
from fulgurite._src.evaluation.batch_metrics import (
    collect_bare_numbers,
    collect_losses_and_bare_metrics,
)
from fulgurite._src.evaluation.feed import BatchFeed, EvalBatch
from fulgurite._src.evaluation.local_strategy import LocalStrategy, has_whole_arrays
from fulgurite._src.evaluation.loss_trial import (
    FIX,
    Sample,
    TrialCompilation,
    Undecided,
    choose_sample,
    compute_trial,
    describe_mismatches,
    is_small,
    lower_trial,
)
from fulgurite._src.evaluation.padding_trial import (
    FIX as FIX_PADDING,
    PaddingTrial,
    choose_examples,
    has_padding,
    try_padding,
)
from fulgurite._src.evaluation.step import EvaluationStep
from fulgurite._src.evaluation.target import EvalTarget
from fulgurite._src.execution.executables import CompilationQueue
from fulgurite._src.model.context import Context
from fulgurite._src.model.media import MEDIA_ACTION
from fulgurite._src.sharding import ShardingStrategy
from fulgurite._src.training.compilations import Compilations

TransformBatch = Callable[[Any, Context], Any]
"""What a batch goes through before the step: `transform_batch(batch, ctx)`; traced."""

MAX_TRIALS = 4
"""How many batches are tried to see if numbers are means over examples, while that is undecided."""


class StepTrials:
    """Tries the numbers of a step on a few examples, in inference mode.

    Args:
        step: the step.
    """

    def __init__(self, step: EvaluationStep) -> None:
        self._step = step
        # By target.
        self._begun: dict[Any, TrialCompilation] = {}

    def compile_ahead(
        self, queue: CompilationQueue, target: EvalTarget, sample: Sample, device_arrays: Any
    ) -> None:
        """Have the trial of means compiled behind other work; `try_means` waits for it.

        Args:
            queue: when.
            target: the module and what belongs to it.
            sample: examples like those that are tried.
            device_arrays: what indexed batches are gathered from.
        """
        sharding = self._choose_strategy(target, device_arrays)
        if sharding is None or target.key in self._begun:
            return
        with sharding.mesh_context():
            program, arguments = self._make_trial(sharding, target, sample, device_arrays, None)
            if jax.eval_shape(program, *arguments)[0]:
                self._begun[target.key] = lower_trial(program, arguments)
                queue.add(self._begun[target.key].compilation)

    def try_means(
        self,
        target: EvalTarget,
        sample: Sample | None,
        device_arrays: Any,
        transform_batch: TransformBatch | None = None,
    ) -> dict[str, str]:
        """Return a sentence for each bare number of the step that is not a mean over examples, by
        its name.

        Args:
            target: the module and what belongs to it.
            sample: the examples; None if there are none to try.
            device_arrays: what indexed batches are gathered from.
            transform_batch: what the batch goes through before it is divided.
        """
        sharding = self._choose_strategy(target, device_arrays)
        if sample is None or sharding is None:
            return {}
        with sharding.mesh_context():
            program, arguments = self._make_trial(
                sharding, target, sample, device_arrays, transform_batch
            )
            trial = self._begun.pop(target.key, None) if self._begun else None
            if trial is None or not trial.fits(arguments):
                if not jax.eval_shape(program, *arguments)[0]:
                    return {}
                trial = lower_trial(program, arguments)
            return describe_mismatches(*trial.run(arguments), sample.size)

    def _make_trial(
        self,
        sharding: ShardingStrategy,
        target: EvalTarget,
        sample: Sample,
        device_arrays: Any,
        transform_batch: TransformBatch | None,
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return the jitted trial of means, and its arguments.

        Args:
            sharding: where it is computed.
            target: the module and what belongs to it.
            sample: the examples.
            device_arrays: what indexed batches are gathered from.
            transform_batch: what the batch goes through before it is divided.
        """

        def compute_numbers(target: Any, batch: Any, index: Any) -> dict[str, Any]:
            with self._step.open_context(target, batch, None, index) as (module, batch, ctx):
                ctx = _hide_media(ctx)
                output = self._step.run(sharding, module, batch, ctx)
                return collect_bare_numbers(self._step.evaluation, output, batch, ctx)

        def run(*arguments: Any) -> Any:
            target_parts, batch = self._prepare(target, transform_batch, *arguments)
            return compute_trial(partial(compute_numbers, target_parts), batch, sample.size)

        leaves = sharding.put_on_mesh(target.leaves)
        batch = sharding.shard_eval_batch(sample.batch, beside=leaves)
        return jax.jit(run), (leaves, batch, device_arrays)

    def try_padding(
        self,
        target: EvalTarget,
        examples: Any,
        device_arrays: Any,
        transform_batch: TransformBatch | None = None,
    ) -> PaddingTrial | None:
        """Return what padding does to the numbers of the step that do not use the mask; None if
        there are none.

        Args:
            target: the module and what belongs to it.
            examples: of a masked batch, without padding; None if there are none to try.
            device_arrays: what indexed batches are gathered from.
            transform_batch: what the batch goes through.
        """
        sharding = self._choose_strategy(target, device_arrays)
        if examples is None or sharding is None:
            return None

        def compute_numbers(target: Any, batch: Any, index: Any) -> Any:
            with self._step.open_context(target, batch, None, index) as (module, batch, ctx):
                ctx = _hide_media(ctx)
                output = self._step.run(sharding, module, batch, ctx)
                return collect_losses_and_bare_metrics(self._step.evaluation, output, batch, ctx)

        with sharding.mesh_context():
            leaves = sharding.put_on_mesh(target.leaves)
            batch = sharding.shard_eval_batch(examples, beside=leaves)
            arguments = (leaves, batch, device_arrays)
            prepare = partial(self._prepare, target, transform_batch)
            return try_padding(compute_numbers, prepare, arguments)

    def _choose_strategy(self, target: EvalTarget, device_arrays: Any) -> ShardingStrategy | None:
        """Return where a trial is computed; None if it cannot be.

        Each of several processes tries its own examples alone, if it has the whole of every array:
        else it would wait for the others, which may have none to try.

        Args:
            target: the module and what belongs to it.
            device_arrays: what indexed batches are gathered from.
        """
        if jax.process_count() == 1:
            return self._step.sharding
        if device_arrays is not None or not has_whole_arrays(target.leaves):
            return None
        return LocalStrategy(self._step.sharding.mesh)

    def _prepare(
        self,
        target: EvalTarget,
        transform_batch: TransformBatch | None,
        leaves: list[Any],
        batch: Any,
        device_arrays: Any,
    ) -> tuple[Any, Any]:
        """Return the parts of the target and the batch as the step gets them; traced.

        Args:
            target: the module and what belongs to it.
            transform_batch: what the batch goes through.
            leaves: of the target.
            batch: of a sample.
            device_arrays: what indexed batches are gathered from.
        """
        target_parts = target.join(leaves)
        batch = ArrayData.gather(device_arrays, batch)
        if transform_batch is not None:
            with self._step.open_context(target_parts, batch, None, 0) as (_, value, ctx):
                batch = Batch(transform_batch(value, ctx), ctx.mask, spec=ctx.spec)
        return target_parts, batch


class ResultWarnings:
    """Tells the user once if the results of an evaluation depend on how its data is divided into
    batches, or on padding.

    Args:
        step: the step.
        compilations: where the user is told.
    """

    def __init__(self, step: EvaluationStep, compilations: Compilations) -> None:
        self._step = step
        self._name = step.evaluation.name
        self._trials = StepTrials(step)
        self._compilations = compilations
        # By target, how many trials of bare numbers are left; and the targets tried with padding.
        self._trials_left: dict[Any, int] = {}
        self._padded_targets: set[Any] = set()
        self._small_batch: Any = None
        self._is_tried = False
        # What this process has found and not told, `means` or `padding`.
        self._found: dict[str, str] = {}

    def compile_ahead(
        self, queue: CompilationQueue, target: EvalTarget, feed: BatchFeed, batch: EvalBatch
    ) -> None:
        """Have what `try_bare_numbers` tries compiled behind other work.

        Args:
            queue: when.
            target: what is evaluated.
            feed: of the batch.
            batch: the first one of several.
        """
        if not self._step.may_have_bare_numbers or target.key in self._trials_left:
            return
        sample = choose_sample(batch.value)
        if sample is not None:
            # What fails is tried again and told there.
            with suppress(Exception):
                self._trials.compile_ahead(queue, target, sample, feed.device_arrays)

    def tell(self, target: EvalTarget) -> None:
        """Tell the user, at the end of a pass, what any process has found: loggers may be on the
        first alone, and the examples of another.

        Args:
            target: what was evaluated.
        """
        name = f"what evaluation {self._name} depends on"
        messages: dict[str, str] = {}
        for answer in reversed(self._step.sharding.sync.all_gather(name, self._found)):
            messages |= answer
        self._found = {}
        # The first process that has found something says it for all.
        if "means" in messages:
            self._trials_left[target.key] = 0
        if "padding" in messages:
            self._padded_targets.add(target.key)
        for message in messages.values():
            self._compilations.notify(message)

    def try_bare_numbers(self, target: EvalTarget, feed: BatchFeed, batch: EvalBatch) -> None:
        """Find out, from the second batch on, if the results depend on how data is divided.

        Args:
            target: what is evaluated.
            feed: of the batch.
            batch: the newest batch.
        """
        if batch.index == 0:
            # In the first evaluation only. The key takes a while to hash.
            self._is_tried = target.key in self._trials_left
        if self._is_tried:
            return
        trials_left = self._trials_left.get(target.key, MAX_TRIALS)
        previous_batch = self._small_batch
        # Tried together with the next one.
        self._small_batch = batch.value if is_small(batch.value) else None
        if batch.index == 0:
            return
        if not self._step.may_have_bare_numbers or trials_left == 0:
            self._trials_left[target.key] = 0
            self._is_tried = True
            return
        sample = choose_sample(previous_batch, batch.value)
        if sample is None:
            return
        self._trials_left[target.key] = 0
        try:
            sentences = self._trials.try_means(target, sample, feed.device_arrays)
        except Undecided:
            self._trials_left[target.key] = trials_left - 1
            return
        except Exception as error:
            message = (
                f"evaluation {self._name!r} averages numbers over examples, and whether they are "
                f"means over examples could not be tried on a few of them: {type(error).__name__}: "
                f"{error}. {FIX}"
            )
        else:
            if not sentences:
                return
            message = (
                f"the results of evaluation {self._name!r} depend on how its data is divided into "
                "batches, because they are averaged over examples: "
                f"{'; '.join(sentences.values())}. {FIX}"
            )
        self._found["means"] = message

    def try_padding(self, target: EvalTarget, feed: BatchFeed, batch: EvalBatch) -> None:
        """Find out if padding counts in the results, at the first batch that has some.

        Args:
            target: what is evaluated.
            feed: of the batch.
            batch: the newest batch.
        """
        if not has_padding(batch.value) or target.key in self._padded_targets:
            return
        self._padded_targets.add(target.key)
        examples = choose_examples(batch.value)
        try:
            trial = self._trials.try_padding(target, examples, feed.device_arrays)
        except Exception as error:
            message = (
                f"whether padding counts in the results of evaluation {self._name!r} could not be "
                f"tried: {type(error).__name__}: {error}. {FIX_PADDING}"
            )
        else:
            if trial is None or not trial.sentences:
                return
            message = (
                f"padding counts in the results of evaluation {self._name!r}, because its step "
                f"does not use ctx.mask for them: {'; '.join(trial.sentences)}. {FIX_PADDING}"
            )
        self._found["padding"] = message


def _hide_media(ctx: Context) -> Context:
    """Return a context for a trial, which shows no media."""
    if MEDIA_ACTION not in ctx.due_flags:
        return ctx
    return replace(ctx, due_flags={**ctx.due_flags, MEDIA_ACTION: jnp.asarray(False)})
