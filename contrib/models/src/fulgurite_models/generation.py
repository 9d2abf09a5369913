"""Tokens that a language model writes after a prompt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError, as_int, set_ints
from fulgurite.plugins import hide_constructor_frames
from jaxtyping import Array, Bool, Float, Int, Key

from fulgurite_models.language import LanguageModel, find_language_model, is_index


@hide_constructor_frames
@dataclass(frozen=True)
class Sampling:
    """How a token is chosen by its logits.

    The order is that of transformers: temperature, then `top_k`, then `top_p`.

    Example:
        from fulgurite_models import Sampling

        sampling = Sampling(temperature=0.8, top_k=50, top_p=0.95)

    Attributes:
        temperature: by which logits are divided; 0 takes the most probable token.
        top_k: how many of the most probable tokens are chosen among; None for all.
        top_p: the most probable tokens, until their probabilities add up to this, are chosen among;
            None for all.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        set_ints(self, "top_k")
        if not _is_number(self.temperature) or not 0 <= self.temperature < float("inf"):
            raise ConfigurationError(
                f"Sampling: temperature is {self.temperature!r}; it must be a finite number, at "
                "least 0"
            )
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ConfigurationError(
                f"Sampling: top_k is {self.top_k!r}; it must be a positive integer, or None for "
                "all tokens"
            )
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise ConfigurationError(
                f"Sampling: top_p is {self.top_p!r}; it must be a number above 0 and at most 1, or "
                "None for all tokens"
            )
        object.__setattr__(self, "temperature", float(self.temperature))
        if self.temperature == 0 and (self.top_k, self.top_p) != (None, None):
            raise ConfigurationError(
                "Sampling: top_k and top_p have no effect with temperature=0, which takes the most "
                "probable token: give temperature=1.0, or leave them out"
            )

    def filter_logits(self, logits: Float[Array, " vocabulary"]) -> Float[Array, " vocabulary"]:
        """Return the logits divided by the temperature, and -inf for tokens that are not chosen
        among; float32."""
        logits = logits.astype(jnp.float32) / self.temperature
        if self.top_k is not None and self.top_k < len(logits):
            smallest = jax.lax.top_k(logits, self.top_k)[0][-1]
            logits = jnp.where(logits < smallest, -jnp.inf, logits)
        if self.top_p is not None and self.top_p < 1:
            order = jnp.argsort(-logits)
            probabilities = jax.nn.softmax(logits[order])
            before = jnp.cumsum(probabilities) - probabilities
            is_chosen = jnp.zeros(len(logits), bool).at[order].set(before < self.top_p)
            # The sum before the first is 0, up to rounding.
            is_chosen = is_chosen.at[order[0]].set(True)
            logits = jnp.where(is_chosen, logits, -jnp.inf)
        return logits

    def choose(self, logits: Float[Array, " vocabulary"], key: Key[Array, ""]) -> Int[Array, ""]:
        """Return a token.

        Args:
            logits: of all tokens.
            key: a random key, which temperature 0 does not use.
        """
        if self.temperature == 0:
            return jnp.argmax(logits).astype(jnp.int32)
        return jax.random.categorical(key, self.filter_logits(logits)).astype(jnp.int32)


class Generated(NamedTuple):
    """What a model wrote.

    Attributes:
        tokens: int32 `(batch, max_new_tokens)`; what follows an end token is 0.
        lengths: int32 `(batch,)`, how many tokens of each row count, its end token among them.
    """

    tokens: Int[Array, "batch new"]
    lengths: Int[Array, " batch"]

    def as_lists(self) -> list[list[int]]:
        """Return the tokens of each row that count."""
        rows = zip(np.asarray(self.tokens), np.asarray(self.lengths), strict=True)
        return [row[:length].tolist() for row, length in rows]


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]] | np.ndarray,
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    end: int | Sequence[int] = (),
    key: Key[Array, ""] | None = None,
) -> Generated:
    """Return the tokens that a model writes after prompts, with a cache, as one compiled program.

    The program is compiled for each number of prompts, length of the longest one and
    `max_new_tokens`. Prompts of other lengths are padded on their left, which changes none of their
    tokens. Rows do not depend on each other, and it ends when all rows have.

    Args:
        model: the model; it writes in inference mode.
        prompts: the tokens of each, at least one.
        max_new_tokens: how many are written at most.
        sampling: how a token is chosen; the most probable one by default.
        end: tokens with which a row ends.
        key: a random key, which a temperature needs.

    Raises:
        ConfigurationError: a prompt is empty or has something that the model cannot read, or an
            argument is missing or invalid.

    Example:
        from fulgurite_models import GPT2, GPT2Config, Sampling, generate

        config = GPT2Config(vocab_size=64, max_length=32, width=16, depth=2, num_heads=2)
        gpt2 = GPT2(config, key=jax.random.key(0))
        sampling = Sampling(temperature=0.8, top_k=10)
        generated = generate(gpt2, [[1, 2, 3], [4]], 8, sampling=sampling, key=jax.random.key(1))
        rows = generated.as_lists()
    """
    if not isinstance(model, LanguageModel):
        raise ConfigurationError(
            f"generate: {type(model).__name__} is not a language model of fulgurite_models: give "
            "the model itself, such as task.model"
        )
    sampling = sampling or Sampling()
    max_new_tokens = _read_new_tokens(max_new_tokens, "generate")
    if key is None:
        if sampling.temperature > 0:
            raise ConfigurationError(
                "generate: a temperature above 0 draws tokens at random: give key=jax.random.key(0)"
            )
        key = jax.random.key(0)
    rows = _read_prompts(prompts, model)
    tokens, padding = map(jnp.asarray, _pad_left(rows))
    _check_length(model, tokens.shape[1] + max_new_tokens)
    ends = _read_ends(end, model)
    model = eqx.nn.inference_mode(model)
    return _generate(model, tokens, padding, key, max_new_tokens, sampling, ends)


