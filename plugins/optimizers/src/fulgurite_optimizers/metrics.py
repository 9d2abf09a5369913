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
    """Return metrics, of which a bare scalar becomes a mean over the examples of its batch.

    Args:
        values: metrics or scalars, by name.
        weight: the number of examples that a scalar counts for.
    """
    return {
        name: value
        if isinstance(value, fg.metrics.RunningMetric)
        else as_metric(name, value, weight)
        for name, value in values.items()
    }


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
    merged = accumulator.merge(MetricAccumulator.from_metrics(second))
    return {**merged.metrics, **merged.running}


def empty_metrics(specs: Metrics, phase_name: str) -> Metrics:
    """Return metrics over no examples.

    Args:
        specs: metrics whose leaves are shapes and dtypes, by name.
        phase_name: the phase that records them, for errors.
    """
    for name, metric in specs.items():
        if isinstance(metric, fg.metrics.RunningMetric):
            raise ModelError(
                f"the metric {name!r} is carried from step to step, but the phase {phase_name!r} "
                "does not run at every step: give a scalar or an fg.metrics.Metric, such as "
                "Mean.from_values(value)"
            )
    return {name: jax.tree.map(zeros_like_spec, metric).empty() for name, metric in specs.items()}


def zeros_like_spec(spec: jax.ShapeDtypeStruct) -> Array:
    """Return zeros of that shape and dtype."""
    return jnp.zeros(spec.shape, spec.dtype)
