"""The three kinds of metrics, and the one place that tells them apart.

A further kind is a class here, and a line in `evaluation/batch_metrics.py` that says what becomes
of it in an evaluation. Whoever works with certain kinds names them to `sort_by_kind`, which raises
for any other.

A metric is made from the values of one batch by a static method such as `from_values`, where `mask`
is true for the values that count, over all or their leading axes. Numbers become float32; float64
stays. `compute` of NumPy fields gives NumPy without touching a device.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree, Shaped

from fulgurite.errors import ConfigurationError, ModelError

Value = Array | np.ndarray | np.number
"""What a metric computes."""
Values = Shaped[ArrayLike, "..."]
"""Numbers of any shape, whose first axis is that of the examples."""
Mask = Bool[ArrayLike, "..."]
"""True for what counts; it broadcasts from the left with the values that it belongs to."""


class AnyMetric(eqx.Module):
    """The base of every kind of metric; a metric of your own subclasses one of the kinds."""

    @abstractmethod
    def compute(self) -> Any:
        """Return the result, or several by name."""


class AccumulatedMetric(AnyMetric):
    """The base of the kinds that a `MetricAccumulator` holds: a metric of fixed shape on the
    device, to which steps or batches are added one by one.

    Attributes:
        restarts_with_window: whether each metric window of training begins with a new one; False
            for a kind that is carried across windows.
    """

    restarts_with_window: ClassVar[bool]

    @abstractmethod
    def update(self, new: Any) -> Self:
        """Return the metric after one more step or batch, whose own metric, of the same class, is
        `new`."""

    @abstractmethod
    def empty(self) -> Self:
        """Return the metric before the first step or batch, with the same structure, shapes and
        dtypes. `empty().update(new)` equals `new`."""

    def media(self) -> Any:
        """Return how to show the result besides its numbers: an `fg.Media`, or several by name;
        None for nothing. Called on the host, after an evaluation."""
        return None


class Metric(AccumulatedMetric):
    """A metric that is merged on the device, over the steps of a window or the batches of an
    evaluation.

    `merge` is associative and commutative up to rounding, and `empty()` is its identity. A metric
    whose fields are metrics is merged field by field; one whose fields are arrays defines `merge`
    and `empty`.

    Example:
        class RelativeError(fg.metrics.Metric):
            error: fg.metrics.Sum
            size: fg.metrics.Sum

            @staticmethod
            def from_values(preds, targets, mask=None):
                return RelativeError(
                    fg.metrics.Sum.from_values(abs(preds - targets), mask),
                    fg.metrics.Sum.from_values(abs(targets), mask),
                )

            def compute(self):
                return self.error.compute() / self.size.compute()


        RelativeError.from_values(preds, targets).compute()

    Attributes:
        higher_is_better: whether a larger value is better; None where neither is.
    """

    restarts_with_window: ClassVar[bool] = True
    higher_is_better: ClassVar[bool | None] = None

    def merge(self, other: Self) -> Self:
        """Return the metric over the examples of both."""
        for field in jax.tree.leaves(self, is_leaf=self._is_field):
            if not isinstance(field, Metric):
                raise ModelError(
                    f"{type(self).__name__} holds {field!r}, which is not a metric: define "
                    "merge(self, other) and empty(self), or build it from metrics"
                )
        return jax.tree.map(lambda a, b: a.merge(b), self, other, is_leaf=self._is_field)

    def update(self, new: Self) -> Self:
        """Return the metric over the examples of both, as `merge` does."""
        return self.merge(new)

    def empty(self) -> Self:
        """Return the metric over no examples, with the same structure, shapes and dtypes. Merging
        it changes no bit."""
        return jax.tree.map(lambda field: field.empty(), self, is_leaf=self._is_field)

    @abstractmethod
    def compute(self) -> Value | dict[str, Value]:
        """Return the result, or several by name."""

    def _is_field(self, node: Any) -> bool:
        return isinstance(node, Metric) and node is not self


class RunningMetric(AccumulatedMetric):
    """A metric that depends on the order of steps and is carried from step to step, across windows.

    Example:
        average = fg.metrics.ExponentialMovingAverage.from_values(1.0)
        average = average.update(fg.metrics.ExponentialMovingAverage.from_values(2.0))
    """

    restarts_with_window: ClassVar[bool] = False

    value: Float[Array, "..."]

    @abstractmethod
    def update(self, new: Self) -> Self:
        """Return the value after one more step, whose own value is `new`.
        `empty().update(new)` equals `new`."""

    def empty(self) -> Self:
        """Return the value before the first step, with the same structure, shapes and dtypes."""
        return jax.tree.map(jnp.zeros_like, self)

    def compute(self) -> Value:
        """Return the value after the last step."""
        return self.value


class CollectingMetric(AnyMetric):
    """A metric that keeps every example, for evaluations only.

    It is computed on the host over all processes, in the order of the examples. A subclass adds
    fields for arrays that begin with the example axis, a traced function that makes it, and a
    `compute` of NumPy arrays.

    Example:
        class Spread(fg.metrics.CollectingMetric):
            values: jax.Array

            def compute(self):
                return np.ptp(self.values[self.mask])


        spread = Spread(mask=np.array([True, True, False]), values=np.array([1.0, 3.0, 9.0]))
        spread.compute()  # 2.0

    Attributes:
        mask: which examples count.
        higher_is_better: whether a larger value is better; None where neither is.
    """

    higher_is_better: ClassVar[bool | None] = None

    mask: Bool[Array | np.ndarray, " examples"]

    @abstractmethod
    def compute(self) -> PyTree[Value]:
        """Return the result over the examples that are not masked. Runs on the host."""

    def merge(self, *others: Self) -> Self:
        """Return the examples of all, in order, as NumPy arrays. Runs on the host; one call copies
        each example once."""

        def concatenate(*parts: Value) -> np.ndarray:
            specs = {f"{part.dtype}{list(part.shape[1:])}" for part in parts}
            if len(specs) > 1:
                raise ModelError(
                    f"{type(self).__name__} collects examples of several shapes: {sorted(specs)}; "
                    "pad them to one shape"
                )
            return np.concatenate(parts)

        return jax.tree.map(concatenate, self, *others)

    def empty(self) -> Self:
        """Return the metric of no examples, with the same structure, trailing shapes and dtypes."""
        return jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape[1:]), leaf.dtype), self)


def sort_by_kind(metrics: Mapping[str, Any], *kinds: type[AnyMetric]) -> list[dict[str, Any]]:
    """Return the metrics of each of these kinds, by name: the one place that tells the kinds apart.

    Args:
        metrics: by name.
        kinds: those that the caller knows.

    Raises:
        ModelError: a metric is of none of these kinds.

    Example:
        metrics = {"loss": fg.metrics.Mean.from_values(1.0)}
        merged, running = fg.metrics.sort_by_kind(
            metrics, fg.metrics.Metric, fg.metrics.RunningMetric
        )
        merged["loss"].compute()  # 1.0
    """
    by_kind: list[dict[str, Any]] = [{} for _ in kinds]
    for name, metric in metrics.items():
        index = next((i for i, kind in enumerate(kinds) if isinstance(metric, kind)), None)
        if index is None:
            known = " or ".join(kind.__name__ for kind in kinds)
            raise ModelError(
                f"metric {name!r} is of type {type(metric).__name__}, which is not known here: use "
                f"a {known}"
            )
        by_kind[index][name] = metric
    return by_kind


def is_metric(value: Any) -> bool:
    """Return whether a value is a metric of any kind."""
    return isinstance(value, AnyMetric)


def flatten_nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what nested dictionaries hold, by names such as `outer/inner`.

    The key "" is the outer name itself, and an index such as `[2]` follows it without a slash.

    Raises:
        ModelError: two of the names are the same.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        parts = {name: value}
        if isinstance(value, dict):
            inner = flatten_nested({str(key): part for key, part in value.items()})
            parts = {_join_names(name, key): part for key, part in inner.items()}
        duplicates = sorted(flat.keys() & parts.keys())
        if duplicates:
            raise ModelError(f"{duplicates[0]!r} appears twice in nested dictionaries: rename one")
        flat |= parts
    return flat


def _join_names(outer: str, inner: str) -> str:
    separator = "" if not inner or inner.startswith("[") else "/"
    return f"{outer}{separator}{inner}"


def as_class_indices(logits: Array, labels: Values, metric_name: str) -> Int[Array, "..."]:
    """Convert labels to class indices.

    Args:
        logits: `(..., classes)`.
        labels: integers or booleans `(...)`, or one-hot `(..., classes)`.
        metric_name: what needs them, for errors.

    Returns:
        Indices `(...)`, -1 for a label that is not a class, such as a row of zeros.
    """
    labels = jnp.asarray(labels)
    is_index_shape = logits.ndim > 0 and labels.shape == logits.shape[:-1]
    if labels.ndim > 1 and labels.shape == logits.shape:
        # A row of zeros is what `one_hot` makes of a label that is not a class.
        labels = jnp.where(jnp.max(labels, axis=-1) > 0, jnp.argmax(labels, axis=-1), -1)
    elif not is_index_shape or jnp.issubdtype(labels.dtype, jnp.inexact):
        raise ConfigurationError(
            f"{metric_name} of logits {list(logits.shape)} with labels "
            f"{labels.dtype}{list(labels.shape)}; the logits end with an axis of classes, the "
            f"labels are integers of shape {list(logits.shape[:-1])}, or one-hot of shape "
            f"{list(logits.shape)}"
        )
    labels = labels.astype(int)
    return jnp.where((labels >= 0) & (labels < logits.shape[-1]), labels, -1)


def to_float(values: Any) -> Array:
    """Convert to a strongly typed float array: float64 stays, all else becomes float32.

    Raises:
        ConfigurationError: the values are complex, and their imaginary parts would be lost.
    """
    values = jnp.asarray(values)
    if jnp.iscomplexobj(values):
        raise ConfigurationError(
            f"the values of a metric are {values.dtype}: give real ones, such as "
            "jnp.abs(values), jnp.real(values) or jnp.imag(values)"
        )
    dtype = jnp.float64 if values.dtype == jnp.float64 else jnp.float32
    return jax.lax.convert_element_type(values, dtype)


def apply_mask(values: Array, mask: Mask | None, fill: float) -> Array:
    """Replace masked values. They are selected, never multiplied: masked values may be NaN.

    Args:
        values: of any shape.
        mask: bools over all axes of `values` or the leading ones; None masks nothing.
        fill: the value where the mask is False.
    """
    if mask is None:
        return values
    dtype = jnp.asarray(mask).dtype
    if dtype != jnp.bool_:
        raise ConfigurationError(
            f"a mask is {dtype}: give bools, such as `mask > 0`; how much a value counts is a "
            "weight, Mean.from_values(values, weight=...)"
        )
    return jnp.where(expand_leading(mask, values, "mask"), values, fill)


def expand_leading(leading: Any, values: Array, what: str) -> Array:
    """Return a mask or weight with axes of length one for the trailing axes of `values`.

    Args:
        leading: an array over the leading axes of `values`.
        values: of any shape.
        what: what `leading` is, for errors.
    """
    leading = jnp.asarray(leading)
    if leading.shape != values.shape[: leading.ndim]:
        raise ConfigurationError(
            f"a {what} of shape {list(leading.shape)} for values of shape {list(values.shape)}; "
            "it must begin like these"
        )
    return leading.reshape(leading.shape + (1,) * (values.ndim - leading.ndim))