def make_generate_function(
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    end: int | Sequence[int] = (),
) -> Callable[[Any, Mapping[str, Array]], dict[str, Array]]:
    """Return `generate` as a function of arrays alone, for `fulgurite_export.Function`.

    It is called as `call(module, batch)`, where the module is or has a language model. The batch
    holds `tokens`, int32 `(batch, length)`, prompts that are padded on their left; `padding`, int32
    `(batch,)`, how many tokens of each row are padding; and, where a temperature draws tokens,
    `key`, uint32 `(2,)`, the `jax.random.key_data` of a key. The result is a dictionary with
    `tokens` and `lengths`, the same that `generate` gives for these prompts and this key.

    A program cannot raise an error: a row has the length -1 if it has a token that the model does
    not know, or no token at all.

    Args:
        max_new_tokens: as of `generate`.
        sampling: likewise.
        end: likewise.
    """
    sampling = sampling or Sampling()
    max_new_tokens = _read_new_tokens(max_new_tokens, "make_generate_function")

    def generate_padded(module: Any, batch: Mapping[str, Array]) -> dict[str, Array]:
        model = eqx.nn.inference_mode(find_language_model(module, "make_generate_function"))
        ends = _read_ends(end, model)
        key = _read_key(batch, sampling)
        tokens, padding = batch["tokens"], batch["padding"]
        length = tokens.shape[1]
        _check_length(model, length + max_new_tokens)
        is_token = jnp.arange(length) >= padding[:, None]
        is_known = is_index(tokens, model.embedding.weight.shape[0])
        is_valid = (padding >= 0) & (padding < length) & jnp.all(is_known | ~is_token, axis=1)
        prompts = jnp.where(is_token & is_known, tokens, 0).astype(jnp.int32)
        padding = jnp.where(is_valid, padding, 0).astype(jnp.int32)
        new = _generate(model, prompts, padding, key, max_new_tokens, sampling, ends)
        return {
            "tokens": jnp.where(is_valid[:, None], new.tokens, 0),
            "lengths": jnp.where(is_valid, new.lengths, -1),
        }

    return generate_padded


class _State(NamedTuple):
    """Where the generation is.

    Attributes:
        step: how many tokens each row has.
        tokens: so far, `(batch, max_new_tokens)`.
        lengths: how many of them count.
        has_ended: which rows have.
        logits: of the next token.
        cache: of the tokens so far.
    """

    step: Int[Array, ""]
    tokens: Int[Array, "batch new"]
    lengths: Int[Array, " batch"]
    has_ended: Bool[Array, " batch"]
    logits: Float[Array, "batch vocabulary"]
    cache: Any


@eqx.filter_jit
def _generate(
    model: LanguageModel,
    prompts: Int[Array, "batch time"],
    padding: Int[Array, " batch"],
    key: Key[Array, ""],
    max_new_tokens: int,
    sampling: Sampling,
    ends: tuple[int, ...],
) -> Generated:
    """Return what `generate` does.

    Args:
        model: in inference mode.
        prompts: padded on their left.
        padding: how many slots at the start of each row are padding.
        key: a random key.
        max_new_tokens: how many are written at most.
        sampling: how a token is chosen.
        ends: tokens with which a row ends.
    """
    batch, time = prompts.shape
    row_keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch))
    decode = jax.vmap(model.decode, in_axes=(0, 0, None, 0))

    def choose(logits: Any, step: Any) -> Any:
        keys = jax.vmap(lambda row_key: jax.random.fold_in(row_key, step))(row_keys)
        return jax.vmap(sampling.choose)(logits, keys)

    def is_running(state: _State) -> Any:
        return (state.step < max_new_tokens) & ~jnp.all(state.has_ended)

    def write(state: _State) -> _State:
        new = jnp.where(state.has_ended, 0, choose(state.logits, state.step))
        tokens = jax.lax.dynamic_update_index_in_dim(state.tokens, new, state.step, axis=1)
        lengths = state.lengths + ~state.has_ended
        has_ended = state.has_ended | jnp.isin(new, jnp.array(ends, jnp.int32))
        logits, cache = decode(new[:, None], state.cache, time + state.step, padding)
        return _State(state.step + 1, tokens, lengths, has_ended, logits[:, -1], cache)

    cache = jax.vmap(lambda _: model.make_cache(time + max_new_tokens))(padding)
    logits, cache = decode(prompts, cache, jnp.int32(0), padding)
    start = _State(
        jnp.int32(0),
        jnp.zeros((batch, max_new_tokens), jnp.int32),
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(batch, bool),
        logits[:, -1],
        cache,
    )
    state = jax.lax.while_loop(is_running, write, start)
    return Generated(state.tokens, state.lengths)


