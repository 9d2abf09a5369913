"""What is measured: three kinds of metric, told apart by type.

`Metric` merges in any grouping, so windows and evaluators sum it up on the device. `Running` is ordered and goes on
from step to step. `Gathered` keeps every example and is computed on the host, by evaluators only.

A step makes a fresh value with `of`, where `mask` is true for the values that count, over all or their leading axes.
Numbers become float32; float64 stays. `compute` of NumPy fields gives NumPy without touching a device.
"""

from abc import abstractmethod
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree, Shaped

from fulgurite.errors import ConfigurationError, ModelError

Value = Array | np.ndarray | np.number
Values = Shaped[ArrayLike, "..."]
Mask = Bool[ArrayLike, "..."]

M = TypeVar("M", bound="Metric")
R = TypeVar("R", bound="Running")
G = TypeVar("G", bound="Gathered")


class Metric(eqx.Module):
    """Mergeable in any grouping: `merge` is associative and commutative up to rounding, and `empty()` its identity.

    A metric whose fields are metrics is merged field by field; one that holds arrays says how.
    """

    def merge(self: M, other: M) -> M:
        """The metric over the examples of both."""
        return jax.tree.map(lambda a, b: a.merge(b), self, other, is_leaf=self._is_field)

    def empty(self: M) -> M:
        """The metric over no examples, with the same structure, shapes and dtypes. Merging it changes no bit."""
        return jax.tree.map(lambda field: field.empty(), self, is_leaf=self._is_field)

    @abstractmethod
    def compute(self) -> Value | dict[str, Value]:
        """The result, or several by name."""

    def _is_field(self, node: Any) -> bool:
        return isinstance(node, Metric) and node is not self


class Sum(Metric):
    """A compensated sum: `value` is the sum rounded, `error` what that lost.

    Source: the addition of double-length numbers of Dekker, A Floating-Point Technique for Extending the Available
    Precision (1971). Errors that are only summed apart, as by Neumaier, grow too large themselves.
    """

    value: Float[Array, ""]
    error: Float[Array, ""]

    @staticmethod
    def of(values: Values, mask: Mask | None = None) -> "Sum":
        """The sum, within a batch as exact as XLA's."""
        total = jnp.sum(_filled(_floats(values), mask, 0.0))
        return Sum(jnp.where(total == 0, 0, total), jnp.zeros_like(total))  # -0 would not survive merging 0

    def merge(self, other: Any) -> "Sum":
        total, lost = _two_sum(self.value, other.value)
        value, error = _two_sum(total, (self.error + other.error) + lost)
        finite = jnp.isfinite(value)  # what an infinite sum has lost is NaN and would hide that it is infinite
        return Sum(jnp.where(finite, value, total), jnp.where(finite, error, 0))

    def empty(self) -> "Sum":
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self)

    def compute(self) -> Any:
        return self.value + self.error


class Mean(Metric):
    """The weighted mean; of nothing, NaN."""

    total: Sum
    weight: Sum

    @staticmethod
    def of(values: Values, mask: Mask | None = None, weight: Values | None = None) -> "Mean":
        """The mean, where `weight` says how much each value counts, over all or the leading axes; weight zero masks."""
        numbers = _floats(values)
        weights = jnp.ones_like(numbers) * _over_leading(1.0 if weight is None else weight, numbers, "weight")
        weights = _filled(weights, mask, 0.0)
        return Mean(Sum.of(numbers * weights, weights != 0), Sum.of(weights))

    def compute(self) -> Any:
        with np.errstate(divide="ignore", invalid="ignore"):  # of nothing it is NaN, and meant to be
            return self.total.compute() / self.weight.compute()


class Accuracy(Metric):
    """The share of examples whose label is among the `top_k` classes with the largest logits; of nothing, NaN."""

    mean: Mean

    @staticmethod
    def of(
        logits: Float[ArrayLike, "*examples classes"], labels: Values, mask: Mask | None = None, top_k: int = 1
    ) -> "Accuracy":
        """Labels are integers, one an example, or one-hot in the shape of `logits`; one that is no class is wrong. Of
        equal logits the first counts as larger, as for `argmax`, and a NaN as larger than none."""
        logits, labels = _floats(logits), jnp.asarray(labels)
        classes = logits.shape[-1]
        if not 1 <= top_k <= classes:
            raise ConfigurationError(f"Accuracy with top_k={top_k} of {classes} classes; choose from 1 to {classes}")
        if labels.shape == logits.shape:
            labels = jnp.argmax(labels, axis=-1)
        elif labels.shape != logits.shape[:-1] or not jnp.issubdtype(labels.dtype, jnp.integer):
            raise ConfigurationError(
                f"Accuracy of logits {list(logits.shape)} with labels {labels.dtype}{list(labels.shape)}; they must be "
                f"integers of shape {list(logits.shape[:-1])}, or one-hot of shape {list(logits.shape)}"
            )
        labels = labels.astype(jnp.int32)
        index, label = jnp.arange(classes), labels[..., None]
        logit = jnp.max(jnp.where(index == label, logits, -jnp.inf), axis=-1, keepdims=True)
        # Counted are the classes that the label beats, not those that beat it: a NaN beats none.
        beaten = jnp.sum((logits < logit) | ((logits == logit) & (index > label)), axis=-1)
        return Accuracy(Mean.of((beaten >= classes - top_k) & (0 <= labels) & (labels < classes), mask))

    def compute(self) -> Value:
        return self.mean.compute()


