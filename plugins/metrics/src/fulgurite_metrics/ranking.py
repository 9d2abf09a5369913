"""Metrics over the whole set at once, for evaluators: computed on the host over the examples of all
processes."""

from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import CollectingMetric, Mask, Value, Values, to_float
from jaxtyping import Array, Float, PyTree, Shaped

from fulgurite_metrics.arrays import example_mask


class Collect(CollectingMetric):
    """The examples themselves, in order: `compute` gives the tree that was collected, without what
    was masked."""

    values: PyTree[Shaped[Array | np.ndarray, "examples ..."]]

    @staticmethod
    def from_values(values: PyTree[Values], mask: Mask | None = None) -> "Collect":
        """A tree of arrays that begin with the example axis, and a mask over that axis."""
        values = jax.tree.map(jnp.asarray, values)
        return Collect(example_mask(values, mask), values)

    def compute(self) -> PyTree[Value]:
        return jax.tree.map(lambda leaf: np.asarray(leaf)[np.asarray(self.mask)], self.values)


class _Ranking(CollectingMetric):
    """Of a binary classifier, exact: scores, the larger the likelier positive, and labels 0 or 1,
    or booleans."""

    scores: Float[Array | np.ndarray, " examples"]
    labels: Shaped[Array | np.ndarray, " examples"]

    @classmethod
    def from_scores(cls, scores: Values, labels: Values, mask: Mask | None = None) -> Self:
        """One score and one label an example, and a mask over them."""
        scores, labels = to_float(scores), jnp.asarray(labels)
        for what, given in (("scores", scores), ("labels", labels)):
            if given.ndim != 1:
                wanted = "one number for each example; of several classes, take one metric for each"
                raise ConfigurationError(
                    f"{cls.__name__} of {what} {list(given.shape)}; they must be {wanted}"
                )
        return cls(example_mask((scores, labels), mask), scores, labels)

    def _by_threshold(self) -> tuple[np.ndarray, np.ndarray]:
        """Negative and positive examples at each distinct score, from the largest; none with a NaN
        among the scores."""
        mask = np.asarray(self.mask)
        scores, labels = np.asarray(self.scores)[mask], np.asarray(self.labels)[mask]
        if not np.isin(labels, (0, 1)).all():
            found = np.unique(labels)[:5].tolist()
            raise ConfigurationError(
                f"{type(self).__name__} of labels {found}; they must be 0 or 1"
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
    """

    def compute(self) -> Value:
        negative, positive = self._by_threshold()
        above = np.cumsum(positive) - positive / 2
        with np.errstate(invalid="ignore"):
            return np.sum(negative * above) / (np.sum(negative) * np.sum(positive))


class AveragePrecision(_Ranking):
    """The precision at each distinct score, weighted by what that adds to the recall, as
    scikit-learn defines it. NaN without a positive example and with a NaN among the scores."""

    def compute(self) -> Value:
        negative, positive = self._by_threshold()
        precision = np.cumsum(positive) / np.cumsum(negative + positive)
        with np.errstate(invalid="ignore"):
            return np.sum(precision * positive) / np.sum(positive)