def _read_key(batch: Mapping[str, Array], sampling: Sampling) -> Key[Array, ""]:
    """Return the key of a batch, or any where none is used; raise `ConfigurationError` for a batch
    that lacks an array."""
    is_random = sampling.temperature > 0
    needed = ["tokens", "padding", "key"] if is_random else ["tokens", "padding"]
    missing = [name for name in needed if name not in batch]
    if missing:
        raise ConfigurationError(
            f"make_generate_function: the batch has no {missing[0]!r}; it needs "
            f"{', '.join(needed)}: give an example of each as inputs"
        )
    return jax.random.wrap_key_data(batch["key"]) if is_random else jax.random.key(0)


def _read_new_tokens(max_new_tokens: Any, user: str) -> int:
    """Return how many tokens to write; raise `ConfigurationError` for what is not a number."""
    number = as_int(max_new_tokens)
    if type(number) is not int or number < 1:
        raise ConfigurationError(
            f"{user}: max_new_tokens is {max_new_tokens!r}; it must be a positive integer"
        )
    return number


def _read_prompts(prompts: Any, model: LanguageModel) -> list[np.ndarray]:
    """Return prompts as arrays; raise `ConfigurationError` for what the model cannot read."""
    if isinstance(prompts, str) or not hasattr(prompts, "__iter__"):
        raise ConfigurationError(
            f"generate: prompts is {prompts!r:.100}; give a list of lists of tokens, such as "
            "[tokenizer.encode(text).ids]"
        )
    rows = [_read_prompt(prompt, number) for number, prompt in enumerate(prompts)]
    if not rows:
        raise ConfigurationError("generate: there is no prompt; give a list of lists of tokens")
    for number, row in enumerate(rows):
        _check_known(row, model, f"prompt {number}")
    return rows


def _read_prompt(prompt: Any, number: int) -> np.ndarray:
    """Return a prompt as an array; raise `ConfigurationError` unless it is a list of tokens.

    Args:
        prompt: as it was given.
        number: of the prompt, for messages.
    """
    expected = "it must be a list of at least one token, each an integer"
    try:
        row = np.asarray(prompt)
    except ValueError as error:
        raise ConfigurationError(
            f"generate: prompt {number} is a list of lists of unequal length; {expected}"
        ) from error
    if row.shape == (0,):
        raise ConfigurationError(f"generate: prompt {number} is empty; {expected}")
    if row.ndim != 1 or not np.issubdtype(row.dtype, np.integer):
        hint = {0: ": give [prompt]", 2: ": give its rows as prompts"}.get(row.ndim, "")
        hint = ": encode it by a tokenizer" if row.dtype.kind in "US" else hint
        kind = "a string" if row.dtype.kind in "US" else f"{row.dtype}{list(row.shape)}"
        raise ConfigurationError(f"generate: prompt {number} is {kind}; {expected}{hint}")
    return row


def _read_ends(end: Any, model: LanguageModel) -> tuple[int, ...]:
    """Return end tokens; raise `ConfigurationError` for what the model does not know."""
    tokens = np.array(sorted(end) if isinstance(end, set | frozenset) else end, ndmin=1)
    if tokens.size and (tokens.ndim > 1 or not np.issubdtype(tokens.dtype, np.integer)):
        raise ConfigurationError(
            f"generate: end is {end!r:.100}; it must be a token, an integer, or a list of such"
        )
    _check_known(tokens, model, "end")
    return tuple(map(int, tokens))


def _check_known(tokens: np.ndarray, model: LanguageModel, label: str) -> None:
    """Raise a ConfigurationError for tokens that the model does not have.

    Args:
        tokens: integers.
        model: the model.
        label: whose tokens they are, for the message.
    """
    vocabulary = model.embedding.weight.shape[0]
    unknown = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if unknown.size:
        raise ConfigurationError(
            f"generate: {label} has the token {unknown[0]}, and the tokens of "
            f"{type(model).__name__} are 0 to {vocabulary - 1}: is the tokenizer that of the model?"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _pad_left(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return prompts as one array, and how many slots at the start of each row are padding."""
    longest = max(map(len, rows))
    padding = np.array([longest - len(row) for row in rows], np.int32)
    tokens = [np.pad(row, (missing, 0)) for row, missing in zip(rows, padding, strict=True)]
    return np.stack(tokens).astype(np.int32), padding


def _check_length(model: LanguageModel, length: int) -> None:
    maximum = model.get_max_length()
    if maximum is not None and length > maximum:
        raise ConfigurationError(
            f"generate: {type(model).__name__} has {maximum} positions, and the longest prompt "
            f"with max_new_tokens has {length}: give fewer"
        )
