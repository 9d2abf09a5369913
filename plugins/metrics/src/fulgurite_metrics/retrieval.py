"""Metrics of ranked lists: how far up the relevant items of each query stand.

Scores are `(queries, items)`. A mask is over the queries, or over queries and items: a masked item
is not in the list, and a query without any item does not count.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import Mask, Mean, Metric, Value, Values, apply_mask, to_float
from jaxtyping import Array, Bool, Float


class NDCG(Metric):
    """The normalized discounted cumulative gain: the sum of relevance / log2(1 + position), divided
    by that of the best order, averaged over the queries. NaN without queries.

    As in scikit-learn, items with equal scores share their positions, and a query without a
    relevant item counts as 0.

    Source: Järvelin and Kekäläinen, Cumulated Gain-Based Evaluation of IR Techniques (2002);
    McSherry and Najork (2008) for ties.

    Example:
        from fulgurite_metrics import NDCG

        NDCG.from_scores(logits, jax.nn.one_hot(labels, 3), mask, top_k=2).compute()
    """

    higher_is_better: ClassVar[bool | None] = True

    mean: Mean

    @staticmethod
    def from_scores(
        scores: Values, relevance: Values, mask: Mask | None = None, top_k: int | None = None
    ) -> "NDCG":
        """Return the metric of a batch.

        Args:
            scores: `(queries, items)`.
            relevance: of the same shape, not negative.
            mask: bools over the queries, or over queries and items.
            top_k: how many positions count; None for all.
        """
        scores, relevance, present = _as_lists(scores, relevance, mask, "NDCG")
        items = scores.shape[-1]
        if top_k is not None and top_k < 1:
            raise ConfigurationError(f"NDCG with top_k={top_k}; it must be at least 1, or None")
        position = jnp.arange(items, dtype=scores.dtype)
        discounts = jnp.where(position < (top_k or items), 1 / jnp.log2(position + 2), 0)
        gain = _sum_gains(scores, relevance, present, discounts)
        best = _sum_gains(relevance, relevance, present, discounts)
        values = jnp.where(best == 0, 0, gain / jnp.where(best == 0, 1, best))
        return NDCG(Mean.from_values(values, jnp.any(present, axis=-1)))

    def compute(self) -> Value:
        return self.mean.compute()


class MeanReciprocalRank(Metric):
    """The mean over the queries of 1 / the position of the first relevant item; 0 for a query
    without one. NaN without queries, and with a NaN in the relevance. Of equal scores the first in
    the list stands higher, and a NaN stands nowhere.

    Example:
        from fulgurite_metrics import MeanReciprocalRank

        MeanReciprocalRank.from_scores(logits, jax.nn.one_hot(labels, 3), mask).compute()
    """

    higher_is_better: ClassVar[bool | None] = True

    mean: Mean

    @staticmethod
    def from_scores(
        scores: Values, relevance: Values, mask: Mask | None = None
    ) -> "MeanReciprocalRank":
        """Return the metric of a batch.

        Args:
            scores: `(queries, items)`.
            relevance: of the same shape; what is above 0 is relevant.
            mask: bools over the queries, or over queries and items.
        """
        scores, relevance, present = _as_lists(scores, relevance, mask, "MeanReciprocalRank")
        is_relevant = present & (relevance > 0) & ~jnp.isnan(scores)
        best = jnp.max(jnp.where(is_relevant, scores, -jnp.inf), axis=-1, keepdims=True)
        index = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        is_best = is_relevant & (scores == best)
        first = jnp.min(jnp.where(is_best, index, scores.shape[-1]), axis=-1, keepdims=True)
        is_before = present & ((scores > best) | ((scores == best) & (index < first)))
        rank = 1 + jnp.sum(is_before, axis=-1)
        values = jnp.where(jnp.any(is_relevant, axis=-1), 1 / rank.astype(scores.dtype), 0)
        # Such an item may be the first relevant one, or not.
        is_unknown = jnp.any(present & jnp.isnan(relevance), axis=-1)
        values = jnp.where(is_unknown, jnp.nan, values)
        return MeanReciprocalRank(Mean.from_values(values, jnp.any(present, axis=-1)))

    def compute(self) -> Value:
        return self.mean.compute()


def _sum_gains(
    scores: Float[Array, "queries items"],
    relevance: Float[Array, "queries items"],
    present: Bool[Array, "queries items"],
    discounts: Float[Array, " items"],
) -> Float[Array, " queries"]:
    """Return the discounted sum of relevance in the order of scores, in which equal scores share
    the mean discount of their positions."""
    larger = jnp.sum((scores[:, None, :] > scores[:, :, None]) & present[:, None, :], axis=-1)
    equal = jnp.sum((scores[:, None, :] == scores[:, :, None]) & present[:, None, :], axis=-1)
    cumulative = jnp.concatenate([jnp.zeros(1, discounts.dtype), jnp.cumsum(discounts)])
    num_equal = jnp.maximum(equal, 1).astype(discounts.dtype)
    shared = (cumulative[larger + equal] - cumulative[larger]) / num_equal
    # A NaN that is not masked equals nothing, not even itself; it must not be hidden.
    shared = jnp.where(jnp.isnan(scores), jnp.nan, shared)
    return jnp.sum(jnp.where(present, relevance * shared, 0), axis=-1)


def _as_lists(
    scores: Any, relevance: Any, mask: Any, metric_name: str
) -> tuple[Array, Array, Bool[Array, "queries items"]]:
    """Return scores and relevance as floats, and which items are in the list; the others have
    scores of 0."""
    scores = to_float(scores)
    relevance = to_float(relevance)
    if scores.ndim != 2 or scores.shape != relevance.shape:
        raise ConfigurationError(
            f"{metric_name} of scores {list(scores.shape)} and relevance {list(relevance.shape)}; "
            "both are (queries, items)"
        )
    present = apply_mask(jnp.ones(scores.shape, bool), mask, False)
    return apply_mask(scores, present, 0.0), apply_mask(relevance, present, 0.0), present
