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
    """Return None if both trees have the same arrays, bit for bit, and the same strings, else a
    description of the first difference. NaN equals NaN.

    Args:
        a: a tree.
        b: a tree.
    """
    return _find_difference(a, b, _has_same_bits)


def find_rough_difference(a: Any, b: Any) -> str | None:
    """Return None if both trees have the same arrays but for rounding, and the same strings, else
    a description of the first difference.

    Args:
        a: a tree.
        b: a tree.
    """
    return _find_difference(a, b, _is_close)


def assert_same_bits(a: Any, b: Any) -> None:
    """Assert that both trees have the same arrays, at least one, bit for bit, and the same strings.
    NaN equals NaN, whatever its bits, and 0 does not equal -0.

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
    first_strings = _get_strings(a)
    second_strings = _get_strings(b)
    names = first.keys() | first_strings.keys()
    other_names = second.keys() | second_strings.keys()
    if names != other_names:
        return f"only one of them has {min(names ^ other_names)}"
    for path, string in first_strings.items():
        other = second_strings.get(path)
        if other != string:
            return f"{path} is {string!r} and {second[path] if other is None else repr(other)}"
    for path, left in first.items():
        if path not in second:
            return f"{path} is {left} and {second_strings[path]!r}"
        right = second[path]
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return f"{path} is {left.dtype}{list(left.shape)} and {right.dtype}{list(right.shape)}"
        if not is_same(left, right):
            return f"{path} is {left} and {right}"
    return None


def _get_strings(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, str)}


def _has_same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.tobytes() == right.tobytes() or (
        jnp.issubdtype(left.dtype, jnp.inexact)
        and _unify_nan(left).tobytes() == _unify_nan(right).tobytes()
    )


def _unify_nan(array: np.ndarray) -> np.ndarray:
    """Return an array whose NaNs have the same bits: 0 / 0 has other ones than `np.nan`."""
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    parts = np.stack([np.real(array), np.imag(array)]) if is_complex else np.array(array)
    parts[np.isnan(parts)] = np.nan
    return parts


def _is_close(left: np.ndarray, right: np.ndarray) -> bool:
    return np.allclose(left, right, rtol=1e-3, atol=1e-4, equal_nan=True)