class Max(Metric):
    """The largest value; of nothing, minus infinity; NaN if there is one."""

    value: Float[Array, ""]

    @staticmethod
    def of(values: Values, mask: Mask | None = None) -> "Max":
        """The largest, over all axes."""
        return Max(jnp.max(_filled(_floats(values), mask, -jnp.inf), initial=-jnp.inf))

    def merge(self, other: Any) -> "Max":
        return Max(jnp.maximum(self.value, other.value))

    def empty(self) -> "Max":
        return Max(jnp.full(self.value.shape, -jnp.inf, self.value.dtype))

    def compute(self) -> Value:
        return self.value


class Min(Metric):
    """The least value; of nothing, infinity; NaN if there is one."""

    negated: Max

    @staticmethod
    def of(values: Values, mask: Mask | None = None) -> "Min":
        """The least, over all axes."""
        return Min(Max.of(-_floats(values), mask))

    def compute(self) -> Value:
        return -self.negated.value


class Std(Metric):
    """The population standard deviation, beside a large mean too; of nothing, NaN.

    Source: the pairwise update of Chan, Golub and LeVeque, Algorithms for Computing the Sample Variance (1983).
    """

    mean: Sum
    variance: Mean

    @staticmethod
    def of(values: Values, mask: Mask | None = None) -> "Std":
        """The deviation, over all axes."""
        numbers = _floats(values)
        count = jnp.maximum(Sum.of(jnp.ones_like(numbers), mask).value, 1)
        mean = Sum.of(numbers, mask).value / count
        error = Sum.of(numbers - mean, mask).value / count
        return Std(Sum(mean, error), Mean.of(((numbers - mean) - error) ** 2, mask))

    def merge(self, other: Any) -> "Std":
        mine, theirs, variance = self.variance.weight, other.variance.weight, self.variance.merge(other.variance)
        share = theirs.value / jnp.maximum(variance.weight.value, 1)
        apart = (other.mean.value - self.mean.value) + (other.mean.error - self.mean.error)
        between = Sum.of(apart**2 * mine.value * share)
        both = Std(self.mean.merge(Sum.of(apart * share)), Mean(variance.total.merge(between), variance.weight))
        which = jnp.where(theirs.value == 0, 0, jnp.where(mine.value == 0, 1, 2))
        return jax.tree.map(lambda *cases: jax.lax.select_n(which, *cases), self, other, both)

    def compute(self) -> Value:
        return self.variance.compute() ** 0.5


class Running(eqx.Module):
    """Ordered, carried from step to step across windows: `before.then(new)`, where `new` is one step's fresh value."""

    value: Float[Array, "..."]

    @abstractmethod
    def then(self: R, new: R) -> R:
        """What it is after one step more. `empty().then(new)` equals `new`."""

    def empty(self: R) -> R:
        """What it is before the first step, with the same structure, shapes and dtypes."""
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self)

    def compute(self) -> Value:
        """The present value."""
        return self.value


class Last(Running):
    """The value of the last step, of any shape."""

    @staticmethod
    def of(value: Values) -> "Last":
        """This step's value."""
        return Last(_floats(value))

    def then(self, new: Any) -> "Last":
        return new


class MovingAverage(Running):
    """The exponential moving average that begins as a plain mean: a new value weighs max(`weight`, 1 / count)."""

    count: Int[Array, ""]
    weight: float | int = eqx.field(static=True)

    @staticmethod
    def of(value: Values, weight: float | int = 0.01) -> "MovingAverage":
        """This step's value, of any shape, and what a new value weighs in the long run."""
        if not 0 < weight <= 1:
            raise ConfigurationError(f"MovingAverage with weight={weight}; it must be above 0 and at most 1")
        return MovingAverage(_floats(value), jnp.ones((), jnp.int32), weight)

    def then(self, new: Any) -> "MovingAverage":
        count = self.count + new.count
        share = jnp.maximum(self.weight, 1 / count).astype(self.value.dtype)
        return MovingAverage(self.value + share * (new.value - self.value), count, self.weight)


