"""Metrics of parts of a step, put together."""

from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import ModelError
from fulgurite.metrics import MetricAccumulator
from fulgurite.metrics.conversion import as_metric
from jaxtyping import Array

Metrics = dict[str, Any]
"""`fg.metrics.Metric` or `RunningMetric`, by name."""


def as_metrics(values: dict[str, Any], weight: Array) -> Metrics:
    """A bare scalar becomes a mean over the examples of its batch, so it weighs `weight`."""
    return {
        name: value
        if isinstance(value, fg.metrics.RunningMetric)
        else as_metric(name, value, weight)
        for name, value in values.items()
    }


def merge_disjoint(given: Metrics, own: Metrics) -> Metrics:
    """The metrics of the module and those of its phases, which have names of their own."""
    if twice := sorted(given.keys() & own.keys()):
        raise ModelError(
            f"{twice[0]!r} is recorded of every phase, so no loss term or metric may be called so; "
            f"rename it"
        )
    return given | own


def merge_metrics(first: Metrics, second: Metrics) -> Metrics:
    """Return each metric over the examples of both, a running one after both.

    Args:
        first: metrics by name.
        second: metrics of the same names.
    """
    accumulator = MetricAccumulator.from_metrics(first)
    merged = accumulator.merge(MetricAccumulator.from_metrics(second))
    return {**merged.metrics, **merged.running}


def empty_metrics(metrics: Metrics, phase: str) -> Metrics:
    """The metrics, made from specs, over no examples."""
    if running := [
        name for name, one in metrics.items() if isinstance(one, fg.metrics.RunningMetric)
    ]:
        raise ModelError(
            f"the metric {running[0]!r} is carried from step to step, but the phase {phase!r} does "
            f"not run at every "
            "step: give a scalar or an fg.metrics.Metric, such as Mean.from_values(value)"
        )
    return {name: jax.tree.map(zeros_like_spec, one).empty() for name, one in metrics.items()}


def zeros_like_spec(spec: jax.ShapeDtypeStruct) -> Array:
    """Zeros of that shape and dtype."""
    return jnp.zeros(spec.shape, spec.dtype)
