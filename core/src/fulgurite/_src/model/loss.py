"""The terms of a loss as numbers, and what each of them is a mean over."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from fulgurite._src.metrics.base import flatten_nested
from fulgurite._src.metrics.basic import Mean
from fulgurite._src.metrics.conversion import split_loss
from fulgurite._src.metrics.weights import note_weight
from fulgurite._src.model.output import Output
from fulgurite.errors import ModelError


def scale_loss(name: str, value: Any, factor: Any) -> Any:
    """Return a term of a loss times a factor, as a number whose weight is noted if it is known.

    Args:
        name: of the term, for errors.
        value: a `Mean` or a number.
        factor: a number, which may be traced.
    """
    number, weight = split_loss(name, value)
    scaled = factor * number
    return scaled if weight is None else note_weight(scaled, weight)


def apply_weight(output: Output, source: str) -> Output:
    """Return an output in which all that is a bare number has the weight of the output, if that
    says one.

    Args:
        output: what a step or a function of a loss returned.
        source: whose output it is, for errors.
    """
    output = output.resolve()
    weight = as_weight(output.weight, source)
    if weight is None:
        return output
    terms = [name for name in ("loss", *output.losses) if name != "loss" or output.loss is not None]
    metrics = {
        name: Mean.from_values(value, weight=weight) if _is_number(value) else value
        for name, value in flatten_nested(output.metrics).items()
    }
    return output.replace(
        weight=None,
        loss_weights={**dict.fromkeys(terms, weight), **output.loss_weights},
        metrics=metrics,
    )


def as_weight(weight: Any, source: str) -> Float[Array, ""] | None:
    """Return what `Output.weight` says as an array; None stays None.

    Args:
        weight: a number.
        source: whose output it is, for the error.
    """
    if weight is None:
        return None
    if not eqx.is_array_like(weight) or jnp.ndim(weight) != 0 or jnp.iscomplexobj(weight):
        raise ModelError(
            f"{source} returned weight={weight!r}: what a loss is a mean over is one real number, "
            "such as jnp.sum(mask)"
        )
    return jnp.asarray(weight, jnp.float32)


def _is_number(value: Any) -> bool:
    return eqx.is_array_like(value) and jnp.ndim(value) == 0
