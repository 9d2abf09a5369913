"""Comparison of trees by their arrays."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


def get_arrays(tree: Any) -> dict[str, np.ndarray]:
    """Return the arrays and numbers of a tree by path, random keys as their data."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array_like))
    return {jax.tree_util.keystr(path): np.asarray(as_plain_array(leaf)) for path, leaf in leaves}


def find_difference(a: Any, b: Any) -> str | None:
    """Return None if both trees have the same arrays, bit for bit, else a description of the first
    difference.

    Args:
        a: a tree.
        b: a tree.
    """
    return _find_difference(a, b, _has_same_bits)


def find_rough_difference(a: Any, b: Any) -> str | None:
    """Return None if both trees have the same arrays but for rounding, else a description of the
    first difference.

    Args:
        a: a tree.
        b: a tree.
    """
    return _find_difference(a, b, _is_close)


def assert_same_bits(a: Any, b: Any) -> None:
    """Assert that both trees have the same arrays, at least one, bit for bit. NaN equals NaN, and 0
    does not equal -0.

    Args:
        a: a tree.
        b: a tree.
    """
    assert get_arrays(a)
    difference = find_difference(a, b)
    assert difference is None, difference


def as_plain_array(leaf: Any) -> Any:
    """Return the data of a random key, and anything else as it is."""
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _find_difference(
    a: Any, b: Any, is_same: Callable[[np.ndarray, np.ndarray], bool]
) -> str | None:
    first = get_arrays(a)
    second = get_arrays(b)
    if first.keys() != second.keys():
        return f"only one of them has {min(first.keys() ^ second.keys())}"
    for path, left in first.items():
        right = second[path]
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return f"{path} is {left.dtype}{list(left.shape)} and {right.dtype}{list(right.shape)}"
        if not is_same(left, right):
            return f"{path} is {left} and {right}"
    return None


def _has_same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.tobytes() == right.tobytes()


def _is_close(left: np.ndarray, right: np.ndarray) -> bool:
    return np.allclose(left, right, rtol=1e-3, atol=1e-4, equal_nan=True)
