"""Evaluation and prediction: one compiled program each, metrics merged on the device and read
once."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr
from jaxtyping import Array, Key, PyTree

from fulgurite.data.iterator import BatchIterator
from fulgurite.data.sources import ArrayData, get_batch_spec, get_device_arrays
from fulgurite.errors import (
    ConfigurationError,
    DataError,
    EvaluationInterrupted,
    ModelError,
    PluginError,
    check_name,
    check_positive_int,
    did_you_mean,
    mark_as_shared,
)
from fulgurite.metrics.base import (
    CollectingMetric,
    Metric,
    MetricAccumulator,
    RunningMetric,
    flatten_metric_dict,
)
from fulgurite.metrics.basic import Mean
from fulgurite.metrics.conversion import as_metric, to_number
from fulgurite.model.context import Context
from fulgurite.model.media import MEDIA_ACTION
from fulgurite.model.mode import training_mode
from fulgurite.model.module import Output, evaluate_metric_fn, get_method
from fulgurite.plugins.manager import PluginManager
from fulgurite.training.forward import call_around, count_examples, forward, split_mask
from fulgurite.training.metric_window import merge_losses_and_metrics
from fulgurite.training.services import Services
from fulgurite.training.state import TrainState, check_has_state, check_not_consumed
from fulgurite.tree.specs import check_same_structure, format_tree, shape_spec, tree_signature
from fulgurite.tree.typecheck import batch_error_context, check_batch

MetricFunctions = Mapping[str, Callable[..., Any]]
"""Functions of predictions and batch, by the name of the metric or loss."""
ShouldStop = Callable[[], bool]
"""Asked before each batch of an evaluation; True gives the evaluation up."""

# Batches under way at once: enough to keep the device busy; each holds its batch.
MAX_IN_FLIGHT = 2


class EvalTarget:
    """What is evaluated, flattened once for all batches.

    Attributes:
        leaves: the arrays.
        key: equal for targets that one compiled program can evaluate.

    Args:
        module: the module.
        model_state: its `eqx.nn.State`, or None.
        key: the root of the random streams.
        step: the number of updates that the module had.
    """

    def __init__(self, module: Any, model_state: Any, key: Any, step: Any) -> None:
        arrays, self._static = eqx.partition(
            (module, model_state, key, jnp.asarray(step)), eqx.is_array
        )
        self.leaves, self._treedef = jax.tree.flatten(arrays)
        self.key = self._treedef, tree_signature(self._static)

    def join(self, leaves: list[Any]) -> tuple[Any, Any, Any, Any]:
        """Return module, model state, key and step of these leaves."""
        return eqx.combine(jax.tree.unflatten(self._treedef, leaves), self._static)


def as_eval_target(model: Any, key: Key[Array, ""]) -> EvalTarget:
    """Return a model as what is evaluated.

    Args:
        model: a module, a pair of a module and its state, or a train state.
        key: the root of the random streams where the model brings none.

    Raises:
        ModelError: the model is something else.
    """
    check_not_consumed(model)
    if isinstance(model, TrainState):
        return EvalTarget(model.module, model.model_state, model.key, model.step)
    module, model_state = model if isinstance(model, tuple) else (model, None)
    if not isinstance(module, eqx.Module):
        raise ModelError(
            f"give a module, (module, state), a train state or a result, not {model!r}"
        )
    check_has_state(module, model_state)
    return EvalTarget(module, model_state, key, 0)


def get_module_view(plugins: PluginManager, state: TrainState, name: str) -> Any:
    """Return the module that a plugin makes of a state.

    Args:
        plugins: of the engine.
        state: the state.
        name: of the view; `current` is the state's own module.
    """
    if name == "current":
        return state.module
    views = plugins.ask("module_views", state=state)
    if name not in views:
        raise PluginError(
            f"no plugin gives the weights {name!r}. {did_you_mean(name, ['current', *views])}"
        )
    return views[name]


@dataclass(frozen=True, eq=False)
class Evaluator:
    """A named evaluation, declared by a plugin in `register_evaluators`.

    Example:
        class TestSet:
            @fg.hookimpl
            def register_evaluators(self):
                return [fg.Evaluator("test", data)]


        engine = fg.Engine(steps=100, plugins=[TestSet()])

    Attributes:
        name: its results are `metrics[name]` and records of the source `name`.
        data: any data source; one epoch of it is evaluated.
        num_batches: use at most this many batches.
        module_view: `current`, or the name of a plugin's module view.
        metrics: used instead of those of the module's step, by name: `metric(preds, batch)` returns
            an array with an example axis, or `metric(preds, batch, mask)` a `Metric` or
            `CollectingMetric`; the step must return `preds`.
        losses: likewise, used instead of the loss and its terms; `loss` is their sum.
        new_rng_each_time: whether each evaluation draws different random numbers; by default all
            draw the same.
        exact: whether its results are exact records; False for one that runs by the clock.
    """

    name: str
    data: Any
    num_batches: int | None = None
    module_view: str = "current"
    metrics: MetricFunctions | None = None
    losses: MetricFunctions | None = None
    new_rng_each_time: bool = False
    exact: bool = True

    def __post_init__(self) -> None:
        check_name(self.name, "Evaluator: name")
        where = f"evaluator {self.name!r}"
        if self.num_batches is not None:
            check_positive_int(self.num_batches, f"{where}: num_batches")
        check_name(self.module_view, f"{where}: module_view")
        _check_functions(f"{where}: metrics", self.metrics)
        _check_functions(f"{where}: losses", self.losses)


@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """What an evaluation gives.

    Attributes:
        metrics: Python numbers and NumPy arrays by name.
        media: what the step showed of the first batch, by name, on the device.
    """

    metrics: dict[str, Any]
    media: dict[str, Any]


def never_stop() -> bool:
    """Return False: the evaluation goes on to its end."""
    return False


def _check_functions(where: str, functions: Any) -> None:
    """Raise a `ConfigurationError` for what is neither None nor functions by name."""
    if functions is None:
        return
    if not isinstance(functions, Mapping) or not all(map(callable, functions.values())):
        raise ConfigurationError(f"{where} are functions by name, not {functions!r}")


class Evaluation:
    """Runs evaluations or predictions as an `Evaluator` says, on any module and data.

    The program is compiled once for each structure of them.

    Args:
        services: what the engine provides.
        evaluator: what to evaluate; its data is not looked at.
    """

    def __init__(self, services: Services, evaluator: Evaluator) -> None:
        self._plugins = services.hooks
        self._make_rng_streams = services.make_rng_streams
        self._evaluator = evaluator
        self._sharding = services.sharding
        self._due_names = services.settings.due_names
        self._compiled: dict[Any, Callable[..., Any]] = {}
        # The batch that is being traced, for errors.
        self._batch_index = 0

    def evaluate(
        self,
        target: EvalTarget,
        data: Any,
        num_batches: int | None,
        should_stop: ShouldStop = never_stop,
    ) -> EvaluationResult:
        """Return the metrics over one epoch.

        Args:
            target: the module and what belongs to it.
            data: any data source.
            num_batches: use at most this many batches.
            should_stop: called before each batch.

        Raises:
            EvaluationInterrupted: `should_stop()` was true.
        """
        accumulator, parts, media = self._run_validation_steps(
            target, data, num_batches, should_stop
        )
        values: dict[str, Any] = {} if accumulator is None else {**accumulator.compute()}
        for name in parts[0] if parts else ():
            collected = [part[name] for part in parts]
            values |= _compute_collected(name, collected)
        # Summed up here and not for each batch: each term may weigh examples in its own way, so the
        # sums of the batches have no weight that fits.
        losses = self._evaluator.losses or {}
        if "loss" in losses or (losses and "loss" not in values):
            values["loss"] = sum(values[name] for name in losses)
        return EvaluationResult(as_numbers(values), media)

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
        in_flight: deque[Any] = deque()
        leaves, device_arrays = self._put_on_devices(target, data)
        with self._open_batches(data, num_batches) as iterator:
            for index, batch in self._iter_checked(iterator):
                run = self._get_compiled("predict_step", target, batch)
                batch = self._sharding.shard_eval_batch(batch)
                in_flight.append(run(leaves, batch, device_arrays, np.int32(index)))
                if len(in_flight) > MAX_IN_FLIGHT:
                    take(_remove_padding(*in_flight.popleft()))
        for preds, mask in in_flight:
            take(_remove_padding(preds, mask))
        return _concatenate_predictions(batches) if callback is None else None

    def _run_validation_steps(
        self,
        target: EvalTarget,
        data: Any,
        num_batches: int | None,
        should_stop: ShouldStop,
    ) -> tuple[MetricAccumulator | None, list[dict[str, CollectingMetric]], dict[str, Any]]:
        """Return the merged metrics and the collecting ones of each batch, both on the host, and
        the media of the first batch."""
        carry: Any = None
        first_media: dict[str, Any] = {}
        in_flight: deque[Any] = deque()
        parts: list[dict[str, CollectingMetric]] = []
        leaves, device_arrays = self._put_on_devices(target, data)
        with self._open_batches(data, num_batches) as iterator:
            for index, batch in self._iter_checked(iterator):
                if should_stop():
                    raise EvaluationInterrupted(
                        f"evaluation {self._evaluator.name!r} was given up before batch {index}: "
                        "training is to stop"
                    )
                run = self._get_compiled("validation_step", target, batch)
                sharded = self._sharding.shard_eval_batch(batch)
                arguments = (leaves, sharded, device_arrays, np.int32(index))
                if carry is None:
                    carry = self._init_carry(run, arguments)
                carry, collected, media = run(*arguments, carry)
                if index == 0:
                    first_media = media
                in_flight.append((carry, jax.copy_to_host_async(collected)))
                if len(in_flight) > MAX_IN_FLIGHT:
                    done, collected = in_flight.popleft()
                    jax.block_until_ready(done)
                    parts.append(jax.device_get(collected))
        parts += [jax.device_get(collected) for _, collected in in_flight]
        accumulator = None if carry is None else jax.device_get(carry)[0]
        return accumulator, parts, first_media

    def _put_on_devices(self, target: EvalTarget, data: Any) -> tuple[Any, Any]:
        """Return the leaves of the target and the arrays of data that stays on the device."""
        leaves = self._sharding.put_on_mesh(target.leaves)
        return leaves, self._sharding.replicate(get_device_arrays(data))

    @contextmanager
    def _open_batches(self, data: Any, num_batches: int | None) -> Iterator[BatchIterator]:
        """Open one epoch of the part of the data that this process reads."""
        shard = self._sharding.process_shard(lambda: get_batch_spec(data))
        with (
            self._sharding.mesh_context(),
            BatchIterator(
                data, seed=0, limit=num_batches, epochs=1, process=shard, restore_on_close=True
            ) as iterator,
        ):
            yield iterator

    def _init_carry(self, run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Return zeros for what one batch hands to the next; the first batch replaces them."""
        specs = jax.eval_shape(run, *arguments, None)[0]
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), specs)
        return jax.device_put(zeros, self._sharding.replicated)

    def _iter_checked(self, iterator: BatchIterator) -> Iterator[tuple[int, Any]]:
        """Yield the batches by number. All of them must have the structure of the first; some may
        be masked only."""
        first = None
        for index, batch in enumerate(self._iter_aligned(iterator)):
            spec = shape_spec(split_mask(batch)[0])
            first = first if index else spec
            if jax.tree.structure(spec) != jax.tree.structure(first):
                raise DataError(
                    f"batch {index} of {self._evaluator.name!r} has another structure than those "
                    f"before: {format_tree(spec)}, not {format_tree(first)}. Give all of them one"
                )
            self._batch_index = index
            yield index, batch

    def _iter_aligned(self, iterator: BatchIterator) -> Iterator[Any]:
        """Yield the batches, equally many on each process; a failure of one is raised on all."""
        # Processes agree before every batch: nothing else is right for sources of unknown length.
        try:
            yield from self._sharding.align_batches(item.batch for item in iterator)
        except Exception as error:
            mark_as_shared(error)
            raise

    def _get_compiled(self, step: str, target: EvalTarget, batch: Any) -> Callable[..., Any]:
        """Return the program for a target and batch of this structure, compiled at its first
        call."""
        key = step, target.key, jax.tree.structure(batch)
        if key not in self._compiled:
            body = self._evaluate_batch if step == "validation_step" else self._predict_batch
            # Whatever leaves an evaluation is read on the host, by every process.
            self._compiled[key] = jax.jit(
                lambda leaves, *rest: body(target.join(leaves), *rest),
                out_shardings=self._sharding.replicated,
            )
        return self._compiled[key]

    def _evaluate_batch(
        self, target: Any, batch: Any, device_arrays: Any, index: Any, carry: Any
    ) -> Any:
        """Run one validation step and merge its metrics into those before; traced.

        `carry` is None, or the accumulator and the names of the collecting metrics with None for
        each: which there are may not change from batch to batch either.
        """
        with self._eval_context(target, batch, device_arrays, index) as (module, batch, ctx):
            output = forward(self._plugins, self._sharding, "validation_step", module, batch, ctx)
            plugin_metrics = self._collect_plugin_metrics(module, output, batch, ctx)
            metrics, collected = self._get_metrics(output, plugin_metrics, batch, ctx)
        accumulator = MetricAccumulator.from_metrics(metrics)
        names = dict.fromkeys(collected)
        if carry is not None:
            before, names_before = carry
            where = f"the metrics of batch {self._batch_index} of {self._evaluator.name!r}"
            check_same_structure(before.metrics | names_before, metrics | names, where)
            accumulator = before.update(accumulator, restart=index == 0)
        return (accumulator, names), collected, output.media

    def _predict_batch(self, target: Any, batch: Any, device_arrays: Any, index: Any) -> Any:
        """Run one prediction step; traced. Gives the predictions and the mask."""
        with self._eval_context(target, batch, device_arrays, index) as (module, batch, ctx):
            step = get_method(module, "predict_step")
            check_batch(step, batch)
            preds = call_around(self._plugins, step, module, batch, ctx.for_forward())
            shapes = [jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(preds)]
            fits_mask = ctx.mask is None or {*shapes} == {ctx.mask.shape}
            if not all(shapes or [()]) or not fits_mask:
                raise ModelError(
                    f"{step.__qualname__} gave {format_tree(preds) or 'nothing'}: return arrays "
                    "that begin with the example axis"
                )
            return preds, ctx.mask

    @contextmanager
    def _eval_context(
        self, target: Any, batch: Any, device_arrays: Any, index: Any
    ) -> Iterator[tuple[Any, Any, Context]]:
        module, model_state, key, step = target
        batch, mask = split_mask(ArrayData.gather(device_arrays, batch))
        # Media are shown of the first batch; nothing else is due in an evaluation.
        due_flags: dict[str, Any] = {name: jnp.asarray(False) for name in self._due_names}
        if MEDIA_ACTION in due_flags:
            due_flags[MEDIA_ACTION] = index == 0
        ctx = Context(
            self._make_rng_streams(key),
            step,
            training=False,
            model_state=model_state,
            mask=mask,
            rng_path=((self._evaluator.name, index),),
            due_flags=due_flags,
            rng_step=step if self._evaluator.new_rng_each_time else None,
        )
        where = f"batch {self._batch_index} of {self._evaluator.name!r}"
        with training_mode(False, module) as module, batch_error_context(where, batch):
            yield module, batch, ctx

    def _collect_plugin_metrics(
        self, module: Any, output: Output, batch: Any, ctx: Context
    ) -> dict[str, Any]:
        """Return the metrics of plugins for one batch, as `PLUGIN/NAME`; traced."""
        metrics: dict[str, Any] = {}
        for hook in self._plugins.implementations("evaluation_metrics"):
            name = hook.plugin.name
            plugin_ctx = ctx.for_plugin(name)
            answer = hook(None, module=module, output=output, batch=batch, ctx=plugin_ctx)
            for key, value in (answer or {}).items():
                metrics[f"{name}/{key}"] = value
        return metrics

    def _get_metrics(
        self, output: Output, plugin_metrics: dict[str, Any], batch: Any, ctx: Context
    ) -> tuple[dict[str, Metric], dict[str, CollectingMetric]]:
        """Return the metrics of one batch by name, and those that collect examples; traced."""
        total = output.loss
        terms = output.losses
        metrics = output.metrics
        # The evaluator's own replace the module's, by kind. A function that takes `mask` makes its
        # own metric; for a padded batch without it that is an error, because padding would count.
        if self._evaluator.losses is not None:
            total = None
            terms = self._call_functions(self._evaluator.losses, output, batch, ctx)
        if self._evaluator.metrics is not None:
            metrics = self._call_functions(self._evaluator.metrics, output, batch, ctx)
        num_examples = count_examples(batch, ctx.mask)
        merged: dict[str, Metric] = {}
        collected: dict[str, CollectingMetric] = {}
        values = merge_losses_and_metrics(total, terms, metrics) | plugin_metrics
        for name, value in values.items():
            if isinstance(value, CollectingMetric):
                collected[name] = value
            elif isinstance(value, RunningMetric):
                # An evaluation has no order of steps: its value is the mean over the batches.
                merged[name] = _as_mean(value.compute(), num_examples)
            else:
                merged[name] = as_metric(name, value, num_examples)
        return merged, collected

    def _call_functions(
        self, functions: MetricFunctions, output: Output, batch: Any, ctx: Context
    ) -> dict[str, Any]:
        """Return what the evaluator's own metrics or losses are for one batch, by name."""
        if output.preds is None:
            raise ModelError(
                f"evaluator {self._evaluator.name!r} has metrics of its own: "
                "return fg.Output(..., preds=...)"
            )
        return {
            name: evaluate_metric_fn(name, function, output.preds, batch, ctx.mask)
            for name, function in functions.items()
        }


def as_numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Return metrics as Python numbers and NumPy arrays; a dictionary gives `name/key` for each of
    its keys."""
    return {name: to_number(value) for name, value in flatten_metric_dict(values).items()}


def _compute_collected(name: str, parts: list[CollectingMetric]) -> dict[str, Any]:
    """Return the result of a collecting metric over its batches; of a tree, `name/path` for each
    leaf."""
    result = parts[0].merge(*parts[1:]).compute()
    values = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(result):
        keys = [keystr((key,), simple=True) for key in path]
        values["/".join([name, *keys])] = leaf
    return values


def _as_mean(value: Any, num_examples: Any) -> Metric:
    """Return the mean over so many examples, element by element."""
    means = jax.vmap(partial(Mean.from_values, weight=num_examples))(jnp.ravel(value))
    return jax.tree.map(lambda leaf: leaf.reshape(jnp.shape(value)), means)


def _concatenate_predictions(batches: list[Any]) -> Any:
    """Return the predictions of all batches as one tree."""
    for index, batch in enumerate(batches):
        if _get_example_spec(batch) != _get_example_spec(batches[0]):
            raise ModelError(
                f"predict_step gave {format_tree(batch)} for batch {index}, and "
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
