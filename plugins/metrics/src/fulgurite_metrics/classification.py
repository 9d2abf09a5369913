"""Predicted against actual classes: the confusion matrix, precision, recall and F1.

Predictions are logits `(..., classes)`, of which the largest is predicted, the first of equal ones,
and none where one is NaN; or booleans `(...)` for two classes, such as `logit > 0`. Labels are
integers or booleans `(...)`, or one-hot `(..., classes)`. A label that is not a class is never
predicted correctly. `mask` is over all or the leading axes.
"""

import importlib.util
from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import (
    Mask,
    Metric,
    Sum,
    Value,
    Values,
    apply_mask,
    as_class_indices,
    to_float,
)
from jaxtyping import Array, Int

from fulgurite_metrics.arrays import count_indices, get_array_namespace

Average = Literal["macro", "micro"] | None
PICTURE_SIZE = 256
"""About how many pixels the picture of a confusion matrix is wide and high."""


class ConfusionMatrix(Metric):
    """`(classes, classes)`, float32: how many examples of each class (rows) were predicted as each
    class (columns).

    Example:
        from fulgurite_metrics import ConfusionMatrix

        ConfusionMatrix.from_predictions(logits, labels, mask).compute()
    """

    counts: Sum

    @staticmethod
    def from_predictions(
        preds: Values, labels: Values, mask: Mask | None = None
    ) -> "ConfusionMatrix":
        """Return the matrix of a batch.

        Args:
            preds: logits `(..., classes)`, or for two classes booleans `(...)`.
            labels: integers or booleans `(...)`, or one-hot `(..., classes)`.
            mask: bools over all axes of the labels or the leading ones.
        """
        predicted, label, classes = _as_class_pair(preds, labels, mask, "ConfusionMatrix")
        cell = jnp.where((predicted < 0) | (label < 0), -1, label * classes + predicted)
        counts = count_indices(cell, classes**2)
        return ConfusionMatrix(jax.tree.map(lambda count: count.reshape(classes, classes), counts))

    def compute(self) -> Value:
        return self.counts.compute()

    def media(self) -> Any:
        """Return a picture: each row of the matrix as shares from black (0) to white (1). None
        without fulgurite-logging, which has the type and shows it."""
        if importlib.util.find_spec("fulgurite_logging") is None:
            return None
        from fulgurite_logging import media

        counts = np.asarray(self.compute())
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        size = max(1, PICTURE_SIZE // len(shares))
        pixels = np.kron(shares, np.ones((size, size)))[..., None]
        return media.Image(np.round(255 * pixels).astype(np.uint8))  # type: ignore[arg-type]


class _ClassRatio(Metric):
    """A ratio of counts for each class, averaged over the classes.

    For two classes as booleans it is that of the second, whatever the average.

    Attributes:
        hits: examples of each class that were predicted as it.
        predicted: examples that were predicted as each class.
        actual: examples of each class.
        average: `macro`, the mean over the classes that occur, as a label or as a prediction;
            `micro`, that of the counts of all classes; None, an array with one for each class, NaN
            for one that does not occur, or the number itself for two classes as booleans.
    """

    higher_is_better: ClassVar[bool | None] = True

    hits: Sum
    predicted: Sum
    actual: Sum
    average: Average = eqx.field(static=True)

    @classmethod
    def from_predictions(
        cls, preds: Values, labels: Values, mask: Mask | None = None, average: Average = "macro"
    ) -> Self:
        """Return the metric of a batch.

        Args:
            preds: logits `(..., classes)`, or for two classes booleans `(...)`.
            labels: integers or booleans `(...)`, or one-hot `(..., classes)`.
            mask: bools over all axes of the labels or the leading ones.
            average: "macro" (over the classes that occur), "micro" (of all counts), or None (one
                for each class).
        """
        _check_average(average, cls.__name__)
        predicted, label, classes = _as_class_pair(preds, labels, mask, cls.__name__)
        hit = jnp.where(predicted == label, label, -1)
        hits, predicted, actual = (
            count_indices(index, classes) for index in (hit, predicted, label)
        )
        if jnp.asarray(preds).dtype == jnp.bool_:
            hits, predicted, actual = jax.tree.map(
                lambda count: count[1], (hits, predicted, actual)
            )
            average = None
        return cls(hits, predicted, actual, average)

    @classmethod
    def from_multilabel(
        cls, preds: Values, labels: Values, mask: Mask | None = None, average: Average = "macro"
    ) -> Self:
        """Return the metric of a batch whose examples have any number of labels each.

        Args:
            preds: booleans `(..., labels)`, such as `logits > 0`.
            labels: booleans, or 0 and 1, of the same shape.
            mask: bools over all axes or the leading ones.
            average: "macro" (over the labels that occur), "micro" (of all counts), or None (one
                for each label).
        """
        _check_average(average, cls.__name__)
        preds = jnp.asarray(preds)
        labels = jnp.asarray(labels)
        if preds.dtype != jnp.bool_ or preds.ndim == 0 or preds.shape != labels.shape:
            raise ConfigurationError(
                f"{cls.__name__} of several labels for each example, with predictions "
                f"{preds.dtype}{list(preds.shape)} and labels {list(labels.shape)}; the "
                "predictions are booleans such as `logits > 0`, and both have one shape"
            )
        predicted = apply_mask(preds, mask, False)
        actual = apply_mask(labels == jnp.ones((), labels.dtype), mask, False)
        index = jax.lax.broadcasted_iota(jnp.int32, preds.shape, preds.ndim - 1)
        hits, predictions, positives = (
            count_indices(jnp.where(chosen, index, -1), preds.shape[-1])
            for chosen in (predicted & actual, predicted, actual)
        )
        return cls(hits, predictions, positives, average)

    def compute(self) -> Value:
        counts: list[Any] = [count.compute() for count in (self.hits, self.predicted, self.actual)]
        numpy = get_array_namespace(*counts)
        hits, predicted, actual = (
            [count.sum(-1) for count in counts] if self.average == "micro" else counts
        )
        occurs = predicted + actual > 0
        denominator = self._compute_denominator(predicted, actual)
        shares = hits / numpy.where(denominator > 0, denominator, 1)
        ratio = numpy.where(occurs, shares, np.nan).astype(hits.dtype)
        if self.average != "macro":
            return ratio
        # The mean of nothing is NaN, and meant to be.
        with np.errstate(invalid="ignore"):
            return numpy.where(occurs, ratio, 0).sum(-1) / occurs.sum(-1).astype(ratio.dtype)

    @abstractmethod
    def _compute_denominator(self, predicted: Any, actual: Any) -> Any:
        """Return the number of examples that the hits are a share of."""


class Precision(_ClassRatio):
    """The share of correct ones among the examples predicted as a class; 0 if none was, NaN without
    examples.

    Example:
        from fulgurite_metrics import Precision

        Precision.from_predictions(logits, labels, mask, average=None).compute()
    """

    def _compute_denominator(self, predicted: Any, actual: Any) -> Any:
        return predicted


class Recall(_ClassRatio):
    """The share of correct ones among the examples of a class; 0 if there is none, NaN without
    examples.

    Example:
        from fulgurite_metrics import Recall

        Recall.from_predictions(logits, labels, mask).compute()
    """

    def _compute_denominator(self, predicted: Any, actual: Any) -> Any:
        return actual


class F1(_ClassRatio):
    """The harmonic mean of precision and recall; NaN without examples.

    Example:
        from fulgurite_metrics import F1

        F1.from_predictions(logits, labels, mask, average="micro").compute()
    """

    def _compute_denominator(self, predicted: Any, actual: Any) -> Any:
        return (predicted + actual) / 2


class FBeta(_ClassRatio):
    """The weighted harmonic mean of precision and recall, in which recall counts `beta` times as
    much; NaN without examples. F1 has a `beta` of 1.

    Source: van Rijsbergen, Information Retrieval (1979), chapter 7.

    Example:
        from fulgurite_metrics import FBeta

        FBeta.from_predictions(logits, labels, mask, beta=2.0).compute()
    """

    beta: float = eqx.field(static=True, default=1.0)

    @classmethod
    def from_predictions(
        cls,
        preds: Values,
        labels: Values,
        mask: Mask | None = None,
        average: Average = "macro",
        beta: float = 1.0,
    ) -> Self:
        """Return the metric of a batch.

        Args:
            preds: logits `(..., classes)`, or for two classes booleans `(...)`.
            labels: integers or booleans `(...)`, or one-hot `(..., classes)`.
            mask: bools over all axes of the labels or the leading ones.
            average: as for `F1`.
            beta: how many times as much recall counts as precision.
        """
        _check_beta(beta)
        return replace(super().from_predictions(preds, labels, mask, average), beta=float(beta))

    @classmethod
    def from_multilabel(
        cls,
        preds: Values,
        labels: Values,
        mask: Mask | None = None,
        average: Average = "macro",
        beta: float = 1.0,
    ) -> Self:
        """Return the metric of a batch whose examples have any number of labels each.

        Args:
            preds: booleans `(..., labels)`, such as `logits > 0`.
            labels: booleans, or 0 and 1, of the same shape.
            mask: bools over all axes or the leading ones.
            average: as for `F1`.
            beta: how many times as much recall counts as precision.
        """
        _check_beta(beta)
        return replace(super().from_multilabel(preds, labels, mask, average), beta=float(beta))

    def _compute_denominator(self, predicted: Any, actual: Any) -> Any:
        # Not of `beta**2` itself, which leaves the range of floats.
        share = 1 / (1 + self.beta * self.beta)
        return share * predicted + (1 - share) * actual


def _check_beta(beta: float) -> None:
    if not beta > 0:
        raise ConfigurationError(f"FBeta with beta={beta}; it must be positive")


def _check_average(average: Any, metric_name: str) -> None:
    if average not in ("macro", "micro", None):
        raise ConfigurationError(
            f"{metric_name} with average={average!r}; choose 'macro', 'micro' or None"
        )


def _as_class_pair(
    preds: Any, labels: Any, mask: Any, metric_name: str
) -> tuple[Int[Array, "..."], Int[Array, "..."], int]:
    """Return the predicted and the actual classes, -1 for masked examples and for no class, and the
    number of classes."""
    preds = jnp.asarray(preds)
    logits = to_float(jnp.stack([~preds, preds], axis=-1) if preds.dtype == jnp.bool_ else preds)
    label = as_class_indices(logits, labels, metric_name)
    predicted = jnp.where(jnp.any(jnp.isnan(logits), axis=-1), -1, jnp.argmax(logits, axis=-1))
    return apply_mask(predicted, mask, -1), apply_mask(label, mask, -1), logits.shape[-1]