class Gathered(eqx.Module):
    """Every example is kept: for evaluators only, computed on the host over all processes in example order.

    A subclass adds arrays that begin with the example axis, an `of` that is traced, and a `compute` of NumPy arrays.
    """

    mask: Bool[Array | np.ndarray, " examples"]

    @abstractmethod
    def compute(self) -> PyTree[Value]:
        """The result over the examples that are not masked. Runs on the host."""

    def merge(self: G, *others: G) -> G:
        """The examples of all, in order, as NumPy arrays. Runs on the host; one call copies each example once."""

        def join(*parts: Value) -> np.ndarray:
            kinds = {f"{part.dtype}{list(part.shape[1:])}" for part in parts}
            if len(kinds) > 1:
                raise ModelError(f"{type(self).__name__} gathers examples of several shapes: {sorted(kinds)}; pad them")
            return np.concatenate([np.asarray(part) for part in parts])

        return jax.tree.map(join, self, *others)

    def empty(self: G) -> G:
        """No examples, of the same structure, trailing shapes and dtypes."""
        return jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape[1:]), leaf.dtype), self)


class Collect(Gathered):
    """The examples themselves: `compute` gives the tree that was collected, without what was masked."""

    values: PyTree[Shaped[Array | np.ndarray, "examples ..."]]

    @staticmethod
    def of(values: PyTree[Shaped[ArrayLike, "_ ..."]], mask: Mask | None = None) -> "Collect":
        """A tree of arrays that begin with the example axis, and a mask over that axis."""
        values = jax.tree.map(jnp.asarray, values)
        return Collect(_example_mask(values, mask), values)

    def compute(self) -> PyTree[Value]:
        return jax.tree.map(lambda leaf: np.asarray(leaf)[np.asarray(self.mask)], self.values)


class AveragePrecision(Gathered):
    """Of a binary classifier, exact: the precision at each distinct score, weighted by what that adds to the recall, as
    scikit-learn defines it. NaN without a positive example and with a NaN among the scores."""

    scores: Float[Array | np.ndarray, " examples"]
    labels: Shaped[Array | np.ndarray, " examples"]

    @staticmethod
    def of(
        scores: Float[ArrayLike, "_"], labels: Shaped[ArrayLike, "_"], mask: Mask | None = None
    ) -> "AveragePrecision":
        """One score an example, the larger the likelier positive; labels 0 or 1, or booleans."""
        scores, labels = jnp.asarray(scores), jnp.asarray(labels)
        return AveragePrecision(_example_mask((scores, labels), mask), scores, labels)

    def compute(self) -> Value:
        mask = np.asarray(self.mask)
        scores, labels = np.asarray(self.scores)[mask], np.asarray(self.labels)[mask]
        if not np.isin(labels, (0, 1)).all():
            raise ConfigurationError(f"AveragePrecision of labels {np.unique(labels)[:5]}; they must be 0 or 1")
        if not labels.any() or np.isnan(scores).any():
            return np.float64(np.nan)
        _, threshold, size = np.unique(-scores, return_inverse=True, return_counts=True)
        positive = np.bincount(threshold, labels)
        precision = np.cumsum(positive) / np.cumsum(size)
        return np.sum(precision * positive) / np.sum(positive)


def _floats(values: Any) -> Array:
    """Strongly typed: float64 stays, all else becomes float32."""
    values = jnp.asarray(values)
    return jax.lax.convert_element_type(values, jnp.float64 if values.dtype == jnp.float64 else jnp.float32)


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """The sum rounded and, exactly, what that lost. Source: Knuth, The Art of Computer Programming 2, 4.2.2."""
    total = jnp.add(a, b)
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _over_leading(given: Any, values: Array, what: str) -> Array:
    """A mask or weight over leading axes, with axes of length one for the trailing ones."""
    given = jnp.asarray(given)
    if given.shape != values.shape[: given.ndim]:
        raise ConfigurationError(
            f"a {what} of shape {list(given.shape)} for values of shape {list(values.shape)}; it must begin like these"
        )
    return given.reshape(given.shape + (1,) * (values.ndim - given.ndim))


def _filled(values: Array, mask: Any, fill: float) -> Array:
    """Chosen, never multiplied: what is masked may be NaN."""
    return values if mask is None else jnp.where(_over_leading(mask, values, "mask"), values, fill)


def _example_mask(values: PyTree[Array], mask: Any) -> Array:
    lengths = {leaf.shape[:1] for leaf in jax.tree.leaves(values)} | (set() if mask is None else {jnp.shape(mask)})
    if len(lengths) != 1 or () in lengths:
        raise ConfigurationError(f"arrays to gather and their mask begin with axes of {lengths}; it must be one length")
    return jnp.ones(lengths.pop(), jnp.bool_) if mask is None else jnp.asarray(mask)
