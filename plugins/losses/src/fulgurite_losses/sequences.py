"""Losses of sequences."""

from typing import Unpack

import jax.numpy as jnp
import optax
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import Mask, Values, apply_mask, to_float
from jaxtyping import Array, Float

from fulgurite_losses.examples import Examples
from fulgurite_losses.signature import LossOptions, loss


@loss
def ctc_loss(
    logits: Values,
    labels: Values,
    *,
    logit_mask: Mask | None = None,
    label_mask: Mask | None = None,
    blank: int = 0,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return -log of the probability of a sequence of labels over all its alignments with the
    frames, one value for each sequence: mask and weight are `(batch,)`. It is not divided by a
    length.

    Labels that fit into no alignment, because there are more of them than frames, give about 1e5.

    Source: Graves et al., Connectionist Temporal Classification (2006), as computed by optax.

    Args:
        logits: `(batch, frames, classes)`.
        labels: integers `(batch, labels)`, none of them the blank.
        logit_mask: bools `(batch, frames)`, False for the padding at the end; None for no padding.
        label_mask: bools `(batch, labels)`, likewise.
        blank: the class that stands for no label.

    Example:
        from fulgurite_losses import ctc_loss

        ctc_loss(logits[None], jnp.array([[1, 2]]), logit_mask=mask[None])
    """
    logits = to_float(logits)
    labels = jnp.asarray(labels)
    is_integer = jnp.issubdtype(labels.dtype, jnp.integer)
    if logits.ndim != 3 or labels.shape[:-1] != logits.shape[:1] or not is_integer:
        raise ConfigurationError(
            f"ctc_loss of logits {list(logits.shape)} with labels "
            f"{labels.dtype}{list(labels.shape)}; they are (batch, frames, classes) and integers "
            "(batch, labels)"
        )
    examples = Examples(logits.shape[:1], options)
    frames = examples.hide(apply_mask(jnp.ones(logits.shape[:2], bool), logit_mask, False), False)
    present = examples.hide(apply_mask(jnp.ones(labels.shape, bool), label_mask, False), False)
    logits = apply_mask(logits, frames, 0.0)
    values = optax.losses.ctc_loss(
        logits,
        (~frames).astype(logits.dtype),
        jnp.where(present, labels, blank),
        (~present).astype(logits.dtype),
        blank_id=blank,
    )
    is_class = (labels >= 0) & (labels < logits.shape[-1]) & (labels != blank)
    values = jnp.where(jnp.all(is_class | ~present, axis=1), values, jnp.nan)
    return examples.reduce(values)
