"""What language models have in common: their pass over tokens, with and without a cache."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from fulgurite.errors import ConfigurationError, ModelError
from fulgurite.plugins import describe_node, is_array_like
from jaxtyping import Array, Bool, Float, Int, Integer, Key

from fulgurite_models.attention import Cache, scan_blocks


class LanguageModel(eqx.Module):
    """A model that predicts the token after each token.

    Its blocks are one stack, `blocks`, whose arrays begin with the axis of the depth. It is called
    with the tokens of one example, as Equinox' layers are; `jax.vmap` makes it one of batches.
    """

    embedding: eqx.AbstractVar[eqx.nn.Embedding]
    blocks: eqx.AbstractVar[Any]
    norm: eqx.AbstractVar[Any]
    head: eqx.AbstractVar[eqx.nn.Linear | None]
    config: eqx.AbstractVar[Any]

    def embed(
        self, tokens: Integer[Array, " time"], positions: Integer[Array, " time"], key: Any
    ) -> Float[Array, "time width"]:
        """Return what the first block gets.

        Args:
            tokens: the tokens.
            positions: of the tokens.
            key: for dropout, or None.
        """
        return look_up(self.embedding, tokens)

    def get_max_length(self) -> int | None:
        """Return how many positions the model has; None for any number."""
        return None

    def make_cache(self, length: int) -> Cache:
        """Return an empty cache for one example.

        Args:
            length: how many tokens it can hold.
        """
        attention = self.blocks.attention
        depth, size, _ = attention.key.weight.shape
        shape = (depth, length, attention.num_kv_heads, size // attention.num_kv_heads)
        dtype = attention.key.weight.dtype
        return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def __call__(
        self,
        tokens: Integer[Array, " time"],
        segments: Integer[Array, " time"] | None = None,
        positions: Integer[Array, " time"] | None = None,
        *,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "time vocabulary"]:
        """Return the logits of the token after each token.

        Args:
            tokens: the tokens of one example.
            segments: which document each token is of, in a row of several: a token sees its own
                document alone. None for one document.
            positions: of the tokens; by default they count from 0.
            key: for dropout.

        Raises:
            ModelError: the tokens are not those of one example, or there are more of them than the
                model has positions.
        """
        self._check_tokens(tokens, segments, positions)
        time = tokens.shape[0]
        mask = jnp.tril(jnp.ones((time, time), bool))
        if segments is not None:
            mask = mask & (segments[:, None] == segments[None])
        if positions is None:
            positions = jnp.arange(time)
        logits, _ = self._run(tokens, positions, mask, None, 0, key)
        return logits

    def decode(
        self,
        tokens: Integer[Array, " time"],
        cache: Cache,
        start: Int[Array, ""] | int = 0,
        padding: Int[Array, ""] | int = 0,
    ) -> tuple[Float[Array, "time vocabulary"], Cache]:
        """Return the logits of the token after each token, and the cache with these tokens; the
        logits are NaN where the cache has too few slots.

        Args:
            tokens: those that follow the tokens in the cache.
            cache: of the tokens so far.
            start: how many tokens the cache holds.
            padding: how many of the first slots of the cache hold no token, as of a prompt that is
                shorter than others and padded on its left.
        """
        slots = jnp.arange(cache.keys.shape[1])
        places = start + jnp.arange(tokens.shape[0])
        mask = (slots[None] <= places[:, None]) & (slots >= padding)
        positions = jnp.maximum(places - padding, 0)
        logits, new_cache = self._run(tokens, positions, mask, cache, start, None)
        assert new_cache is not None
        # JAX writes the last slots instead, over tokens that are there.
        fits = start + tokens.shape[0] <= slots.size
        return jnp.where(fits, logits, jnp.nan), new_cache

    def make_rotation(self, positions: Integer[Array, " time"]) -> Any:
        """Return how positions turn queries and keys; None for not at all."""
        return None

    def _run(
        self,
        tokens: Integer[Array, " time"],
        positions: Integer[Array, " time"],
        mask: Bool[Array, "time slots"],
        cache: Cache | None,
        start: Any,
        key: Key[Array, ""] | None,
    ) -> tuple[Float[Array, "time vocabulary"], Cache | None]:
        embed_key, block_key = (None, None) if key is None else jax.random.split(key)
        rotate = self.make_rotation(positions)

        def apply(block: Any, x: Any, block_cache: Any, key: Any) -> tuple[Any, Any]:
            return block(x, mask, rotate=rotate, cache=block_cache, start=start, key=key)

        x = self.embed(tokens, positions, embed_key)
        x, cache = scan_blocks(self.blocks, apply, x, cache, block_key)
        x = jax.vmap(self.norm)(x)
        if self.head is None:
            return x @ self.embedding.weight.T, cache
        return jax.vmap(self.head)(x), cache

    def _check_tokens(self, tokens: Any, segments: Any, positions: Any) -> None:
        """Raise a `ModelError` unless the arguments of `__call__` are the tokens of one example."""
        name = type(self).__name__
        num_axes = len(tokens.shape) if is_array_like(tokens) else None
        if num_axes != 1 or not tokens.shape[0]:
            hint = ": jax.vmap(model)(tokens) is for a batch" if num_axes == 2 else ""
            raise ModelError(
                f"{name} takes the tokens of one example, an array (time,) of at least one, and "
                f"gets {describe_node(tokens)}{hint}"
            )
        arrays = {"tokens": tokens, "segments": segments, "positions": positions}
        for argument, array in arrays.items():
            if array is None:
                continue
            if array.shape != tokens.shape or not jnp.issubdtype(array.dtype, jnp.integer):
                raise ModelError(
                    f"{name}: {argument} are {describe_node(array)}; they must be integers "
                    f"{list(tokens.shape)}, one for each token"
                )
        maximum = self.get_max_length()
        length = tokens.shape[0]
        if maximum is not None and length > maximum:
            raise ModelError(f"{name} has {maximum} positions, and gets {length} tokens")


def find_language_model(module: Any, user: str) -> LanguageModel:
    """Return the language model in a module.

    Args:
        module: the model itself, or a module that has it, such as an `fg.Task`.
        user: what needs it, for errors.

    Raises:
        ConfigurationError: there is none, or there are several.
    """
    nodes = jax.tree.leaves(module, is_leaf=_is_language_model)
    models = [node for node in nodes if _is_language_model(node)]
    if len(models) != 1:
        raise ConfigurationError(
            f"{user}: {type(module).__name__} has {len(models)} language models of "
            "fulgurite_models in it, and one is meant"
        )
    return models[0]


def _is_language_model(node: Any) -> bool:
    return isinstance(node, LanguageModel)


def look_up(
    embedding: eqx.nn.Embedding, tokens: Integer[Array, " time"]
) -> Float[Array, "time width"]:
    """Return the vectors of tokens, and NaN for those outside of the vocabulary.

    An index of JAX that is too large means the last vector, and a negative one counts from the end:
    a tokenizer of another model would be trained on, and -100 in the place of padding.

    Args:
        embedding: of the vocabulary.
        tokens: the tokens.
    """
    is_known = is_index(tokens, embedding.weight.shape[0])
    return jnp.where(is_known[:, None], jax.vmap(embedding)(tokens), jnp.nan)


def is_index(indices: Integer[Array, "*shape"], size: int) -> Bool[Array, "*shape"]:
    """Return which integers are valid indices.

    JAX compares with a number in the dtype of the array, in which 256 is 0 for bytes.

    Args:
        indices: the integers, of any dtype.
        size: of the axis that is indexed.
    """
    last = min(size - 1, jnp.iinfo(indices.dtype).max)
    return (indices >= 0) & (indices <= last)
