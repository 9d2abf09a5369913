"""What trains a language model: its batches, their logits, and the loss of the next tokens."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import fulgurite as fg
import jax
import jax.numpy as jnp
import optax
from fulgurite.errors import ModelError
from fulgurite.plugins import describe_node, is_array_like
from jaxtyping import Array, Bool, Float, Integer

from fulgurite_models.language import LanguageModel, is_index


class TokenBatch(NamedTuple):
    """What a batch says of its rows of tokens.

    Attributes:
        tokens: integers `(batch, time)`.
        mask: bool, False for padding; or None.
        segments: which document each token is of, or None.
        positions: of the tokens within their documents, or None.
    """

    tokens: Integer[Array, "batch time"]
    mask: Bool[Array, "batch time"] | None = None
    segments: Integer[Array, "batch time"] | None = None
    positions: Integer[Array, "batch time"] | None = None


def compute_logits(
    model: LanguageModel, batch: Any, ctx: fg.Context
) -> Float[Array, "batch time vocabulary"]:
    """Return the logits of the token after each token, for `fg.Task(forward=)`.

    Padding after the tokens of a row changes none of their logits.

    Example:
        from fulgurite_models import GPT2, GPT2Config, compute_logits, next_token_loss

        config = GPT2Config(vocab_size=64, max_length=32, width=16, depth=2, num_heads=2)
        gpt2 = GPT2(config, key=jax.random.key(0))
        task = fg.Task(gpt2, loss=next_token_loss, forward=compute_logits)

    Args:
        model: the language model.
        batch: as for `next_token_loss`.
        ctx: gives the random keys of dropout.
    """
    rows = read_token_batch(batch)
    keys = ctx.keys("default", rows.tokens.shape[0])

    def run(tokens: Any, segments: Any, positions: Any, key: Any) -> Any:
        return model(tokens, segments, positions, key=key)

    return jax.vmap(run)(rows.tokens, rows.segments, rows.positions, keys)


def next_token_loss(
    logits: Float[Array, "batch time vocabulary"],
    batch: Any,
    mask: Bool[Array, " batch"] | None = None,
) -> fg.metrics.Mean:
    """Return the mean cross-entropy of the next tokens, for `fg.Task(loss=)`.

    It is a mean over the tokens that are predicted: those that the mask of the batch does not
    exclude, and that follow one of their own document. A batch without any counts for nothing, and
    the loss of a token outside of the vocabulary is NaN.

    Args:
        logits: of a language model.
        batch: tokens `(batch, time)`, as an array, as `(tokens,)` or `(tokens, mask)`; or by name,
            as the rows of `fulgurite_data` are: `tokens`, and with it `mask`, `segments` and
            `positions` or none of them.
        mask: `ctx.mask`, False for examples that are padding.

    Raises:
        ModelError: the batch has something else, which would have no effect, or rows of one token,
            after which there is nothing to predict; or the logits are not those of its tokens.
    """
    rows = read_token_batch(batch)
    if rows.tokens.shape[1] < 2:
        raise ModelError(
            f"next_token_loss: the tokens are {describe_node(rows.tokens)}: a row needs at least "
            "two, because each is predicted by those before it"
        )
    if logits.shape[:-1] != rows.tokens.shape:
        raise ModelError(
            f"next_token_loss: the logits are {describe_node(logits)}, and the tokens "
            f"{describe_node(rows.tokens)}: give the logits of all tokens of the batch"
        )
    labels = rows.tokens[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1].astype(jnp.float32), labels
    )
    # A negative label would be counted from the end of the vocabulary.
    losses = jnp.where(is_index(labels, logits.shape[-1]), losses, jnp.nan)
    counts = jnp.ones(labels.shape, bool) if rows.mask is None else rows.mask[:, 1:]
    if rows.segments is not None:
        # What follows must be of the same document; 0 is padding.
        counts &= rows.segments[:, 1:] == rows.segments[:, :-1]
        counts &= rows.segments[:, 1:] > 0
    if mask is not None:
        counts &= mask[:, None]
    return fg.metrics.Mean.from_values(losses, counts)


def read_token_batch(batch: Any) -> TokenBatch:
    """Return the rows of a batch by name.

    Raises:
        ModelError: the batch has something else, or arrays of other shapes.
    """
    if isinstance(batch, Mapping):
        unknown = sorted(map(str, batch.keys() - {*TokenBatch._fields}))
        if unknown or "tokens" not in batch:
            raise ModelError(
                f"a batch of tokens has the arrays {', '.join(map(str, batch))}; it may have "
                f"{', '.join(TokenBatch._fields)}. Write a loss for what else there is"
            )
        rows = TokenBatch(**batch)
    elif isinstance(batch, tuple | list):
        if len(batch) not in (1, 2):
            raise ModelError(
                f"a batch of tokens has {len(batch)} arrays; it is (tokens,) or (tokens, mask), or "
                f"has names: {', '.join(TokenBatch._fields)}"
            )
        rows = TokenBatch(*batch)
    else:
        rows = TokenBatch(batch)
    _check_rows(rows)
    return rows


def _check_rows(rows: TokenBatch) -> None:
    """Raise a ModelError unless the arrays of a batch are rows of tokens."""
    if not is_array_like(rows.tokens) or len(rows.tokens.shape) != 2:
        raise ModelError(
            f"the tokens of a batch are {describe_node(rows.tokens)}; they must be integers "
            "[batch, time]"
        )
    for name, array in rows._asdict().items():
        if array is None:
            continue
        is_mask = name == "mask"
        fits = is_array_like(array) and array.shape == rows.tokens.shape
        if not fits or not jnp.issubdtype(array.dtype, jnp.bool_ if is_mask else jnp.integer):
            kind = "bools, as mask != 0 makes them," if is_mask else "integers"
            raise ModelError(
                f"{name} of a batch of tokens are {describe_node(array)}; they must be {kind} "
                f"{list(rows.tokens.shape)}"
            )
