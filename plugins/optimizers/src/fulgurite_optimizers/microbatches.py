"""A computation over a batch, done by microbatches."""

from collections.abc import Callable
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import DataError
from fulgurite.metrics import MetricAccumulator
from fulgurite.training.forward import count_examples
from jaxtyping import Array, PyTree

from fulgurite_optimizers.metrics import zeros_like_spec

Computed = tuple[Any, dict[str, Any], Any, list[Array]]
"""Numbers that are means over the examples; metrics by name, of which the running ones are
averaged, too; the new model state; arrays of the first microbatch."""


def run_microbatches(
    compute: Callable[[Any, fg.Context], Computed], batch: PyTree, ctx: fg.Context, n: int
) -> Computed:
    """What `compute(batch, ctx)` gives for the whole batch, by `n` microbatches of which one is in
    memory at a time."""
    parts, masks = split(batch, n), None if ctx.mask is None else split(ctx.mask, n)

    def one(index: Any, model_state: Any) -> tuple[Array, Computed]:
        batch, mask = jax.tree.map(lambda leaf: leaf[index], (parts, masks))
        turn = ctx.fork("microbatch", index, model_state=model_state, mask=mask)
        means, metrics, model_state, arrays = compute(batch, turn)
        running = {
            name: metrics.pop(name)
            for name in [*metrics]
            if isinstance(metrics[name], fg.metrics.RunningMetric)
        }
        return count_examples(batch, mask), ((means, running), metrics, model_state, arrays)

    def body(index: Any, carry: Any) -> Any:
        total, sums, merged, model_state, first = carry
        weight, (means, metrics, new_state, arrays) = one(index, model_state)
        model_state = jax.tree.map(
            lambda old, new: jnp.where(weight > 0, new, old), model_state, new_state
        )
        sums = jax.tree.map(lambda sum, x: _add_weighted(sum, x, weight), sums, means)
        before = MetricAccumulator(metrics=merged, running={})
        new_metrics = MetricAccumulator(metrics=metrics, running={})
        merged = before.update(new_metrics, restart=index == 0).metrics
        first = jax.tree.map(lambda new, old: jnp.where(index == 0, new, old), arrays, first)
        return total + weight, sums, merged, model_state, first

    like = jax.eval_shape(one, jnp.int32(0), ctx.model_state)[1]
    sums = jax.tree.map(
        lambda spec: jnp.zeros(spec.shape, _accumulation_dtype(spec.dtype)), like[0]
    )
    merged, first = jax.tree.map(zeros_like_spec, (like[1], like[3]))
    carry = (jnp.float32(0), sums, merged, ctx.model_state, first)
    total, sums, merged, model_state, first = jax.lax.fori_loop(0, n, body, carry)
    means, running = jax.tree.map(
        lambda sum, spec: _divide(sum, total).astype(spec.dtype), sums, like[0]
    )
    return means, {**merged, **running}, model_state, first


def _accumulation_dtype(dtype: Any) -> Any:
    """In what numbers are summed up: half precision has too few digits for it, and too small a
    range."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype


def _add_weighted(sum: Array, new: Array, weight: Array) -> Array:
    """A microbatch more; one of nothing but padding may give NaN. Of a count, as a running metric
    has it, the last."""
    if not jnp.issubdtype(sum.dtype, jnp.inexact):
        return new
    return sum + jnp.where(weight > 0, weight.astype(sum.dtype) * new.astype(sum.dtype), 0)


def _divide(sum: Array, total: Array) -> Array:
    return sum / total.astype(sum.dtype) if jnp.issubdtype(sum.dtype, jnp.inexact) else sum


def split(batch: PyTree, n: int) -> PyTree:
    """Every leaf `(examples, ...)` as `(n, examples / n, ...)`; part `i` has the examples `i`, `i +
    n`, ..."""

    def apart(leaf: Any) -> Any:
        if not leaf.shape or leaf.shape[0] % n:
            raise DataError(
                f"a batch with a leaf of shape {list(leaf.shape)} cannot be split into {n} parts: "
                f"choose a batch size "
                f"that is a multiple of {n}, with ArrayData(remainder='drop') or 'pad'"
            )
        return jnp.swapaxes(leaf.reshape(leaf.shape[0] // n, n, *leaf.shape[1:]), 0, 1)

    return jax.tree.map(apart, batch)
