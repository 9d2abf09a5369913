"""A computation over a batch, done by microbatches."""

from collections.abc import Callable
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import DataError
from fulgurite.step import examples_in
from jaxtyping import Array, PyTree

from fulgurite_optimizers.metrics import joined, zeros

Computed = tuple[Any, dict[str, Any], Any, list[Array]]
"""Numbers that are means over the examples; metrics by name; the new model state; arrays of the first microbatch."""


def over_microbatches(
    compute: Callable[[Any, fg.Context], Computed], batch: PyTree, ctx: fg.Context, n: int
) -> Computed:
    """What `compute(batch, ctx)` gives for the whole batch, by `n` microbatches of which one is in memory at a time."""
    parts, masks = split(batch, n), None if ctx.mask is None else split(ctx.mask, n)

    def one(index: Any, model_state: Any) -> tuple[Array, Computed]:
        batch, mask = jax.tree.map(lambda leaf: leaf[index], (parts, masks))
        made = compute(batch, ctx.fresh("microbatch", index, model_state=model_state, mask=mask))
        return examples_in(batch, mask), made

    def body(index: Any, carry: Any) -> Any:
        total, sums, merged, model_state, first = carry
        weight, (means, metrics, model_state, arrays) = one(index, model_state)
        # A microbatch of nothing but padding may give NaN.
        sums = jax.tree.map(lambda sum, x: sum + jnp.where(weight > 0, weight.astype(x.dtype) * x, 0), sums, means)
        both = joined(merged, metrics)
        merged, first = jax.tree.map(lambda new, old: jnp.where(index == 0, new, old), (metrics, arrays), (both, first))
        return total + weight, sums, merged, model_state, first

    like = jax.eval_shape(one, jnp.int32(0), ctx.model_state)[1]
    sums, merged, first = jax.tree.map(zeros, (*like[:2], like[3]))
    carry = (jnp.float32(0), sums, merged, ctx.model_state, first)
    total, sums, merged, model_state, first = jax.lax.fori_loop(0, n, body, carry)
    return jax.tree.map(lambda sum: sum / total.astype(sum.dtype), sums), merged, model_state, first


def split(batch: PyTree, n: int) -> PyTree:
    """Every leaf `(examples, ...)` as `(n, examples / n, ...)`; part `i` has the examples `i`, `i + n`, ..."""

    def apart(leaf: Any) -> Any:
        if not leaf.shape or leaf.shape[0] % n:
            raise DataError(
                f"a batch with a leaf of shape {list(leaf.shape)} cannot be split into {n} parts: choose a batch size "
                f"that is a multiple of {n}, with ArrayData(remainder='drop') or 'pad'"
            )
        return jnp.swapaxes(leaf.reshape(leaf.shape[0] // n, n, *leaf.shape[1:]), 0, 1)

    return jax.tree.map(apart, batch)
