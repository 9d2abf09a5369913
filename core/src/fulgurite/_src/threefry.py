"""Random keys of JAX's default kind, Threefry-2x32, and their bits, in NumPy.

A fit begins with a root key and with what is folded from it. By `jax.random` these are six programs
of XLA, the first that a process compiles: 0.37 of the 3.5 s of CPU time before the first step of a
small perceptron, and 0.1 of 0.7 s where a compilation cache has them.

What is made of many keys or of one key many times is an array of words: keys have two in the last
dimension, and bits are drawn as with `jax_threefry_partitionable`.
"""

from math import prod

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Key, UInt32

from fulgurite._src.tree.specs import is_key

IMPL = "threefry2x32"

Words = UInt32[np.ndarray, "... 2"]
"""The words of keys."""

# The algorithm: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = 0x1BD11BDA
_MASK = 2**32 - 1


def is_default_impl() -> bool:
    """Return whether `jax.random.key` makes keys of this kind."""
    impl: str = jax.config.jax_default_prng_impl  # type: ignore[attr-defined]
    return impl == IMPL


def make_key(seed: int) -> Key[Array, ""]:
    """Return the key of a seed of up to 64 bits, as `jax.random.key` with x64 does."""
    return as_key(np.array([seed >> 32 & _MASK, seed & _MASK], np.uint32))


def read_words(key: Key[Array, ""]) -> tuple[int, int] | None:
    """Return the two words of a key, for `fold_in`.

    None for a key that is traced or in a trace, which would know it as a constant; for one of
    another kind; and for one that is bound to a device, which the folded key would leave.
    """
    if isinstance(key, Tracer) or not is_key(key):
        return None
    if key.committed or str(jax.random.key_impl(key)) != IMPL:
        return None
    data = jax.random.key_data(key)
    if isinstance(data, Tracer):
        return None
    first, second = map(int, np.asarray(data))
    return first, second


def fold_in(words: tuple[int, int], data: int) -> Key[Array, ""]:
    """Return a key folded with a number, as `jax.random.fold_in` does.

    Args:
        words: of the key, from `read_words`.
        data: a number of up to 32 bits.
    """
    return as_key(np.array(_hash(*words, 0, data), np.uint32))


def fold_in_words(words: Words, data: int) -> Words:
    """Return the words of keys folded with a number, as `jax.random.fold_in` does.

    Args:
        words: of the keys.
        data: a number of up to 32 bits.
    """
    number = np.array([data], np.uint32)
    return np.concatenate(_hash_arrays(words, np.zeros_like(number), number), -1)


def split(words: Words, shape: tuple[int, ...]) -> Words:
    """Return the words of new keys, as `jax.random.split` does.

    Args:
        words: of the keys.
        shape: of the new keys of each.
    """
    return np.stack(_hash_numbers(words, shape), -1)


def draw_bits(words: Words, shape: tuple[int, ...]) -> UInt32[np.ndarray, "..."]:
    """Return random bits, as `jax.random.bits` does.

    Args:
        words: of the keys.
        shape: of the bits of each.
    """
    first, second = _hash_numbers(words, shape)
    first ^= second
    return first


def as_key(data: Words) -> Key[Array, "..."]:
    """Return the keys of these words."""
    # Annotated for arrays of jax, and takes those of NumPy: `jnp.asarray` would be a program.
    return jax.random.wrap_key_data(data, impl=IMPL)  # type: ignore[arg-type]


def _hash(key_0: int, key_1: int, x_0: int, x_1: int) -> tuple[int, int]:
    """Return the block of two numbers under a key: 20 rounds, after every fourth of which the key
    is added."""
    keys = key_0, key_1, key_0 ^ key_1 ^ _PARITY
    x_0 = (x_0 + keys[0]) & _MASK
    x_1 = (x_1 + keys[1]) & _MASK
    for block in range(1, 6):
        for distance in _ROTATIONS[(block - 1) % 2]:
            x_0 = (x_0 + x_1) & _MASK
            x_1 = x_0 ^ (x_1 << distance | x_1 >> 32 - distance) & _MASK
        x_0 = (x_0 + keys[block % 3]) & _MASK
        x_1 = (x_1 + keys[(block + 1) % 3] + block) & _MASK
    return x_0, x_1


def _hash_numbers(
    words: Words, shape: tuple[int, ...]
) -> tuple[UInt32[np.ndarray, "..."], UInt32[np.ndarray, "..."]]:
    """Return the blocks of the numbers from 0 on, of up to 64 bits, under each key.

    Args:
        words: of the keys.
        shape: of the numbers.
    """
    numbers = np.arange(prod(shape), dtype=np.uint64)
    first, second = _hash_arrays(
        words, (numbers >> 32).astype(np.uint32), numbers.astype(np.uint32)
    )
    full_shape = (*words.shape[:-1], *shape)
    return first.reshape(full_shape), second.reshape(full_shape)


def _hash_arrays(
    words: Words, high: UInt32[np.ndarray, " n"], low: UInt32[np.ndarray, " n"]
) -> tuple[UInt32[np.ndarray, "... n"], UInt32[np.ndarray, "... n"]]:
    """Do what `_hash` does, for many keys and numbers; arrays of NumPy wrap around.

    Args:
        words: of the keys.
        high: the upper words of the numbers.
        low: the lower ones.
    """
    key_0, key_1 = words[..., 0, None], words[..., 1, None]
    keys = key_0, key_1, key_0 ^ key_1 ^ np.uint32(_PARITY)
    x_0 = high + keys[0]
    x_1 = low + keys[1]
    shifted = np.empty_like(x_1)
    for block in range(1, 6):
        for distance in _ROTATIONS[(block - 1) % 2]:
            # In place: a fresh array for each of 100 operations took three times as long.
            x_0 += x_1
            np.right_shift(x_1, np.uint32(32 - distance), out=shifted)
            x_1 <<= np.uint32(distance)
            x_1 |= shifted
            x_1 ^= x_0
        x_0 += keys[block % 3]
        x_1 += keys[(block + 1) % 3] + np.uint32(block)
    return x_0, x_1
