"""Metrics of the probabilities that a classifier gives: logits `(..., classes)`, labels as for
accuracy."""

from typing import Any, ClassVar

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
    """The exponential of the mean of -log p(label); NaN without examples.

    A label that is not a class has probability zero.

    Example:
        from fulgurite_metrics import Perplexity

        Perplexity.from_logits(logits, labels, mask).compute()
    """

    higher_is_better: ClassVar[bool | None] = False

    negative_log_likelihood: Mean

    @staticmethod
    def from_logits(logits: Values, labels: Values, mask: Mask | None = None) -> "Perplexity":
        """Return the perplexity of a batch.

        Args:
            logits: `(..., classes)`.
            labels: integers or booleans `(...)`, or one-hot `(..., classes)`.
            mask: bools over all axes of the labels or the leading ones.
        """
        logits = to_float(logits)
        label = as_class_indices(logits, labels, "Perplexity")
        is_label = jax.nn.one_hot(label, logits.shape[-1], dtype=bool)
        log_probs = jnp.where(is_label, jax.nn.log_softmax(logits), -jnp.inf)
        return Perplexity(Mean.from_values(-jnp.max(log_probs, axis=-1), mask))

    def compute(self) -> Value:
        mean: Any = self.negative_log_likelihood.compute()
        with np.errstate(over="ignore"):
            return get_array_namespace(mean).exp(mean)


class ExpectedCalibrationError(Metric):
    """How far confidence is from accuracy; NaN without examples.

    Examples are binned by the probability of their likeliest class. The distances of mean
    confidence and accuracy are averaged, weighted by the examples of the bins.

    Source: Guo et al., On Calibration of Modern Neural Networks (2017), equations 2 to 3; bins are
    open below.

    Example:
        from fulgurite_metrics import ExpectedCalibrationError

        ExpectedCalibrationError.from_logits(logits, labels, mask, bins=15).compute()

    Attributes:
        excess: `(bins,)`, the sum of confidence - correctness in each bin.
        count: the number of examples.
    """

    higher_is_better: ClassVar[bool | None] = False

    excess: Sum
    count: Sum

    @staticmethod
    def from_logits(
        logits: Values, labels: Values, mask: Mask | None = None, bins: int = 15
    ) -> "ExpectedCalibrationError":
        """Return the error of a batch.

        Args:
            logits: `(..., classes)`.
            labels: integers or booleans `(...)`, or one-hot `(..., classes)`.
            mask: bools over all axes of the labels or the leading ones.
            bins: the number of bins of equal width.
        """
        if bins < 1:
            raise ConfigurationError(
                f"ExpectedCalibrationError with bins={bins}; there must be at least one"
            )
        logits = to_float(logits)
        label = as_class_indices(logits, labels, "ExpectedCalibrationError")
        confidence = jnp.max(jax.nn.softmax(logits), axis=-1)
        excess = confidence - (jnp.argmax(logits, axis=-1) == label).astype(confidence.dtype)
        bin_index = jnp.clip(jnp.ceil(confidence * bins).astype(jnp.int32) - 1, 0, bins - 1)
        present = apply_mask(jnp.ones_like(bin_index, bool), mask, False)
        is_in_bin = jax.nn.one_hot(bin_index, bins, dtype=bool) & present[..., None]
        return ExpectedCalibrationError(
            jax.vmap(lambda in_bin: Sum.from_values(excess, in_bin), in_axes=-1)(is_in_bin),
            Sum.from_values(jnp.ones_like(excess), mask),
        )

    def compute(self) -> Value:
        distances: Any = abs(self.excess.compute())
        # The error of nothing is NaN, and meant to be.
        with np.errstate(invalid="ignore"):
            return distances.sum(-1) / self.count.compute()


class BrierScore(Metric):
    """The mean of Σ (p - t)² over the classes, where t is 1 for the label and 0 for all others; NaN
    without examples. It is from 0 to 2; for two classes some halve it.

    Source: Brier, Verification of Forecasts Expressed in Terms of Probability (1950).

    Example:
        from fulgurite_metrics import BrierScore

        BrierScore.from_logits(logits, labels, mask).compute()
    """

    higher_is_better: ClassVar[bool | None] = False

    mean: Mean

    @staticmethod
    def from_logits(logits: Values, labels: Values, mask: Mask | None = None) -> "BrierScore":
        """Return the score of a batch.

        Args:
            logits: `(..., classes)`.
            labels: integers or booleans `(...)`, or one-hot `(..., classes)`.
            mask: bools over all axes of the labels or the leading ones.
        """
        logits = to_float(logits)
        label = as_class_indices(logits, labels, "BrierScore")
        targets = jax.nn.one_hot(label, logits.shape[-1], dtype=logits.dtype)
        squares = (jax.nn.softmax(logits) - targets) ** 2
        return BrierScore(Mean.from_values(jnp.sum(squares, axis=-1), mask))

    def compute(self) -> Value:
        return self.mean.compute()
