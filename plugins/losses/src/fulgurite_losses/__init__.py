"""Losses with masks and weights; `docs/losses.md` lists all.

A loss is a function of predictions and targets. It returns the mean over the values that `mask`
does not exclude, or with `reduction="none"` the value of each example. What is masked changes no
value and no gradient, even where it is NaN. All losses are computed in float32, or float64 where
the inputs are; a gradient has the dtype of its input.
"""

__tracebackhide__ = True

from fulgurite_losses.classification import (
    binary_cross_entropy,
    categorical_cross_entropy,
    dice_loss,
    hinge_loss,
    kl_divergence,
    sigmoid_binary_cross_entropy,
    sigmoid_focal_loss,
    softmax_cross_entropy,
)
from fulgurite_losses.embeddings import (
    contrastive_loss,
    euclidean_distance,
    info_nce,
    negative_cosine,
    triplet_loss,
    triplet_margin_loss,
)
from fulgurite_losses.examples import Examples
from fulgurite_losses.regression import (
    absolute_error,
    adaptive_power_loss,
    huber_loss,
    log_cosh,
    poisson_loss,
    squared_error,
)
from fulgurite_losses.sequences import ctc_loss
from fulgurite_losses.signature import Reduction

__all__ = [
    "Examples",
    "Reduction",
    "absolute_error",
    "adaptive_power_loss",
    "binary_cross_entropy",
    "categorical_cross_entropy",
    "contrastive_loss",
    "ctc_loss",
    "dice_loss",
    "euclidean_distance",
    "hinge_loss",
    "huber_loss",
    "info_nce",
    "kl_divergence",
    "log_cosh",
    "negative_cosine",
    "poisson_loss",
    "sigmoid_binary_cross_entropy",
    "sigmoid_focal_loss",
    "softmax_cross_entropy",
    "squared_error",
    "triplet_loss",
    "triplet_margin_loss",
]
