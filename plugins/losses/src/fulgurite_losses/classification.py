"""Losses of predicted classes.

Labels of `(..., classes)` are integers `(...)`, or numbers `(..., classes)`: one-hot, or the
probability of each class. An integer that is not a class gives NaN, so that it is noticed: mask it,
as by `mask=labels >= 0`.
"""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import Values, to_float
from jax.scipy.special import xlogy
from jaxtyping import Array, Float

from fulgurite_losses.examples import Examples, as_same_shape
from fulgurite_losses.signature import LossOptions, loss

SMALLEST_PROBABILITY = 1e-7
"""Below it a probability counts as this one, as in Keras: its logarithm stays finite."""


@loss
def softmax_cross_entropy(
    logits: Values,
    labels: Values,
    *,
    label_smoothing: float = 0.0,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return -Σ t · log softmax(logits) over the classes, one value for each example.

    Args:
        logits: `(..., classes)`. A class that is impossible has the logit -inf.
        labels: integers `(...)`, or one-hot or probabilities `(..., classes)`.
        label_smoothing: the share of each label that is spread evenly over all classes.

    Example:
        from fulgurite_losses import softmax_cross_entropy

        softmax_cross_entropy(logits, labels, mask=mask, label_smoothing=0.1)
    """
    logits = to_float(logits)
    examples, targets = _as_targets(logits, labels, options, "softmax_cross_entropy")
    targets = _smooth_labels(targets, label_smoothing, "softmax_cross_entropy")
    log_probs = jax.nn.log_softmax(examples.hide(logits))
    return examples.reduce(-_multiply_logs(targets, log_probs))


@loss
def categorical_cross_entropy(
    probs: Values,
    labels: Values,
    *,
    label_smoothing: float = 0.0,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return -Σ t · log p over the classes, one value for each example.

    A probability below 1e-7 counts as 1e-7 and has no gradient; prefer `softmax_cross_entropy`,
    which is exact.

    Args:
        probs: `(..., classes)`, the predicted probabilities.
        labels: integers `(...)`, or one-hot or probabilities `(..., classes)`.
        label_smoothing: the share of each label that is spread evenly over all classes.
    """
    probs = to_float(probs)
    examples, targets = _as_targets(probs, labels, options, "categorical_cross_entropy")
    targets = _smooth_labels(targets, label_smoothing, "categorical_cross_entropy")
    logs = jnp.log(jnp.maximum(examples.hide(probs, 1.0), SMALLEST_PROBABILITY))
    return examples.reduce(-_multiply_logs(targets, logs))


@loss
def sigmoid_binary_cross_entropy(
    logits: Values,
    labels: Values,
    *,
    label_smoothing: float = 0.0,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return -t · log σ(x) - (1 - t) · log σ(-x), one value for each logit x.

    Args:
        logits: of any shape.
        labels: of the same: booleans, 0 and 1, or the probability of 1.
        label_smoothing: the share of each label that is spread evenly over 0 and 1.

    Example:
        from fulgurite_losses import sigmoid_binary_cross_entropy

        sigmoid_binary_cross_entropy(preds, targets, mask=mask)
    """
    logits, labels = as_same_shape(logits, labels, "sigmoid_binary_cross_entropy")
    examples = Examples(logits.shape, options)
    targets = _smooth_binary(examples.hide(labels), label_smoothing, "sigmoid_binary_cross_entropy")
    values = optax.losses.sigmoid_binary_cross_entropy(examples.hide(logits), targets)
    return examples.reduce(values)


@loss
def binary_cross_entropy(
    probs: Values,
    labels: Values,
    *,
    label_smoothing: float = 0.0,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return -t · log p - (1 - t) · log(1 - p), one value for each probability p.

    Probabilities below 1e-7 count as 1e-7 and have no gradient; prefer
    `sigmoid_binary_cross_entropy`, which is exact.

    Args:
        probs: of any shape, the predicted probabilities of 1.
        labels: of the same: booleans, 0 and 1, or the probability of 1.
        label_smoothing: the share of each label that is spread evenly over 0 and 1.
    """
    probs, labels = as_same_shape(probs, labels, "binary_cross_entropy")
    examples = Examples(probs.shape, options)
    targets = _smooth_binary(examples.hide(labels), label_smoothing, "binary_cross_entropy")
    probs = examples.hide(probs, 0.5)
    positive = targets * jnp.log(jnp.maximum(probs, SMALLEST_PROBABILITY))
    negative = (1 - targets) * jnp.log(jnp.maximum(1 - probs, SMALLEST_PROBABILITY))
    return examples.reduce(-positive - negative)


@loss
def sigmoid_focal_loss(
    logits: Values,
    labels: Values,
    *,
    alpha: float | None = None,
    gamma: float = 2.0,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return the binary cross-entropy times (1 - p)^gamma, where p is the probability of the label:
    examples that are right already count less.

    Source: Lin et al., Focal Loss for Dense Object Detection (2017).

    Args:
        logits: of any shape.
        labels: of the same: booleans, or 0 and 1.
        alpha: the weight of label 1, and 1 - alpha that of label 0; None for no such weights.
        gamma: how much less they count; 0 for the cross-entropy itself.
    """
    logits, labels = as_same_shape(logits, labels, "sigmoid_focal_loss")
    if not gamma >= 0:
        raise ConfigurationError(f"sigmoid_focal_loss with gamma={gamma}; it is at least 0")
    if isinstance(alpha, int | float) and not 0 <= alpha <= 1:
        raise ConfigurationError(
            f"sigmoid_focal_loss with alpha={alpha}; it is from 0 to 1, or None for no such weights"
        )
    examples = Examples(logits.shape, options)
    logits = examples.hide(logits)
    targets = examples.hide(labels)
    cross_entropy = optax.losses.sigmoid_binary_cross_entropy(logits, targets)
    # (1 - p)^gamma of the logarithm: 1 - p itself rounds to 0, where a power has no gradient.
    log_wrong = targets * jax.nn.log_sigmoid(-logits) + (1 - targets) * jax.nn.log_sigmoid(logits)
    values = cross_entropy * jnp.exp(gamma * log_wrong)
    if alpha is not None:
        values *= alpha * targets + (1 - alpha) * (1 - targets)
    return examples.reduce(values)


@loss
def hinge_loss(
    preds: Values,
    labels: Values,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return max(0, 1 - s·p), where s is 1 for positive labels and -1 for all others.

    Args:
        preds: scores of any shape.
        labels: of the same shape: booleans, 0 and 1, or -1 and 1.
    """
    preds, labels = as_same_shape(preds, labels, "hinge_loss")
    examples = Examples(preds.shape, options)
    sign = jnp.where(labels > 0, 1, jnp.where(jnp.isnan(labels), labels, -1))
    return examples.reduce(jax.nn.relu(1 - examples.hide(sign) * examples.hide(preds)))


@loss
def kl_divergence(
    log_probs: Values,
    targets: Values,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return Σ t · (log t - log p) over the last axis: how far the predicted distribution p is from
    the distribution t. 0 · log 0 is 0.

    Args:
        log_probs: `(..., classes)`, the logarithms of the predicted probabilities, such as
            `jax.nn.log_softmax(logits)`.
        targets: `(..., classes)`, probabilities.
    """
    log_probs, targets = as_same_shape(log_probs, targets, "kl_divergence")
    _check_class_axis(log_probs, "kl_divergence")
    examples = Examples(log_probs.shape[:-1], options)
    targets = examples.hide(targets, 1.0)
    log_probs = examples.hide(log_probs)
    entropy = jnp.sum(xlogy(targets, targets), axis=-1)
    return examples.reduce(entropy - _multiply_logs(targets, log_probs))


@loss
def dice_loss(
    probs: Values,
    labels: Values,
    *,
    smooth: float = 1.0,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return 1 - (2 Σ p·t + smooth) / (Σ p + Σ t + smooth), one value for each example and class;
    the sums are over the axes between, such as the pixels of a picture.

    The mask is over `(batch, ...)` or its leading axes: pixels that must not count. An example
    without any pixel is masked itself. The weight is over `(batch, classes)` or `(batch,)`.

    Source: Milletari et al., V-Net (2016), with p and t in the place of their squares.

    Args:
        probs: `(batch, ..., classes)`, predicted probabilities; for one class `(batch, ..., 1)`.
        labels: integers `(batch, ...)`, or one-hot or probabilities `(batch, ..., classes)`.
        smooth: 0 for the Dice coefficient itself, which is 0 / 0 (taken as 1) for a class that
            neither occurs nor is predicted.
    """
    probs = to_float(probs)
    if probs.ndim < 2:
        raise ConfigurationError(
            f"dice_loss of probabilities {list(probs.shape)}; they begin with the axis of examples "
            "and end with that of classes"
        )
    pixels, targets = _as_targets(probs, labels, {"mask": options.get("mask")}, "dice_loss")
    inner = tuple(range(1, probs.ndim - 1))
    has_pixels = jnp.any(pixels.present, axis=inner)
    examples = Examples((len(probs), probs.shape[-1]), {**options, "mask": has_pixels})
    probs = pixels.hide(probs)
    targets = pixels.hide(targets)
    both = 2 * jnp.sum(probs * targets, axis=inner) + smooth
    either = jnp.sum(probs, axis=inner) + jnp.sum(targets, axis=inner) + smooth
    is_empty = either == 0
    values = jnp.where(is_empty, 0, 1 - both / jnp.where(is_empty, 1, either))
    return examples.reduce(values)


def _as_targets(
    preds: Array, labels: Any, options: LossOptions, loss_name: str
) -> tuple[Examples, Float[Array, "... classes"]]:
    """Return which losses `(...)` count, and the labels as one number for each class: NaN for an
    integer that is not a class, but not for masked examples."""
    _check_class_axis(preds, loss_name)
    labels = jnp.asarray(labels)
    classes = preds.shape[-1]
    examples = Examples(preds.shape[:-1], options)
    if labels.shape == preds.shape[:-1] and not jnp.issubdtype(labels.dtype, jnp.inexact):
        indices = labels.astype(int)
        is_class = (indices >= 0) & (indices < classes)
        targets = jax.nn.one_hot(indices, classes, dtype=preds.dtype)
        targets = jnp.where(is_class[..., None], targets, jnp.nan)
    elif labels.shape == preds.shape:
        targets = labels.astype(preds.dtype)
    else:
        raise ConfigurationError(
            f"{loss_name} of predictions {list(preds.shape)} with labels "
            f"{labels.dtype}{list(labels.shape)}; the predictions end with an axis of classes, the "
            f"labels are integers of shape {list(preds.shape[:-1])}, or one number for each class, "
            f"of shape {list(preds.shape)}"
        )
    return examples, examples.hide(targets)


def _check_class_axis(preds: Array, loss_name: str) -> None:
    if preds.ndim == 0:
        raise ConfigurationError(
            f"{loss_name} of a single number; its predictions end with an axis of classes"
        )


def _multiply_logs(
    targets: Float[Array, "... classes"], logs: Float[Array, "... classes"]
) -> Float[Array, "..."]:
    """Return Σ t · log p over the classes, where 0 · log 0 is 0."""
    # What is -inf is replaced before it is multiplied, or the gradient would be NaN.
    is_impossible = (targets == 0) & (logs == -jnp.inf)
    return jnp.sum(targets * jnp.where(is_impossible, 0, logs), axis=-1)


def _smooth_labels(
    targets: Float[Array, "... classes"], share: float, loss_name: str
) -> Float[Array, "... classes"]:
    """Return labels of which a share is spread evenly over all classes."""
    _check_share(share, loss_name)
    return targets if share == 0 else (1 - share) * targets + share / targets.shape[-1]


def _smooth_binary(targets: Array, share: float, loss_name: str) -> Array:
    """Return labels of which a share is spread evenly over 0 and 1."""
    _check_share(share, loss_name)
    return targets if share == 0 else (1 - share) * targets + share / 2


def _check_share(share: float, loss_name: str) -> None:
    if not 0 <= share <= 1:
        raise ConfigurationError(
            f"{loss_name} with label_smoothing={share}; it is a share from 0 to 1"
        )
