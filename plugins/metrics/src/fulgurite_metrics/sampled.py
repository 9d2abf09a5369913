"""Samples of a fixed size out of any number of examples, the same in any order and grouping."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import Mask, Metric, Value, Values, apply_mask, to_float
from fulgurite.plugins import as_arrays
from jaxtyping import Array, Bool, Int, Key, PyTree, Shaped, UInt32

from fulgurite_metrics.arrays import get_array_namespace, make_example_mask

_WORD = 0xFFFF_FFFF


class SampledSet(Metric):
    """A uniform sample of `size` examples without replacement, or all of them if there are fewer.

    Each example has a random priority, made by folding its id into a key, and those with the
    smallest are kept. So the sample depends only on the ids, not on order or grouping. An id stands
    for one example and is not taken twice.

    Source: bottom-k sampling, Cohen and Kaplan, Summarizing Data using Bottom-k Sketches (2007).

    Example:
        from fulgurite_metrics import SampledSet

        ids = jnp.arange(4)
        sample = SampledSet.from_values({"logits": logits}, ids, mask, size=2)

    Attributes:
        count: the number of examples; the entries after them are zero.
        priorities: ascending; of equal ones the smaller id is first.
        ids: the ids of the examples.
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
        """Return the sample of a batch.

        Args:
            values: a tree of arrays that begin with the example axis.
            ids: integers of 32 bits, or of 64 with x64.
            mask: bools over the example axis.
            size: the largest number of examples.
            key: chooses the sample. It must be the same for all batches; None for the same sample
                in all sets.

        Raises:
            DataError: ids or values do not fit the dtypes that jax gives them.
        """
        values = jax.tree.map(jnp.asarray, as_arrays(values))
        ids = jnp.asarray(as_arrays({"ids": ids})["ids"])
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ConfigurationError(
                f"SampledSet with ids of {ids.dtype}; they must be integers, one for each example"
            )
        present = make_example_mask((values, ids), mask)
        return _take_smallest(_draw_priorities(ids, key), ids, values, present, size)

    def add(
        self,
        values: PyTree[Values],
        ids: Int[Array | np.ndarray, " examples"],
        mask: Mask | None = None,
        *,
        key: Key[Array, ""] | None = None,
    ) -> "SampledSet":
        """Return the sample with the examples of another batch.

        Args:
            values: as of `from_values`.
            ids: as of `from_values`.
            mask: as of `from_values`.
            key: that of the other batches.
        """
        return self.merge(self.from_values(values, ids, mask, size=len(self.ids), key=key))

    def merge(self, other: Any) -> "SampledSet":
        entries = [
            (jnp.arange(len(part.ids)) < part.count, part.priorities, part.ids, part.values)
            for part in (self, other)
        ]
        present, priorities, ids, values = jax.tree.map(
            lambda *parts: jnp.concatenate(parts), *entries
        )
        return _take_smallest(priorities, ids, values, present, len(self.ids))

    def empty(self) -> "SampledSet":
        return jax.tree.map(jnp.zeros_like, self)

    def compute(self) -> dict[str, Value]:
        """Return `count` and the sample, as `values` or, for a dictionary, by its names. Entries
        after `count` are zero."""
        values = self.values if isinstance(self.values, dict) else {"values": self.values}
        return {"count": self.count, **values}


@dataclass(frozen=True)
class SampledObjects:
    """The sample of `SampledSet`, of objects on the host, such as strings or file names.

    The same ids give the same sample as a `SampledSet` with the same size and key.

    Example:
        from fulgurite_metrics import SampledObjects

        first = SampledObjects.from_values(["a", "b"], ids=[0, 1], size=2)
        sample = first.merge(SampledObjects.from_values(["c"], ids=[2], size=2))
        sample = sample.add(["d"], ids=[3])
        sample.compute()  # two of the four
        len(sample), "d" in sample  # how many are kept, and whether an object is

    Attributes:
        size: the largest number of objects.
        entries: priority, id and object of each that is kept, by ascending priority.
        key: chooses the sample; None for the same one in all sets.
    """

    size: int
    entries: tuple[tuple[int, int, Any], ...]
    key: Key[Array, ""] | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def from_values(
        values: Sequence[Any],
        ids: Sequence[int] | np.ndarray,
        *,
        size: int,
        key: Key[Array, ""] | None = None,
    ) -> "SampledObjects":
        """Return the sample of some objects.

        Args:
            values: any objects.
            ids: integers of 64 bits, one for each object. They stay on the host as they are.
            size: the largest number of objects.
            key: chooses the sample, as of `SampledSet.from_values`.
        """
        if len(values) != len(ids):
            raise ConfigurationError(
                f"SampledObjects with {len(values)} values and {len(ids)} ids; give one id each"
            )
        if size < 1:
            raise ConfigurationError(f"a sample of size={size}; it must be at least one")
        try:
            # `int` would make one id of 0.2 and 0.7.
            ids = list(map(index, ids))
        except TypeError as error:
            raise ConfigurationError(
                f"SampledObjects with ids that are not integers: {error}; give one for each object"
            ) from error
        priorities = map(int, _draw_host_priorities(ids, key))
        entries = zip(priorities, ids, values, strict=True)
        return SampledObjects(size, (), key).merge(SampledObjects(size, tuple(entries), key))

    def add(self, values: Sequence[Any], ids: Sequence[int] | np.ndarray) -> "SampledObjects":
        """Return the sample with further objects, drawn by the same key.

        Args:
            values: any objects.
            ids: as of `from_values`.
        """
        return self.merge(self.from_values(values, ids, size=self.size, key=self.key))

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.compute())

    def __contains__(self, value: Any) -> bool:
        return value in self.compute()

    def merge(self, other: "SampledObjects") -> "SampledObjects":
        """Return the sample of the objects of both."""
        by_id = {entry[1]: entry for entry in (*other.entries, *self.entries)}
        entries = sorted(by_id.values(), key=lambda entry: entry[:2])
        return SampledObjects(self.size, tuple(entries[: self.size]), self.key)

    def compute(self) -> list[Any]:
        """Return the objects that are kept."""
        return [value for _, _, value in self.entries]


