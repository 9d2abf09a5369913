"""The plugin that pulls the weights back to slow ones every few steps."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import ConfigurationError


@dataclass(frozen=True)
class Lookahead:
    """Moves slow weights towards the trained ones every `period` steps, and trains on from them.

    Works with any optimizer, several too, whose states stay as they are. The slow weights are a
    module view, `slow`.

    Source: Zhang et al. 2019, arXiv:1907.08610.

    Example:
        from fulgurite_averaging import Lookahead

        engine = fg.Engine(steps=100, plugins=[Lookahead(5)])

    Attributes:
        period: the steps between two moves.
        rate: how far the slow weights move, from 0 to 1.
    """

    plugin_name = "lookahead"

    period: int = 6
    rate: float = 0.5

    def __post_init__(self) -> None:
        if type(self.period) is not int or self.period < 1:
            raise ConfigurationError(
                f"Lookahead: period is {self.period!r}; it must be a positive integer"
            )
        if not 0 < self.rate <= 1:
            raise ConfigurationError(
                f"Lookahead: rate is {self.rate!r}; it must be above 0 and at most 1"
            )

    @fg.hookimpl
    def init_plugin_state(self, module: Any) -> Any:
        """Return the slow weights, which begin as the initial ones."""
        return eqx.filter(module, eqx.is_inexact_array)

    @fg.hookimpl
    def after_update(self, module: Any, plugin_state: Any, ctx: fg.Context) -> tuple[Any, Any]:
        """Move the slow weights, and go back to them.

        Args:
            module: the module after its update.
            plugin_state: the slow weights.
            ctx: the context of the step.
        """
        fast = eqx.filter(module, eqx.is_inexact_array)
        is_due = (ctx.step + 1) % self.period == 0

        def move() -> tuple[Any, Any]:
            slow = jax.tree.map(
                lambda slow, fast: slow + jnp.asarray(self.rate, slow.dtype) * (fast - slow),
                plugin_state,
                fast,
            )
            return slow, slow

        fast, slow = jax.lax.cond(is_due, move, lambda: (fast, plugin_state))
        return eqx.combine(fast, module), slow

    @fg.hookimpl
    def module_views(self, state: fg.TrainState) -> dict[str, Any]:
        """Return the module with its slow weights."""
        return {"slow": eqx.combine(state.plugin_states[self.plugin_name], state.module)}
