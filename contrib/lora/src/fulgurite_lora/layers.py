"""The layers that a model with adapters consists of."""

import dataclasses
import math
from typing import Any, ClassVar

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Inexact, Key

STREAM = fg.RngStream("lora")
"""The random stream of the dropout of all adapters."""


class Adapter(eqx.Module):
    """A change of a linear layer by a matrix of low rank, `scale * up @ down`.

    The method is that of Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2022;
    `scale` is their alpha / rank.

    Example:
        from fulgurite_lora import Adapter

        adapter = Adapter.init(jnp.zeros((3, 4)), rank=2, key=jax.random.key(0))
        y = adapter(jnp.ones(4))  # zeros (3,), until it is trained

    Attributes:
        down: `(..., rank, in)`; further axes are those of a stack of layers.
        up: `(..., out, rank)`.
        dropout: of what goes in.
        scale: a factor for each layer. It is an array so that it is saved and loaded with the
            matrices, which mean nothing without it; it has no gradient, and the plugin freezes it.
        axis_name: of a `vmap` over examples, each of which then has dropout of its own.
        is_loaded_whole: what reads a part of a model takes all of an adapter or nothing.
    """

    is_loaded_whole: ClassVar[bool] = True

    down: Inexact[Array, "*stack rank in"]
    up: Inexact[Array, "*stack out rank"]
    dropout: eqx.nn.Dropout
    scale: Inexact[Array, "*stack"]
    axis_name: str | None = eqx.field(static=True)

    @staticmethod
    def init(
        weight: Inexact[Array, "*stack out in"],
        rank: int,
        *,
        scale: float = 1.0,
        dropout: float = 0.0,
        axis_name: str | None = None,
        key: Key[Array, ""],
    ) -> "Adapter":
        """Return an adapter that changes nothing yet: `up` is zero, and `down` uniform as the
        weight of `eqx.nn.Linear` is.

        Args:
            weight: that of the layer; its shape and dtype count.
            rank: of the matrix; with 0 it is zero.
            scale: a factor.
            dropout: the probability with which an element of what goes in becomes 0.
            axis_name: of a `vmap` over examples.
            key: a random key.
        """
        *stack, out_size, in_size = weight.shape
        bound = 1 / math.sqrt(max(in_size, 1))
        shape = (*stack, rank, in_size)
        down = _draw_uniform(key, shape, weight.dtype, bound)
        up = jnp.zeros((*stack, out_size, rank), weight.dtype)
        scales = jnp.full(stack, scale, weight.dtype)
        return Adapter(down, up, eqx.nn.Dropout(dropout), scales, axis_name)

    @property
    def change(self) -> Inexact[Array, "*stack out in"]:
        """What merging adds to the weight of the layer."""
        return self.scale[..., None, None] * (self.up @ self.down)

    def __call__(
        self, x: Inexact[ArrayLike, " in"], *, key: Key[Array, ""] | None = None
    ) -> Inexact[Array, " out"]:
        """Return what is added to the output of the layer.

        Args:
            x: the input of the layer.
            key: for dropout; without one it comes from the random stream `lora` of the step, which
                cannot be drawn from within a `scan` or `checkpoint`.
        """
        x = jnp.asarray(x)
        if not self.dropout.inference and self.dropout.p > 0:
            if key is None:
                key = fg.make_rng(STREAM.name, axis_name=self.axis_name)
            x = self.dropout(x, key=key)
        return jax.lax.stop_gradient(self.scale) * (self.up @ (self.down @ x))


class LoraLinear(eqx.nn.Linear):
    """A linear layer with adapters. `weight` and `bias` stay where they are in the model, so that
    rules for sharding and checkpoints of the model without adapters fit.

    Example:
        from fulgurite_lora import add_adapters

        linear = eqx.nn.Linear(4, 3, key=jax.random.key(0))
        layer = add_adapters(linear, rank=2, key=jax.random.key(1))  # a LoraLinear
        y = layer(jnp.ones(4))

    Attributes:
        adapters: by name.
        active: the names of those that take part.
        merged: the names of those that are part of `weight` already.
    """

    adapters: dict[str, Adapter]
    active: tuple[str, ...] = eqx.field(static=True)
    merged: tuple[str, ...] = eqx.field(static=True)

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self, name, value)

    def __call__(
        self, x: Inexact[ArrayLike, "*in"], *, key: Key[Array, ""] | None = None
    ) -> Inexact[Array, "*out"]:
        """Return `weight @ x + bias`, and what the active adapters add.

        Args:
            x: the input, `()` if `in_features` is "scalar".
            key: for dropout; without one it comes from the random stream `lora` of the step, which
                cannot be drawn from within a `scan` or `checkpoint`.
        """
        y = super().__call__(jnp.asarray(x))
        names = [name for name in self.active if name not in self.merged]
        keys = [None] * len(names) if key is None else list(jax.random.split(key, len(names)))
        for name, adapter_key in zip(names, keys, strict=True):
            change = self.adapters[name](jnp.atleast_1d(x), key=adapter_key)
            y = y + change.reshape(y.shape)
        return y

    def replace(self, **changes: Any) -> "LoraLinear":
        """Return a copy with some fields changed."""
        return LoraLinear(**(get_fields(self) | changes))

    def drop_adapters(self) -> eqx.nn.Linear:
        """Return the layer without adapters; what is merged stays in the weight."""
        fields = get_fields(self)
        linear = object.__new__(eqx.nn.Linear)
        for field in dataclasses.fields(eqx.nn.Linear):
            object.__setattr__(linear, field.name, fields[field.name])
        return linear


def get_fields(layer: eqx.nn.Linear) -> dict[str, Any]:
    """Return the fields of a layer by name."""
    return {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}


def _draw_uniform(
    key: Key[Array, ""], shape: tuple[int, ...], dtype: Any, bound: float
) -> Inexact[Array, "..."]:
    """Return numbers between -bound and bound; of complex ones each part is.

    Args:
        key: a random key.
        shape: of the array.
        dtype: real or complex.
        bound: the largest absolute value.
    """
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.random.uniform(key, shape, dtype, minval=-bound, maxval=bound)
    parts = jax.random.uniform(
        key, (2, *shape), jnp.finfo(dtype).dtype, minval=-bound, maxval=bound
    )
    return jax.lax.complex(parts[0], parts[1])
