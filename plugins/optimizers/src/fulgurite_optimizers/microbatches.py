"""A computation over a batch, by microbatches."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import DataError
from fulgurite.metrics import Metric, MetricAccumulator, RunningMetric, sort_by_kind
from fulgurite.plugins import format_tree
from jaxtyping import Array, Float, PyTree

from fulgurite_optimizers.metrics import zeros_like_spec


class WeightedMeans(NamedTuple):
    """Arrays that are means over the same values.

    Attributes:
        weight: the number or the total weight of these values.
        values: the means.
    """

    weight: Float[Array, ""]
    values: Any


class MicrobatchResult(NamedTuple):
    """What is computed from a batch or a microbatch.

    Attributes:
        means: at least one group.
        metrics: by name. Over several microbatches, running ones are averaged.
        model_state: the new model state.
        media: arrays of media; of several microbatches those of the first.
    """

    means: list[WeightedMeans]
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
    if ctx.num_examples is not None:
        raise DataError(
            f"a fg.Batch with num_examples cannot be split into {n} microbatches, because nobody "
            "knows how many examples each has: accumulate over steps, "
            f"GradientAccumulation({n}, 'steps')"
        )
    parts = split_into_parts(batch, n)
    masks = None if ctx.mask is None else split_into_parts(ctx.mask, n)

    def compute_part(index: Any, model_state: Any) -> tuple[Any, MicrobatchResult]:
        batch, mask = jax.tree.map(lambda leaf: leaf[index], (parts, masks))
        part_ctx = ctx.fork("microbatch", index, model_state=model_state, mask=mask)
        result = compute(batch, part_ctx)
        accumulator = MetricAccumulator.from_metrics(result.metrics)
        merged, running = sort_by_kind(accumulator.by_name, Metric, RunningMetric)
        first, *others = result.means
        means = [first._replace(values=(first.values, running)), *others]
        has_examples = True if mask is None else jnp.any(mask)
        return has_examples, result._replace(means=means, metrics=merged)

    def accumulate(index: Any, sums: MicrobatchResult) -> MicrobatchResult:
        has_examples, result = compute_part(index, sums.model_state)
        return _add_result(sums, result, has_examples, is_first=index == 0)

    _, spec = jax.eval_shape(compute_part, jnp.int32(0), ctx.model_state)
    zero_means = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, get_accumulation_dtype(leaf.dtype)), spec.means
    )
    metrics, media = jax.tree.map(zeros_like_spec, (spec.metrics, spec.media))
    zeros = MicrobatchResult(zero_means, metrics, ctx.model_state, media)
    sums = jax.lax.fori_loop(0, n, accumulate, zeros)
    first, *others = [
        _divide_group(group, group_spec)
        for group, group_spec in zip(sums.means, spec.means, strict=True)
    ]
    values, running = first.values
    return sums._replace(
        means=[first._replace(values=values), *others], metrics={**sums.metrics, **running}
    )


def split_into_parts(batch: PyTree, n: int) -> PyTree:
    """Return every array `(examples, ...)` as `(n, examples / n, ...)`.

    Part `i` has the examples `i`, `i + n`, ..., so examples that are spread over several devices
    stay where they are. Each part has all single numbers.

    Args:
        batch: arrays with the same number of examples, and single numbers.
        n: the number of parts; it divides the number of examples.
    """

    lengths = {leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.shape}
    if len(lengths) > 1:
        raise DataError(
            f"a batch of {format_tree(batch)} cannot be split into {n} parts, because its arrays "
            "begin with different lengths. What is not one entry an example, such as the weights "
            "of classes, is a field of the module. Sources that are read together need one batch "
            f"size for this; or accumulate over steps, GradientAccumulation({n}, 'steps'), with "
            "one weight for all losses, fg.Output(losses=..., weight=1)"
        )

    if not lengths:
        raise DataError(
            f"a batch of {format_tree(batch)} cannot be split into {n} parts, because it has no "
            f"axis of examples: accumulate over steps, GradientAccumulation({n}, 'steps')"
        )

    def split_leaf(leaf: Any) -> Any:
        if not leaf.shape:
            return jnp.broadcast_to(leaf, n)
        if leaf.shape[0] % n:
            raise DataError(
                f"a batch with a leaf of shape {list(leaf.shape)} cannot be split into {n} parts: "
                f"choose a batch size that is a multiple of {n}, with ArrayData(remainder='drop') "
                "or 'pad'"
            )
        return jnp.swapaxes(leaf.reshape(leaf.shape[0] // n, n, *leaf.shape[1:]), 0, 1)

    return jax.tree.map(split_leaf, batch)


def get_accumulation_dtype(dtype: Any) -> Any:
    """Return the dtype of a sum: half precision has too few digits for it, and too small a
    range."""
    return np.promote_types(dtype, np.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype


def add_weighted(total: Array, new: Array, weight: Float[Array, ""]) -> Array:
    """Return a sum with one mean more.

    Args:
        total: the sum before.
        new: a mean, which may be NaN where it is one over nothing. A count, as a running metric has
            it, replaces the one before.
        weight: what it is a mean over.
    """
    if not jnp.issubdtype(total.dtype, jnp.inexact):
        return new
    return total + jnp.where(weight == 0, 0, weight.astype(total.dtype) * new.astype(total.dtype))


def divide(total: Array, weight: Float[Array, ""]) -> Array:
    """Return a sum divided by its weight; over nothing it is 0."""
    if not jnp.issubdtype(total.dtype, jnp.inexact):
        return total
    divisor = jnp.where(weight == 0, 1, weight)
    return jnp.where(weight == 0, 0, total / divisor.astype(total.dtype))


def _add_result(
    sums: MicrobatchResult, result: MicrobatchResult, has_examples: Any, *, is_first: Any
) -> MicrobatchResult:
    """Return the sums with those of one microbatch more.

    Args:
        sums: over the microbatches before.
        result: of this one.
        has_examples: whether it has any; without one, the model state stays as it was.
        is_first: whether there are no microbatches before.
    """
    model_state = jax.tree.map(
        lambda old, new: jnp.where(has_examples, new, old),
        sums.model_state,
        result.model_state,
    )
    means = [_add_group(old, new) for old, new in zip(sums.means, result.means, strict=True)]
    metrics = MetricAccumulator.from_metrics(sums.metrics).update(
        MetricAccumulator.from_metrics(result.metrics), restart=is_first
    )
    media = jax.tree.map(lambda new, old: jnp.where(is_first, new, old), result.media, sums.media)
    return MicrobatchResult(means, metrics.by_name, model_state, media)


def _divide_group(sums: WeightedMeans, spec: WeightedMeans) -> WeightedMeans:
    """Return the means of sums, in the dtypes of a spec."""
    values = jax.tree.map(
        lambda leaf, like: divide(leaf, sums.weight).astype(like.dtype), sums.values, spec.values
    )
    return sums._replace(values=values)


def _add_group(sums: WeightedMeans, new: WeightedMeans) -> WeightedMeans:
    values = jax.tree.map(partial(add_weighted, weight=new.weight), sums.values, new.values)
    return WeightedMeans(sums.weight + new.weight, values)
