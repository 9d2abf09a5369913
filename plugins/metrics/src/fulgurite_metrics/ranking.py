"""Metrics over the whole set at once, for evaluations.

They are computed on the host over the examples of all processes.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import CollectingMetric, Mask, Value, Values, as_class_indices, to_float
from fulgurite.plugins import as_arrays
from jaxtyping import Array, Float, Int, PyTree, Shaped

from fulgurite_metrics.arrays import make_example_mask

MultipleAverage = Literal["macro"] | None


class Collect(CollectingMetric):
    """The examples themselves, in order: `compute` gives the tree that was collected, without what
    was masked.

    Example:
        from fulgurite_metrics import Collect

        Collect.from_values({"pred": preds, "target": targets}, mask).compute()
    """

    values: PyTree[Shaped[Array | np.ndarray, "examples ..."]]

    @staticmethod
    def from_values(values: PyTree[Values], mask: Mask | None = None) -> "Collect":
        """Return the examples of a batch.

        Args:
            values: a tree of arrays that begin with the example axis.
            mask: bools over that axis.

        Raises:
            DataError: the values do not fit the dtypes that jax gives them.
        """
        values = jax.tree.map(jnp.asarray, as_arrays(values))
        return Collect(make_example_mask(values, mask), values)

    def compute(self) -> PyTree[Value]:
        return jax.tree.map(lambda leaf: np.asarray(leaf)[np.asarray(self.mask)], self.values)


class _Ranking(CollectingMetric):
    """A metric of how a binary classifier ranks examples, exact.

    Attributes:
        scores: the larger, the likelier positive.
        labels: 0 or 1, or booleans.
    """

    higher_is_better: ClassVar[bool | None] = True

    scores: Float[Array | np.ndarray, " examples"]
    labels: Shaped[Array | np.ndarray, " examples"]

    @classmethod
    def from_scores(cls, scores: Values, labels: Values, mask: Mask | None = None) -> Self:
        """Return the metric of a batch.

        Args:
            scores: `(examples,)`.
            labels: `(examples,)`, 0 or 1, or booleans.
            mask: bools `(examples,)`.
        """
        scores = to_float(scores)
        labels = jnp.asarray(labels)
        for name, array in (("scores", scores), ("labels", labels)):
            if array.ndim != 1:
                raise ConfigurationError(
                    f"{cls.__name__} of {name} {list(array.shape)}; they must be one number for "
                    "each example; of several classes, take one metric for each"
                )
        return cls(make_example_mask((scores, labels), mask), scores, labels)

    def _count_by_score(self) -> tuple[np.ndarray, np.ndarray]:
        """Count the negative and the positive examples at each distinct score, from the largest."""
        mask = np.asarray(self.mask)
        name = type(self).__name__
        return count_by_score(np.asarray(self.scores)[mask], np.asarray(self.labels)[mask], name)


class RocAuc(_Ranking):
    """The area under the receiver operating characteristic: the share of pairs of a negative and a
    positive example in which the positive one has the larger score, a tie counting half. NaN
    without a pair, and with a NaN in the scores.

    Source: Hanley and McNeil, The Meaning and Use of the Area under a ROC Curve (1982).

    Example:
        from fulgurite_metrics import RocAuc

        RocAuc.from_scores(preds, targets, mask).compute()
    """

    def compute(self) -> Value:
        return compute_roc_auc(*self._count_by_score())


class AveragePrecision(_Ranking):
    """The precision at each distinct score, weighted by what that adds to the recall, as
    scikit-learn defines it. NaN without a positive example and with a NaN among the scores.

    Example:
        from fulgurite_metrics import AveragePrecision

        AveragePrecision.from_scores(preds, targets, mask).compute()
    """

    def compute(self) -> Value:
        return compute_average_precision(*self._count_by_score())


class PrecisionRecallCurve(_Ranking):
    """Precision and recall at each distinct score, as scikit-learn gives them: three arrays,
    `precision` and `recall` with one more element than `thresholds`, which grow. Without a positive
    example the recall is 1. With a NaN among the scores there are no thresholds.

    Example:
        from fulgurite_metrics import PrecisionRecallCurve

        PrecisionRecallCurve.from_scores(preds, targets, mask).compute()["precision"]
    """

    higher_is_better: ClassVar[bool | None] = None

    def compute(self) -> dict[str, np.ndarray]:
        negative, positive = self._count_by_score()
        thresholds = np.unique(np.asarray(self.scores)[np.asarray(self.mask)])[: len(positive)]
        hits = np.cumsum(positive)
        recall = hits / hits[-1] if hits.any() else np.ones(len(hits))
        precision = hits / np.cumsum(negative + positive)
        return {
            "precision": np.append(precision[::-1], 1.0),
            "recall": np.append(recall[::-1], 0.0),
            "thresholds": thresholds,
        }


class RocAucOneVsRest(CollectingMetric):
    """The area under the receiver operating characteristic of each class against all others.

    A class without a positive or without a negative example has NaN, and is left out of the mean.

    Example:
        from fulgurite_metrics import RocAucOneVsRest

        RocAucOneVsRest.from_logits(logits, labels, mask).compute()

    Attributes:
        scores: `(examples, classes)`.
        labels: the index of each class, -1 for none.
        average: `macro`, the mean over the classes; None, an array with one for each.
    """

    higher_is_better: ClassVar[bool | None] = True

    scores: Float[Array | np.ndarray, "examples classes"]
    labels: Int[Array | np.ndarray, " examples"]
    average: MultipleAverage = eqx.field(static=True)

    @staticmethod
    def from_logits(
        logits: Values,
        labels: Values,
        mask: Mask | None = None,
        average: MultipleAverage = "macro",
    ) -> "RocAucOneVsRest":
        """Return the metric of a batch.

        Args:
            logits: `(examples, classes)`, or probabilities, by which examples are ranked for each
                class.
            labels: integers `(examples,)`, or one-hot `(examples, classes)`.
            mask: bools `(examples,)`.
            average: "macro" or None.
        """
        _check_average(average, "RocAucOneVsRest")
        logits = _as_score_matrix(logits, "RocAucOneVsRest")
        indices = as_class_indices(logits, labels, "RocAucOneVsRest")
        return RocAucOneVsRest(make_example_mask((logits, indices), mask), logits, indices, average)

    def compute(self) -> Value:
        mask = np.asarray(self.mask)
        scores = np.asarray(self.scores)[mask]
        labels = np.asarray(self.labels)[mask]
        areas = [
            compute_roc_auc(*count_by_score(column, labels == index, "RocAucOneVsRest"))
            for index, column in enumerate(scores.T)
        ]
        return _average_defined(areas, bool(np.isnan(scores).any()), self.average)


class MultilabelAveragePrecision(CollectingMetric):
    """The average precision of each label, where examples have any number of labels: mAP.

    A label without a positive example has NaN, and is left out of the mean.

    Example:
        from fulgurite_metrics import MultilabelAveragePrecision

        targets = jax.nn.one_hot(labels, 3)
        MultilabelAveragePrecision.from_scores(logits, targets, mask).compute()

    Attributes:
        scores: `(examples, labels)`, the larger, the likelier.
        labels: of the same shape, 0 or 1, or booleans.
        average: `macro`, the mean over the labels; None, an array with one for each.
    """

    higher_is_better: ClassVar[bool | None] = True

    scores: Float[Array | np.ndarray, "examples labels"]
    labels: Shaped[Array | np.ndarray, "examples labels"]
    average: MultipleAverage = eqx.field(static=True)

    @staticmethod
    def from_scores(
        scores: Values,
        labels: Values,
        mask: Mask | None = None,
        average: MultipleAverage = "macro",
    ) -> "MultilabelAveragePrecision":
        """Return the metric of a batch.

        Args:
            scores: `(examples, labels)`.
            labels: of the same shape, 0 or 1, or booleans.
            mask: bools `(examples,)`.
            average: "macro" or None.
        """
        _check_average(average, "MultilabelAveragePrecision")
        scores = _as_score_matrix(scores, "MultilabelAveragePrecision")
        labels = jnp.asarray(labels)
        if labels.shape != scores.shape:
            raise ConfigurationError(
                f"MultilabelAveragePrecision of scores {list(scores.shape)} and labels "
                f"{list(labels.shape)}; they must have the same shape"
            )
        mask = make_example_mask((scores, labels), mask)
        return MultilabelAveragePrecision(mask, scores, labels, average)

    def compute(self) -> Value:
        mask = np.asarray(self.mask)
        scores = np.asarray(self.scores)[mask]
        labels = np.asarray(self.labels)[mask]
        values = [
            compute_average_precision(*count_by_score(*pair, "MultilabelAveragePrecision"))
            for pair in zip(scores.T, labels.T, strict=True)
        ]
        return _average_defined(values, bool(np.isnan(scores).any()), self.average)


def count_by_score(
    scores: Float[np.ndarray, " examples"],
    labels: Shaped[np.ndarray, " examples"],
    metric_name: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Count the negative and the positive examples at each distinct score, from the largest. With a
    NaN among the scores there are none.

    Args:
        scores: the larger, the likelier positive.
        labels: 0 or 1, or booleans; anything else is an error.
        metric_name: what needs them, for errors.
    """
    if not np.isin(labels, (0, 1)).all():
        raise ConfigurationError(
            f"{metric_name} of labels {np.unique(labels)[:5].tolist()}; they must be 0 or 1"
        )
    if np.isnan(scores).any():
        return np.zeros(0), np.zeros(0)
    _, threshold, size = np.unique(-scores, return_inverse=True, return_counts=True)
    positive = np.bincount(threshold, labels, len(size))
    return size - positive, positive


