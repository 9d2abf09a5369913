"""A computation over a batch, by microbatches."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import DataError
from fulgurite.metrics import MetricAccumulator
from fulgurite.training.forward import count_examples
from jaxtyping import Array, Float, PyTree

from fulgurite_optimizers.metrics import zeros_like_spec


class MicrobatchResult(NamedTuple):
    """What is computed from a batch or a microbatch.

    Attributes:
        means: arrays that are means over the examples.
        metrics: by name. Over several microbatches, running ones are averaged.
        model_state: the new model state.
        media: arrays of media; of several microbatches those of the first.
    """

    means: Any
    metrics: dict[str, Any]
    model_state: Any
    media: list[Array]


def run_microbatches(
    compute: Callable[[Any, fg.Context], MicrobatchResult],
    batch: PyTree,
    ctx: fg.Context,
    n: int,
) -> MicrobatchResult:
    """Return what `compute(batch, ctx)` gives for the whole batch, with one microbatch in memory at
    a time.

    Args:
        compute: called with each microbatch and its context.
        batch: arrays `(examples, ...)`.
        ctx: the context of the batch.
        n: the number of microbatches; it divides the number of examples.
    """
    parts = split_into_parts(batch, n)
    masks = None if ctx.mask is None else split_into_parts(ctx.mask, n)

    def compute_part(index: Any, model_state: Any) -> tuple[Array, MicrobatchResult]:
        batch, mask = jax.tree.map(lambda leaf: leaf[index], (parts, masks))
        part_ctx = ctx.fork("microbatch", index, model_state=model_state, mask=mask)
        result = compute(batch, part_ctx)
        accumulator = MetricAccumulator.from_metrics(result.metrics)
        result = result._replace(
            means=(result.means, accumulator.running), metrics=accumulator.metrics
        )
        return count_examples(batch, mask), result

    def accumulate(index: Any, carry: tuple[Array, MicrobatchResult]) -> Any:
        total_weight, sums = carry
        weight, result = compute_part(index, sums.model_state)
        has_examples = weight > 0
        is_first = index == 0
        model_state = jax.tree.map(
            lambda old, new: jnp.where(has_examples, new, old),
            sums.model_state,
            result.model_state,
        )
        means = jax.tree.map(partial(_add_weighted, weight=weight), sums.means, result.means)
        metrics = MetricAccumulator(sums.metrics, {}).update(
            MetricAccumulator(result.metrics, {}), restart=is_first
        )
        media = jax.tree.map(
            lambda new, old: jnp.where(is_first, new, old), result.media, sums.media
        )
        return total_weight + weight, MicrobatchResult(means, metrics.metrics, model_state, media)

    _, spec = jax.eval_shape(compute_part, jnp.int32(0), ctx.model_state)
    zero_means = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, _get_accumulation_dtype(leaf.dtype)), spec.means
    )
    metrics, media = jax.tree.map(zeros_like_spec, (spec.metrics, spec.media))
    zeros = MicrobatchResult(zero_means, metrics, ctx.model_state, media)
    total_weight, sums = jax.lax.fori_loop(0, n, accumulate, (jnp.float32(0), zeros))
    means, running = jax.tree.map(
        lambda leaf, like: _divide(leaf, total_weight).astype(like.dtype), sums.means, spec.means
    )
    return sums._replace(means=means, metrics={**sums.metrics, **running})


def split_into_parts(batch: PyTree, n: int) -> PyTree:
    """Return every array `(examples, ...)` as `(n, examples / n, ...)`.

    Part `i` has the examples `i`, `i + n`, ..., so examples that are spread over several devices
    stay where they are.

    Args:
        batch: arrays with the same number of examples.
        n: the number of parts; it divides the number of examples.
    """

    def split_leaf(leaf: Any) -> Any:
        if not leaf.shape or leaf.shape[0] % n:
            raise DataError(
                f"a batch with a leaf of shape {list(leaf.shape)} cannot be split into {n} parts: "
                f"choose a batch size that is a multiple of {n}, with ArrayData(remainder='drop') "
                "or 'pad'"
            )
        return jnp.swapaxes(leaf.reshape(leaf.shape[0] // n, n, *leaf.shape[1:]), 0, 1)

    return jax.tree.map(split_leaf, batch)


def _get_accumulation_dtype(dtype: Any) -> Any:
    """Return the dtype of a sum: half precision has too few digits for it, and too small a
    range."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype


def _add_weighted(total: Array, new: Array, weight: Float[Array, ""]) -> Array:
    """Return a sum with one microbatch more.

    Args:
        total: the sum before.
        new: the mean of the microbatch; NaN is possible where it is nothing but padding. A count,
            as a running metric has it, replaces the one before.
        weight: the number of examples of the microbatch.
    """
    if not jnp.issubdtype(total.dtype, jnp.inexact):
        return new
    return total + jnp.where(weight > 0, weight.astype(total.dtype) * new.astype(total.dtype), 0)


def _divide(total: Array, weight: Float[Array, ""]) -> Array:
    if not jnp.issubdtype(total.dtype, jnp.inexact):
        return total
    return total / weight.astype(total.dtype)
