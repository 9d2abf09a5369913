"""The general metrics: sums, means, extremes, accuracy, and values carried from step to step."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fulgurite._src.metrics.base import (
    Mask,
    Metric,
    RunningMetric,
    Value,
    Values,
    apply_mask,
    as_class_indices,
    expand_leading,
    to_float,
)
from fulgurite._src.metrics.weights import note_weight
from fulgurite.errors import ConfigurationError, ModelError


class Sum(Metric):
    """A compensated sum.

    Within a batch it is as exact as XLA's; merging loses nothing that two floats can hold.
    `from_values` sums to a scalar; `jax.vmap(Sum.from_values)` gives sums side by side, which are
    merged element by element.

    Source: the addition of double-length numbers of Dekker, A Floating-Point Technique for
    Extending the Available Precision (1971). Errors that are only summed separately, as by
    Neumaier, grow too large themselves.

    Example:
        total = fg.metrics.Sum.from_values(jnp.array([1.0, 2.0]))
        total.merge(fg.metrics.Sum.from_values(3.0)).compute()  # 6.0

    Attributes:
        total: the sum, rounded.
        rounding_error: what rounding lost; the two together are the sum.
    """

    total: Float[Array, "..."]
    rounding_error: Float[Array, "..."]

    @staticmethod
    def from_values(values: Values, mask: Mask | None = None) -> "Sum":
        """Return the sum of the values that `mask` does not exclude."""
        total = jnp.sum(apply_mask(to_float(values), mask, 0.0))
        # -0 would not survive merging 0. Adding its magnitude keeps the gradient, which a constant
        # in the place of a loss that happens to be 0 would cut off.
        positive = total + jax.lax.stop_gradient(jnp.abs(total))
        return Sum(jnp.where(total == 0, positive, total), jnp.zeros_like(total))

    def merge(self, other: Any) -> "Sum":
        rounded, lost = _add_exactly(self.total, other.total)
        lost += self.rounding_error + other.rounding_error
        total, rounding_error = _add_exactly(rounded, lost)
        # What an infinite sum has lost is NaN, and would hide that the sum is infinite.
        is_finite = jnp.isfinite(total)
        return Sum(jnp.where(is_finite, total, rounded), jnp.where(is_finite, rounding_error, 0))

    def empty(self) -> "Sum":
        return jax.tree.map(jnp.zeros_like, self)

    def compute(self) -> Any:
        return self.total + self.rounding_error


class Mean(Metric):
    """The weighted mean; NaN without values.

    Example:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        fg.metrics.Mean.from_values(losses, mask).compute()
    """

    total: Sum
    weight: Sum

    @staticmethod
    def from_values(
        values: Values, mask: Mask | None = None, weight: Values | None = None
    ) -> "Mean":
        """Return the mean of a batch.

        Args:
            values: of any shape.
            mask: bools over all axes or the leading ones.
            weight: how much each value counts, over all axes or the leading ones; weight zero
                masks.
        """
        numbers = to_float(values)
        weight_array = 1.0 if weight is None else to_float(weight)
        expanded = expand_leading(weight_array, numbers, "weight")
        weights = apply_mask(jnp.ones_like(numbers) * expanded, mask, 0.0)
        return Mean(Sum.from_values(numbers * weights, weights != 0), Sum.from_values(weights))

    def compute(self) -> Any:
        # Of the class: to make a bound method of an Equinox module takes longer than to call it.
        weight = Sum.compute(self.weight)
        # The mean of nothing is NaN, and meant to be.
        with np.errstate(divide="ignore", invalid="ignore"):
            return note_weight(Sum.compute(self.total) / weight, weight)


class SumOfMeans(Metric):
    """The sum of means that weigh examples in different ways, such as the terms of a loss. One over
    nothing adds nothing, as in the loss of a step; NaN where all are.

    Example:
        cross_entropy = fg.metrics.Mean.from_values(abs(preds - targets), mask)
        penalty = fg.metrics.Mean.from_values(0.1)
        fg.metrics.SumOfMeans((cross_entropy, penalty)).compute()

    Attributes:
        means: each is merged by itself.
    """

    means: tuple[Mean, ...]

    def compute(self) -> Any:
        weights = [Sum.compute(mean.weight) for mean in self.means]
        # As numbers, of NumPy or JAX: 1 for a mean over nothing.
        empty = [(weight == 0).astype(weight.dtype) for weight in weights]
        first, *others = [
            Sum.compute(mean.total) / (weight + is_empty)
            for mean, weight, is_empty in zip(self.means, weights, empty, strict=True)
        ]
        # 0 / 0, where all are over nothing, is NaN, and meant to be.
        with np.errstate(invalid="ignore"):
            return sum(others, start=first) + 0 / sum(1 - is_empty for is_empty in empty)


class Accuracy(Metric):
    """The share of examples whose label is among the `top_k` classes with the largest logits;
    NaN without examples.

    Example:
        fg.metrics.Accuracy.from_logits(logits, labels, mask, top_k=2).compute()
    """

    higher_is_better: ClassVar[bool | None] = True

    mean: Mean

    @staticmethod
    def from_logits(
        logits: Values, labels: Values, mask: Mask | None = None, top_k: int = 1
    ) -> "Accuracy":
        """Return the accuracy of a batch.

        The first of equal logits counts as larger, as for `argmax`; a NaN is larger than no other.

        Args:
            logits: `(..., classes)`.
            labels: integers or booleans `(...)`, or one-hot `(..., classes)`. A label that is not a
                class is wrong.
            mask: bools over all axes of the labels or the leading ones.
            top_k: from 1 to the number of classes.
        """
        logits = to_float(logits)
        label = as_class_indices(logits, labels, "Accuracy")[..., None]
        index = jax.lax.broadcasted_iota(label.dtype, logits.shape, logits.ndim - 1)
        classes = logits.shape[-1]
        if not 1 <= top_k <= classes:
            raise ConfigurationError(
                f"Accuracy with top_k={top_k} of {classes} classes; choose from 1 to {classes}"
            )
        logit = jnp.max(jnp.where(index == label, logits, -jnp.inf), axis=-1, keepdims=True)
        # Count the classes that the label beats, not those that beat it: a NaN beats none.
        is_beaten = (logits < logit) | ((logits == logit) & (index > label))
        num_beaten = jnp.sum(is_beaten, axis=-1)
        is_correct = (num_beaten >= classes - top_k) & (label >= 0)[..., 0]
        return Accuracy(Mean.from_values(is_correct, mask))

    @staticmethod
    def from_binary_logits(
        logits: Values, labels: Values, mask: Mask | None = None, threshold: float = 0.0
    ) -> "Accuracy":
        """Return the accuracy of a batch of two classes with one logit for each example.

        Args:
            logits: of any shape; an example above the threshold is predicted as class 1. NaN is
                never right.
            labels: of the same shape: booleans, or 0 and 1; any other is wrong.
            mask: bools over all axes or the leading ones.
            threshold: 0 for logits, 0.5 for probabilities.
        """
        logits = to_float(logits)
        labels = jnp.asarray(labels)
        if labels.shape != logits.shape:
            raise ModelError(
                f"Accuracy of binary logits of shape {logits.shape} with labels of shape "
                f"{labels.shape}; give one label for each logit"
            )
        preds = (logits > threshold).astype(labels.dtype)
        is_correct = (preds == labels) & ~jnp.isnan(logits)
        return Accuracy(Mean.from_values(is_correct, mask))

    def compute(self) -> Value:
        return Mean.compute(self.mean)


class Max(Metric):
    """The largest value; minus infinity without values; NaN if any value is NaN.

    Example:
        fg.metrics.Max.from_values(abs(preds - targets)).compute()
    """

    value: Float[Array, ""]

    @staticmethod
    def from_values(values: Values, mask: Mask | None = None) -> "Max":
        """Return the largest of the values that `mask` does not exclude."""
        return Max(jnp.max(apply_mask(to_float(values), mask, -jnp.inf), initial=-jnp.inf))

    def merge(self, other: Any) -> "Max":
        return Max(jnp.maximum(self.value, other.value))

    def empty(self) -> "Max":
        return Max(jnp.full_like(self.value, -jnp.inf))

    def compute(self) -> Value:
        return self.value


class Min(Metric):
    """The smallest value; infinity without values; NaN if any value is NaN.

    Example:
        fg.metrics.Min.from_values(preds, mask).compute()
    """

    negated: Max

    @staticmethod
    def from_values(values: Values, mask: Mask | None = None) -> "Min":
        """Return the smallest of the values that `mask` does not exclude."""
        return Min(Max.from_values(-to_float(values), mask))

    def compute(self) -> Value:
        return -self.negated.value


class Std(Metric):
    """The population standard deviation, exact even with a large mean; NaN without values.

    Source: the pairwise update of Chan, Golub and LeVeque, Algorithms for Computing the Sample
    Variance (1983).

    Example:
        fg.metrics.Std.from_values(preds - targets, mask).compute()
    """

    mean: Sum
    variance: Mean

    @staticmethod
    def from_values(values: Values, mask: Mask | None = None) -> "Std":
        """Return the standard deviation of the values that `mask` does not exclude."""
        numbers = to_float(values)
        count = jnp.maximum(Sum.from_values(jnp.ones_like(numbers), mask).total, 1)
        mean = Sum.from_values(numbers, mask).total / count
        error = Sum.from_values(numbers - mean, mask).total / count
        return Std(Sum(mean, error), Mean.from_values(((numbers - mean) - error) ** 2, mask))

    def merge(self, other: Any) -> "Std":
        self_count = self.variance.weight.total
        other_count = other.variance.weight.total
        variance = self.variance.merge(other.variance)
        other_share = other_count / jnp.maximum(variance.weight.total, 1)
        delta = other.mean.total - self.mean.total
        delta += other.mean.rounding_error - self.mean.rounding_error
        # The squared deviations of the two means from their common mean.
        between = Sum.from_values(delta**2 * self_count * other_share)
        both = Std(
            self.mean.merge(Sum.from_values(delta * other_share)),
            Mean(variance.total.merge(between), variance.weight),
        )
        # Merging an empty metric must change no bit, so the other one is selected as it is.
        case = jnp.where(other_count == 0, 0, jnp.where(self_count == 0, 1, 2))
        return jax.tree.map(lambda *cases: jax.lax.select_n(case, *cases), self, other, both)

    def compute(self) -> Value:
        return self.variance.compute() ** 0.5


class LastValue(RunningMetric):
    """The value of the last step, of any shape.

    Example:
        schedule = optax.cosine_decay_schedule(1e-3, 1000)
        learning_rate = fg.metrics.LastValue.from_values(schedule(10))
    """

    @staticmethod
    def from_values(value: Values) -> "LastValue":
        """Return the value of one step."""
        return LastValue(to_float(value))

    def update(self, new: Any) -> "LastValue":
        return new


class ExponentialMovingAverage(RunningMetric):
    """The exponential moving average of values of any shape.

    It begins as a plain mean, because a new value weighs max(1 - `decay`, 1 / count). NaN without
    values.

    Example:
        loss = fg.metrics.ExponentialMovingAverage.from_values(0.5, decay=0.99)

    Attributes:
        value: the average.
        count: int32, the number of values.
        decay: the weight of the average before, when a value is added.
    """

    count: Int[Array, ""]
    decay: float | int = eqx.field(static=True)

    @staticmethod
    def from_values(
        value: Values, decay: float | int = 0.99, *, weight: Any = 1
    ) -> "ExponentialMovingAverage":
        """Return the average of one step.

        Args:
            value: of any shape.
            decay: at least 0 and below 1.
            weight: a scalar, 0 where the step has no value, such as one whose examples are all
                padding; any other counts alike.
        """
        if not 0 <= decay < 1:
            raise ConfigurationError(
                f"ExponentialMovingAverage with decay={decay}; it must be at least 0 and below 1"
            )
        has_value = jnp.asarray(weight) != 0
        numbers = jnp.where(has_value, to_float(value), jnp.nan)
        return ExponentialMovingAverage(numbers, has_value.astype(jnp.int32), decay)

    def update(self, new: Any) -> "ExponentialMovingAverage":
        count = self.count + new.count
        share = jnp.maximum(1 - self.decay, new.count / jnp.maximum(count, 1))
        average = self.value + share.astype(self.value.dtype) * (new.value - self.value)
        value = jnp.where(new.count == 0, self.value, average)
        value = jnp.where(self.count == 0, new.value, value)
        return ExponentialMovingAverage(value, count, self.decay)


def is_over_nothing(metric: Any) -> bool:
    """Return whether a metric, on the host, holds means over values that weigh nothing, and no
    others."""
    nodes = jax.tree.leaves(metric, is_leaf=lambda node: isinstance(node, Mean))
    means = [node for node in nodes if isinstance(node, Mean)]
    return bool(means) and all(np.all(mean.weight.total == 0) for mean in means)


def _add_exactly(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the sum rounded and, exactly, what that lost.

    Source: Knuth, The Art of Computer Programming 2, 4.2.2.
    """
    total = jnp.add(a, b)
    part = total - a
    return total, (a - (total - part)) + (b - part)
