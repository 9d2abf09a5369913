"""The program of an evaluation or a prediction: compiled once, its metrics merged on the device and
read once."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fulgurite._src.callbacks import callback_error_context
from fulgurite._src.data.iterator import BatchIterator
from fulgurite._src.data.sources import (
    ArrayData,
    Batch,
    MaskedBatch,
    StatefulSource,
    as_data,
    get_array_data_spec,
    get_batch_examples,
    get_device_arrays,
)
from fulgurite._src.evaluation.batch_metrics import (
    choose_media,
    collect_bare_numbers,
    collect_batch_metrics,
    collect_losses_and_bare_metrics,
    may_have_bare_numbers,
)
from fulgurite._src.evaluation.evaluator import Evaluator, ShouldStop, never_stop
from fulgurite._src.evaluation.local_strategy import LocalStrategy, has_whole_arrays
from fulgurite._src.evaluation.loss_trial import (
    FIX,
    Sample,
    Undecided,
    choose_sample,
    compute_trial,
    describe_mismatches,
    is_small,
    run_trial,
)
from fulgurite._src.evaluation.padding_trial import (
    FIX as FIX_PADDING,
    PaddingTrial,
    choose_examples,
    has_padding,
    try_padding,
)
from fulgurite._src.evaluation.program import CarryLayout, EvaluationProgram
from fulgurite._src.evaluation.target import EvalTarget
from fulgurite._src.evaluation.totals import EvaluationTotals, Pending
from fulgurite._src.execution.debugging import check_jit_can_compile
from fulgurite._src.metrics.base import MetricAccumulator
from fulgurite._src.model.context import Context
from fulgurite._src.model.media import MEDIA_ACTION
from fulgurite._src.model.mode import training_mode
from fulgurite._src.model.module import get_method
from fulgurite._src.sharding import ShardingStrategy
from fulgurite._src.training.forward import Step, call_with_around_hooks, forward, split_batch
from fulgurite._src.training.services import Services
from fulgurite._src.tree.specs import (
    check_same_structure,
    describe_structures,
    format_tree,
    put_beside,
    shape_signature,
    shape_spec,
)
from fulgurite._src.tree.typecheck import batch_error_context, check_batch
from fulgurite.errors import DataError, EvaluationInterrupted, ModelError, mark_as_shared

# Batches under way at once: enough to keep the device busy; each holds its batch.
MAX_IN_FLIGHT = 4

MAX_TRIALS = 4
"""On how many batches it is tried if numbers are means over examples, while they say nothing."""


class EvaluationRunner:
    """Runs evaluations or predictions as an `Evaluator` says, on any module and data.

    The program is compiled once for each structure of them.

    Args:
        services: what the engine provides.
        evaluator: what to evaluate; its data is not looked at.
        step: of the module, or a function `step(module, batch, ctx)`.
    """

    def __init__(
        self, services: Services, evaluator: Evaluator, step: Step = "validation_step"
    ) -> None:
        check_jit_can_compile()
        self._plugins = services.plugins
        self._make_rng_streams = services.make_rng_streams
        self._evaluator = evaluator
        self._step: Step = step
        self._sharding = services.sharding
        self._due_names = services.due_names
        self._compilations = services.compilations
        self._validation_programs: dict[Any, EvaluationProgram] = {}
        self._prediction_programs: dict[Any, jax.stages.Wrapped] = {}
        # By program, the shapes of the batches that it was compiled for.
        self._batch_specs: dict[Any, dict[Any, Any]] = {}
        # The batch that is being traced, for errors.
        self._batch_index = 0
        self._may_have_bare_numbers = False
        # By target, how often its bare numbers are to be tried yet; and those tried with padding.
        self._trials_left: dict[Any, int] = {}
        self._padded_targets: set[Any] = set()
        self._small_batch: Any = None
        self._is_tried = False

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
            totals: those of the batches before.

        Raises:
            EvaluationInterrupted: `should_stop()` was true.
        """
        totals = totals or EvaluationTotals(self._evaluator)
        with callback_error_context(self._name_failed_batch):
            return self._run_validation_steps(target, data, num_batches, should_stop, totals)

    def check(self, target: EvalTarget, data: Any) -> dict[str, type]:
        """Trace an evaluation by shape, on the first batch of `data`, and return the types of its
        metrics by name; nothing is compiled.

        The program that is traced is the one that the evaluation runs, so this is work done earlier
        and not twice. A source with a state is left as it was; from any other, a new pass begins.

        Args:
            target: the module and what belongs to it.
            data: any data source.

        Raises:
            DataError: the data is an iterator, which the first evaluation would use up.
        """
        source = as_data(data).source
        if isinstance(source, Iterator) and not isinstance(source, StatefulSource):
            raise DataError(
                f"the data of evaluator {self._evaluator.name!r} is an iterator "
                f"({type(source).__name__}), which its first evaluation uses up: pass what can be "
                "iterated again, such as fg.ArrayData, a list, or an object with __iter__"
            )
        metric_types: dict[str, type] = {}
        leaves, device_arrays = self._put_on_devices(target, data)
        with self._open_batches(data, 1) as iterator:
            for index, batch, _ in self._iter_checked(iterator, get_batch_examples(data)):
                run = self._get_validation_program(target, batch)
                sharded = self._shard(batch, leaves)
                arguments = (leaves, sharded, device_arrays, np.int32(index))
                carry, collected, _ = jax.eval_shape(run, *arguments, None)
                jax.eval_shape(run, *arguments, carry)
                assert run.carry_layout is not None
                accumulator: MetricAccumulator = run.carry_layout.spec[0]
                collected = run.collected_treedef.unflatten(collected)
                metrics = accumulator.metrics | accumulator.running | collected
                metric_types = {name: type(metric) for name, metric in metrics.items()}
        return metric_types

    def predict(
        self,
        target: EvalTarget,
        data: Any,
        num_batches: int | None,
        callback: Callable[[PyTree[np.ndarray]], None] | None,
    ) -> Any:
        """Return the predictions for every example, in order and without padding, as one tree.

        Args:
            target: the module and what belongs to it.
            data: any data source.
            num_batches: use at most this many batches.
            callback: called with the predictions of each batch instead; nothing is returned.
        """
        batches: list[Any] = []
        take = batches.append if callback is None else callback
        with callback_error_context(self._name_failed_batch):
            self._run_predict_steps(target, data, num_batches, take)
        return _concatenate_predictions(batches) if callback is None else None

    def _run_predict_steps(
        self, target: EvalTarget, data: Any, num_batches: int | None, take: Callable[[Any], None]
    ) -> None:
        """Hand the predictions of each batch to `take`; the other arguments are those of
        `predict`."""
        programs: dict[Any, jax.stages.Wrapped] = {}
        in_flight: deque[Any] = deque()
        leaves, device_arrays = self._put_on_devices(target, data)
        with self._open_batches(data, num_batches) as iterator:
            for index, batch, signature in self._iter_checked(iterator, get_batch_examples(data)):
                sharded = self._shard(batch, leaves)
                arguments = (leaves, sharded, device_arrays, np.int32(index))
                run = programs.get(signature)
                if run is None:
                    run = self._get_prediction_program(target, batch)
                    self._note_compilation("predict_step", target, sharded, run, arguments)
                    programs[signature] = run
                in_flight.append(run(*arguments))
                if len(in_flight) > MAX_IN_FLIGHT:
                    take(_remove_padding(*in_flight.popleft()))
        for preds, mask in in_flight:
            take(_remove_padding(preds, mask))

    def _name_failed_batch(self) -> str:
        """Name the batch a callback of which has failed. Only a CPU is known to be done with those
        before when an error arrives."""
        is_exact = jax.default_backend() == "cpu"
        which = "batch" if is_exact else "one of the batches up to"
        return f"{which} {self._batch_index} of {self._evaluator.name!r}"

    def try_means(
        self,
        target: EvalTarget,
        sample: Sample | None,
        device_arrays: Any,
        transform_batch: Callable[[Any, Context], Any] | None = None,
    ) -> dict[str, str]:
        """Return a sentence for each bare number of the step that is not a mean over examples, by
        its name, tried on a few of them in inference mode.

        Args:
            target: the module and what belongs to it.
            sample: the examples; None if there are none to try.
            device_arrays: what indexed batches are gathered from.
            transform_batch: what the batch goes through before it is divided.
        """
        sharding = self._choose_trial_strategy(target, device_arrays)
        if sample is None or sharding is None:
            return {}

        def compute_numbers(target: Any, batch: Any, index: Any) -> dict[str, Any]:
            with self._eval_context(target, batch, None, index) as (module, batch, ctx):
                ctx = _hide_media(ctx)
                output = forward(self._plugins, sharding, self._step, module, batch, ctx)
                return collect_bare_numbers(self._evaluator, output, batch, ctx)

        def run(*arguments: Any) -> Any:
            target_parts, batch = self._prepare_trial(target, transform_batch, *arguments)
            return compute_trial(partial(compute_numbers, target_parts), batch, sample.size)

        with sharding.mesh_context():
            leaves = sharding.put_on_mesh(target.leaves)
            batch = sharding.shard_eval_batch(sample.batch)
            program = jax.jit(run)
            arguments = (leaves, batch, device_arrays)
            if not jax.eval_shape(program, *arguments)[0]:
                return {}
            return describe_mismatches(*run_trial(program, arguments), sample.size)

    def try_padding(
        self,
        target: EvalTarget,
        examples: Any,
        device_arrays: Any,
        transform_batch: Callable[[Any, Context], Any] | None = None,
    ) -> PaddingTrial | None:
        """Return what padding does to the numbers of the step that do not use the mask, tried in
        inference mode; None if there are none.

        Args:
            target: the module and what belongs to it.
            examples: of a masked batch, without padding; None if there are none to try.
            device_arrays: what indexed batches are gathered from.
            transform_batch: what the batch goes through.
        """
        sharding = self._choose_trial_strategy(target, device_arrays)
        if examples is None or sharding is None:
            return None

        def compute_numbers(target: Any, batch: Any, index: Any) -> Any:
            with self._eval_context(target, batch, None, index) as (module, batch, ctx):
                ctx = _hide_media(ctx)
                output = forward(self._plugins, sharding, self._step, module, batch, ctx)
                return collect_losses_and_bare_metrics(self._evaluator, output, batch, ctx)

        with sharding.mesh_context():
            leaves = sharding.put_on_mesh(target.leaves)
            batch = sharding.shard_eval_batch(examples)
            arguments = (leaves, batch, device_arrays)
            prepare = partial(self._prepare_trial, target, transform_batch)
            return try_padding(compute_numbers, prepare, arguments)

    def _choose_trial_strategy(
        self, target: EvalTarget, device_arrays: Any
    ) -> ShardingStrategy | None:
        """Return where a trial is computed; None if it cannot be.

        Each of several processes tries its own examples alone, if it has the whole of every array:
        else it would wait for the others, which may have none to try.

        Args:
            target: the module and what belongs to it.
            device_arrays: what indexed batches are gathered from.
        """
        if jax.process_count() == 1:
            return self._sharding
        if device_arrays is not None or not has_whole_arrays(target.leaves):
            return None
        return LocalStrategy(self._sharding.mesh)

    def _prepare_trial(
        self,
        target: EvalTarget,
        transform_batch: Callable[[Any, Context], Any] | None,
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
            with self._eval_context(target_parts, batch, None, 0) as (_, value, ctx):
                value = Batch(transform_batch(value, ctx), spec=ctx.spec)
            batch = value if ctx.mask is None else MaskedBatch(value, ctx.mask)
        return target_parts, batch

    def _warn_of_bare_numbers(self, target: EvalTarget, batch: Any, device_arrays: Any) -> None:
        """Say it once, from the second batch on, if the results depend on how the data is divided
        into batches.

        Args:
            target: what is evaluated.
            batch: the newest batch.
            device_arrays: what indexed batches are gathered from.
        """
        if self._batch_index == 0:
            # In the first evaluation only. The key takes a while to hash.
            self._is_tried = target.key in self._trials_left
        if self._is_tried:
            return
        trials_left = self._trials_left.get(target.key, MAX_TRIALS)
        previous_batch = self._small_batch
        # Tried together with the next one.
        self._small_batch = batch if is_small(batch) else None
        if self._batch_index == 0:
            return
        if not self._may_have_bare_numbers or trials_left == 0:
            self._trials_left[target.key] = 0
            self._is_tried = True
            return
        sample = choose_sample(previous_batch, batch)
        if sample is None:
            return
        self._trials_left[target.key] = 0
        name = self._evaluator.name
        try:
            sentences = self.try_means(target, sample, device_arrays)
        except Undecided:
            self._trials_left[target.key] = trials_left - 1
            return
        except Exception as error:
            message = (
                f"evaluation {name!r} averages numbers over examples, and whether they are means "
                f"over examples could not be tried on a few of them: {type(error).__name__}: "
                f"{error}. {FIX}"
            )
        else:
            if not sentences:
                return
            message = (
                f"the results of evaluation {name!r} depend on how its data is divided into "
                f"batches, because they are averaged over examples: "
                f"{'; '.join(sentences.values())}. {FIX}"
            )
        self._compilations.notify(message)

    def _warn_of_padding(self, target: EvalTarget, batch: Any, device_arrays: Any) -> None:
        """Say it once if padding counts in the results, at the first batch that has some."""
        if not has_padding(batch) or target.key in self._padded_targets:
            return
        self._padded_targets.add(target.key)
        name = self._evaluator.name
        try:
            trial = self.try_padding(target, choose_examples(batch), device_arrays)
        except Exception as error:
            message = (
                f"whether padding counts in the results of evaluation {name!r} could not be "
                f"tried: {type(error).__name__}: {error}. {FIX_PADDING}"
            )
        else:
            if trial is None or not trial.sentences:
                return
            message = (
                f"padding counts in the results of evaluation {name!r}, because its step does not "
                f"use ctx.mask for them: {'; '.join(trial.sentences)}. {FIX_PADDING}"
            )
        self._compilations.notify(message)

    def _run_validation_steps(
        self,
        target: EvalTarget,
        data: Any,
        num_batches: int | None,
        should_stop: ShouldStop,
        totals: EvaluationTotals,
    ) -> EvaluationTotals:
        """Return the totals with these batches; the arguments are those of `evaluate`."""
        carries = dict(totals.carries)
        layouts: dict[Any, Any] = dict(totals.layouts)
        # By signature of batch: its structure and its program.
        programs: dict[Any, tuple[Any, EvaluationProgram]] = {}
        shown = totals.shown
        in_flight = deque(totals.pending)
        parts = list(totals.parts)
        leaves, device_arrays = self._put_on_devices(target, data)
        examples = get_batch_examples(data)
        first_index = num_summed = totals.num_batches
        with self._open_batches(data, num_batches) as iterator:
            for index, batch, signature in self._iter_checked(iterator, examples, first_index):
                if should_stop():
                    raise EvaluationInterrupted(
                        f"evaluation {self._evaluator.name!r} was given up before batch {index}: "
                        "training is to stop"
                    )
                self._warn_of_bare_numbers(target, batch, device_arrays)
                sharded = self._shard(batch, leaves)
                arguments = (leaves, sharded, device_arrays, np.int32(index))
                if signature in programs:
                    structure, run = programs[signature]
                else:
                    structure = split_batch(batch).structure
                    run = self._get_validation_program(target, batch)
                    if structure not in carries:
                        carries[structure] = self._init_carry(run, arguments)
                        layouts[structure] = run.carry_layout
                    self._continue_layout(run, layouts[structure])
                    complete = (*arguments, carries[structure])
                    self._note_compilation("validation_step", target, sharded, run, complete)
                    programs[signature] = structure, run
                carry, collected, media = run(*arguments, carries[structure])
                carries[structure] = carry
                # Behind the step itself, whose own errors come first.
                self._warn_of_padding(target, batch, device_arrays)
                if index == 0:
                    shown = run.media_treedef.unflatten(media)
                for array in collected:
                    array.copy_to_host_async()
                in_flight.append(Pending(carry[-1], collected, run.collected_treedef))
                if len(in_flight) > MAX_IN_FLIGHT:
                    parts.append(in_flight.popleft().read())
                num_summed = index + 1
        return replace(
            totals,
            num_batches=num_summed,
            carries=carries,
            layouts=layouts,
            parts=tuple(parts),
            pending=tuple(in_flight),
            shown=shown,
        )

    def _shard(self, batch: Any, leaves: Any) -> Any:
        """Return a batch on the devices of the target, whose leaves those are."""
        if self._sharding.mesh is None:
            batch = put_beside(batch, leaves)
        return self._sharding.shard_eval_batch(batch)

    def _put_on_devices(self, target: EvalTarget, data: Any) -> tuple[Any, Any]:
        """Return the leaves of the target and the arrays of data that stays on the device."""
        leaves = self._sharding.put_on_mesh(target.leaves)
        return leaves, self._sharding.replicate(get_device_arrays(data))

    @contextmanager
    def _open_batches(self, data: Any, num_batches: int | None) -> Iterator[BatchIterator]:
        """Open one epoch of the part of the data that this process reads."""
        shard = self._sharding.process_shard(lambda: get_array_data_spec(data))
        with (
            self._sharding.mesh_context(),
            BatchIterator(
                data, seed=0, limit=num_batches, epochs=1, process=shard, restore_on_close=True
            ) as iterator,
        ):
            yield iterator

    def _init_carry(self, run: EvaluationProgram, arguments: tuple[Any, ...]) -> list[Any]:
        """Return zeros for what one batch hands to the next; the first batch replaces them."""
        zeros = run.carry_zeros
        if zeros is None:
            specs = jax.eval_shape(run, *arguments, None)[0]
            on_host = [np.zeros(leaf.shape, leaf.dtype) for leaf in specs]
            zeros = jax.device_put(on_host, self._sharding.replicated)
            run.carry_zeros = zeros
        return zeros

    def _continue_layout(self, run: EvaluationProgram, layout: CarryLayout) -> None:
        """Have a program continue what other batches of this structure have summed up, which may
        have been those of another target.

        Args:
            run: the program.
            layout: of what they hand on.
        """
        if run.carry_layout is None:
            run.carry_layout = layout
            return
        before, new = (
            {**spec[0].metrics, **spec[1]} for spec in (layout.spec, run.carry_layout.spec)
        )
        where = f"the metrics of batch {self._batch_index} of {self._evaluator.name!r}"
        check_same_structure(before, new, where)

    def _iter_checked(
        self, iterator: BatchIterator, examples: tuple[Any, ...], first_index: int = 0
    ) -> Iterator[tuple[int, Any, Any]]:
        """Yield the number of each batch, the batch, and the signature of its shapes. All of them
        must have the structure of the first, or one that the source declares; some may be masked
        only.

        Args:
            iterator: gives the batches.
            examples: of the structures that the source declares.
            first_index: the number of the first batch.
        """
        known = [split_batch(example) for example in examples]
        signatures: set[Any] = set()
        for index, batch in enumerate(self._iter_aligned(iterator), first_index):
            self._batch_index = index
            signature = shape_signature(batch)
            if signature not in signatures:
                parts = split_batch(batch)
                known = known or [parts._replace(value=shape_spec(parts.value))]
                if parts.structure not in [other.structure for other in known]:
                    text, known_text = describe_structures(parts.value, known[0].value)
                    if parts.spec != known[0].spec:
                        text = f"{format_tree(parts.value)} of spec {parts.spec!r}"
                        known_text = f"{format_tree(known[0].value)} of spec {known[0].spec!r}"
                    raise DataError(
                        f"batch {index} of {self._evaluator.name!r} has another structure than "
                        f"those before: {text}, not {known_text}. Give all of them one, or declare "
                        "a batch of each: fg.DataSource(source, batch_examples=(...))"
                    )
                signatures.add(signature)
            yield index, batch, signature

    def _iter_aligned(self, iterator: BatchIterator) -> Iterator[Any]:
        """Yield the batches, equally many on each process; a failure of one is raised on all."""
        # Processes agree before every batch: nothing else is right for sources of unknown length.
        try:
            yield from self._sharding.align_batches(item.batch for item in iterator)
        except Exception as error:
            mark_as_shared(error)
            raise

    def _get_validation_program(self, target: EvalTarget, batch: Any) -> EvaluationProgram:
        """Return the program of a validation step for a target and batch of this structure,
        compiled at its first call."""
        key = "validation_step", target.key, jax.tree.structure(batch)
        if key not in self._validation_programs:
            self._validation_programs[key] = EvaluationProgram(
                lambda leaves, *rest: self._evaluate_batch(target.join(leaves), *rest),
                self._sharding.replicated,
            )
        return self._validation_programs[key]

    def _get_prediction_program(self, target: EvalTarget, batch: Any) -> jax.stages.Wrapped:
        """Do so for predictions."""
        key = "predict_step", target.key, jax.tree.structure(batch)
        if key not in self._prediction_programs:
            # Whatever leaves an evaluation is read on the host, by every process.
            self._prediction_programs[key] = jax.jit(
                lambda leaves, *rest: self._predict_batch(target.join(leaves), *rest),
                out_shardings=self._sharding.replicated,
            )
        return self._prediction_programs[key]

    def _note_compilation(
        self,
        step: str,
        target: EvalTarget,
        batch: Any,
        run: Any,
        arguments: tuple[Any, ...],
    ) -> None:
        """Before a batch of new shapes is run: check that there may be so many, and tell plugins of
        the executable.

        Args:
            step: the name of the method of the module.
            target: what is evaluated.
            batch: the batch.
            run: the program, with `trace`.
            arguments: of the program.
        """
        key = step, target.key
        signature = shape_signature(batch)
        specs = self._batch_specs.setdefault(key, {})
        if signature in specs:
            return
        batch_spec = shape_spec(batch)
        name = "predict" if step == "predict_step" else f"evaluate.{self._evaluator.name}"
        where = f"batch {self._batch_index} of {name}"
        self._compilations.check_limit(where, batch_spec, list(specs.values()))
        specs[signature] = batch_spec
        if self._compilations.is_observed:
            # jax keeps the executable for the call that follows.
            traced = run.trace(*arguments)
            compiled = traced.lower().compile()
            self._compilations.report(name, batch_spec, compiled, traced.jaxpr)

    def _evaluate_batch(
        self, target: Any, batch: Any, device_arrays: Any, index: Any, carry: Any
    ) -> Any:
        """Run one validation step and merge its metrics into those before; traced.

        `carry` is None, or the accumulator, the names of the collecting metrics with None for each
        (which there are may not change from batch to batch either), and whether there was a batch.
        """
        with self._eval_context(target, batch, device_arrays, index) as (module, batch, ctx):
            output = forward(self._plugins, self._sharding, self._step, module, batch, ctx)
            self._may_have_bare_numbers |= may_have_bare_numbers(self._evaluator, output)
            metrics, collected = collect_batch_metrics(
                self._evaluator, self._plugins, module, output, batch, ctx
            )
            media = choose_media(self._evaluator, output, batch, ctx, index == 0)
        accumulator = MetricAccumulator.from_metrics(metrics)
        names = dict.fromkeys(collected)
        if carry is not None:
            before, names_before, has_batches = carry
            where = f"the metrics of batch {self._batch_index} of {self._evaluator.name!r}"
            check_same_structure(before.metrics | names_before, metrics | names, where)
            accumulator = before.update(accumulator, restart=~has_batches)
        return (accumulator, names, jnp.bool_(True)), collected, media

    def _predict_batch(self, target: Any, batch: Any, device_arrays: Any, index: Any) -> Any:
        """Return the predictions of one batch, and its mask; traced."""
        with self._eval_context(target, batch, device_arrays, index) as (module, batch, ctx):
            step = get_method(module, "predict_step")
            check_batch(step, batch, module)
            preds = call_with_around_hooks(self._plugins, step, module, batch, ctx.for_forward())
            shapes = [jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(preds)]
            fits_mask = ctx.mask is None or {*shapes} == {ctx.mask.shape}
            if not all(shapes or [()]) or not fits_mask:
                raise ModelError(
                    f"{step.__qualname__} returned {format_tree(preds) or 'nothing'}: return "
                    "arrays "
                    "that begin with the example axis"
                )
            return preds, ctx.mask

    @contextmanager
    def _eval_context(
        self, target: Any, batch: Any, device_arrays: Any, index: Any
    ) -> Iterator[tuple[Any, Any, Context]]:
        """Give the module in inference mode, the batch without its mask, and the context of the
        step; errors name the batch."""
        module, model_state, key, step = target
        batch, mask, spec, num_examples = split_batch(ArrayData.gather(device_arrays, batch))
        # Media are shown of the first batch; nothing else is due in an evaluation.
        due_flags: dict[str, Any] = {name: jnp.asarray(False) for name in self._due_names}
        if MEDIA_ACTION in due_flags:
            due_flags[MEDIA_ACTION] = jnp.asarray(index == 0)
        ctx = Context(
            self._make_rng_streams(key),
            step,
            training=False,
            model_state=model_state,
            mask=mask,
            spec=spec,
            num_examples=num_examples,
            rng_path=((self._evaluator.name, index),),
            due_flags=due_flags,
            rng_step=step if self._evaluator.new_rng_each_time else None,
            evaluation=self._evaluator.name,
        )
        where = f"batch {self._batch_index} of {self._evaluator.name!r}"
        with training_mode(False, module) as module, batch_error_context(where, batch):
            yield module, batch, ctx


def _hide_media(ctx: Context) -> Context:
    """Return a context for a trial, which shows no media."""
    if MEDIA_ACTION not in ctx.due_flags:
        return ctx
    return replace(ctx, due_flags={**ctx.due_flags, MEDIA_ACTION: jnp.asarray(False)})


def _concatenate_predictions(batches: list[Any]) -> Any:
    """Return the predictions of all batches as one tree."""
    for index, batch in enumerate(batches):
        if _get_example_spec(batch) != _get_example_spec(batches[0]):
            raise ModelError(
                f"predict_step returned {format_tree(batch)} for batch {index}, and "
                f"{format_tree(batches[0])} for batch 0: give them the same shapes, or take each "
                "with callback="
            )
    return jax.tree.map(lambda *parts: np.concatenate(parts), *batches)


def _get_example_spec(preds: Any) -> tuple[Any, list[tuple[int, ...]]]:
    """Return the structure of predictions, and the shapes of one example."""
    return jax.tree.structure(preds), [leaf.shape[1:] for leaf in jax.tree.leaves(preds)]


def _remove_padding(preds: Any, mask: Any) -> Any:
    """Return the predictions that the mask, if any, does not exclude, as NumPy arrays."""

    def select(leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        return array if mask is None else array[np.asarray(mask)]

    return jax.tree.map(select, preds)
