"""What several metrics need: counts, masks of examples, and the choice between NumPy and jax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import Sum, apply_mask
from jaxtyping import Array, Bool, Int, PyTree


def count_indices(index: Int[Array, "..."], size: int) -> Sum:
    """Count how often each of `0 … size - 1` occurs; anything else is dropped.

    Args:
        index: of any shape.
        size: the number of counts.

    Returns:
        The counts `(size,)`, counted as int32 and held exactly as a sum of two float32.
    """
    in_range = jnp.where(index < 0, size, index).ravel()
    counts = jnp.zeros(size, jnp.int32).at[in_range].add(1, mode="drop")
    rounded = counts.astype(jnp.float32)
    return Sum(rounded, (counts - rounded.astype(jnp.int32)).astype(jnp.float32))


def make_example_mask(values: PyTree[Array], mask: Any) -> Bool[Array, " examples"]:
    """Return the mask over the example axis, with which all arrays begin.

    Args:
        values: a tree of arrays.
        mask: bools over the example axis; None for all true.
    """
    lengths = {leaf.shape[:1] for leaf in jax.tree.leaves(values)}
    if mask is not None:
        lengths.add(jnp.shape(mask))
    if len(lengths) != 1 or () in lengths:
        raise ConfigurationError(
            f"arrays of examples and their mask begin with axes {sorted(map(list, lengths))}; "
            "it must be one length"
        )
    return apply_mask(jnp.ones(lengths.pop(), jnp.bool_), mask, False)


def get_array_namespace(*arrays: Any) -> Any:
    """Return `jax.numpy` for jax arrays, traced or not, else NumPy, which touches no device."""
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np
