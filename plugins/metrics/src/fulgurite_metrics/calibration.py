"""How good the probabilities are that a classifier gives: logits `(..., classes)`, labels as for
accuracy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import (
    Mask,
    Mean,
    Metric,
    Sum,
    Value,
    Values,
    apply_mask,
    as_class_indices,
    to_float,
)

from fulgurite_metrics.arrays import get_array_namespace


class Perplexity(Metric):
    """exp of the mean of -log p(label); of nothing, NaN. A label that is no class has probability
    zero."""

    surprise: Mean

    @staticmethod
    def from_logits(logits: Values, labels: Values, mask: Mask | None = None) -> "Perplexity":
        logits = to_float(logits)
        label = as_class_indices(logits, labels, "Perplexity")
        right = jax.nn.one_hot(label, logits.shape[-1], dtype=bool)
        chosen = jnp.max(jnp.where(right, jax.nn.log_softmax(logits), -jnp.inf), axis=-1)
        return Perplexity(Mean.from_values(-chosen, mask))

    def compute(self) -> Value:
        mean: Any = self.surprise.compute()
        with np.errstate(over="ignore"):
            return get_array_namespace(mean).exp(mean)


class ExpectedCalibrationError(Metric):
    """How far confidence is from accuracy: examples are binned by the probability of their
    likeliest class, and the distances of mean confidence and accuracy averaged, weighted by the
    bins' examples; of nothing, NaN.

    Source: Guo et al., On Calibration of Modern Neural Networks (2017), equations 2 to 3; bins are
        open below.

    Attributes:
        excess: `(bins,)`, the sum of confidence - correctness in each bin.
        count: the examples.
    """

    excess: Sum
    count: Sum

    @staticmethod
    def from_logits(
        logits: Values, labels: Values, mask: Mask | None = None, bins: int = 15
    ) -> "ExpectedCalibrationError":
        if bins < 1:
            raise ConfigurationError(
                f"ExpectedCalibrationError with bins={bins}; there must be at least one"
            )
        logits = to_float(logits)
        label = as_class_indices(logits, labels, "ExpectedCalibrationError")
        confidence = jnp.max(jax.nn.softmax(logits), axis=-1)
        excess = confidence - (jnp.argmax(logits, axis=-1) == label).astype(confidence.dtype)
        place = jnp.clip(jnp.ceil(confidence * bins).astype(jnp.int32) - 1, 0, bins - 1)
        inside = (
            jax.nn.one_hot(place, bins, dtype=bool)
            & apply_mask(jnp.ones_like(place, bool), mask, False)[..., None]
        )
        return ExpectedCalibrationError(
            jax.vmap(lambda one: Sum.from_values(excess, one), in_axes=-1)(inside),
            Sum.from_values(jnp.ones_like(excess), mask),
        )

    def compute(self) -> Value:
        distances: Any = abs(self.excess.compute())
        with np.errstate(invalid="ignore"):  # of nothing it is NaN, and meant to be
            return distances.sum() / self.count.compute()
