"""Trees are compared by the bits of their arrays, and by their strings."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite_testing import assert_same_bits, find_difference

# Of IEEE 754: a NaN is any number of the largest exponent but infinity, of either sign.
NANS = np.array([0x7FC00000, 0xFFC00000, 0x7F800001], np.uint32).view(np.float32)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, jnp.bfloat16, np.complex64], ids=lambda dtype: dtype.__name__
)
def test_nan_equals_nan_whatever_its_bits(dtype: Any) -> None:
    first, second, _ = NANS
    assert first.tobytes() != second.tobytes()
    assert_same_bits({"x": first.astype(dtype)}, {"x": second.astype(dtype)})
    pair = np.array([1, first], np.float32).astype(dtype)
    assert_same_bits(pair, np.array([1, second], np.float32).astype(dtype))
    assert find_difference(pair, np.array([2, second], np.float32).astype(dtype)) is not None


def test_zero_does_not_equal_minus_zero_beside_nan() -> None:
    assert find_difference(np.array([0.0, np.nan]), np.array([-0.0, -np.nan])) is not None
    assert find_difference(np.array([np.nan + 1j]), np.array([np.nan + 2j])) is not None


def test_keys_are_compared_by_their_data() -> None:
    assert_same_bits(jax.random.key(3), jax.random.key(3))
    assert find_difference(jax.random.key(3), jax.random.key(4)) is not None


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ({"a": 1.0, "b": "one"}, {"a": 1.0, "b": "two"}, "['b'] is 'one' and 'two'"),
        ({"a": 1.0, "b": "one"}, {"a": 1.0}, "only one of them has ['b']"),
        ({"a": 1.0, "b": "1"}, {"a": 1.0, "b": 1}, "['b'] is '1' and 1"),
        ({"a": 1.0, "b": 1}, {"a": 1.0, "b": "1"}, "['b'] is 1 and '1'"),
    ],
)
def test_strings_are_compared(first: Any, second: Any, says: str) -> None:
    assert find_difference(first, first) is None
    assert find_difference(first, second) == says
