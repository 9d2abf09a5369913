"""What the metrics share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import Sum, apply_mask
from jaxtyping import Array, Bool, Int, PyTree


def count_indices(index: Int[Array, "..."], size: int) -> Sum:
    """How often each of `0 … size - 1` occurs; anything else is dropped. Counted as int32, held
    exactly as a sum."""
    counts = (
        jnp.zeros(size, jnp.int32).at[jnp.where(index < 0, size, index).ravel()].add(1, mode="drop")
    )
    rounded = counts.astype(jnp.float32)
    return Sum(rounded, (counts - rounded.astype(jnp.int32)).astype(jnp.float32))


def example_mask(values: PyTree[Array], mask: Any) -> Bool[Array, " examples"]:
    """The mask over the axis with which all of `values` begin; all true if none is given."""
    lengths = {leaf.shape[:1] for leaf in jax.tree.leaves(values)} | (
        set() if mask is None else {jnp.shape(mask)}
    )
    if len(lengths) != 1 or () in lengths:
        found = sorted(map(list, lengths))
        raise ConfigurationError(
            f"arrays of examples and their mask begin with axes {found}; it must be one length"
        )
    return apply_mask(jnp.ones(lengths.pop(), jnp.bool_), mask, False)


def get_array_namespace(*arrays: Any) -> Any:
    """`jax.numpy` for jax arrays, traced or not, else NumPy, which touches no device."""
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np
