"""Trees compared by their arrays."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


def arrays(tree: Any) -> dict[str, np.ndarray]:
    """The arrays and numbers of a tree by path, random keys as their data."""
    found = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array_like))
    return {jax.tree_util.keystr(path): np.asarray(_plain(leaf)) for path, leaf in found}


def same_bits(a: Any, b: Any) -> str | None:
    """None if both trees have the same arrays, bit for bit, else where the first difference is."""
    return _difference(a, b, lambda one, other: one.tobytes() == other.tobytes())


def assert_same_bits(a: Any, b: Any) -> None:
    """Both trees have the same arrays, at least one, bit for bit: NaN equals NaN, and 0 does not
    equal -0."""
    assert arrays(a)
    difference = same_bits(a, b)
    assert difference is None, difference


def about_same(a: Any, b: Any) -> str | None:
    """None if both trees have the same arrays but for rounding, else where the first difference
    is."""
    return _difference(
        a, b, lambda one, other: np.allclose(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)
    )


def _difference(a: Any, b: Any, same: Any) -> str | None:
    first, second = arrays(a), arrays(b)
    if first.keys() != second.keys():
        return f"{min(first.keys() ^ second.keys())} is in one alone"
    for path, one in first.items():
        other = second[path]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"{path} is {one.dtype}{list(one.shape)} and {other.dtype}{list(other.shape)}"
        if not same(one, other):
            return f"{path} is {one} and {other}"
    return None


def _plain(leaf: Any) -> Any:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf
