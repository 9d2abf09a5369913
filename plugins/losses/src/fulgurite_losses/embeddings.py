"""Losses of embeddings: how near vectors are that belong together, and how far all others.

Vectors are along the last axis. All gradients are finite, also where vectors coincide or are zero.
"""

from typing import Literal, Unpack, get_args

import jax
import jax.numpy as jnp
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import Values, to_float
from jaxtyping import Array, Bool, Float

from fulgurite_losses.examples import Examples, as_same_shape, check_positive
from fulgurite_losses.signature import LossOptions, loss

Mining = Literal["all", "hard", "semi_hard"]
"""Which triplets of a batch count; see `triplet_loss`."""


@loss
def negative_cosine(
    preds: Values,
    targets: Values,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return minus the cosine of the angle between two vectors; 0 if either is zero.

    Args:
        preds: `(..., features)`.
        targets: of the same shape.

    Example:
        from fulgurite_losses import negative_cosine

        negative_cosine(logits, jax.nn.one_hot(labels, 3), mask=mask)
    """
    preds, targets = _as_vectors(preds, targets, "negative_cosine")
    examples = Examples(preds.shape[:-1], options)
    cosine = jnp.sum(_normalize(examples.hide(preds)) * _normalize(examples.hide(targets)), axis=-1)
    return examples.reduce(-cosine)


@loss
def euclidean_distance(
    preds: Values,
    targets: Values,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return the length of p - t. Its gradient is 0 where the two are equal.

    Args:
        preds: `(..., features)`.
        targets: of the same shape.
    """
    preds, targets = _as_vectors(preds, targets, "euclidean_distance")
    examples = Examples(preds.shape[:-1], options)
    return examples.reduce(_get_length(examples.hide(preds) - examples.hide(targets)))


@loss
def contrastive_loss(
    first: Values,
    second: Values,
    is_same: Values,
    *,
    margin: float = 1.0,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return d² for two vectors at distance d that belong together, and max(0, margin - d)² for two
    that do not.

    Source: Hadsell, Chopra and LeCun, Dimensionality Reduction by Learning an Invariant Mapping
    (2006), without its factor 1/2.

    Args:
        first: `(..., features)`.
        second: of the same shape.
        is_same: `(...)`, booleans or 0 and 1: whether the two belong together.
        margin: the distance beyond which two that do not no longer repel each other.
    """
    check_positive(margin, "margin", "contrastive_loss")
    first, second = _as_vectors(first, second, "contrastive_loss")
    same = to_float(is_same)
    if same.shape != first.shape[:-1]:
        raise ConfigurationError(
            f"contrastive_loss of vectors {list(first.shape)} with is_same {list(same.shape)}; "
            f"it has one value for each pair, {list(first.shape[:-1])}"
        )
    examples = Examples(same.shape, options)
    same = examples.hide(same)
    distance = _get_length(examples.hide(first) - examples.hide(second))
    values = same * distance**2 + (1 - same) * jax.nn.relu(margin - distance) ** 2
    return examples.reduce(values)


@loss
def info_nce(
    queries: Values,
    keys: Values,
    *,
    temperature: float = 0.1,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return how unlikely each query finds its key among all keys of the batch: the softmax
    cross-entropy of cosines / temperature, one value for each query.

    Mask and weight are `(batch,)`, of queries. A masked example is neither a query nor a key that
    others are compared with. For the symmetric
    loss of CLIP take the mean of `info_nce(a, b)` and `info_nce(b, a)`.

    Source: van den Oord, Li and Vinyals, Representation Learning with Contrastive Predictive Coding
    (2018).

    Args:
        queries: `(batch, features)`.
        keys: of the same shape; row i belongs to query i.
        temperature: what cosines are divided by.

    Example:
        from fulgurite_losses import info_nce

        info_nce(logits, logits + 0.1, temperature=0.2, mask=mask)
    """
    check_positive(temperature, "temperature", "info_nce")
    queries, keys = _as_vectors(queries, keys, "info_nce")
    if queries.ndim != 2:
        raise ConfigurationError(
            f"info_nce of vectors {list(queries.shape)}; give one for each example, "
            "(batch, features)"
        )
    examples = Examples(queries.shape[:1], options)
    cosines = _normalize(examples.hide(queries)) @ _normalize(examples.hide(keys)).T
    # -inf in a row without any key would be NaN; such a row is masked itself.
    logits = jnp.where(examples.present, cosines / temperature, jnp.finfo(cosines.dtype).min)
    values = -jnp.diagonal(jax.nn.log_softmax(logits))
    return examples.reduce(values, are_independent=False)


@loss
def triplet_margin_loss(
    anchors: Values,
    positives: Values,
    negatives: Values,
    *,
    margin: float = 1.0,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return max(0, |a - p| - |a - n| + margin) for triplets that were chosen before.

    Source: Schroff, Kalenichenko and Philbin, FaceNet (2015), with distances in the place of their
    squares.

    Args:
        anchors: `(..., features)`.
        positives: of the same shape, what is to be near.
        negatives: of the same shape, what is to be farther by the margin.
        margin: by how much.
    """
    check_positive(margin, "margin", "triplet_margin_loss")
    anchors, positives = _as_vectors(anchors, positives, "triplet_margin_loss")
    anchors, negatives = _as_vectors(anchors, negatives, "triplet_margin_loss")
    examples = Examples(anchors.shape[:-1], options)
    anchors = examples.hide(anchors)
    near = _get_length(anchors - examples.hide(positives))
    far = _get_length(anchors - examples.hide(negatives))
    return examples.reduce(jax.nn.relu(near - far + margin))


@loss
def triplet_loss(
    embeddings: Values,
    labels: Values,
    *,
    mining: Mining = "semi_hard",
    margin: float = 1.0,
    **options: Unpack[LossOptions],
) -> Float[Array, "..."]:
    """Return max(0, |a - p| - |a - n| + margin) over triplets within a batch: an anchor, a positive
    example of the same label, and a negative one of another label.

    `all` takes every triplet, `hard` the farthest positive and the nearest negative of each anchor,
    and `semi_hard` for each anchor and positive the nearest negative that is farther than the
    positive, or if there is none, the farthest negative. There is one value for each anchor, the
    mean over its positives (and negatives). An anchor without a positive or without a negative
    counts as masked. Mask and weight are `(batch,)`: a masked example is in no triplet, and the
    weight says how much each anchor counts.

    Source: Schroff, Kalenichenko and Philbin, FaceNet (2015); Hermans, Beyer and Leibe, In Defense
    of the Triplet Loss (2017).

    Args:
        embeddings: `(batch, features)`.
        labels: `(batch,)`, integers or booleans.
        mining: "all", "hard" or "semi_hard".
        margin: by how much a negative example is to be farther than a positive one.
    """
    check_positive(margin, "margin", "triplet_loss")
    if mining not in get_args(Mining):
        raise ConfigurationError(
            f"triplet_loss with mining={mining!r}; choose 'all', 'hard' or 'semi_hard'"
        )
    embeddings = to_float(embeddings)
    labels = jnp.asarray(labels)
    if embeddings.ndim != 2 or labels.shape != embeddings.shape[:1]:
        raise ConfigurationError(
            f"triplet_loss of embeddings {list(embeddings.shape)} with labels "
            f"{list(labels.shape)}; they are (batch, features) and (batch,)"
        )
    present = Examples(labels.shape, {"mask": options.get("mask")})
    embeddings = present.hide(embeddings)
    distance = _get_length(embeddings[:, None] - embeddings[None])
    is_pair = present.present[:, None] & present.present[None]
    is_same = labels[:, None] == labels[None]
    is_positive = is_pair & is_same & ~jnp.eye(len(labels), dtype=bool)
    is_negative = is_pair & ~is_same
    values = jnp.zeros(0, distance.dtype)
    if len(labels) > 0:
        values = _MINERS[mining](distance, is_positive, is_negative, margin)
    is_anchor = jnp.any(is_positive, axis=1) & jnp.any(is_negative, axis=1)
    examples = Examples(labels.shape, {**options, "mask": is_anchor})
    return examples.reduce(values, are_independent=False)


def _mine_all(
    distance: Float[Array, "n n"],
    is_positive: Bool[Array, "n n"],
    is_negative: Bool[Array, "n n"],
    margin: float,
) -> Float[Array, " n"]:
    """Return the mean over all triplets of each anchor."""
    losses = jax.nn.relu(distance[:, :, None] - distance[:, None, :] + margin)
    is_triplet = is_positive[:, :, None] & is_negative[:, None, :]
    return _take_mean(losses, is_triplet, axis=(1, 2))


def _mine_hard(
    distance: Float[Array, "n n"],
    is_positive: Bool[Array, "n n"],
    is_negative: Bool[Array, "n n"],
    margin: float,
) -> Float[Array, " n"]:
    """Return the loss of the farthest positive and the nearest negative of each anchor."""
    farthest = jnp.max(distance, axis=1, where=is_positive, initial=0)
    bound = _get_bound(distance)
    nearest = jnp.min(jnp.where(is_negative, distance, bound), axis=1)
    return jax.nn.relu(farthest - nearest + margin)


def _mine_semi_hard(
    distance: Float[Array, "n n"],
    is_positive: Bool[Array, "n n"],
    is_negative: Bool[Array, "n n"],
    margin: float,
) -> Float[Array, " n"]:
    """Return the mean over the positives of each anchor, each with its semi-hard negative."""
    # Axes: anchor, positive, negative.
    is_farther = is_negative[:, None, :] & (distance[:, None, :] > distance[:, :, None])
    bound = _get_bound(distance)
    nearest_farther = jnp.min(jnp.where(is_farther, distance[:, None, :], bound), axis=2)
    farthest = jnp.max(distance, axis=1, where=is_negative, initial=0)[:, None]
    negative = jnp.where(jnp.any(is_farther, axis=2), nearest_farther, farthest)
    return _take_mean(jax.nn.relu(distance - negative + margin), is_positive, axis=(1,))


_MINERS = {"all": _mine_all, "hard": _mine_hard, "semi_hard": _mine_semi_hard}


def _get_bound(distance: Float[Array, "n n"]) -> Float[Array, ""]:
    """Return a number above all distances, without a gradient.

    It is finite, or an anchor that has no negative would have NaN as its gradient; and it is above,
    or the minimum would share its gradient between the two.
    """
    return 2 * jax.lax.stop_gradient(jnp.max(distance)) + 1


def _take_mean(
    values: Float[Array, "..."], present: Bool[Array, "..."], axis: tuple[int, ...]
) -> Float[Array, " n"]:
    """Return the mean of what is present along axes; 0 where nothing is."""
    count = jnp.sum(present, axis=axis, dtype=values.dtype)
    return jnp.sum(jnp.where(present, values, 0), axis=axis) / jnp.maximum(count, 1)


def _as_vectors(first: Values, second: Values, loss_name: str) -> tuple[Array, Array]:
    """Return two arrays of vectors of the same shape as floats."""
    first, second = as_same_shape(first, second, loss_name)
    if first.ndim == 0:
        raise ConfigurationError(f"{loss_name} of a single number; vectors are along the last axis")
    return first, second


def _get_length(vectors: Float[Array, "... features"]) -> Float[Array, "..."]:
    """Return the Euclidean norm along the last axis, with the gradient 0 at a zero vector."""
    square = jnp.sum(vectors**2, axis=-1)
    is_zero = square == 0
    # The root of 0 has an infinite gradient, which selecting afterwards would turn into NaN.
    return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, square)))


def _normalize(vectors: Float[Array, "... features"]) -> Float[Array, "... features"]:
    """Return vectors of length 1 along the last axis; a zero vector stays zero."""
    # A common factor changes no direction, so it needs no gradient. Without it squares of large or
    # small numbers leave the range of floats.
    size = jnp.max(jnp.abs(jax.lax.stop_gradient(vectors)), axis=-1, keepdims=True)
    scaled = vectors / jnp.where(size < jnp.finfo(size.dtype).tiny, 1, size)
    length = _get_length(scaled)[..., None]
    return scaled / jnp.where(length == 0, 1, length)
