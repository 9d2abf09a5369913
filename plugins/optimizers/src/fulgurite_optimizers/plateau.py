"""The plugin: smaller updates once a metric does not improve any more."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite.errors import ConfigurationError, did_you_mean
from fulgurite.training.update import Forward
from fulgurite.triggers import as_trigger, is_exact
from optax.contrib import reduce_on_plateau

from fulgurite_optimizers.wrapper import UpdateRuleWrapper


@dataclass(frozen=True)
class ReduceOnPlateau:
    """Multiplies the updates of all optimizers by `factor` whenever a metric has not improved
    `patience` times.

    The rule is that of `optax.contrib.reduce_on_plateau`, fed at `every` instead of in every step.
    Its state is part of the train state, and the scale is logged as `reduce_on_plateau/scale`, of
    several as `reduce_on_plateau/SOURCE/NAME/scale`.

    Example:
        from fulgurite_optimizers import ReduceOnPlateau

        reduce = ReduceOnPlateau("test/loss", every=100, factor=0.5, patience=3)
        engine = fg.Engine(steps=1000, plugins=[reduce])

    Attributes:
        monitor: `SOURCE/NAME` of a metric, such as `test/loss`.
        every: when to check the metric: the trigger of its evaluator.
        mode: whether a smaller or a larger value is better.
        factor, patience, cooldown, min_scale, rtol, atol: see optax.
    """

    plugin_name = "reduce_on_plateau"

    monitor: str
    every: fg.Trigger | int
    _: KW_ONLY
    mode: Literal["min", "max"] = "min"
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
        if self.mode not in ("min", "max"):
            raise ConfigurationError(
                f"ReduceOnPlateau: mode is {self.mode!r}; choose 'min' or 'max'"
            )
        if not is_exact(as_trigger(self.every)):
            raise ConfigurationError(
                f"ReduceOnPlateau: every is {self.every!r}; give steps or a trigger that goes by "
                f"steps or epochs, not "
                "by the clock, so that a resumed run does the same"
            )
        try:
            self._rule()
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"ReduceOnPlateau: {error}") from error

    @property
    def instance(self) -> str:
        """Several have different metrics."""
        return self.monitor

    @fg.hookimpl
    def init_plugin_state(self) -> Any:
        """The state of optax's rule."""
        return self._rule().init({"weight": jnp.zeros(())})

    @fg.hookimpl
    def wrap_update_rule(self, rule: fg.UpdateRule) -> fg.UpdateRule:
        """Scales what the rule does to the parameters."""
        return ScaledUpdate(rule, f"{self.plugin_name}:{self.instance}")

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """A look at the metric after it was evaluated."""
        return [fg.ScheduledAction("look", self.every, self.check_metric, "decide")]

    def check_metric(self, run: fg.Run) -> fg.ReplaceState:
        """Takes the newest value of the metric into account."""
        source, _, name = self.monitor.partition("/")
        known = {
            f"{one}/{key}": value
            for one, values in run.metrics.items()
            for key, value in values.items()
        }
        if self.monitor not in known:
            raise ConfigurationError(
                f"ReduceOnPlateau: nothing is called {self.monitor!r} at step {run.step}. "
                f"{did_you_mean(self.monitor, known)} An evaluator must run at the same steps"
            )
        if np.ndim(value := run.metrics[source][name]):
            raise ConfigurationError(
                f"ReduceOnPlateau: {self.monitor!r} is an array {np.shape(value)}; take a number"
            )
        value = value if self.mode == "min" else -value
        state, key = run.state, f"{self.plugin_name}:{self.instance}"
        _, new = self._rule().update({}, state.plugin_states[key], value=value)
        placed = jax.tree.map(
            lambda old, leaf: jax.device_put(leaf, old.sharding), state.plugin_states[key], new
        )
        alone = (
            sum(name.startswith(f"{self.plugin_name}:") for name in run.engine.plugins.plugins) == 1
        )
        name = "scale" if alone else f"{self.monitor}/scale"
        run.log_scalars(self.plugin_name, {name: float(placed.scale)})
        return fg.ReplaceState(state.replace(plugin_states={**state.plugin_states, key: placed}))

    def _rule(self) -> optax.GradientTransformationExtraArgs:
        return reduce_on_plateau(
            factor=self.factor,
            patience=self.patience,
            rtol=self.rtol,
            atol=self.atol,
            cooldown=self.cooldown,
            min_scale=self.min_scale,
        )


class ScaledUpdate(UpdateRuleWrapper):
    """A rule whose changes of the parameters are multiplied by the scale in a plugin's slice of the
    state."""

    def __init__(self, rule: fg.UpdateRule, slice: str) -> None:
        super().__init__(rule)
        self._slice = slice

    def __call__(
        self, forward: Forward, state: fg.TrainState, batch: Any, ctx: fg.Context
    ) -> tuple[fg.TrainState, fg.Output]:
        new, output = self.rule(forward, state, batch, ctx)
        return self._scale_update(state, new), output

    def apply_gradients(
        self, state: fg.TrainState, grads: Any, output: fg.Output
    ) -> tuple[fg.TrainState, fg.Output]:
        new, output = self.rule.apply_gradients(state, grads, output)
        return self._scale_update(state, new), output

    def finalize(self, state: fg.TrainState) -> fg.TrainState:
        return self._scale_update(state, self.rule.finalize(state))

    def _scale_update(self, state: fg.TrainState, new: fg.TrainState) -> fg.TrainState:
        scale = state.plugin_states[self._slice].scale

        def scaled(old: Any, made: Any) -> Any:
            if old is made:
                return made
            return jnp.where(scale == 1, made, old + scale.astype(made.dtype) * (made - old))

        return new.replace(module=jax.tree.map(scaled, state.module, new.module))

    def rewrap(self, rule: fg.UpdateRule) -> "ScaledUpdate":
        return ScaledUpdate(rule, self._slice)
