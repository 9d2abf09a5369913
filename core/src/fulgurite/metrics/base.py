"""Metrics of three kinds, distinguished by type.

Each is made by `of`, where `mask` is true for the values that count, over all or their leading
axes. Numbers become float32; float64 stays. `compute` of NumPy fields gives NumPy without touching
a device.
"""

from abc import abstractmethod
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree, Shaped

from fulgurite.errors import ConfigurationError, ModelError

Value = Array | np.ndarray | np.number
Values = Shaped[ArrayLike, "..."]
Mask = Bool[ArrayLike, "..."]


class Metric(eqx.Module):
    """Summed up on the device, by windows and evaluators: `merge` is associative and commutative up
    to rounding, and `empty()` its identity. A metric whose fields are metrics is merged field by
    field; one made of arrays says how."""

    def merge(self, other: Self) -> Self:
        """The metric over the examples of both."""
        if bad := [
            one
            for one in jax.tree.leaves(self, is_leaf=self._is_field)
            if not isinstance(one, Metric)
        ]:
            gap = f"{type(self).__name__} holds {bad[0]!r}, which is no metric"
            raise ModelError(
                f"{gap}: define merge(self, other) and empty(self), or make it by `of`"
            )
        return jax.tree.map(lambda a, b: a.merge(b), self, other, is_leaf=self._is_field)

    def empty(self) -> Self:
        """The metric over no examples, with the same structure, shapes and dtypes. Merging it
        changes no bit."""
        return jax.tree.map(lambda field: field.empty(), self, is_leaf=self._is_field)

    @abstractmethod
    def compute(self) -> Value | dict[str, Value]:
        """The result, or several by name."""

    def _is_field(self, node: Any) -> bool:
        return isinstance(node, Metric) and node is not self


class Sum(Metric):
    """A compensated sum: `value` is the rounded sum, `error` what rounding lost; within a batch as
    exact as XLA's. `of` sums to a scalar; `jax.vmap(Sum.from_values)` gives sums side by side,
    which are merged element by element.

    Source: the addition of double-length numbers of Dekker, A Floating-Point Technique for
    Extending the Available Precision (1971). Errors that are only summed apart, as by Neumaier,
    grow too large themselves.
    """

    value: Float[Array, "..."]
    error: Float[Array, "..."]

    @staticmethod
    def from_values(values: Values, mask: Mask | None = None) -> "Sum":
        total = jnp.sum(apply_mask(to_float(values), mask, 0.0))
        return Sum(
            jnp.where(total == 0, 0, total), jnp.zeros_like(total)
        )  # -0 would not survive merging 0

    def merge(self, other: Any) -> "Sum":
        total, lost = _two_sum(self.value, other.value)
        value, error = _two_sum(total, (self.error + other.error) + lost)
        finite = jnp.isfinite(
            value
        )  # what an infinite sum has lost is NaN and would hide that it is infinite
        return Sum(jnp.where(finite, value, total), jnp.where(finite, error, 0))

    def empty(self) -> "Sum":
        return jax.tree.map(jnp.zeros_like, self)

    def compute(self) -> Any:
        return self.value + self.error


class Mean(Metric):
    """The weighted mean; without values NaN."""

    total: Sum
    weight: Sum

    @staticmethod
    def from_values(
        values: Values, mask: Mask | None = None, weight: Values | None = None
    ) -> "Mean":
        """`weight` says how much each value counts, over all or the leading axes; weight zero
        masks."""
        numbers = to_float(values)
        given = 1.0 if weight is None else to_float(weight)
        weights = apply_mask(
            jnp.ones_like(numbers) * _over_leading(given, numbers, "weight"), mask, 0.0
        )
        return Mean(Sum.from_values(numbers * weights, weights != 0), Sum.from_values(weights))

    def compute(self) -> Any:
        with np.errstate(
            divide="ignore", invalid="ignore"
        ):  # of nothing it is NaN, and meant to be
            return self.total.compute() / self.weight.compute()


