"""Losses of predicted numbers: one value for each element.

Predictions and targets have the same shape. A mask or weight is over all axes or the leading ones.
"""

import math
from typing import Unpack

import jax
import jax.numpy as jnp
import optax
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import Values
from jaxtyping import Array, Float

from fulgurite_losses.examples import Examples, as_same_shape, check_positive
from fulgurite_losses.signature import LossOptions, loss


@loss
def absolute_error(
    preds: Values,
    targets: Values,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return |p - t|, also known as L1 or MAE. Its gradient at 0 is 0.

    Args:
        preds: of any shape.
        targets: of the same.

    Example:
        from fulgurite_losses import absolute_error

        absolute_error(preds, targets, mask=mask)
    """
    preds, targets = as_same_shape(preds, targets, "absolute_error")
    examples = Examples(preds.shape, options)
    return examples.reduce(jnp.abs(examples.hide(preds) - examples.hide(targets)))


@loss
def squared_error(
    preds: Values,
    targets: Values,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return (p - t)², also known as L2 or MSE. It is not halved.

    Args:
        preds: of any shape.
        targets: of the same.

    Example:
        from fulgurite_losses import squared_error

        squared_error(preds, targets, weight=jnp.array([1.0, 2.0, 1.0, 0.5]))
    """
    preds, targets = as_same_shape(preds, targets, "squared_error")
    examples = Examples(preds.shape, options)
    return examples.reduce((examples.hide(preds) - examples.hide(targets)) ** 2)


@loss
def huber_loss(
    preds: Values,
    targets: Values,
    *,
    delta: float = 1.0,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return e² / 2 for an error e up to `delta`, and beyond it a line: delta · (|e| - delta / 2).

    Source: Huber, Robust Estimation of a Location Parameter (1964).

    Args:
        preds: of any shape.
        targets: of the same.
        delta: the error at which the line begins.
    """
    check_positive(delta, "delta", "huber_loss")
    preds, targets = as_same_shape(preds, targets, "huber_loss")
    examples = Examples(preds.shape, options)
    values = optax.losses.huber_loss(examples.hide(preds), examples.hide(targets), delta=delta)
    return examples.reduce(values)


@loss
def log_cosh(
    preds: Values,
    targets: Values,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return log(cosh(p - t)): about half the square of a small error, and |p - t| - log 2 of a
    large one.

    Args:
        preds: of any shape.
        targets: of the same.
    """
    preds, targets = as_same_shape(preds, targets, "log_cosh")
    examples = Examples(preds.shape, options)
    distance = jnp.abs(examples.hide(preds) - examples.hide(targets))
    return examples.reduce(_log_cosh(distance))


@loss
def adaptive_power_loss(
    preds: Values,
    targets: Values,
    *,
    near: float = 2.0,
    far: float = 1.0,
    middle: float = 1.0,
    sharpness: float = 1.0,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return |e| to a power that goes from `near` for small errors e to `far` for large ones.

    The power is near + (far - near) · s, where s / (1 - s) = (|e| / middle) to the power of
    |near - far| / sharpness. The gradient takes the power as a constant.

    Source: the loss of this name of GoMLX.

    Args:
        preds: of any shape.
        targets: of the same.
        near: the power for small errors, at least 1.
        far: the power for large errors, at least 1.
        middle: the error at which the power is the mean of both.
        sharpness: how slowly the power changes around there; the smaller, the more suddenly.
    """
    check_positive(middle, "middle", "adaptive_power_loss")
    check_positive(sharpness, "sharpness", "adaptive_power_loss")
    if not (near >= 1 and far >= 1):
        raise ConfigurationError(
            f"adaptive_power_loss with near={near} and far={far}; a power below 1 has an infinite "
            "gradient where the error is 0: give powers of at least 1"
        )
    preds, targets = as_same_shape(preds, targets, "adaptive_power_loss")
    examples = Examples(preds.shape, options)
    distance = jnp.abs(examples.hide(preds) - examples.hide(targets))
    smallest = jnp.finfo(distance.dtype).tiny
    log_ratio = jnp.log(jnp.maximum(distance / middle, smallest))
    share = jax.nn.sigmoid(log_ratio * abs(near - far) / sharpness)
    power = jax.lax.stop_gradient(near + (far - near) * share)
    return examples.reduce(distance**power)


@loss
def poisson_loss(
    log_rates: Values,
    targets: Values,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return exp(p) - t·p, the negative log-likelihood of counts t under Poisson distributions of
    rate exp(p), without the constant log t!.

    Args:
        log_rates: the logarithms of the predicted rates, of any shape.
        targets: counts, of the same shape.
    """
    log_rates, targets = as_same_shape(log_rates, targets, "poisson_loss")
    examples = Examples(log_rates.shape, options)
    log_rates = examples.hide(log_rates)
    values = jnp.exp(log_rates) - examples.hide(targets) * log_rates
    return examples.reduce(values)


def _log_cosh(distance: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return log(cosh(x)) of numbers that are not negative, exact to rounding at both ends."""
    # cosh(x) = 1 + 2·sinh(x / 2)², which is exact for small x and overflows for large x.
    small = jnp.log1p(2 * jnp.sinh(jnp.minimum(distance, 1) / 2) ** 2)
    large = distance + jnp.log1p(jnp.exp(-2 * distance)) - math.log(2)
    return jnp.where(distance < 1, small, large)