def compute_roc_auc(negative: np.ndarray, positive: np.ndarray) -> np.float64:
    """Return the area under the curve from the counts at each score, from the largest.

    Args:
        negative: how many negative examples have each score.
        positive: how many positive examples have it.
    """
    above = np.cumsum(positive) - positive / 2
    with np.errstate(invalid="ignore"):
        return np.sum(negative * above) / (np.sum(negative) * np.sum(positive))


def compute_average_precision(negative: np.ndarray, positive: np.ndarray) -> np.float64:
    """Return the average precision from the counts at each score, from the largest.

    Args:
        negative: how many negative examples have each score.
        positive: how many positive examples have it.
    """
    precision = np.cumsum(positive) / np.cumsum(negative + positive)
    with np.errstate(invalid="ignore"):
        return np.sum(precision * positive) / np.sum(positive)


def _average_defined(
    values: Sequence[np.float64], has_nan: bool, average: MultipleAverage
) -> Value:
    """Return one value for each class, or the mean of those that are defined.

    Args:
        values: of the classes, NaN where undefined.
        has_nan: whether a score is NaN, which leaving out its class must not hide.
        average: `macro` or None.
    """
    array = np.asarray(values)
    if average is None:
        return array
    defined = array[~np.isnan(array)]
    if has_nan or not len(defined):
        return np.float64(np.nan)
    return np.mean(defined)


def _as_score_matrix(scores: Values, metric_name: str) -> Array:
    scores = to_float(scores)
    if scores.ndim != 2:
        raise ConfigurationError(
            f"{metric_name} of scores {list(scores.shape)}; they are (examples, classes)"
        )
    return scores


def _check_average(average: object, metric_name: str) -> None:
    if average not in ("macro", None):
        raise ConfigurationError(f"{metric_name} with average={average!r}; choose 'macro' or None")
