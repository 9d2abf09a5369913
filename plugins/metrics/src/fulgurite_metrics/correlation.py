"""Whether predictions grow with the targets."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.metrics import CollectingMetric, Mask, Mean, Metric, Std, Sum, Value, Values
from jaxtyping import Array, Float

from fulgurite_metrics.arrays import get_array_namespace, make_example_mask
from fulgurite_metrics.regression import as_same_shape


class Pearson(Metric):
    """The correlation of predictions and targets, from -1 to 1; NaN for fewer than two values and
    where either is constant.

    Source: the pairwise update of Chan, Golub and LeVeque (1983), for the covariance.

    Example:
        from fulgurite_metrics import Pearson

        Pearson.from_predictions(preds, targets, mask).compute()
    """

    higher_is_better: ClassVar[bool | None] = True

    preds: Std
    targets: Std
    covariance: Mean

    @staticmethod
    def from_predictions(preds: Values, targets: Values, mask: Mask | None = None) -> "Pearson":
        """Return the correlation of a batch.

        Args:
            preds: of any shape.
            targets: of the same shape.
            mask: bools over all axes or the leading ones.
        """
        preds, targets = as_same_shape(preds, targets, "Pearson")
        first = Std.from_values(preds, mask)
        second = Std.from_values(targets, mask)
        products = _subtract_mean(preds, first) * _subtract_mean(targets, second)
        return Pearson(first, second, Mean.from_values(products, mask))

    def merge(self, other: Any) -> "Pearson":
        self_count = self.covariance.weight.total
        other_count = other.covariance.weight.total
        covariance = self.covariance.merge(other.covariance)
        share = self_count * (other_count / jnp.maximum(covariance.weight.total, 1))
        # The products of how far the two means are from their common means.
        deltas = _subtract_means(other.preds, self.preds) * _subtract_means(
            other.targets, self.targets
        )
        between = Sum.from_values(deltas * share)
        both = Mean(covariance.total.merge(between), covariance.weight)
        # Merging an empty metric must change no bit, so the other one is selected as it is.
        case = jnp.where(other_count == 0, 0, jnp.where(self_count == 0, 1, 2))
        selected = jax.tree.map(
            lambda *cases: jax.lax.select_n(case, *cases), self.covariance, other.covariance, both
        )
        return Pearson(self.preds.merge(other.preds), self.targets.merge(other.targets), selected)

    def compute(self) -> Value:
        covariance: Any = self.covariance.compute()
        spread: Any = self.preds.compute() * self.targets.compute()
        numpy = get_array_namespace(covariance)
        ratio = covariance / numpy.where(spread == 0, 1, spread)
        # Rounding must not lead beyond 1.
        return numpy.where(spread == 0, np.nan, numpy.clip(ratio, -1, 1)).astype(covariance.dtype)


class Spearman(CollectingMetric):
    """The correlation of the ranks of predictions and targets, where equal values share the mean of
    their ranks; NaN for fewer than two values, where either is constant, and with a NaN.

    Source: Spearman, The Proof and Measurement of Association between Two Things (1904).

    Example:
        from fulgurite_metrics import Spearman

        Spearman.from_predictions(preds, targets, mask).compute()
    """

    higher_is_better: ClassVar[bool | None] = True

    preds: Float[Array | np.ndarray, " examples"]
    targets: Float[Array | np.ndarray, " examples"]

    @staticmethod
    def from_predictions(preds: Values, targets: Values, mask: Mask | None = None) -> "Spearman":
        """Return the correlation of a batch.

        Args:
            preds: `(examples,)`.
            targets: of the same shape.
            mask: bools `(examples,)`.
        """
        preds, targets = as_same_shape(preds, targets, "Spearman")
        return Spearman(make_example_mask((preds, targets), mask), preds, targets)

    def compute(self) -> Value:
        mask = np.asarray(self.mask)
        preds = np.asarray(self.preds)[mask]
        targets = np.asarray(self.targets)[mask]
        if np.isnan(preds).any() or np.isnan(targets).any() or not len(preds):
            return np.float64(np.nan)
        first = _compute_ranks(preds)
        second = _compute_ranks(targets)
        spread = np.std(first) * np.std(second)
        if spread == 0:
            return np.float64(np.nan)
        return np.mean((first - np.mean(first)) * (second - np.mean(second))) / spread


def _subtract_mean(values: Float[Array, "..."], std: Std) -> Float[Array, "..."]:
    return (values - std.mean.total) - std.mean.rounding_error


def _subtract_means(first: Std, second: Std) -> Float[Array, ""]:
    rounding_error = first.mean.rounding_error - second.mean.rounding_error
    return (first.mean.total - second.mean.total) + rounding_error


def _compute_ranks(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Return the ranks of values, where equal ones share the mean of theirs."""
    _, index, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[index]
