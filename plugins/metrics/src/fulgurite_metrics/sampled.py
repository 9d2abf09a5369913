"""Samples of a fixed size out of any number of examples, the same in any order and grouping."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import Mask, Metric, Value, Values, apply_mask, to_float
from jaxtyping import Array, Bool, Int, Key, PyTree, Shaped

from fulgurite_metrics.arrays import example_mask, get_array_namespace


class SampledSet(Metric):
    """A uniform sample of `size` examples without replacement, or all of them if there are fewer.

    Each example has a random priority, made by folding its id into a key, and those with the
    smallest are kept. So the sample depends only on the ids, not on order or grouping. An id stands
    for one example and is not taken twice.
    Source: bottom-k sampling, Cohen and Kaplan, Summarizing Data using Bottom-k Sketches (2007).

    Attributes:
        count: how many there are; the entries after them are zero.
        priorities: ascending; of equal ones the smaller id is first.
        ids: of the examples.
        values: a tree of arrays that begin with an axis of `size`.
    """

    count: Int[Array, ""]
    priorities: Shaped[Array, " size"]
    ids: Shaped[Array, " size"]
    values: PyTree[Shaped[Array, "size ..."]]

    @staticmethod
    def from_values(
        values: PyTree[Values],
        ids: Int[Array | np.ndarray, " examples"],
        mask: Mask | None = None,
        *,
        size: int,
        key: Key[Array, ""] | None = None,
    ) -> "SampledSet":
        """Of a tree of arrays that begin with the example axis, and ids of 32 bits. `key` chooses
        the sample; it is the same for all batches, and if none is given for all sets."""
        values, ids = jax.tree.map(jnp.asarray, values), jnp.asarray(ids)
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ConfigurationError(
                f"SampledSet with ids of {ids.dtype}; they must be integers, one for each example"
            )
        present = example_mask((values, ids), mask)
        keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(0) if key is None else key))(ids)
        return _take_smallest(jax.vmap(jax.random.bits)(keys), ids, values, present, size)

    def merge(self, other: Any) -> "SampledSet":
        mine, theirs = (
            (jnp.arange(len(one.ids)) < one.count, one.priorities, one.ids, one.values)
            for one in (self, other)
        )
        present, priorities, ids, values = jax.tree.map(
            lambda *parts: jnp.concatenate(parts), mine, theirs
        )
        return _take_smallest(priorities, ids, values, present, len(self.ids))

    def empty(self) -> "SampledSet":
        return jax.tree.map(jnp.zeros_like, self)

    def compute(self) -> dict[str, Value]:
        """`count`, and the sample: `values`, or the entries of a dictionary by name. Entries after
        `count` are zero."""
        values = self.values if isinstance(self.values, dict) else {"values": self.values}
        return {"count": self.count, **values}


class Median(Metric):
    """The median of a uniform sample of `size` numbers, or of all if there are no more. NaN without
    numbers, and if one is NaN. The share of numbers below it is off from one half by `0.5 /
    size**0.5` (standard deviation)."""

    sample: SampledSet

    @staticmethod
    def from_values(
        values: Values, key: Key[Array, ""], mask: Mask | None = None, size: int = 256
    ) -> "Median":
        """`key` draws the sample and must be different for each batch, such as `ctx.key()`."""
        numbers = to_float(values)
        priorities, ids = jax.random.bits(key, (2, numbers.size))
        present = apply_mask(jnp.ones(numbers.shape, bool), mask, False).ravel()
        # A NaN is always part of the sample, so that it is not hidden.
        priorities = jnp.where(jnp.isnan(numbers.ravel()), 0, priorities)
        return Median(_take_smallest(priorities, ids, numbers.ravel(), present, size))

    def merge(self, other: Any) -> "Median":
        return Median(self.sample.merge(other.sample))

    def compute(self) -> Value:
        values: Any = self.sample.values
        numpy, count = get_array_namespace(values), self.sample.count
        present = numpy.arange(len(values)) < count
        ordered = numpy.sort(numpy.where(present, values, np.inf))
        with np.errstate(invalid="ignore"):  # the middle of minus infinity and infinity is NaN
            middle = ordered[(count - 1) // 2] / 2 + ordered[count // 2] / 2
        nothing = (count == 0) | numpy.any(numpy.isnan(values))
        return numpy.where(nothing, np.nan, middle).astype(values.dtype)


def _take_smallest(
    priorities: Shaped[Array, " n"],
    ids: Shaped[Array, " n"],
    values: PyTree[Array],
    present: Bool[Array, " n"],
    size: int,
) -> SampledSet:
    """The `size` examples of the least priorities, each id once."""
    if size < 1:
        raise ConfigurationError(f"a sample of size={size}; it must be at least one")
    order = jnp.lexsort((ids, priorities, ~present))
    present, sorted_ids = present[order], ids[order]
    again = jnp.concatenate([jnp.zeros(1, bool), sorted_ids[1:] == sorted_ids[:-1]])[: len(ids)]
    new = present & ~again
    slots = jnp.where(new, jnp.cumsum(new) - 1, size)
    count = jnp.minimum(jnp.sum(new, dtype=jnp.int32), size)

    def kept(leaf: Array) -> Array:
        return (
            jnp.zeros((size, *leaf.shape[1:]), leaf.dtype).at[slots].set(leaf[order], mode="drop")
        )

    return SampledSet(count, kept(priorities), kept(ids), jax.tree.map(kept, values))
