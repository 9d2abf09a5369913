"""Random keys of JAX's default kind, Threefry-2x32, made and folded in NumPy, with the same bits.

A fit begins with a root key and with what is folded from it. By `jax.random` these are six programs
of XLA, the first that a process compiles: 0.37 of the 3.5 s of CPU time before the first step of a
small perceptron, and 0.1 of 0.7 s where a compilation cache has them.
"""

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Key, UInt32

from fulgurite._src.tree.specs import is_key

IMPL = "threefry2x32"

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
    return _as_key(np.array([seed >> 32 & _MASK, seed & _MASK], np.uint32))


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
    return _as_key(np.array(_hash(*words, 0, data), np.uint32))


def _as_key(data: UInt32[np.ndarray, "2"]) -> Key[Array, ""]:
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
