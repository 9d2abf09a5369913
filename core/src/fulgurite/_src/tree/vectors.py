"""Many numbers in one vector, in a way that XLA compiles fast.

XLA on CPU runs a kernel for each operand of a long concatenation, and only one for up to 16 numbers
that are chosen by their index. Where the operands are the numbers of one vector, it runs none: what
was split and is joined again is that vector. Everything here is of `jax.lax`: the functions of
`jax.numpy` take ten times as long to trace, and there are two calls for each number.
"""

from collections.abc import Sequence
from itertools import groupby

import jax
import numpy as np
from jaxtyping import Array, Shaped

GROUP_SIZE = 16


def concatenate_vectors(vectors: Sequence[Shaped[Array, " _"]]) -> Shaped[Array, " _"]:
    """Return one vector of several with the same dtype; traced."""
    parts: list[Array] = []
    for is_single, run in groupby(vectors, lambda vector: vector.size == 1):
        if is_single:
            parts += _stack_in_groups([jax.lax.squeeze(vector, (0,)) for vector in run])
        else:
            parts += run
    return parts[0] if len(parts) == 1 else jax.lax.concatenate(parts, 0)


def stack_scalars(scalars: Sequence[Shaped[Array, ""]]) -> Shaped[Array, " _"]:
    """Return a vector of numbers with the same dtype; traced."""
    parts = _stack_in_groups(scalars)
    return parts[0] if len(parts) == 1 else jax.lax.concatenate(parts, 0)


def join_scalars(scalars: Sequence[Shaped[Array, ""]]) -> Shaped[Array, " _"]:
    """Return a vector of numbers that `split_into_scalars` returned, or that lie in memory already;
    traced. For numbers that are computed, `stack_scalars` compiles faster."""
    return jax.lax.concatenate([jax.lax.reshape(scalar, (1,)) for scalar in scalars], 0)


def split_into_scalars(vector: Shaped[Array, " _"]) -> list[Shaped[Array, ""]]:
    """Return the numbers of a vector; traced."""
    return [
        jax.lax.squeeze(jax.lax.slice(vector, (index,), (index + 1,)), (0,))
        for index in range(vector.size)
    ]


def _stack_in_groups(scalars: Sequence[Array]) -> list[Array]:
    starts = range(0, len(scalars), GROUP_SIZE)
    return [_stack_group(scalars[start : start + GROUP_SIZE]) for start in starts]


def _stack_group(scalars: Sequence[Array]) -> Array:
    """Return a vector of a few numbers."""
    shape = (len(scalars),)
    vector = jax.lax.broadcast(scalars[0], shape)
    for index, scalar in enumerate(scalars[1:], start=1):
        # A mask in the program, not a comparison: of a loop XLA takes comparisons out, each as a
        # kernel of its own, and a step of a small perceptron compiles in 1.3 instead of 1 s.
        mask = np.arange(len(scalars)) == index
        vector = jax.lax.select(mask, jax.lax.broadcast(scalar, shape), vector)
    return vector
