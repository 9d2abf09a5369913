"""The open metric window: what the steps since the last log trigger have merged, on the device."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from fulgurite.errors import ModelError, error_context
from fulgurite.metrics import (
    CollectingMetric,
    ExponentialMovingAverage,
    LastValue,
    Mean,
    Metric,
    RunningMetric,
    Value,
)
from fulgurite.model.module import Output


class MetricWindow(eqx.Module):
    """Metrics over a stretch of steps.

    Only a log trigger closes a window: the values stay until the next step begins a new one, so
    that they can be read while that step runs, and so that a window that straddles a checkpoint or
    a kill is logged once with the same bits.

    Attributes:
        count: int32, the steps merged.
        closed: bool, whether the next step begins a new window.
        metrics: merged over the window, by name.
        running: carried from step to step across windows, by name.
        begun: bool, whether any step has been taken yet.
    """

    count: Int[Array, ""]
    closed: Bool[Array, ""]
    has_steps: Bool[Array, ""]
    metrics: dict[str, Metric]
    running: dict[str, RunningMetric]

    @staticmethod
    def empty(metrics: dict[str, Metric], running: dict[str, RunningMetric]) -> "MetricWindow":
        """A window in which nothing is, for metrics of this structure."""
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (metrics, running))
        return MetricWindow(jnp.int32(0), jnp.bool_(False), jnp.bool_(False), *zeros)

    def add(self, metrics: dict[str, Metric], running: dict[str, RunningMetric]) -> "MetricWindow":
        """The window with one step more, or a new one with this step if the window was closed."""
        start = self.closed | (self.count == 0)
        merged = {
            name: _merge_checked(name, new, self.metrics[name].merge)
            for name, new in metrics.items()
        }
        then = {
            name: _merge_checked(name, new, self.running[name].update)
            for name, new in running.items()
        }
        return MetricWindow(
            jnp.where(start, 1, self.count + 1),
            jnp.bool_(False),
            jnp.bool_(True),
            jax.tree.map(partial(jnp.where, start), metrics, merged),
            jax.tree.map(partial(jnp.where, self.has_steps), then, running),
        )

    def close(self) -> "MetricWindow":
        """The same window; the next step begins a new one."""
        return replace(self, closed=jnp.bool_(True))

    @property
    def steps(self) -> Int[Array, ""]:
        """The steps in the window that no log trigger has closed yet."""
        return jnp.where(self.closed, 0, self.count)

    def compute(self) -> dict[str, Value]:
        """The values by name."""
        every = {**self.metrics, **self.running}
        values = flatten_metric_dict(
            {name: _call_with_metric_name(name, metric.compute) for name, metric in every.items()}
        )
        if bad := [
            f"{name!r} computed {value!r}"
            for name, value in values.items()
            if not eqx.is_array_like(value)
        ]:
            raise ModelError(
                f"metric {bad[0]}: compute gives a number, an array, or several by name"
            )
        return values


def flatten_metric_dict(values: dict[str, Any]) -> dict[str, Any]:
    """A metric that computed a dictionary gives `name/key` for each of its keys."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= (
            {f"{name}/{key}": part for key, part in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    return flat


def to_number(value: Any) -> Any:
    """A Python number of an array with one element, else a NumPy array."""
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array


def collect_step_metrics(
    output: Output, extra: dict[str, Any], weight: Array
) -> tuple[dict[str, Metric], dict[str, RunningMetric]]:
    """The metrics and running metrics of a step: its own, those of plugins, every loss term, the
    batch loss and its moving average. A bare scalar is a mean over the batch's examples, so it
    weighs `weight`."""
    given = {name: term for name, term in output.losses.items() if name != "loss"} | output.metrics
    if output.loss is not None:
        kinds = {
            "batch_loss": LastValue.from_values(output.loss),
            "loss_average": ExponentialMovingAverage.from_values(output.loss),
        }
        given = {"loss": output.loss, **kinds, **given}
    if twice := sorted(given.keys() & extra.keys()):
        raise ModelError(
            f"the step and a plugin both give the metric {twice[0]!r}; rename that of the step"
        )
    metrics: dict[str, Metric] = {}
    running: dict[str, RunningMetric] = {}
    for name, value in {**given, **extra}.items():
        if isinstance(value, RunningMetric):
            running[name] = _with_arrays(name, value)
        else:
            metrics[name] = as_metric(name, value, weight)
    return metrics, running


def merge_named_values(
    total: Any, terms: Mapping[str, Any], metrics: Mapping[str, Any]
) -> dict[str, Any]:
    """The total loss, if any, its terms and the metrics, all by name. A metric may stand for the
    total, for no term."""
    if twice := sorted((terms.keys() & metrics.keys()) - {"loss"}):
        raise ModelError(
            f"{twice[0]!r} is both a term of the loss, which is recorded too, and a metric; rename one"
        )
    return {**terms, **({} if total is None else {"loss": total}), **metrics}


def as_metric(name: str, value: Any, weight: Array) -> Metric:
    """What a step gave as the metric `name`; a bare scalar is the mean of so many examples."""
    if isinstance(value, Metric):
        return _with_arrays(name, value)
    if isinstance(value, CollectingMetric):
        raise ModelError(
            f"metric {name!r} is gathered, which only evaluators do; return it from there"
        )
    if eqx.is_array_like(value) and jnp.ndim(value) == 0:
        return Mean.from_values(value, weight=weight)
    kind = (
        f"an array of shape {jnp.shape(value)}"
        if eqx.is_array_like(value)
        else f"of type {type(value).__name__}"
    )
    raise ModelError(
        f"metric {name!r} is {kind}: return a scalar, or fg.metrics.Mean.from_values(array, ctx.mask)"
    )


def _with_arrays(name: str, metric: Any) -> Any:
    """The metric with an array for each number in it."""
    if bad := [leaf for leaf in jax.tree.leaves(metric) if not eqx.is_array_like(leaf)]:
        raise ModelError(
            f"metric {name!r} holds {bad[0]!r}: the fields of a metric are arrays, or marked as static"
        )
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), metric)


def _merge_checked(name: str, new: Any, merge: Callable[[Any], Any]) -> Any:
    merged = _call_with_metric_name(name, merge, new)
    was, became = (
        [jax.tree.structure(one), *map(jnp.shape, jax.tree.leaves(one))] for one in (new, merged)
    )
    if was != became:
        gap = f"metric {name!r} became {merged!r} when merged"
        raise ModelError(f"{gap}: it must stay {type(new).__name__} as it was, of the same shapes")
    return merged


def _call_with_metric_name(name: str, call: Callable[..., Any], *given: Any) -> Any:
    with error_context(lambda: f"metric {name!r}"):
        return call(*given)
