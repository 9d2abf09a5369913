"""Metrics of predicted numbers.

All elements count alike. A mask is over all axes or the leading ones.
"""

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import Mask, Mean, Metric, Std, Value, Values, to_float
from jaxtyping import Array

from fulgurite_metrics.arrays import get_array_namespace


class MeanSquaredError(Metric):
    """The mean of `(preds - targets)**2`; NaN without values.

    Example:
        from fulgurite_metrics import MeanSquaredError

        MeanSquaredError.from_predictions(preds, targets, mask).compute()
    """

    higher_is_better: ClassVar[bool | None] = False

    mean: Mean

    @staticmethod
    def from_predictions(
        preds: Values, targets: Values, mask: Mask | None = None
    ) -> "MeanSquaredError":
        """Return the error of a batch.

        Args:
            preds: of any shape.
            targets: of the same shape.
            mask: bools over all axes or the leading ones.
        """
        preds, targets = as_same_shape(preds, targets, "MeanSquaredError")
        return MeanSquaredError(Mean.from_values((preds - targets) ** 2, mask))

    def compute(self) -> Value:
        return self.mean.compute()


class MeanAbsoluteError(Metric):
    """The mean of `|preds - targets|`; NaN without values.

    Example:
        from fulgurite_metrics import MeanAbsoluteError

        MeanAbsoluteError.from_predictions(preds, targets, mask).compute()
    """

    higher_is_better: ClassVar[bool | None] = False

    mean: Mean

    @staticmethod
    def from_predictions(
        preds: Values, targets: Values, mask: Mask | None = None
    ) -> "MeanAbsoluteError":
        """Return the error of a batch.

        Args:
            preds: of any shape.
            targets: of the same shape.
            mask: bools over all axes or the leading ones.
        """
        preds, targets = as_same_shape(preds, targets, "MeanAbsoluteError")
        return MeanAbsoluteError(Mean.from_values(jnp.abs(preds - targets), mask))

    def compute(self) -> Value:
        return self.mean.compute()


class R2(Metric):
    """The share of the targets' variance that the predictions explain: 1 - squared error /
    variance.

    As in scikit-learn it is NaN for fewer than two values, and if all targets are equal, 1 for
    exact predictions and else 0.

    Example:
        from fulgurite_metrics import R2

        R2.from_predictions(preds, targets, mask).compute()
    """

    higher_is_better: ClassVar[bool | None] = True

    error: Mean
    targets: Std

    @staticmethod
    def from_predictions(preds: Values, targets: Values, mask: Mask | None = None) -> "R2":
        """Return the metric of a batch.

        Args:
            preds: of any shape.
            targets: of the same shape.
            mask: bools over all axes or the leading ones.
        """
        preds, targets = as_same_shape(preds, targets, "R2")
        return R2(Mean.from_values((preds - targets) ** 2, mask), Std.from_values(targets, mask))

    def compute(self) -> Value:
        error: Any = self.error.compute()
        variance = self.targets.variance.compute()
        count = self.error.weight.compute()
        numpy = get_array_namespace(error)
        score = 1 - error / numpy.where(variance == 0, 1, variance)
        score = numpy.where((variance == 0) & (error > 0), 0, score)
        return numpy.where(count < 2, np.nan, score).astype(error.dtype)


def as_same_shape(preds: Any, targets: Any, metric_name: str) -> tuple[Array, Array]:
    """Return predictions and targets as floats; an error if their shapes differ."""
    preds = to_float(preds)
    targets = to_float(targets)
    if preds.shape != targets.shape:
        raise ConfigurationError(
            f"{metric_name} of predictions {list(preds.shape)} and targets {list(targets.shape)}; "
            "they must have the same shape, so that none is broadcast by mistake"
        )
    return preds, targets
