"""Evaluation and prediction: one compiled program each, metrics merged on the device and read once."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fulgurite.annotations import describe
from fulgurite.context import Context
from fulgurite.data import ArrayData, Indexed, Masked, resident_of
from fulgurite.errors import ModelError
from fulgurite.feed import Feed
from fulgurite.layout import hashable
from fulgurite.metrics import Gathered, Mean, Metric, Running
from fulgurite.mode import training_mode
from fulgurite.module import Output
from fulgurite.plugins import PluginManager
from fulgurite.step import examples_in, forward
from fulgurite.streams import Streams
from fulgurite.window import as_number, flattened

# As in training: enough to keep the device busy, and no more batches held than that.
IN_FLIGHT = 2


class Interrupted(Exception):
    """An evaluation was given up between two batches, because training is to stop."""


@dataclass(frozen=True, eq=False)
class EvaluatorSpec:
    """A named evaluation.

    Attributes:
        name: its results are `metrics[name]` and records of the source `name`.
        data: any data source; one epoch of it is evaluated.
        limit: at most so many batches.
        weights: `current`, or the name of a module view of a plugin.
        metrics: further metrics by name: `metric(preds, batch)` gives a `Metric`, a `Gathered`, or an array with an example
            axis; the step must return `preds` then.
        fresh: whether each evaluation draws other random numbers; by default all draw the same.
        exact: whether its results are exact records; False for one that runs by the clock.
    """

    name: str
    data: Any
    limit: int | None = None
    weights: str = "current"
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    fresh: bool = False
    exact: bool = True


class Subject:
    """What is evaluated: a module, its state, a root key and a step, flattened once for all batches."""

    def __init__(self, module: Any, model_state: Any, key: Any, step: Any) -> None:
        arrays, self._static = eqx.partition((module, model_state, key, jnp.asarray(step)), eqx.is_array)
        self.leaves, self._treedef = jax.tree.flatten(arrays)
        self.key = self._treedef, jax.tree.structure(self._static), tuple(map(hashable, jax.tree.leaves(self._static)))

    def join(self, leaves: list[Any]) -> tuple[Any, Any, Any, Any]:
        """Module, model state, key and step of these leaves."""
        return eqx.combine(jax.tree.unflatten(self._treedef, leaves), self._static)


class Evaluation:
    """Runs one evaluation or prediction, on any module of one structure; compiled once for each shape of batch.

    Arguments:
        plugins: whose loss terms take part.
        streams: the random streams over a root key.
        spec: what to evaluate.
    """

    def __init__(self, plugins: PluginManager, streams: Callable[[Any], Streams], spec: EvaluatorSpec) -> None:
        self._plugins = plugins
        self._streams = streams
        self.spec = spec
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def evaluate(
        self, subject: Subject, data: Any, limit: int | None, interrupted: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """The metrics as Python numbers and NumPy arrays, over one epoch of at most `limit` batches.

        Raises:
            Interrupted: `interrupted()`, asked before each batch, was true.
        """
        merged: dict[str, Metric] | None = None
        gathered: list[dict[str, Gathered]] = []
        in_flight: deque[Any] = deque()
        resident = resident_of(data)
        with Feed(data, seed=0, limit=limit, epochs=1) as feed:
            for index, item in enumerate(feed):
                if interrupted():
                    raise Interrupted
                run = self._function("validation_step", subject, item.batch)
                arguments = (subject.leaves, item.batch, resident, np.int32(index))
                if merged is None:
                    specs = jax.eval_shape(run, *arguments, None)[0]
                    merged = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), specs)
                merged, more = run(*arguments, merged)
                for leaf in jax.tree.leaves(more):
                    leaf.copy_to_host_async()
                gathered.append(more)
                in_flight.append(merged)
                if len(in_flight) > IN_FLIGHT:
                    jax.block_until_ready(in_flight.popleft())
        values: dict[str, Any] = {name: metric.compute() for name, metric in (merged or {}).items()}
        for name in gathered[0] if gathered else ():
            parts = [part[name] for part in gathered]
            values[name] = parts[0].merge(*parts[1:]).compute()
        return {name: as_number(value) for name, value in flattened(values).items()}

    def predict(self, subject: Subject, data: Any, limit: int | None) -> PyTree[np.ndarray]:
        """The predictions for every example, in order, without padding."""
        made: list[Any] = []
        resident = resident_of(data)
        with Feed(data, seed=0, limit=limit, epochs=1) as feed:
            for index, item in enumerate(feed):
                run = self._function("predict_step", subject, item.batch)
                preds, mask = run(subject.leaves, item.batch, resident, np.int32(index))
                made.append((preds, mask))
                if index >= IN_FLIGHT:
                    made[index - IN_FLIGHT] = _unpadded(*made[index - IN_FLIGHT])
        made[-IN_FLIGHT:] = [_unpadded(*pair) for pair in made[-IN_FLIGHT:]]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *made)

    def _function(self, step: str, subject: Subject, batch: Any) -> Callable[..., Any]:
        key = step, subject.key, jax.tree.structure(batch)
        if key not in self._compiled:
            body = self._evaluate if step == "validation_step" else self._predict
            self._compiled[key] = jax.jit(lambda leaves, *arguments: body(*subject.join(leaves), *arguments))
        return self._compiled[key]

    def _evaluate(
        self, module: Any, state: Any, key: Any, step: Any, batch: Any, resident: Any, index: Any, merged: Any
    ) -> Any:
        batch, ctx = self._context(state, key, step, batch, resident, index)
        with training_mode(False, module) as module, _told(self.spec.name, batch):
            output = forward(self._plugins, "validation_step", module, batch, ctx)
            metrics, gathered = self._metrics(output, batch, ctx)
        if merged is not None:
            metrics = jax.tree.map(
                lambda new, both: jnp.where(index == 0, new, both),
                metrics,
                {name: merged[name].merge(metric) for name, metric in metrics.items()},
            )
        return metrics, gathered

    def _predict(self, module: Any, state: Any, key: Any, step: Any, batch: Any, resident: Any, index: Any) -> Any:
        batch, ctx = self._context(state, key, step, batch, resident, index)
        with training_mode(False, module) as module, _told(self.spec.name, batch):
            return module.predict_step(batch, ctx.for_forward()), ctx.mask

    def _context(self, state: Any, key: Any, step: Any, batch: Any, resident: Any, index: Any) -> tuple[Any, Context]:
        if isinstance(batch, Indexed):
            batch = ArrayData.gather(resident, batch)
        mask = None
        if isinstance(batch, Masked):
            batch, mask = batch.value, batch.mask
        scope = ((self.spec.name, index),)
        fresh = step if self.spec.fresh else None
        streams = self._streams(key)
        return batch, Context(
            streams, step, training=False, model_state=state, mask=mask, scope=scope, key_step=fresh
        )

    def _metrics(self, output: Output, batch: Any, ctx: Context) -> tuple[dict[str, Metric], dict[str, Gathered]]:
        given: dict[str, Any] = {} if output.loss is None else {"loss": output.loss}
        given |= {name: value for name, value in output.losses.items() if name != "loss"} | output.metrics
        for name, metric in self.spec.metrics.items():
            if output.preds is None:
                raise ModelError(f"evaluator {self.spec.name!r} has metrics of its own: return fg.Output(..., preds=...)")
            value = metric(output.preds, batch)
            given[name] = value if isinstance(value, Metric | Gathered) else Mean.of(value, ctx.mask)
        examples = examples_in(batch, ctx.mask)
        metrics: dict[str, Metric] = {}
        gathered: dict[str, Gathered] = {}
        for name, value in given.items():
            if isinstance(value, Gathered):
                gathered[name] = value
            elif isinstance(value, Metric):
                metrics[name] = value
            else:
                metrics[name] = Mean.of(value.compute() if isinstance(value, Running) else value, weight=examples)
        return metrics, gathered


@contextmanager
def _told(name: str, batch: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"while tracing {name!r} on a batch of {describe(batch)}")
        raise


def _unpadded(preds: Any, mask: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf) if mask is None else np.asarray(leaf)[np.asarray(mask)], preds)