class Accuracy(Metric):
    """The share of examples whose label is among the `top_k` classes with the largest logits;
    without examples NaN."""

    mean: Mean

    @staticmethod
    def from_logits(
        logits: Values, labels: Values, mask: Mask | None = None, top_k: int = 1
    ) -> "Accuracy":
        """From logits `(..., classes)` and labels as `class_labels` takes them. A label that is no
        class is wrong. The first of equal logits counts as larger, as for `argmax`; a NaN is larger
        than no other."""
        logits = to_float(logits)
        label = as_class_indices(logits, labels, "Accuracy")[..., None]
        index, classes = (
            jax.lax.broadcasted_iota(label.dtype, logits.shape, logits.ndim - 1),
            logits.shape[-1],
        )
        if not 1 <= top_k <= classes:
            raise ConfigurationError(
                f"Accuracy with top_k={top_k} of {classes} classes; choose from 1 to {classes}"
            )
        logit = jnp.max(jnp.where(index == label, logits, -jnp.inf), axis=-1, keepdims=True)
        # Counted are the classes that the label beats, not those that beat it: a NaN beats none.
        beaten = jnp.sum((logits < logit) | ((logits == logit) & (index > label)), axis=-1)
        return Accuracy(Mean.from_values((beaten >= classes - top_k) & (label >= 0)[..., 0], mask))

    def compute(self) -> Value:
        return self.mean.compute()


class Max(Metric):
    """The largest value; without values minus infinity; NaN if any value is NaN."""

    value: Float[Array, ""]

    @staticmethod
    def from_values(values: Values, mask: Mask | None = None) -> "Max":
        return Max(jnp.max(apply_mask(to_float(values), mask, -jnp.inf), initial=-jnp.inf))

    def merge(self, other: Any) -> "Max":
        return Max(jnp.maximum(self.value, other.value))

    def empty(self) -> "Max":
        return Max(jnp.full_like(self.value, -jnp.inf))

    def compute(self) -> Value:
        return self.value


class Min(Metric):
    """The smallest value; without values infinity; NaN if any value is NaN."""

    negated: Max

    @staticmethod
    def from_values(values: Values, mask: Mask | None = None) -> "Min":
        return Min(Max.from_values(-to_float(values), mask))

    def compute(self) -> Value:
        return -self.negated.value


class Std(Metric):
    """The population standard deviation, exact even with a large mean; without values NaN.
    Source: the pairwise update of Chan, Golub and LeVeque, Algorithms for Computing the Sample
        Variance (1983)."""

    mean: Sum
    variance: Mean

    @staticmethod
    def from_values(values: Values, mask: Mask | None = None) -> "Std":
        numbers = to_float(values)
        count = jnp.maximum(Sum.from_values(jnp.ones_like(numbers), mask).value, 1)
        mean = Sum.from_values(numbers, mask).value / count
        error = Sum.from_values(numbers - mean, mask).value / count
        return Std(Sum(mean, error), Mean.from_values(((numbers - mean) - error) ** 2, mask))

    def merge(self, other: Any) -> "Std":
        mine, theirs, variance = (
            self.variance.weight,
            other.variance.weight,
            self.variance.merge(other.variance),
        )
        share = theirs.value / jnp.maximum(variance.weight.value, 1)
        apart = (other.mean.value - self.mean.value) + (other.mean.error - self.mean.error)
        between = Sum.from_values(apart**2 * mine.value * share)
        both = Std(
            self.mean.merge(Sum.from_values(apart * share)),
            Mean(variance.total.merge(between), variance.weight),
        )
        which = jnp.where(theirs.value == 0, 0, jnp.where(mine.value == 0, 1, 2))
        return jax.tree.map(lambda *cases: jax.lax.select_n(which, *cases), self, other, both)

    def compute(self) -> Value:
        return self.variance.compute() ** 0.5


class RunningMetric(eqx.Module):
    """Ordered, carried from step to step across windows: `before.update(new)`, where `new` is one
    step's fresh value."""

    value: Float[Array, "..."]

    @abstractmethod
    def update(self, new: Self) -> Self:
        """The value after one more step. `empty().update(new)` equals `new`."""

    def empty(self) -> Self:
        """The value before the first step, with the same structure, shapes and dtypes."""
        return jax.tree.map(jnp.zeros_like, self)

    def compute(self) -> Value:
        return self.value


class LastValue(RunningMetric):
    """The value of the last step, of any shape."""

    @staticmethod
    def from_values(value: Values) -> "LastValue":
        return LastValue(to_float(value))

    def update(self, new: Any) -> "LastValue":
        return new


