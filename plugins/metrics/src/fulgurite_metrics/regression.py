"""Errors of predicted numbers. All elements count alike, over all or the leading axes of the
mask."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import Mask, Mean, Metric, Std, Value, Values, to_float
from jaxtyping import Array

from fulgurite_metrics.arrays import get_array_namespace


class MeanSquaredError(Metric):
    """The mean of `(preds - targets)**2`; of nothing, NaN."""

    mean: Mean

    @staticmethod
    def from_predictions(
        preds: Values, targets: Values, mask: Mask | None = None
    ) -> "MeanSquaredError":
        preds, targets = _check_same_shape(preds, targets, "MeanSquaredError")
        return MeanSquaredError(Mean.from_values((preds - targets) ** 2, mask))

    def compute(self) -> Value:
        return self.mean.compute()


class MeanAbsoluteError(Metric):
    """The mean of `|preds - targets|`; of nothing, NaN."""

    mean: Mean

    @staticmethod
    def from_predictions(
        preds: Values, targets: Values, mask: Mask | None = None
    ) -> "MeanAbsoluteError":
        preds, targets = _check_same_shape(preds, targets, "MeanAbsoluteError")
        return MeanAbsoluteError(Mean.from_values(jnp.abs(preds - targets), mask))

    def compute(self) -> Value:
        return self.mean.compute()


class R2(Metric):
    """The share of the targets' variance that the predictions explain, 1 - squared error /
    variance, as in scikit-learn: NaN for fewer than two; if all targets are equal, 1 if they are
    met, else 0."""

    error: Mean
    targets: Std

    @staticmethod
    def from_predictions(preds: Values, targets: Values, mask: Mask | None = None) -> "R2":
        preds, targets = _check_same_shape(preds, targets, "R2")
        return R2(Mean.from_values((preds - targets) ** 2, mask), Std.from_values(targets, mask))

    def compute(self) -> Value:
        error: Any = self.error.compute()
        variance, count = self.targets.variance.compute(), self.error.weight.compute()
        numpy = get_array_namespace(error)
        explained = 1 - error / numpy.where(variance == 0, 1, variance)
        explained = numpy.where((variance == 0) & (error > 0), 0, explained)
        return numpy.where(count < 2, np.nan, explained).astype(error.dtype)


def _check_same_shape(preds: Any, targets: Any, what: str) -> tuple[Array, Array]:
    preds, targets = to_float(preds), to_float(targets)
    if preds.shape != targets.shape:
        shapes = f"{what} of predictions {list(preds.shape)} and targets {list(targets.shape)}"
        raise ConfigurationError(
            f"{shapes}; they must have the same shape, so that none is broadcast by mistake"
        )
    return preds, targets
