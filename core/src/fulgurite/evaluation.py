"""Evaluation and prediction: one compiled program each, metrics merged on the device and read once."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr
from jaxtyping import PyTree

from fulgurite.annotations import check_batch, describe, described, spec_of
from fulgurite.context import Context
from fulgurite.data import ArrayData, resident_of
from fulgurite.errors import ConfigurationError, DataError, ModelError, PluginError
from fulgurite.feed import Feed
from fulgurite.lockstep import conclude, together
from fulgurite.media import SHOW, apart
from fulgurite.metrics import Gathered, Mean, Metric, Running
from fulgurite.mode import training_mode
from fulgurite.module import Output, measured, method_of
from fulgurite.placing import everywhere, replicated, share_of, shared, spread, tracing_on
from fulgurite.state import TrainState, check_same_structure
from fulgurite.step import examples_in, forward, unmasked
from fulgurite.weights import Subject, subject_of, view_of
from fulgurite.window import as_metric, as_number, by_name, flattened

if TYPE_CHECKING:
    from fulgurite.engine import Engine

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
        metrics: used instead of those of the module's step, by name: `metric(preds, batch)` returns an array with an
            example axis, or `metric(preds, batch, mask)` a `Metric` or `Gathered`; the step must return `preds`.
        losses: likewise, used instead of the loss and its terms; `loss` is their sum.
        fresh: whether each evaluation draws different random numbers; by default all draw the same.
        exact: whether its results are exact records; False for one that runs by the clock.
        required: whether an exception in it ends training; if not, there is one notice and it is left out from then on.
        custom: `custom(state, step, standard)` computes the metrics itself, with any media to show among them. `state`
            has the chosen weights, in inference mode; `standard(state)` is the evaluation without `custom`.
    """

    name: str
    data: Any
    limit: int | None = None
    weights: str = "current"
    metrics: Functions | None = None
    losses: Functions | None = None
    fresh: bool = False
    exact: bool = True
    required: bool = True
    custom: Callable[[TrainState, int, Callable[[TrainState], dict[str, Any]]], dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(f"EvaluatorSpec: name is {self.name!r}; it must be a non-empty string")
        for kind, given in (("metrics", self.metrics), ("losses", self.losses)):
            if given is not None and not (isinstance(given, Mapping) and all(map(callable, given.values()))):
                raise ConfigurationError(f"evaluator {self.name!r}: {kind} are functions by name, not {given!r}")


class Evaluation:
    """Runs evaluations or predictions like `spec`, on any module and data; compiled once for each structure of them."""

    def __init__(self, engine: "Engine", spec: EvaluatorSpec) -> None:
        self._plugins, self._streams, self._spec = engine.plugins, engine.streams, spec
        self._mesh, self._consensus = engine.mesh, engine.consensus
        self._tasks = ["log", *(task.name for task in engine.tasks)]
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._at = 0  # the batch that is being traced, for errors
        self._told = False

    def evaluate(
        self, subject: Subject, data: Any, limit: int | None, interrupted: Interrupt, show: Show | None
    ) -> dict[str, Any]:
        """The metrics as Python numbers and NumPy arrays, over one epoch of at most `limit` batches. `show` gets the
        media of the first batch, on the device. Raises `Interrupted` if `interrupted()`, asked before each, is true."""
        merged: dict[str, Metric] | None = None
        gathered: list[dict[str, Gathered]] = []
        in_flight: deque[Any] = deque()
        leaves, resident = shared(subject.leaves, self._mesh), replicated(resident_of(data), self._mesh)
        share = share_of(self._plugins, data, self._mesh)
        with tracing_on(self._mesh), Feed(data, seed=0, limit=limit, epochs=1, process=share, keep=True) as feed:
            for index, batch in self._batches(feed):
                if interrupted():
                    raise Interrupted
                run = self._function("validation_step", subject, batch)
                arguments = (leaves, spread(self._plugins, batch, self._mesh), resident, np.int32(index))
                if merged is None:
                    specs = jax.eval_shape(run, *arguments, None)[0]
                    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), specs)
                    merged = jax.device_put(zeros, everywhere(self._mesh))
                merged, more, media = run(*arguments, merged)
                if index == 0 and media and show:
                    show(media)
                gathered.append(jax.copy_to_host_async(more))
                in_flight.append(merged)
                if len(in_flight) > IN_FLIGHT:
                    jax.block_until_ready(in_flight.popleft())
                    gathered[index - IN_FLIGHT] = jax.device_get(gathered[index - IN_FLIGHT])
        values: dict[str, Any] = {name: one.compute() for name, one in jax.device_get(merged or {}).items() if one}
        for name in gathered[0] if gathered else ():
            parts = [part[name] for part in gathered]
            for path, leaf in jax.tree_util.tree_leaves_with_path(parts[0].merge(*parts[1:]).compute()):
                values["/".join([name, *(keystr((key,), simple=True) for key in path)])] = leaf
        losses = self._spec.losses or {}
        if "loss" in losses or (losses and "loss" not in values):
            values["loss"] = sum(values[name] for name in losses)
        return as_numbers(values)

    def of_state(
        self, spec: EvaluatorSpec, state: TrainState, limit: int | None, interrupted: Interrupt, show: Show | None
    ) -> dict[str, Any]:
        """The metrics of the evaluation `spec` of a train state, with the weights that it asks for."""
        state = state.replace(module=view_of(self._plugins, state, spec.weights))

        def standard(state: TrainState) -> dict[str, Any]:
            return self.evaluate(subject_of(state, state.key), spec.data, limit, interrupted, show)

        if spec.custom is None:
            return standard(state)
        with training_mode(False, state.module) as module:
            self._told = False
            try:
                metrics = spec.custom(state.replace(module=module), int(state.step), standard)
            except Interrupted:
                raise
            except Exception as error:
                if not self._told:
                    conclude(self._consensus, error)
                raise
            conclude(self._consensus, None)
        if not isinstance(metrics, dict) or not all(isinstance(key, str) for key in metrics):
            raise PluginError(f"evaluator {spec.name!r} gave {metrics!r}; an evaluation gives metrics by name")
        metrics, media = apart(flattened(metrics))
        if media and show:
            show(media)
        numbers = as_numbers(metrics)
        if bad := [name for name, value in numbers.items() if np.asarray(value).dtype.kind not in "biufV"]:
            gap = f"the metric {bad[0]!r} of evaluator {spec.name!r} is {type(numbers[bad[0]]).__name__}"
            raise PluginError(f"{gap}: an evaluation gives numbers, arrays of them, and fg.media")
        return numbers

    def predict(
        self, subject: Subject, data: Any, limit: int | None, callback: Callable[[PyTree[np.ndarray]], None] | None
    ) -> Any:
        """The predictions for every example, in order, without padding: one tree, or batch by batch to `callback`."""
        made: list[Any] = []
        take = made.append if callback is None else callback
        in_flight: deque[Any] = deque()
        leaves, resident = shared(subject.leaves, self._mesh), replicated(resident_of(data), self._mesh)
        share = share_of(self._plugins, data, self._mesh)
        with tracing_on(self._mesh), Feed(data, seed=0, limit=limit, epochs=1, process=share, keep=True) as feed:
            for index, batch in self._batches(feed):
                run = self._function("predict_step", subject, batch)
                batch = spread(self._plugins, batch, self._mesh)
                in_flight.append(run(leaves, batch, resident, np.int32(index)))
                if len(in_flight) > IN_FLIGHT:
                    take(_unpadded(*in_flight.popleft()))
        for preds, mask in in_flight:
            take(_unpadded(preds, mask))
        kinds = [(jax.tree.structure(part), [leaf.shape[1:] for leaf in jax.tree.leaves(part)]) for part in made]
        if other := [index for index, kind in enumerate(kinds) if kind != kinds[0]]:
            given = f"{describe(made[other[0]])} for batch {other[0]}, and {describe(made[0])} for batch 0"
            raise ModelError(f"predict_step gave {given}: give them the same shapes, or take each with callback=")
        return jax.tree.map(lambda *parts: np.concatenate(parts), *made) if callback is None else None

    def _batches(self, feed: Feed) -> Iterator[tuple[int, Any]]:
        """The batches by number; one of another structure than the first is an error. Some may be masked only."""
        first = None
        self._told = True  # of what fails in here all processes know
        for index, batch in enumerate(together(feed, self._consensus)):
            self._told = False
            spec = spec_of(unmasked(batch)[0])
            first = first if index else spec
            if jax.tree.structure(spec) != jax.tree.structure(first):
                gap = f"batch {index} of {self._spec.name!r} has another structure than those before"
                raise DataError(f"{gap}: {describe(spec)}, not {describe(first)}. Give all of them one")
            self._at = index
            yield index, batch
            self._told = True
        self._told = False

    def _function(self, step: str, subject: Subject, batch: Any) -> Callable[..., Any]:
        key = step, subject.key, jax.tree.structure(batch)
        if key not in self._compiled:
            body = self._evaluate if step == "validation_step" else self._predict
            # Whatever leaves an evaluation is read on the host, by every process.
            whole = everywhere(self._mesh)
            self._compiled[key] = jax.jit(lambda leaves, *rest: body(subject.join(leaves), *rest), out_shardings=whole)
        return self._compiled[key]

    def _evaluate(self, subject: Any, batch: Any, resident: Any, index: Any, merged: Any) -> Any:
        with self._prepared(subject, batch, resident, index) as (module, batch, ctx):
            output = forward(self._plugins, "validation_step", module, batch, ctx)
            metrics, gathered = self._metrics(output, batch, ctx)
        if merged is not None:
            check_same_structure(merged, metrics, f"the metrics of batch {self._at} of {self._spec.name!r}")
            both = {name: one and merged[name].merge(one) for name, one in metrics.items()}
            metrics = jax.tree.map(partial(jnp.where, index == 0), metrics, both)
        return metrics, gathered, output.media

    def _predict(self, subject: Any, batch: Any, resident: Any, index: Any) -> Any:
        with self._prepared(subject, batch, resident, index) as (module, batch, ctx):
            check_batch(step := method_of(module, "predict_step"), batch)
            preds = step(module, batch, ctx.for_forward())
            shapes = [jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(preds)]
            if not all(shapes or [()]) or (ctx.mask is not None and {*shapes} != {ctx.mask.shape}):
                what = f"{step.__qualname__} gave {describe(preds) or 'nothing'}"
                raise ModelError(f"{what}: return arrays that begin with the example axis")
            return preds, ctx.mask

    @contextmanager
    def _prepared(self, subject: Any, batch: Any, resident: Any, index: Any) -> Iterator[tuple[Any, Any, Context]]:
        module, model_state, key, step = subject
        batch, mask = unmasked(ArrayData.gather(resident, batch))
        ctx = Context(
            self._streams(key),
            step,
            training=False,
            model_state=model_state,
            mask=mask,
            scope=((self._spec.name, index),),
            flags={name: index == 0 if name == SHOW else jnp.asarray(False) for name in self._tasks},
            key_step=step if self._spec.fresh else None,
        )
        with training_mode(False, module) as module, described(f"batch {self._at} of {self._spec.name!r}", batch):
            yield module, batch, ctx

    def _metrics(self, output: Output, batch: Any, ctx: Context) -> tuple[dict[str, Any], dict[str, Gathered]]:
        spec = self._spec
        total, terms = output.loss, output.losses
        if spec.losses is not None:
            total, terms = None, self._of_preds(spec.losses, output, batch, ctx)
        metrics = output.metrics if spec.metrics is None else self._of_preds(spec.metrics, output, batch, ctx)
        given = by_name(total, terms, metrics)
        gathered = {name: value for name, value in given.items() if isinstance(value, Gathered)}
        examples = examples_in(batch, ctx.mask)
        # The gathered ones have a place without a value: which there are may not change from batch to batch either.
        metrics = dict.fromkeys(gathered) | {
            name: _mean(value.compute(), examples) if isinstance(value, Running) else as_metric(name, value, examples)
            for name, value in given.items()
            if name not in gathered
        }
        return metrics, gathered

    def _of_preds(self, functions: Functions, output: Output, batch: Any, ctx: Context) -> dict[str, Any]:
        if output.preds is None:
            raise ModelError(f"evaluator {self._spec.name!r} has metrics of its own: return fg.Output(..., preds=...)")
        return {name: measured(name, function, output.preds, batch, ctx.mask) for name, function in functions.items()}


def as_numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Metrics as Python numbers and NumPy arrays; a dictionary gives `name/key` for each of its keys."""
    return {name: as_number(value) for name, value in flattened(values).items()}


def _mean(value: Any, examples: Any) -> Metric:
    """The mean over so many examples, element by element."""
    means = jax.vmap(partial(Mean.of, weight=examples))(jnp.ravel(value))
    return jax.tree.map(lambda leaf: leaf.reshape(jnp.shape(value)), means)


def _unpadded(preds: Any, mask: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf) if mask is None else np.asarray(leaf)[np.asarray(mask)], preds)
