"""Metrics over the whole set at once, for evaluations.

They are computed on the host over the examples of all processes.
"""

from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import CollectingMetric, Mask, Value, Values, to_float
from jaxtyping import Array, Float, PyTree, Shaped

from fulgurite_metrics.arrays import make_example_mask


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
        """
        values = jax.tree.map(jnp.asarray, values)
        return Collect(make_example_mask(values, mask), values)

    def compute(self) -> PyTree[Value]:
        return jax.tree.map(lambda leaf: np.asarray(leaf)[np.asarray(self.mask)], self.values)


class _Ranking(CollectingMetric):
    """A metric of how a binary classifier ranks examples, exact.

    Attributes:
        scores: the larger, the likelier positive.
        labels: 0 or 1, or booleans.
    """

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
        """Count the negative and the positive examples at each distinct score, from the largest.
        With a NaN among the scores there are none."""
        mask = np.asarray(self.mask)
        scores = np.asarray(self.scores)[mask]
        labels = np.asarray(self.labels)[mask]
        if not np.isin(labels, (0, 1)).all():
            raise ConfigurationError(
                f"{type(self).__name__} of labels {np.unique(labels)[:5].tolist()}; they must be "
                "0 or 1"
            )
        if np.isnan(scores).any():
            return np.zeros(0), np.zeros(0)
        _, threshold, size = np.unique(-scores, return_inverse=True, return_counts=True)
        positive = np.bincount(threshold, labels, len(size))
        return size - positive, positive


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
        negative, positive = self._count_by_score()
        above = np.cumsum(positive) - positive / 2
        with np.errstate(invalid="ignore"):
            return np.sum(negative * above) / (np.sum(negative) * np.sum(positive))


class AveragePrecision(_Ranking):
    """The precision at each distinct score, weighted by what that adds to the recall, as
    scikit-learn defines it. NaN without a positive example and with a NaN among the scores.

    Example:
        from fulgurite_metrics import AveragePrecision

        AveragePrecision.from_scores(preds, targets, mask).compute()
    """

    def compute(self) -> Value:
        negative, positive = self._count_by_score()
        precision = np.cumsum(positive) / np.cumsum(negative + positive)
        with np.errstate(invalid="ignore"):
            return np.sum(precision * positive) / np.sum(positive)