class Median(Metric):
    """The median of a uniform sample of `size` numbers, or of all if there are no more.

    NaN without numbers, and if one is NaN. The share of numbers below it is off from one half by
    `0.5 / size**0.5` (standard deviation).

    Example:
        from fulgurite_metrics import Median

        # In a step the key is `ctx.key()`.
        Median.from_values(abs(preds - targets), jax.random.key(0), mask).compute()
    """

    sample: SampledSet

    @staticmethod
    def from_values(
        values: Values, key: Key[Array, ""], mask: Mask | None = None, size: int = 256
    ) -> "Median":
        """Return the median of a batch.

        Args:
            values: of any shape.
            key: draws the sample; it must be different for each batch, such as `ctx.key()`.
            mask: bools over all axes or the leading ones.
            size: the size of the sample.
        """
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
        numpy = get_array_namespace(values)
        count = self.sample.count
        present = numpy.arange(len(values)) < count
        ordered = numpy.sort(numpy.where(present, values, np.inf))
        # The middle of minus infinity and infinity is NaN.
        with np.errstate(invalid="ignore"):
            middle = ordered[(count - 1) // 2] / 2 + ordered[count // 2] / 2
        nothing = (count == 0) | numpy.any(numpy.isnan(values))
        return numpy.where(nothing, np.nan, middle).astype(values.dtype)


def _draw_priorities(
    ids: Int[Array, " examples"], key: Key[Array, ""] | None
) -> UInt32[Array, " examples"]:
    """Return the random priority of each id, by a key that None is the default of."""
    key = jax.random.key(0) if key is None else key
    if ids.dtype.itemsize <= 4:
        return _draw_bits(jax.vmap(partial(jax.random.fold_in, key))(ids))
    low = (ids & _WORD).astype(jnp.uint32)
    high = (ids >> 32 & _WORD).astype(jnp.uint32)
    is_wide = ids >= 2**32
    if jnp.issubdtype(ids.dtype, jnp.signedinteger):
        is_wide |= ids < -(2**31)
    return _draw_of_words(low, high, is_wide, key)


def _draw_host_priorities(ids: Sequence[int], key: Key[Array, ""] | None) -> np.ndarray:
    """Return the priorities of integers of any size up to 64 bits; of those of 32 bits, what
    `_draw_priorities` returns."""
    for id in ids:
        if not -(2**63) <= id < 2**64:
            raise ConfigurationError(f"SampledObjects with the id {id}; it must have 64 bits")
    low = np.asarray([id & _WORD for id in ids], np.uint32)
    high = np.asarray([id >> 32 & _WORD for id in ids], np.uint32)
    is_wide = np.asarray([not -(2**31) <= id < 2**32 for id in ids], bool)
    key = jax.random.key(0) if key is None else key
    return np.asarray(_draw_of_words(jnp.asarray(low), jnp.asarray(high), is_wide, key))


def _draw_of_words(
    low: UInt32[Array, " examples"],
    high: UInt32[Array, " examples"],
    is_wide: Any,
    key: Key[Array, ""],
) -> UInt32[Array, " examples"]:
    """Return the priorities of ids in two words, of which those that are not wide are the low one
    alone.

    Args:
        low: the lower 32 bits of each id.
        high: the upper ones.
        is_wide: which ids need more than 32 bits.
        key: chooses the sample.
    """
    keys = jax.vmap(partial(jax.random.fold_in, key))(low)
    of_both_words = _draw_bits(jax.vmap(jax.random.fold_in)(keys, high))
    return jnp.where(is_wide, of_both_words, _draw_bits(keys))


def _draw_bits(keys: Key[Array, " examples"]) -> UInt32[Array, " examples"]:
    """Return 32 random bits for each key, with x64 as without."""
    return jax.vmap(partial(jax.random.bits, dtype=jnp.uint32))(keys)


def _take_smallest(
    priorities: Shaped[Array, " n"],
    ids: Shaped[Array, " n"],
    values: PyTree[Array],
    present: Bool[Array, " n"],
    size: int,
) -> SampledSet:
    """Return the `size` examples of the smallest priorities, each id once."""
    if size < 1:
        raise ConfigurationError(f"a sample of size={size}; it must be at least one")
    order = jnp.lexsort((ids, priorities, ~present))
    present = present[order]
    sorted_ids = ids[order]
    repeats = sorted_ids[1:] == sorted_ids[:-1]
    is_duplicate = jnp.concatenate([jnp.zeros(1, bool), repeats])[: len(ids)]
    new = present & ~is_duplicate
    slots = jnp.where(new, jnp.cumsum(new) - 1, size)
    count = jnp.minimum(jnp.sum(new, dtype=jnp.int32), size)

    def select(leaf: Array) -> Array:
        zeros = jnp.zeros((size, *leaf.shape[1:]), leaf.dtype)
        return zeros.at[slots].set(leaf[order], mode="drop")

    return SampledSet(count, select(priorities), select(ids), jax.tree.map(select, values))
