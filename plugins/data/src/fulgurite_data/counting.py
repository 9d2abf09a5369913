"""How much is in a batch."""

from typing import Any

import fulgurite as fg
import jax
import numpy as np

TOKENS = "tokens"
"""The name of an array of tokens in a batch."""
SEGMENTS = "segments"
"""The name of an array that says which document each token of a packed row is of, 0 for none."""

MASK = "mask"
"""The name of an array that is True for what is not padding, as `Dataset.pad` adds it."""


def count_examples(batch: Any) -> int:
    """Return the number of examples in a batch, without padding.

    Args:
        batch: a pytree of arrays, or an `fg.Batch`.
    """
    if isinstance(batch, fg.Batch):
        if batch.num_examples is not None:
            return int(batch.num_examples)
        if batch.mask is not None:
            return int(np.sum(batch.mask))
        batch = batch.value
    return np.shape(jax.tree.leaves(batch)[0])[0]


def count_tokens(batch: Any) -> int | None:
    """Return the number of tokens in a batch, without padding; None if it has no array of them.

    Args:
        batch: with `tokens`, and perhaps `segments` or the `mask` of padded rows.
    """
    value = batch.value if isinstance(batch, fg.Batch) else batch
    if not isinstance(value, dict) or TOKENS not in value:
        return None
    is_token = np.ones(np.shape(value[TOKENS]), bool)
    mask = np.asarray(value.get(MASK))
    if SEGMENTS in value:
        is_token &= np.asarray(value[SEGMENTS]) > 0
    elif mask.dtype == bool and mask.shape == is_token.shape:
        is_token &= mask
    if isinstance(batch, fg.Batch) and batch.mask is not None:
        is_token &= np.asarray(batch.mask).reshape(-1, *[1] * (is_token.ndim - 1))
    return int(is_token.sum())
