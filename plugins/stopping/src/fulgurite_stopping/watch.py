"""The look at the loss of each step, in the compiled step."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax.numpy as jnp
from fulgurite import UpdateRuleWrapper
from fulgurite.metrics import is_beyond
from fulgurite.plugins import Forward
from jaxtyping import Array, Bool, Float, Int


class SpikeState(eqx.Module):
    """What `SpikeDetection` holds on the device.

    Attributes:
        values: float32 `(window,)`, the newest finite losses.
        count: int32, how many there were.
        num_spikes: int32, the number of spikes so far.
        step: int32, the update of the newest spike; 0 without one.
        value: float32, its loss.
        median: float32, that of the losses before it.
    """

    values: Float[Array, " window"]
    count: Int[Array, ""]
    num_spikes: Int[Array, ""]
    step: Int[Array, ""]
    value: Float[Array, ""]
    median: Float[Array, ""]

    @staticmethod
    def init(window: int) -> "SpikeState":
        """Return the state before the first step."""
        return SpikeState(
            values=jnp.zeros(window),
            count=jnp.int32(0),
            num_spikes=jnp.int32(0),
            step=jnp.int32(0),
            value=jnp.zeros(()),
            median=jnp.zeros(()),
        )

    def update(
        self, value: Float[Array, ""], step: Int[Array, ""], factor: float
    ) -> tuple["SpikeState", Bool[Array, ""]]:
        """Return the state after a loss, and whether it is a spike.

        Args:
            value: the loss.
            step: the number of its update, from 1.
            factor: of a positive median, how many times it a spike is at least; see
                `SpikeDetection`.
        """
        value = value.astype(jnp.float32)
        window = len(self.values)
        median = jnp.median(self.values)
        # Of losses of one sign that is |median|. Of losses around zero the median says nothing of
        # their size, and of those that are mostly zero nothing is known of it: no spikes then.
        size = jnp.median(jnp.abs(self.values))
        is_above = is_beyond(value, median, "max", (factor - 1) * size)
        is_spike = (self.count >= window) & (size > 0) & is_above
        # A spike enters the window as any value does: a lasting change of the level is not a spike
        # any more once half of the window has seen it. NaN is the finite check's.
        is_finite = jnp.isfinite(value)
        values = jnp.where(is_finite, self.values.at[self.count % window].set(value), self.values)
        new = SpikeState(
            values,
            self.count + is_finite.astype(jnp.int32),
            self.num_spikes + is_spike.astype(jnp.int32),
            jnp.where(is_spike, step, self.step).astype(jnp.int32),
            jnp.where(is_spike, value, self.value),
            jnp.where(is_spike, median, self.median),
        )
        return new, is_spike


class WatchedUpdate(UpdateRuleWrapper):
    """A rule whose losses are watched for spikes.

    Args:
        update_rule: the rule within.
        state_name: the name of the plugin state that is a `SpikeState`.
        factor: see `SpikeState.update`.
        find_loss: `find_loss(output)` returns the loss to watch.
        leaves_out: whether a spike counts as a step that is not finite.
    """

    def __init__(
        self,
        update_rule: fg.UpdateRule,
        state_name: str,
        factor: float,
        find_loss: Callable[[fg.Output], Array],
        leaves_out: bool,
    ) -> None:
        super().__init__(update_rule)
        self._state_name = state_name
        self._factor = factor
        self._find_loss = find_loss
        self._leaves_out = leaves_out

    def __call__(
        self, forward: Forward, state: fg.TrainState, batch: Any, ctx: fg.Context
    ) -> tuple[fg.TrainState, fg.Output]:
        return self._watch(state, *self.update_rule(forward, state, batch, ctx))

    def apply_gradients(
        self, state: fg.TrainState, grads: Any, output: fg.Output
    ) -> tuple[fg.TrainState, fg.Output]:
        return self._watch(state, *self.update_rule.apply_gradients(state, grads, output))

    def rewrap(self, update_rule: fg.UpdateRule) -> "WatchedUpdate":
        return WatchedUpdate(
            update_rule, self._state_name, self._factor, self._find_loss, self._leaves_out
        )

    def _watch(
        self, state: fg.TrainState, new_state: fg.TrainState, output: fg.Output
    ) -> tuple[fg.TrainState, fg.Output]:
        spikes, is_spike = state.plugin_states[self._state_name].update(
            self._find_loss(output), state.step + 1, self._factor
        )
        if self._leaves_out:
            # The engine leaves out what is not finite: averages, metrics and all.
            losses = {
                name: jnp.where(is_spike, jnp.nan, value) for name, value in output.losses.items()
            }
            output = output.replace(losses=losses)
        return new_state.with_plugin_state(self._state_name, spikes), output
