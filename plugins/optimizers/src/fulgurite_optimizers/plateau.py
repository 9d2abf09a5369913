"""The plugin that makes updates smaller once a metric stops improving."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import optax
from fulgurite.errors import ConfigurationError
from fulgurite.metrics.direction import Mode, resolve_mode
from fulgurite.training.update import Forward, UpdateRuleWrapper
from fulgurite.triggers import as_trigger, is_exact
from optax.contrib import reduce_on_plateau


@dataclass(frozen=True)
class ReduceOnPlateau:
    """Multiplies the updates of all optimizers by `factor` whenever a metric has not improved
    `patience` times.

    The rule is that of `optax.contrib.reduce_on_plateau`, but it reads the metric at `every`
    instead of in every step. Its state is part of the train state. The scale is logged as
    `reduce_on_plateau/scale`, or, of several such plugins, as
    `reduce_on_plateau/SOURCE/NAME/scale`.

    Attributes:
        monitor: `SOURCE/NAME` of a metric, such as `test/loss`.
        every: when to check the metric: the trigger of its evaluator.
        mode: whether a smaller (`min`) or a larger (`max`) value is better. None to tell it from
            the metric's name, as `Checkpointer` does.
        factor, patience, cooldown, min_scale, rtol, atol: see optax.

    Example:

        from fulgurite_optimizers import ReduceOnPlateau

        ReduceOnPlateau("test/loss", every=fg.EveryEpoch(), patience=3)
    """

    plugin_name = "reduce_on_plateau"

    monitor: str
    every: fg.Trigger | int
    _: KW_ONLY
    mode: Mode | None = None
    factor: float = 0.1
    patience: int = 10
    cooldown: int = 0
    min_scale: float = 0.0
    rtol: float = 1e-4
    atol: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.monitor, str) or "/" not in self.monitor:
            raise ConfigurationError(
                f"ReduceOnPlateau: monitor is {self.monitor!r}; write SOURCE/NAME, as in test/loss"
            )
        mode = resolve_mode(self.monitor, self.mode, "ReduceOnPlateau")
        object.__setattr__(self, "mode", mode)
        if not is_exact(as_trigger(self.every)):
            raise ConfigurationError(
                f"ReduceOnPlateau: every is {self.every!r}; pass steps, or a trigger that counts "
                "steps or epochs, not seconds, so that a resumed run does the same"
            )
        try:
            self._build_rule()
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"ReduceOnPlateau: {error}") from error

    @property
    def instance(self) -> str:
        """Several such plugins have different metrics."""
        return self.monitor

    @fg.hookimpl
    def init_plugin_state(self) -> Any:
        """Return the state of optax's rule."""
        return self._build_rule().init({"weight": jnp.zeros(())})

    @fg.hookimpl
    def wrap_update_rule(self, rule: fg.UpdateRule) -> fg.UpdateRule:
        """Return a rule that scales the changes of the parameters."""
        return ScaledUpdate(rule, self._state_name)

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Read the metric after it was evaluated."""
        return [fg.ScheduledAction("look", self.every, self.check_metric, "decide")]

    def check_metric(self, run: fg.Run) -> fg.ReplaceState:
        """Update the scale by the newest value of the metric."""
        value = run.get_metric(self.monitor)
        if self.mode == "max":
            value = -value
        old_state = run.state.plugin_states[self._state_name]
        # Optax adds integers to numbers, also where jax is told to promote nothing by itself.
        with jax.numpy_dtype_promotion("standard"):
            _, new_state = self._build_rule().update({}, old_state, value=value)
        new_state = jax.tree.map(
            lambda old, new: jax.device_put(new, old.sharding), old_state, new_state
        )
        names = [
            name for name in run.engine.plugins.plugins if name.startswith(f"{self.plugin_name}:")
        ]
        scale_name = "scale" if len(names) == 1 else f"{self.monitor}/scale"
        run.log_scalars(self.plugin_name, {scale_name: float(new_state.scale)})
        plugin_states = {**run.state.plugin_states, self._state_name: new_state}
        return fg.ReplaceState(run.state.replace(plugin_states=plugin_states))

    @property
    def _state_name(self) -> str:
        return f"{self.plugin_name}:{self.instance}"

    def _build_rule(self) -> optax.GradientTransformationExtraArgs:
        return reduce_on_plateau(
            factor=self.factor,
            patience=self.patience,
            rtol=self.rtol,
            atol=self.atol,
            cooldown=self.cooldown,
            min_scale=self.min_scale,
        )


class ScaledUpdate(UpdateRuleWrapper):
    """A rule whose changes of the parameters are multiplied by the scale in a plugin's state.

    Args:
        rule: the rule within.
        state_name: the name of that plugin state in the train state.
    """

    def __init__(self, rule: fg.UpdateRule, state_name: str) -> None:
        super().__init__(rule)
        self._state_name = state_name

    def __call__(
        self, forward: Forward, state: fg.TrainState, batch: Any, ctx: fg.Context
    ) -> tuple[fg.TrainState, fg.Output]:
        new_state, output = self.rule(forward, state, batch, ctx)
        return self._scale_update(state, new_state), output

    def apply_gradients(
        self, state: fg.TrainState, grads: Any, output: fg.Output
    ) -> tuple[fg.TrainState, fg.Output]:
        new_state, output = self.rule.apply_gradients(state, grads, output)
        return self._scale_update(state, new_state), output

    def finalize(self, state: fg.TrainState) -> fg.TrainState:
        return self._scale_update(state, self.rule.finalize(state))

    def rewrap(self, rule: fg.UpdateRule) -> "ScaledUpdate":
        return ScaledUpdate(rule, self._state_name)

    def _scale_update(self, state: fg.TrainState, new_state: fg.TrainState) -> fg.TrainState:
        scale = state.plugin_states[self._state_name].scale

        def scale_leaf(old: Any, new: Any) -> Any:
            if old is new:
                return new
            return jnp.where(scale == 1, new, old + scale.astype(new.dtype) * (new - old))

        return new_state.replace(module=jax.tree.map(scale_leaf, state.module, new_state.module))
