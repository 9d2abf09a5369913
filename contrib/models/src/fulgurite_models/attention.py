"""What the models are made of: attention, rotations of positions, stacks of equal blocks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError
from jaxtyping import Array, Bool, Float, Int, Key

Rotate = Callable[[Float[Array, "time heads size"]], Float[Array, "time heads size"]]


class Cache(NamedTuple):
    """The keys and values of the tokens so far, of all layers.

    Attributes:
        keys: `(depth, length, kv_heads, head_size)`.
        values: of the same shape.
    """

    keys: Array
    values: Array


@dataclass(frozen=True)
class Rope:
    """How positions turn queries and keys.

    Source: Su et al. 2021, arXiv:2104.09864. Halves of a head are turned against each other, not
    its even and odd numbers: the weights of Hugging Face are ordered so.

    Attributes:
        theta: the base of the wave lengths.
        kind: `default`; `linear`, which divides positions by `factor`; or `llama3`, which does so
            for long waves alone.
        factor: of `linear` and `llama3`.
        low: below `length / low`, and `high`: above which `llama3` leaves waves as they are.
        high: see `low`.
        length: for which the model was trained at first, of `llama3`.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    length: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("default", "linear", "llama3"):
            raise ConfigurationError(
                f"the rotation of positions {self.kind!r} is not built; there are 'default', "
                "'linear' and 'llama3'"
            )
        if not self.low < self.high:
            raise ConfigurationError(
                f"the rotation of positions is between low={self.low} and high={self.high}: low "
                "must be below high"
            )

    def make_frequencies(self, size: int) -> np.ndarray:
        """Return the angles of one position, float32 `(size / 2,)`."""
        frequencies = 1.0 / self.theta ** (np.arange(0, size, 2, dtype=np.float32) / size)
        if self.kind == "default":
            return frequencies
        if self.kind == "linear":
            return frequencies / np.float32(self.factor)
        waves = 2 * math.pi / frequencies
        smooth = (self.length / waves - self.low) / (self.high - self.low)
        smooth = np.clip(smooth, 0.0, 1.0)
        return ((1 - smooth) * frequencies / self.factor + smooth * frequencies).astype(np.float32)

    def make_rotation(self, positions: Int[Array, " time"], size: int) -> Rotate:
        """Return the function that turns queries or keys.

        Args:
            positions: of the tokens.
            size: of a head.
        """
        angles = positions[:, None].astype(jnp.float32) * self.make_frequencies(size)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]

        def rotate(heads: Float[Array, "time heads size"]) -> Float[Array, "time heads size"]:
            first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
            turned = [first * cos - second * sin, second * cos + first * sin]
            return jnp.concatenate(turned, axis=-1).astype(heads.dtype)

        return rotate


