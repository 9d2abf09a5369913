"""What a step returns as metrics, converted to metrics."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fulgurite.errors import ModelError
from fulgurite.metrics.base import CollectingMetric, Metric
from fulgurite.metrics.basic import Mean


def as_metric(name: str, value: Any, weight: Array) -> Metric:
    """Convert what a step returned as a metric.

    Args:
        name: the name of the metric, for errors.
        value: a `Metric`, or a scalar, which becomes a mean over the examples of its batch.
        weight: the number of these examples.
    """
    if isinstance(value, Metric):
        return as_array_fields(name, value)
    if isinstance(value, CollectingMetric):
        raise ModelError(
            f"metric {name!r} is a CollectingMetric, which keeps every example: return it from a "
            "validation step or an evaluator, not from a training step"
        )
    if eqx.is_array_like(value) and jnp.ndim(value) == 0:
        return Mean.from_values(value, weight=weight)
    if eqx.is_array_like(value):
        description = f"an array of shape {jnp.shape(value)}"
    else:
        description = f"of type {type(value).__name__}"
    raise ModelError(
        f"metric {name!r} is {description}: return a scalar, or "
        "fg.metrics.Mean.from_values(array, ctx.mask)"
    )


def as_array_fields(name: str, metric: Any) -> Any:
    """Return a metric with an array for each number in it; `name` is for errors."""
    for leaf in jax.tree.leaves(metric):
        if not eqx.is_array_like(leaf):
            raise ModelError(
                f"metric {name!r} holds {leaf!r}: the fields of a metric are arrays, or marked as "
                "static"
            )
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), metric)


def to_number(value: Any) -> Any:
    """Return a Python number for an array with no axes, else a NumPy array."""
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array
