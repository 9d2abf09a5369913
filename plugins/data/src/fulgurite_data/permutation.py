"""A random order of numbers, of which any part can be computed without the rest.

A keyed Feistel network permutes the integers below a power of two; numbers that leave the range are
permuted again until they are back in it ("cycle walking": Black and Rogaway, Ciphers with Arbitrary
Finite Domains, 2002). It takes no memory, for any number of examples.
"""

from functools import lru_cache

import numpy as np

_NUM_ROUNDS = 8
_TABLE_SIZE = 4096
"""Up to here the order is a table from NumPy's generator: few bits make a weak network, and the
table takes 32 kB."""
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Of splitmix64 (Steele, Lea and Flood, 2014)."""


def permute(indices: np.ndarray, length: int, key: int) -> np.ndarray:
    """Return where a random order of `range(length)` has its elements number `indices`.

    Args:
        indices: int64 `(k,)`, each in `range(length)`.
        length: of the order, below 2**62.
        key: 64 bits that choose the order.

    Returns:
        int64 `(k,)`.
    """
    if length <= _TABLE_SIZE:
        return _make_table(length, key)[indices]
    num_bits = (length - 1).bit_length()
    round_keys = _make_round_keys(key)
    numbers = _encrypt(indices.astype(np.uint64), num_bits, round_keys)
    outside = np.flatnonzero(numbers >= length)
    while len(outside):
        numbers[outside] = _encrypt(numbers[outside], num_bits, round_keys)
        outside = outside[numbers[outside] >= length]
    return numbers.astype(np.int64)


@lru_cache(maxsize=64)
def _make_table(length: int, key: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=key)).permutation(length)


@lru_cache(maxsize=1024)
def _make_round_keys(key: int) -> tuple[np.uint64, ...]:
    words = np.random.SeedSequence(key).generate_state(_NUM_ROUNDS, np.uint64)
    return tuple(words)


def _encrypt(numbers: np.ndarray, num_bits: int, round_keys: tuple[np.uint64, ...]) -> np.ndarray:
    """Return a permutation of the integers of `num_bits` bits, applied to some of them."""
    left_bits = np.uint64(num_bits - num_bits // 2)
    right_bits = np.uint64(num_bits // 2)
    left = numbers >> right_bits
    right = numbers & _make_mask(right_bits)
    # The halves may differ by one bit; they change places, and so do their widths.
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right + round_key) & _make_mask(left_bits))
        left_bits, right_bits = right_bits, left_bits
    return (left << right_bits) | right


def _make_mask(num_bits: np.uint64) -> np.uint64:
    return np.uint64((1 << int(num_bits)) - 1)


def _mix(words: np.ndarray) -> np.ndarray:
    """Return words whose every bit depends on all bits of the given ones, modulo 2**64."""
    words = (words ^ (words >> np.uint64(30))) * _MULTIPLIERS[0]
    words = (words ^ (words >> np.uint64(27))) * _MULTIPLIERS[1]
    return words ^ (words >> np.uint64(31))
