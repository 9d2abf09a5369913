"""Metrics of parts of a step, put together."""

from functools import partial
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import ModelError
from fulgurite.metrics import Metric, MetricAccumulator, RunningMetric, sort_by_kind
from jaxtyping import Array, Bool

Metrics = dict[str, Any]
"""`fg.metrics.Metric` or `RunningMetric`, by name."""


def merge_disjoint(module_metrics: Metrics, phase_metrics: Metrics) -> Metrics:
    """Return the metrics of the module and those that every phase records.

    Args:
        module_metrics: by name.
        phase_metrics: by other names; a name that is in both is an error.
    """
    shared = sorted(module_metrics.keys() & phase_metrics.keys())
    if shared:
        raise ModelError(
            f"{shared[0]!r} is recorded of every phase, so no loss term or metric may have that "
            "name: rename it"
        )
    return module_metrics | phase_metrics


def merge_metrics(first: Metrics, second: Metrics) -> Metrics:
    """Return each metric over the examples of both, a running one after both.

    Args:
        first: metrics by name.
        second: metrics of the same names.
    """
    accumulator = MetricAccumulator.from_metrics(first)
    return accumulator.merge(MetricAccumulator.from_metrics(second)).by_name


class OptionalMetric(fg.metrics.RunningMetric):
    """A running metric of a phase that does not run in every step; NaN before it first runs.

    Attributes:
        value: None; that of the metric counts.
        metric: the running metric.
        has_run: whether the phase ran in the step, or in any of the steps so far.
    """

    value: None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    metric: fg.metrics.RunningMetric = eqx.field(kw_only=True)
    has_run: Bool[Array, ""] = eqx.field(kw_only=True)

    def update(self, new: Any) -> "OptionalMetric":
        updated = jax.tree.map(
            partial(jnp.where, self.has_run), self.metric.update(new.metric), new.metric
        )
        metric = jax.tree.map(partial(jnp.where, new.has_run), updated, self.metric)
        return OptionalMetric(metric=metric, has_run=self.has_run | new.has_run)

    def compute(self) -> Any:
        return jnp.where(self.has_run, self.metric.compute(), jnp.nan)


def make_optional(metrics: Metrics) -> Metrics:
    """Return metrics of a phase that does not run in every step."""
    _, running = sort_by_kind(metrics, Metric, RunningMetric)
    optional = {
        name: OptionalMetric(metric=metric, has_run=jnp.bool_(True))
        for name, metric in running.items()
    }
    return metrics | optional


def empty_metrics(specs: Metrics) -> Metrics:
    """Return metrics over no examples.

    Args:
        specs: metrics whose leaves are shapes and dtypes, by name.
    """
    return {name: jax.tree.map(zeros_like_spec, metric).empty() for name, metric in specs.items()}


def zeros_like_spec(spec: jax.ShapeDtypeStruct) -> Array:
    """Return zeros of that shape and dtype."""
    return jnp.zeros(spec.shape, spec.dtype)
