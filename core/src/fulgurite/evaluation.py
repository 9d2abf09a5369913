"""Evaluation and prediction: one compiled program each, metrics merged on the device and read
once."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr
from jaxtyping import PyTree

from fulgurite.data.iterator import BatchIterator
from fulgurite.data.sources import ArrayData, get_device_arrays
from fulgurite.errors import ConfigurationError, DataError, ModelError, PluginError
from fulgurite.lockstep import iter_aligned_batches, raise_on_any_process
from fulgurite.media import MEDIA_ACTION, split_media
from fulgurite.metrics.base import (
    CollectingMetric,
    Metric,
    RunningMetric,
    flatten_metric_dict,
)
from fulgurite.metrics.basic import Mean
from fulgurite.metrics.conversion import as_metric, to_number
from fulgurite.model.context import Context
from fulgurite.model.mode import training_mode
from fulgurite.model.module import Output, evaluate_metric_fn, get_method
from fulgurite.placing import (
    process_shard,
    put_shared,
    replicate,
    replicated_sharding,
    shard_batch,
    use_mesh,
)
from fulgurite.training.forward import count_examples, forward, split_mask
from fulgurite.training.metric_window import merge_named_values
from fulgurite.training.services import Services
from fulgurite.training.state import TrainState
from fulgurite.tree.specs import check_same_structure, format_tree, shape_spec
from fulgurite.tree.typecheck import batch_error_context, check_batch
from fulgurite.weights import EvalTarget, as_eval_target, get_module_view

Functions = Mapping[str, Callable[..., Any]]
Interrupt = Callable[[], bool]
Show = Callable[[dict[str, Any]], None]
# Enough to keep the device busy; each holds its batch.
IN_FLIGHT = 2


class Interrupted(Exception):
    """An evaluation was given up between two batches, because training is to stop."""


@dataclass(frozen=True, eq=False)
class EvaluatorSpec:
    """A named evaluation.

    Attributes:
        name: its results are `metrics[name]` and records of the source `name`.
        data: any data source; one epoch of it is evaluated.
        limit: use at most this many batches.
        weights: `current`, or the name of a plugin's module view.
        metrics: used instead of those of the module's step, by name: `metric(preds, batch)` returns
            an array with an example axis, or `metric(preds, batch, mask)` a `Metric` or
            `CollectingMetric`; the step must return `preds`.
        losses: likewise, used instead of the loss and its terms; `loss` is their sum.
        fresh: whether each evaluation draws different random numbers; by default all draw the same.
        exact: whether its results are exact records; False for one that runs by the clock.
        required: whether an exception in it ends training; if not, there is one notice and it is
            left out from then on.
        custom: `custom(state, step, standard)` computes the metrics itself, with any media to show
            among them. `state` has the chosen weights, in inference mode; `standard(state)` is the
            evaluation without `custom`.
    """

    name: str
    data: Any
    num_batches: int | None = None
    module_view: str = "current"
    metrics: Functions | None = None
    losses: Functions | None = None
    new_rng_each_time: bool = False
    exact: bool = True
    raise_on_error: bool = True
    custom: (
        Callable[[TrainState, int, Callable[[TrainState], dict[str, Any]]], dict[str, Any]] | None
    ) = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(
                f"EvaluatorSpec: name is {self.name!r}; it must be a non-empty string"
            )
        for kind, given in (("metrics", self.metrics), ("losses", self.losses)):
            if given is not None and not (
                isinstance(given, Mapping) and all(map(callable, given.values()))
            ):
                raise ConfigurationError(
                    f"evaluator {self.name!r}: {kind} are functions by name, not {given!r}"
                )


class Evaluation:
    """Runs evaluations or predictions like `spec`, on any module and data; compiled once for each
    structure of them."""

    def __init__(self, services: Services, spec: EvaluatorSpec) -> None:
        self._plugins = services.hooks
        self._streams = services.make_rng_streams
        self._spec = spec
        self._mesh = services.mesh
        self._consensus = services.sync
        self._due_names = services.settings.due_names
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._at = 0  # the batch that is being traced, for errors
        self._failure_is_shared = False

    def evaluate(
        self,
        subject: EvalTarget,
        data: Any,
        limit: int | None,
        interrupted: Interrupt,
        show: Show | None,
    ) -> dict[str, Any]:
        """The metrics as Python numbers and NumPy arrays, over one epoch of at most `limit`
        batches. `show` gets the media of the first batch, on the device. Raises `Interrupted` if
        `interrupted()`, asked before each, is true."""
        merged: dict[str, Metric] | None = None
        gathered: list[dict[str, CollectingMetric]] = []
        in_flight: deque[Any] = deque()
        leaves, resident = (
            put_shared(subject.leaves, self._mesh),
            replicate(get_device_arrays(data), self._mesh),
        )
        share = process_shard(self._plugins, data, self._mesh)
        with (
            use_mesh(self._mesh),
            BatchIterator(
                data, seed=0, limit=limit, epochs=1, process=share, restore_on_close=True
            ) as feed,
        ):
            for index, batch in self._batches(feed):
                if interrupted():
                    raise Interrupted
                run = self._function("validation_step", subject, batch)
                arguments = (
                    leaves,
                    shard_batch(self._plugins, batch, self._mesh),
                    resident,
                    np.int32(index),
                )
                if merged is None:
                    specs = jax.eval_shape(run, *arguments, None)[0]
                    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), specs)
                    merged = jax.device_put(zeros, replicated_sharding(self._mesh))
                merged, more, media = run(*arguments, merged)
                if index == 0 and media and show:
                    show(media)
                gathered.append(jax.copy_to_host_async(more))
                in_flight.append(merged)
                if len(in_flight) > IN_FLIGHT:
                    jax.block_until_ready(in_flight.popleft())
                    gathered[index - IN_FLIGHT] = jax.device_get(gathered[index - IN_FLIGHT])
        values: dict[str, Any] = {
            name: one.compute() for name, one in jax.device_get(merged or {}).items() if one
        }
        for name in gathered[0] if gathered else ():
            parts = [part[name] for part in gathered]
            for path, leaf in jax.tree_util.tree_leaves_with_path(
                parts[0].merge(*parts[1:]).compute()
            ):
                values["/".join([name, *(keystr((key,), simple=True) for key in path)])] = leaf
        losses = self._spec.losses or {}
        if "loss" in losses or (losses and "loss" not in values):
            values["loss"] = sum(values[name] for name in losses)
        return as_numbers(values)

    def evaluate_state(
        self,
        spec: EvaluatorSpec,
        state: TrainState,
        limit: int | None,
        interrupted: Interrupt,
        show: Show | None,
    ) -> dict[str, Any]:
        """The metrics of the evaluation `spec` of a train state, with the weights that it asks
        for."""
        state = state.replace(module=get_module_view(self._plugins, state, spec.module_view))

        def standard(state: TrainState) -> dict[str, Any]:
            return self.evaluate(
                as_eval_target(state, state.key), spec.data, limit, interrupted, show
            )

        if spec.custom is None:
            return standard(state)
        with training_mode(False, state.module) as module:
            self._failure_is_shared = False
            try:
                metrics = spec.custom(state.replace(module=module), int(state.step), standard)
            except Interrupted:
                raise
            except Exception as error:
                if not self._failure_is_shared:
                    raise_on_any_process(self._consensus, error)
                raise
            raise_on_any_process(self._consensus, None)
        if not isinstance(metrics, dict) or not all(isinstance(key, str) for key in metrics):
            raise PluginError(
                f"evaluator {spec.name!r} gave {metrics!r}; an evaluation gives metrics by name"
            )
        metrics, media = split_media(flatten_metric_dict(metrics))
        if media and show:
            show(media)
        numbers = as_numbers(metrics)
        if bad := [
            name for name, value in numbers.items() if np.asarray(value).dtype.kind not in "biufV"
        ]:
            gap = f"the metric {bad[0]!r} of evaluator {spec.name!r} is {type(numbers[bad[0]]).__name__}"
            raise PluginError(f"{gap}: an evaluation gives numbers, arrays of them, and fg.media")
        return numbers

    def predict(
        self,
        subject: EvalTarget,
        data: Any,
        limit: int | None,
        callback: Callable[[PyTree[np.ndarray]], None] | None,
    ) -> Any:
        """The predictions for every example, in order, without padding: one tree, or batch by batch
        to `callback`."""
        made: list[Any] = []
        take = made.append if callback is None else callback
        in_flight: deque[Any] = deque()
        leaves, resident = (
            put_shared(subject.leaves, self._mesh),
            replicate(get_device_arrays(data), self._mesh),
        )
        share = process_shard(self._plugins, data, self._mesh)
        with (
            use_mesh(self._mesh),
            BatchIterator(
                data, seed=0, limit=limit, epochs=1, process=share, restore_on_close=True
            ) as feed,
        ):
            for index, batch in self._batches(feed):
                run = self._function("predict_step", subject, batch)
                batch = shard_batch(self._plugins, batch, self._mesh)
                in_flight.append(run(leaves, batch, resident, np.int32(index)))
                if len(in_flight) > IN_FLIGHT:
                    take(_remove_padding(*in_flight.popleft()))
        for preds, mask in in_flight:
            take(_remove_padding(preds, mask))
        kinds = [
            (jax.tree.structure(part), [leaf.shape[1:] for leaf in jax.tree.leaves(part)])
            for part in made
        ]
        if other := [index for index, kind in enumerate(kinds) if kind != kinds[0]]:
            given = f"{format_tree(made[other[0]])} for batch {other[0]}, and {format_tree(made[0])} for batch 0"
            raise ModelError(
                f"predict_step gave {given}: give them the same shapes, or take each with callback="
            )
        return (
            jax.tree.map(lambda *parts: np.concatenate(parts), *made) if callback is None else None
        )

    def _batches(self, feed: BatchIterator) -> Iterator[tuple[int, Any]]:
        """The batches by number; one of another structure than the first is an error. Some may be
        masked only."""
        first = None
        self._failure_is_shared = True  # of what fails in here all processes know
        for index, batch in enumerate(iter_aligned_batches(feed, self._consensus)):
            self._failure_is_shared = False
            spec = shape_spec(split_mask(batch)[0])
            first = first if index else spec
            if jax.tree.structure(spec) != jax.tree.structure(first):
                gap = (
                    f"batch {index} of {self._spec.name!r} has another structure than those before"
                )
                raise DataError(
                    f"{gap}: {format_tree(spec)}, not {format_tree(first)}. Give all of them one"
                )
            self._at = index
            yield index, batch
            self._failure_is_shared = True
        self._failure_is_shared = False

    def _function(self, step: str, subject: EvalTarget, batch: Any) -> Callable[..., Any]:
        key = step, subject.key, jax.tree.structure(batch)
        if key not in self._compiled:
            body = self._evaluate if step == "validation_step" else self._predict
            # Whatever leaves an evaluation is read on the host, by every process.
            whole = replicated_sharding(self._mesh)
            self._compiled[key] = jax.jit(
                lambda leaves, *rest: body(subject.join(leaves), *rest), out_shardings=whole
            )
        return self._compiled[key]

    def _evaluate(self, subject: Any, batch: Any, resident: Any, index: Any, merged: Any) -> Any:
        with self._eval_context(subject, batch, resident, index) as (module, batch, ctx):
            output = forward(self._plugins, "validation_step", module, batch, ctx)
            metrics, gathered = self._metrics(output, batch, ctx)
        if merged is not None:
            check_same_structure(
                merged, metrics, f"the metrics of batch {self._at} of {self._spec.name!r}"
            )
            both = {name: one and merged[name].merge(one) for name, one in metrics.items()}
            metrics = jax.tree.map(partial(jnp.where, index == 0), metrics, both)
        return metrics, gathered, output.media

    def _predict(self, subject: Any, batch: Any, resident: Any, index: Any) -> Any:
        with self._eval_context(subject, batch, resident, index) as (module, batch, ctx):
            check_batch(step := get_method(module, "predict_step"), batch)
            preds = step(module, batch, ctx.for_forward())
            shapes = [jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(preds)]
            if not all(shapes or [()]) or (ctx.mask is not None and {*shapes} != {ctx.mask.shape}):
                what = f"{step.__qualname__} gave {format_tree(preds) or 'nothing'}"
                raise ModelError(f"{what}: return arrays that begin with the example axis")
            return preds, ctx.mask

    @contextmanager
    def _eval_context(
        self, subject: Any, batch: Any, resident: Any, index: Any
    ) -> Iterator[tuple[Any, Any, Context]]:
        module, model_state, key, step = subject
        batch, mask = split_mask(ArrayData.gather(resident, batch))
        ctx = Context(
            self._streams(key),
            step,
            training=False,
            model_state=model_state,
            mask=mask,
            rng_path=((self._spec.name, index),),
            due_flags={
                name: index == 0 if name == MEDIA_ACTION else jnp.asarray(False)
                for name in self._due_names
            },
            rng_step=step if self._spec.new_rng_each_time else None,
        )
        with (
            training_mode(False, module) as module,
            batch_error_context(f"batch {self._at} of {self._spec.name!r}", batch),
        ):
            yield module, batch, ctx

    def _metrics(
        self, output: Output, batch: Any, ctx: Context
    ) -> tuple[dict[str, Any], dict[str, CollectingMetric]]:
        spec = self._spec
        total, terms = output.loss, output.losses
        if spec.losses is not None:
            total, terms = None, self._metrics_from_preds(spec.losses, output, batch, ctx)
        metrics = (
            output.metrics
            if spec.metrics is None
            else self._metrics_from_preds(spec.metrics, output, batch, ctx)
        )
        given = merge_named_values(total, terms, metrics)
        gathered = {
            name: value for name, value in given.items() if isinstance(value, CollectingMetric)
        }
        examples = count_examples(batch, ctx.mask)
        # The gathered ones have a place without a value: which there are may not change from batch
        # to batch either.
        metrics = dict.fromkeys(gathered) | {
            name: _as_mean(value.compute(), examples)
            if isinstance(value, RunningMetric)
            else as_metric(name, value, examples)
            for name, value in given.items()
            if name not in gathered
        }
        return metrics, gathered

    def _metrics_from_preds(
        self, functions: Functions, output: Output, batch: Any, ctx: Context
    ) -> dict[str, Any]:
        if output.preds is None:
            raise ModelError(
                f"evaluator {self._spec.name!r} has metrics of its own: return fg.Output(..., preds=...)"
            )
        return {
            name: evaluate_metric_fn(name, function, output.preds, batch, ctx.mask)
            for name, function in functions.items()
        }


def as_numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Metrics as Python numbers and NumPy arrays; a dictionary gives `name/key` for each of its
    keys."""
    return {name: to_number(value) for name, value in flatten_metric_dict(values).items()}


def _as_mean(value: Any, examples: Any) -> Metric:
    """The mean over so many examples, element by element."""
    means = jax.vmap(partial(Mean.from_values, weight=examples))(jnp.ravel(value))
    return jax.tree.map(lambda leaf: leaf.reshape(jnp.shape(value)), means)


def _remove_padding(preds: Any, mask: Any) -> Any:
    return jax.tree.map(
        lambda leaf: np.asarray(leaf) if mask is None else np.asarray(leaf)[np.asarray(mask)], preds
    )
