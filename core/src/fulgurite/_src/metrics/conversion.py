"""What a step returns as metrics, converted to metrics."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fulgurite._src.identity import ByIdentity
from fulgurite._src.metrics.base import Metric, is_metric
from fulgurite._src.metrics.basic import Mean, SumOfMeans
from fulgurite._src.metrics.weights import find_weight
from fulgurite.errors import ModelError

GetWeight = Callable[[], Array]
"""Returns what the bare numbers of a batch are means over, such as the number of its examples; an
error where that is not known. It is called only where there is such a number."""


def as_mean(name: str, value: Any, get_weight: GetWeight) -> Mean:
    """Convert a number that a step returned as a metric.

    Args:
        name: the name of the metric, for errors.
        value: a scalar.
        get_weight: returns how much it counts.
    """
    if eqx.is_array_like(value) and jnp.ndim(value) == 0:
        weight = find_weight(value)
        return Mean.from_values(value, weight=get_weight() if weight is None else weight)
    if eqx.is_array_like(value):
        description = f"an array of shape {jnp.shape(value)}"
    else:
        description = f"of type {type(value).__name__}"
    raise ModelError(
        f"metric {name!r} is {description}: return a scalar, or fg.metrics.Mean.from_values(array, "
        "ctx.mask)"
    )


def as_metrics(values: Mapping[str, Any], get_weight: GetWeight) -> dict[str, Any]:
    """Convert what a step returned as metrics by name: scalars become means, and metrics of any
    kind stay.

    Args:
        values: metrics and scalars by name.
        get_weight: returns how much a scalar counts.
    """
    get_weight = cache(get_weight)
    metrics: dict[str, Any] = {}
    for name, value in values.items():
        if is_metric(value):
            metrics[name] = as_array_fields(name, value)
        else:
            metrics[name] = as_mean(name, value, get_weight)
    return metrics


def as_loss_metric(total: Any, terms: Mapping[str, Any], weights: Mapping[str, Any]) -> Metric:
    """Return the metric of a loss, whose result over several batches is the sum of the means of its
    terms.

    Args:
        total: the sum of the terms.
        terms: scalars by name.
        weights: what each term is a mean over, by name.
    """
    groups = group_by_weight(terms, weights)
    if len(groups) == 1:
        ((weight, _),) = groups
        return Mean.from_values(total, weight=weight)
    means = [
        Mean.from_values(sum_values([terms[name] for name in names]), weight=weight)
        for weight, names in groups
    ]
    return SumOfMeans(tuple(means))


def group_by_weight(
    terms: Mapping[str, Any], weights: Mapping[str, Any]
) -> list[tuple[Any, list[str]]]:
    """Return each weight with the names of the terms that are means over it.

    Args:
        terms: scalars of a loss, by name.
        weights: what each term is a mean over, by name. Those that are one object are one weight.
    """
    groups: dict[ByIdentity, list[str]] = {}
    for name in terms:
        groups.setdefault(ByIdentity(weights[name]), []).append(name)
    return [(weight.value, names) for weight, names in groups.items()]


def sum_values(values: Iterable[Any]) -> Any:
    """Return the sum of at least one value."""
    first, *others = values
    # Their dtypes may differ, also where jax is told to promote nothing by itself.
    with jax.numpy_dtype_promotion("standard"):
        return sum(others, start=first)


def split_loss(name: str, value: Any) -> tuple[Any, Any]:
    """Return a term of a loss as a number, and its weight: the number of values that it is a mean
    over, or their total weight; None where nothing is known of it.

    Args:
        name: of the term, for errors.
        value: a `Mean`, or anything else, which is returned as it is.
    """
    if isinstance(value, Mean):
        total, weight = value.total.compute(), value.weight.compute()
        is_empty = weight == 0
        # The loss over nothing is 0, and so is its gradient.
        mean = jnp.where(is_empty, 0, total / jnp.where(is_empty, 1, weight))
        return mean, weight
    if is_metric(value):
        raise ModelError(
            f"the loss term {name!r} is a {type(value).__name__}: a loss is a floating-point "
            "number, or an fg.metrics.Mean, whose values and weights add up over microbatches"
        )
    return value, find_weight(value)


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
