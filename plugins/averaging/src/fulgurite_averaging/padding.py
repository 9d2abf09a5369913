"""Batch normalization of a batch of which some rows are padding."""

from dataclasses import fields
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from fulgurite.errors import ModelError
from jaxtyping import Array, Bool, Float


class UnpaddedBatchNorm(eqx.nn.BatchNorm):
    """A layer that normalizes by the statistics of the rows that are not padding, and keeps those
    of the last batch alone.

    Attributes:
        mask: which rows of the batch are examples.
    """

    mask: Bool[Array, " batch"]

    def __call__(
        self, x: Array, state: eqx.nn.State, *, key: Any = None, inference: bool | None = None
    ) -> tuple[Array, eqx.nn.State]:
        if self.inference if inference is None else inference:
            return super().__call__(x, state, key=key, inference=True)
        index = self.ema_state_index if self.mode == "ema" else self.batch_state_index
        assert index is not None
        # As it computes in training, whatever the layers around it compute in.
        old_mean, old_variance = state.get(index)
        y = x.astype(jnp.promote_types(x.dtype, old_mean.dtype))
        mean, variance = jax.vmap(self._measure)(y)
        statistics = (mean.astype(old_mean.dtype), variance.astype(old_variance.dtype))
        if self.mode == "ema":
            assert self.ema_first_time_index is not None
            state = state.set(self.ema_first_time_index, jnp.array(False))
        else:
            assert self.batch_counter is not None
            state = state.set(self.batch_counter, state.get(self.batch_counter) + 1)
        state = state.set(index, statistics)
        out = jax.vmap(self._normalize)(y, mean, variance, self.weight, self.bias)
        return out.astype(x.dtype), state

    def _measure(self, y: Array) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return mean and variance of a channel over all examples.

        Args:
            y: the numbers of the channel in one row, of any shape.
        """
        axis = self._find_axis()
        is_example = self.mask[jax.lax.axis_index(axis)]
        num_examples = jnp.maximum(jax.lax.psum(is_example.astype(jnp.int32), axis), 1)

        def average(value: Array) -> Array:
            # What a row of padding holds may be no number at all.
            return jax.lax.psum(jnp.where(is_example, value, 0), axis) / num_examples

        mean = average(jnp.mean(y))
        return mean, average(jnp.mean((y - mean) * jnp.conj(y - mean)))

    def _normalize(
        self, y: Array, mean: Array, variance: Array, weight: Array | None, bias: Array | None
    ) -> Array:
        out = (y - mean) / jnp.sqrt(variance + self.eps)
        return out if weight is None or bias is None else out * weight + bias

    def _find_axis(self) -> Any:
        """Return the name of the axis of examples."""
        names: Any = self.axis_name
        names = tuple(names) if isinstance(names, list | tuple) else (names,)
        sizes = [jax.lax.axis_size(name) for name in names]
        if sizes != [len(self.mask)]:
            pairs = zip(names, sizes, strict=True)
            axes = ", ".join(f"{name!r} of size {size}" for name, size in pairs)
            raise ModelError(
                f"recompute_statistics: a batch of {len(self.mask)} rows has padding, and an "
                f"eqx.nn.BatchNorm normalizes over {axes}, so that it is not known which of its "
                "inputs are padding: pass data without padding"
            )
        return names[0]


def leave_out_padding(module: Any, mask: Bool[Array, " batch"]) -> Any:
    """Return a module whose batch normalization leaves out the rows that are padding.

    Args:
        module: the module.
        mask: which rows of the batch are examples.
    """

    def replace_layer(node: Any) -> Any:
        if not isinstance(node, eqx.nn.BatchNorm):
            return node
        layer = object.__new__(UnpaddedBatchNorm)
        for field in fields(node):
            object.__setattr__(layer, field.name, getattr(node, field.name))
        object.__setattr__(layer, "mask", mask)
        return layer

    return jax.tree.map(
        replace_layer, module, is_leaf=lambda node: isinstance(node, eqx.nn.BatchNorm)
    )
