"""Masks of packed rows, for use within a step."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def make_attention_mask(
    segments: Int[Array, "*batch length"], *, causal: bool = True
) -> Bool[Array, "*batch length length"]:
    """Return which tokens of a packed row see which: those of their own segment, and with `causal`
    none that come later. Padding sees nothing and is seen by nothing.

    Args:
        segments: the segment of each token from 1, 0 for padding, as `Dataset.pack` gives them.
        causal: whether a token sees no later one.

    Returns:
        True at `[i, j]` if token `i` sees token `j`.
    """
    is_same = segments[..., :, None] == segments[..., None, :]
    is_real = segments > 0
    mask = is_same & is_real[..., :, None]
    if causal:
        length = segments.shape[-1]
        mask &= jnp.tril(jnp.ones((length, length), bool))
    return mask
