"""The plugin that pulls the weights back to slow ones every few steps."""

from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import (
    ConfigurationError,
    set_ints,
)
from fulgurite.plugins import hide_constructor_frames
from jaxtyping import Array, Int, PyTree


class LookaheadState(NamedTuple):
    """What `Lookahead` holds on the device.

    Attributes:
        slow: the slow weights: the floating-point arrays of the module, None elsewhere.
        num_updates: int32, how often the weights were updated.
    """

    slow: PyTree
    num_updates: Int[Array, ""]


@hide_constructor_frames
@dataclass(frozen=True)
class Lookahead(fg.Plugin):
    """Moves slow weights towards the trained ones every `period` updates, and trains on from them.

    Works with any optimizer, several too, whose states stay as they are. The slow weights are a
    module view, `slow`.

    Source: Zhang et al. 2019, arXiv:1907.08610.

    Example:
        from fulgurite_averaging import Lookahead

        engine = fg.Engine(steps=100, plugins=[Lookahead(5)])

    Attributes:
        period: the updates of the weights between two moves. Every step is one, unless gradients
            are accumulated over steps.
        rate: how far the slow weights move, from 0 to 1.
    """

    plugin_name = "lookahead"

    period: int = 6
    rate: float = 0.5

    def __post_init__(self) -> None:
        set_ints(self, "period")
        if type(self.period) is not int or self.period < 1:
            raise ConfigurationError(
                f"Lookahead: period is {self.period!r}; it must be a positive integer"
            )
        is_number = isinstance(self.rate, Real) and not isinstance(self.rate, bool)
        if not is_number or not 0 < self.rate <= 1:
            raise ConfigurationError(
                f"Lookahead: rate is {self.rate!r}; it must be above 0 and at most 1"
            )

    @fg.hookimpl
    def init_plugin_state(self, module: Any) -> LookaheadState:
        """Return the slow weights, which begin as the initial ones."""
        return LookaheadState(eqx.filter(module, eqx.is_inexact_array), jnp.int32(0))

    @fg.hookimpl
    def after_update(
        self, module: Any, plugin_state: LookaheadState, output: fg.Output
    ) -> tuple[Any, LookaheadState]:
        """Move the slow weights, and go back to them.

        Args:
            module: the module after its update.
            plugin_state: the slow weights.
            output: of the step.
        """
        return self._update(module, plugin_state, output.is_update)

    @fg.hookimpl
    def after_finalize(
        self, module: Any, plugin_state: LookaheadState
    ) -> tuple[Any, LookaheadState]:
        """Do so after the update at the end of training.

        Args:
            module: the module after that update.
            plugin_state: the slow weights.
        """
        return self._update(module, plugin_state, None)

    def _update(
        self, module: Any, state: LookaheadState, is_update: Any
    ) -> tuple[Any, LookaheadState]:
        """Return module and state after a step.

        Args:
            module: the module after the step.
            state: the state before.
            is_update: whether the step changed the weights; None for yes.
        """
        fast = eqx.filter(module, eqx.is_inexact_array)
        is_update = jnp.bool_(True) if is_update is None else is_update
        num_updates = state.num_updates + is_update.astype(jnp.int32)
        is_due = is_update & (num_updates % self.period == 0)

        def move() -> tuple[Any, Any]:
            slow = jax.tree.map(self._move, state.slow, fast)
            return slow, slow

        fast, slow = jax.lax.cond(is_due, move, lambda: (fast, state.slow))
        return eqx.combine(fast, module), LookaheadState(slow, num_updates)

    def _move(self, slow: Array, fast: Array) -> Array:
        moved = slow + jnp.asarray(self.rate, slow.dtype) * (fast - slow)
        # What is infinite from the beginning, such as a mask, has no difference.
        return jnp.where(fast == slow, fast, moved)

    @fg.hookimpl
    def module_views(self, state: fg.TrainState) -> dict[str, Any]:
        """Return the module with its slow weights."""
        return {"slow": eqx.combine(state.plugin_states[self.registered_name].slow, state.module)}