class Attention(eqx.Module):
    """Attention of several heads, of which groups may share keys and values.

    Attributes:
        query: makes the queries of all heads.
        key: makes the keys.
        value: makes the values.
        output: of all heads together.
        query_norm: of the queries of each head, or None.
        key_norm: of the keys of each head, or None.
        dropout: of the weights.
        num_heads: of queries.
        num_kv_heads: of keys and values.
    """

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    query_norm: eqx.nn.RMSNorm | None
    key_norm: eqx.nn.RMSNorm | None
    dropout: eqx.nn.Dropout
    num_heads: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        use_bias: bool = True,
        use_output_bias: bool = True,
        norm_eps: float | None = None,
        dropout: float = 0.0,
        key: Key[Array, ""],
    ) -> None:
        """Make the layers.

        Args:
            width: of the inputs.
            num_heads: of queries.
            num_kv_heads: of keys and values; as many by default.
            head_size: of a head; `width / num_heads` by default.
            use_bias: of queries, keys and values.
            use_output_bias: of the output.
            norm_eps: of the norms of queries and keys; None for no norms.
            dropout: of the weights.
            key: a random key.
        """
        num_kv_heads = num_kv_heads or num_heads
        head_size = head_size or width // num_heads
        keys = jax.random.split(key, 4)
        size, kv_size = num_heads * head_size, num_kv_heads * head_size
        self.query = eqx.nn.Linear(width, size, use_bias=use_bias, key=keys[0])
        self.key = eqx.nn.Linear(width, kv_size, use_bias=use_bias, key=keys[1])
        self.value = eqx.nn.Linear(width, kv_size, use_bias=use_bias, key=keys[2])
        self.output = eqx.nn.Linear(size, width, use_bias=use_output_bias, key=keys[3])
        self.query_norm = None
        self.key_norm = None
        if norm_eps is not None:
            self.query_norm = eqx.nn.RMSNorm(head_size, eps=norm_eps, use_bias=False)
            self.key_norm = eqx.nn.RMSNorm(head_size, eps=norm_eps, use_bias=False)
        self.dropout = eqx.nn.Dropout(dropout)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads

    def __call__(
        self,
        x: Float[Array, "time width"],
        mask: Bool[Array, "time slots"] | None,
        *,
        rotate: Rotate | None = None,
        cache: Cache | None = None,
        start: Int[Array, ""] | int = 0,
        key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "time width"], Cache | None]:
        """Return what is added to `x`, and the cache with these tokens.

        Args:
            x: the inputs.
            mask: where a token may look, of the slots of the cache, or else of the tokens; None for
                everywhere.
            rotate: turns queries and keys.
            cache: of this layer alone, without the axis of the depth; it is written from `start`.
            start: the slot of the first token.
            key: for dropout.
        """
        keys = [None] * 5 if key is None else list(jax.random.split(key, 5))
        queries = _split_heads(project(self.query, x, keys[0]), self.num_heads, self.query_norm)
        new_keys = _split_heads(project(self.key, x, keys[1]), self.num_kv_heads, self.key_norm)
        new_values = _split_heads(project(self.value, x, keys[2]), self.num_kv_heads, None)
        if rotate is not None:
            queries, new_keys = rotate(queries), rotate(new_keys)
        if cache is not None:
            cache = Cache(
                _write(cache.keys, new_keys, start), _write(cache.values, new_values, start)
            )
            new_keys, new_values = cache.keys, cache.values
        heads = _attend(queries, new_keys, new_values, mask, self.dropout, keys[3])
        return project(self.output, heads.reshape(x.shape[0], -1), keys[4]), cache


class MLP(eqx.Module):
    """Two linear layers, or, of SwiGLU, three: `down(activation(gate(x)) * up(x))`.

    Attributes:
        up: into the hidden width.
        down: out of it.
        gate: of SwiGLU, or None.
        activation: between them.
    """

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    gate: eqx.nn.Linear | None
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(
        self,
        width: int,
        hidden_width: int,
        activation: Callable[[Array], Array],
        *,
        is_gated: bool = False,
        use_bias: bool = True,
        key: Key[Array, ""],
    ) -> None:
        """Make the layers.

        Args:
            width: of inputs and outputs.
            hidden_width: between the layers.
            activation: a function of an array.
            is_gated: whether there is a gate.
            use_bias: of all layers.
            key: a random key.
        """
        keys = jax.random.split(key, 3)
        self.up = eqx.nn.Linear(width, hidden_width, use_bias=use_bias, key=keys[0])
        self.down = eqx.nn.Linear(hidden_width, width, use_bias=use_bias, key=keys[1])
        self.gate = None
        if is_gated:
            self.gate = eqx.nn.Linear(width, hidden_width, use_bias=use_bias, key=keys[2])
        self.activation = activation

    def __call__(
        self, x: Float[Array, "time width"], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, "time width"]:
        """Return the outputs; `key` is for the dropout of adapters."""
        keys = [None] * 3 if key is None else list(jax.random.split(key, 3))
        hidden = project(self.up, x, keys[0])
        if self.gate is None:
            hidden = self.activation(hidden)
        else:
            hidden = self.activation(project(self.gate, x, keys[1])) * hidden
        return project(self.down, hidden, keys[2])