class ExponentialMovingAverage(RunningMetric):
    """The exponential moving average of values of any shape; it begins as a plain mean, because a
    new value weighs max(`weight`, 1 / count)."""

    count: Int[Array, ""]
    decay: float | int = eqx.field(static=True)

    @staticmethod
    def from_values(value: Values, weight: float | int = 0.01) -> "ExponentialMovingAverage":
        if not 0 < weight <= 1:
            raise ConfigurationError(
                f"MovingAverage with weight={weight}; it must be above 0 and at most 1"
            )
        return ExponentialMovingAverage(to_float(value), jnp.ones((), jnp.int32), weight)

    def update(self, new: Any) -> "ExponentialMovingAverage":
        count = self.count + new.count
        share = jnp.maximum(self.decay, new.count / count).astype(self.value.dtype)
        return ExponentialMovingAverage(
            self.value + share * (new.value - self.value), count, self.decay
        )


class CollectingMetric(eqx.Module):
    """Every example is kept: for evaluators only, computed on the host over all processes in
    example order. A subclass adds arrays that begin with the example axis, an `of` that is traced,
    and a `compute` of NumPy arrays."""

    mask: Bool[Array | np.ndarray, " examples"]

    @abstractmethod
    def compute(self) -> PyTree[Value]:
        """The result over the examples that are not masked. Runs on the host."""

    def merge(self, *others: Self) -> Self:
        """The examples of all, in order, as NumPy arrays. Runs on the host; one call copies each
        example once."""

        def join(*parts: Value) -> np.ndarray:
            kinds = {f"{part.dtype}{list(part.shape[1:])}" for part in parts}
            if len(kinds) > 1:
                raise ModelError(
                    f"{type(self).__name__} gathers examples of several shapes: {sorted(kinds)}; pad them"
                )
            return np.concatenate(parts)

        return jax.tree.map(join, self, *others)

    def empty(self) -> Self:
        """No examples, of the same structure, trailing shapes and dtypes."""
        return jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape[1:]), leaf.dtype), self)


def as_class_indices(logits: Array, labels: Values, what: str) -> Int[Array, "..."]:
    """Labels `(...)` for logits `(..., classes)`, -1 for one that is no class. Given are integers
    or booleans `(...)`, or one-hot `(..., classes)`. `what` needs them, for the error."""
    labels = jnp.asarray(labels)
    if labels.ndim > 1 and labels.shape == logits.shape:
        labels = jnp.argmax(labels, axis=-1)
    elif (
        labels.shape != logits.shape[:-1]
        or logits.ndim == 0
        or jnp.issubdtype(labels.dtype, jnp.inexact)
    ):
        given = (
            f"{what} of logits {list(logits.shape)} with labels {labels.dtype}{list(labels.shape)}"
        )
        wanted = (
            f"integers of shape {list(logits.shape[:-1])}, or one-hot of shape {list(logits.shape)}"
        )
        raise ConfigurationError(
            f"{given}; the logits end with an axis of classes, the labels are {wanted}"
        )
    labels = labels.astype(int)
    return jnp.where((labels >= 0) & (labels < logits.shape[-1]), labels, -1)


def to_float(values: Any) -> Array:
    """Strongly typed: float64 stays, all else becomes float32."""
    values = jnp.asarray(values)
    return jax.lax.convert_element_type(
        values, jnp.float64 if values.dtype == jnp.float64 else jnp.float32
    )


def apply_mask(values: Array, mask: Mask | None, fill: float) -> Array:
    """The values with `fill` where the mask over all or their leading axes, if any, is False.
    Selected, never
    multiplied: masked values may be NaN."""
    if mask is not None and (dtype := jnp.asarray(mask).dtype) != jnp.bool_:
        fix = "give bools, such as `mask > 0`; how much a value counts is a weight, Mean.from_values(values, weight=...)"
        raise ConfigurationError(f"a mask is {dtype}: {fix}")
    return values if mask is None else jnp.where(_over_leading(mask, values, "mask"), values, fill)


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """The sum rounded and, exactly, what that lost. Source: Knuth, The Art of Computer Programming
    2, 4.2.2."""
    total = jnp.add(a, b)
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _over_leading(given: Any, values: Array, what: str) -> Array:
    """A mask or weight over leading axes, with axes of length one for the trailing ones."""
    given = jnp.asarray(given)
    if given.shape != values.shape[: given.ndim]:
        shapes = f"a {what} of shape {list(given.shape)} for values of shape {list(values.shape)}"
        raise ConfigurationError(f"{shapes}; it must begin like these")
    return given.reshape(given.shape + (1,) * (values.ndim - given.ndim))
