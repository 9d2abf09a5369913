"""Layers that draw their own random keys."""

from functools import partial
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import ConfigurationError
from jaxtyping import Array, Float, Inexact, Key


class Dropout(eqx.Module):
    """`eqx.nn.Dropout` that needs no key: it draws one of the stream `dropout` in each training
    step. In evaluation it passes on what it gets.

    Under `vmap` each example loses other elements. It may stand in `eqx.nn.Sequential`.

    Example:
        from fulgurite_rng import Dropout, Rng


        class Net(fg.Module):
            layers: eqx.nn.Sequential

            def __init__(self, *, key):
                self.layers = eqx.nn.Sequential([eqx.nn.Linear(4, 2, key=key), Dropout(0.1)])

            def training_step(self, batch, ctx):
                preds = jax.vmap(self.layers)(batch["x"])
                return fg.Output(jnp.mean(preds**2))


        engine = fg.Engine(steps=1000, plugins=[Rng()])

    Attributes:
        dropout: the layer whose rate and mode count.
        axis_name: of the `vmap` over examples.

    Args:
        p: the probability with which an element becomes 0. An array is not checked, because it may
            be traced.
        axis_name: of a `vmap`, whose index is folded into the key, as by `fg.make_rng`. The masks
            are others then, and differ between examples whose input is the same for all.
    """

    dropout: eqx.nn.Dropout
    axis_name: str | None = eqx.field(static=True)

    def __init__(self, p: float | Array = 0.5, *, axis_name: str | None = None) -> None:
        if not isinstance(p, jax.Array) and not 0 <= p <= 1:
            raise ConfigurationError(f"Dropout: p is {p!r}; it must be a number from 0 to 1")
        self.dropout = eqx.nn.Dropout(p)  # type: ignore[arg-type]
        self.axis_name = axis_name

    def __call__(
        self, x: Inexact[Array, "*shape"], *, key: Key[Array, ""] | None = None
    ) -> Inexact[Array, "*shape"]:
        """Return `x` with some elements 0 and the others larger by `1 / (1 - p)`.

        Args:
            x: of any shape.
            key: ignored; `eqx.nn.Sequential` hands one to each of its layers.
        """
        p = self.dropout.p
        is_known = not isinstance(p, jax.Array)  # otherwise, it may be traced
        if self.dropout.inference or (is_known and p == 0):
            return x
        if is_known and p == 1:
            return jnp.zeros_like(x)  # 0 / 0 would be a gradient of NaN
        key = fg.make_rng("dropout", axis_name=self.axis_name)
        keep_rate = 1 - jax.lax.stop_gradient(p)
        # Only the shape of `x` counts, and `custom_vmap` has no derivative.
        mask = _draw_uniform(key, jax.lax.stop_gradient(x)) < keep_rate
        return jnp.where(mask, x / keep_rate, 0)


@jax.custom_batching.custom_vmap
def _draw_uniform(keys: Key[Array, "*mapped"], x: Inexact[Array, "..."]) -> Float[Array, "..."]:
    """Return numbers of the shape of `x`, uniform between 0 and 1.

    A step draws one key for all the examples that a `vmap` maps. It is split where the mapped axis
    is known, which is in the rule below.

    Args:
        keys: one for each index of the axes that were mapped so far, with which `x` begins.
        x: of any shape.
    """
    draw = partial(jax.random.uniform, shape=x.shape[keys.ndim :])
    for _ in range(keys.ndim):
        draw = jax.vmap(draw)
    return draw(keys)


@_draw_uniform.def_vmap
def _draw_uniform_for_each(
    axis_size: int, is_mapped: list[bool], keys: Any, x: Any
) -> tuple[Float[Array, "..."], bool]:
    """Return the numbers of `axis_size` examples, each of a key of its own."""
    are_keys_mapped, is_x_mapped = is_mapped
    if not are_keys_mapped:
        keys = _split_each(keys, axis_size)
    if not is_x_mapped:
        x = jnp.broadcast_to(x, (axis_size, *x.shape))
    return _draw_uniform(keys, x), True


def _split_each(keys: Key[Array, "*mapped"], count: int) -> Key[Array, "count *mapped"]:
    """Return `count` keys of each key, along a new first axis."""
    split = partial(jax.random.split, num=count)
    for _ in range(keys.ndim):
        split = jax.vmap(split, out_axes=1)
    return split(keys)