def project(layer: eqx.nn.Linear, x: Array, key: Key[Array, ""] | None) -> Array:
    """Return what a linear layer makes of each token.

    Args:
        layer: the layer; one with adapters may have dropout.
        x: the tokens, `(time, in)`.
        key: for that dropout.
    """
    if key is None:
        return jax.vmap(layer)(x)
    return jax.vmap(lambda token, key: layer(token, key=key))(x, jax.random.split(key, x.shape[0]))


def apply_dropout(dropout: eqx.nn.Dropout, x: Array, key: Key[Array, ""] | None) -> Array:
    """Return `x` after dropout, which asks for a key only if it drops anything."""
    return dropout(x, key=key) if dropout.p > 0 else x


def stack_blocks(make: Callable[[Key[Array, ""]], Any], depth: int, key: Key[Array, ""]) -> Any:
    """Return equal blocks as one, whose arrays begin with the axis of the depth.

    Args:
        make: makes a block from a key.
        depth: how many there are.
        key: a random key.
    """
    return eqx.filter_vmap(make)(jax.random.split(key, depth))


def scan_blocks(
    blocks: Any,
    apply: Callable[[Any, Any, Any, Any], tuple[Any, Any]],
    x: Array,
    cache: Cache | None,
    key: Key[Array, ""] | None,
) -> tuple[Array, Cache | None]:
    """Return what a stack of blocks makes of `x`, one after the other, and the cache of all.

    Compiling takes as long for many blocks as for one.

    Args:
        blocks: the stack.
        apply: `apply(block, x, cache, key)` returns the next `x` and cache.
        x: the inputs of the first block.
        cache: of all blocks, or None.
        key: a random key, or None.
    """
    arrays, static = eqx.partition(blocks, eqx.is_array)
    depth = len(jax.tree.leaves(arrays)[0])
    keys = None if key is None else jax.random.split(key, depth)

    def step(x: Array, part: Any) -> tuple[Array, Any]:
        block_arrays, block_cache, block_key = part
        return apply(eqx.combine(block_arrays, static), x, block_cache, block_key)

    return jax.lax.scan(step, x, (arrays, cache, keys))


def _split_heads(x: Array, num_heads: int, norm: Any) -> Float[Array, "time heads size"]:
    heads = x.reshape(x.shape[0], num_heads, -1)
    return heads if norm is None else jax.vmap(jax.vmap(norm))(heads)


def _write(slots: Array, new: Array, start: Any) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(slots, new.astype(slots.dtype), start, axis=0)


def _attend(
    queries: Array,
    keys: Array,
    values: Array,
    mask: Array | None,
    dropout: eqx.nn.Dropout,
    key: Key[Array, ""] | None,
) -> Float[Array, "time heads size"]:
    """Return the heads.

    Args:
        queries: `(time, heads, size)`.
        keys: `(slots, kv_heads, size)`.
        values: of the same shape.
        mask: `(time, slots)`, or None.
        dropout: of the weights.
        key: for dropout.
    """
    is_still = dropout.p == 0 or dropout.inference
    num_heads = queries.shape[1]
    # The function of jax has no dropout, and on CPUs no float16, nor bfloat16 for a single head.
    is_known = queries.dtype != jnp.float16 and (queries.dtype != jnp.bfloat16 or num_heads > 1)
    if is_still and is_known:
        wide_mask = None if mask is None else mask[None]
        return jax.nn.dot_product_attention(queries, keys, values, mask=wide_mask)
    size = queries.shape[-1]
    groups = queries.reshape(queries.shape[0], keys.shape[1], -1, size)
    # Scores of 8 bits would be wrong by more than weights are; not every device has products of
    # 16 bits that are summed in float32.
    scores = jnp.einsum("tkgs,uks->kgtu", groups.astype(jnp.float32), keys.astype(jnp.float32))
    scores = scores / math.sqrt(size)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    weights = dropout(jax.nn.softmax(scores), key=key).astype(values.dtype)
    return jnp.einsum("kgtu,uks->tkgs", weights, values).reshape(queries.shape)
