"""The plugin that makes updates smaller once a metric stops improving."""

import math
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite import UpdateRuleWrapper
from fulgurite.errors import (
    ConfigurationError,
    set_ints,
)
from fulgurite.metrics import Mode, is_better, resolve_mode
from fulgurite.plugins import (
    Forward,
    as_trigger,
    check_metric_exists,
    check_metric_measured,
    get_decision_stage,
    hide_constructor_frames,
    is_exact,
    read_measured_metric,
)
from jaxtyping import Array, Float, Int


class PlateauState(eqx.Module):
    """What `ReduceOnPlateau` holds on the device.

    Attributes:
        scale: float, by which updates are multiplied.
        best: float, the best value of the metric; infinite before the first.
        num_failed: int32, the checks since then that were no improvement.
        cooldown: int32, the checks that are still to be passed over.
    """

    scale: Float[Array, ""]
    best: Float[Array, ""]
    num_failed: Int[Array, ""]
    cooldown: Int[Array, ""]


@hide_constructor_frames
@dataclass(frozen=True)
class ReduceOnPlateau(fg.Plugin):
    """Multiplies the updates of all optimizers by `factor` whenever a metric has not improved
    `patience` times.

    A value is an improvement if it is better than the best one by more than `atol + rtol * |best|`,
    in both modes and for values of either sign; NaN and infinities never are. Values are compared
    in the precision of JAX, which is float32 unless 64 bits are enabled. The state is part of the
    train state. The scale is logged as `reduce_on_plateau/scale`, or, of several such plugins, as
    `reduce_on_plateau/SOURCE/NAME/scale`.

    Attributes:
        monitor: `SOURCE/NAME` of a metric, such as `test/loss`.
        every: when to check the metric: the trigger of its evaluator, or for metrics of training
            steps at which the engine logs. It must be measured at the very step.
        mode: whether a smaller (`min`) or a larger (`max`) value is better. None to tell it from
            the metric's name, as `Checkpointer` does.
        factor: what the scale is multiplied by, between 0 and 1.
        patience: the number of checks in a row without an improvement after which it is.
        cooldown: the number of checks after that in which nothing is counted.
        min_scale: the smallest scale.
        rtol, atol: what an improvement must exceed.

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
        self._check_numbers()

    def _check_numbers(self) -> None:
        if not _is_number(self.factor) or not 0 < self.factor < 1:
            raise ConfigurationError(
                f"ReduceOnPlateau: factor is {self.factor!r}; it must be between 0 and 1"
            )
        set_ints(self, "patience", "cooldown")
        for name, smallest in (("patience", 1), ("cooldown", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < smallest:
                raise ConfigurationError(
                    f"ReduceOnPlateau: {name} is {value!r}; it must be an integer of at least "
                    f"{smallest}"
                )
        for name in ("min_scale", "rtol", "atol"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < math.inf:
                raise ConfigurationError(
                    f"ReduceOnPlateau: {name} is {value!r}; it must be a number that is not "
                    "negative"
                )

    @property
    def instance(self) -> str:
        """Several such plugins have different metrics."""
        return self.monitor

    @fg.hookimpl
    def init_plugin_state(self) -> PlateauState:
        """Return the state before the first check."""
        return PlateauState(jnp.ones(()), jnp.full((), jnp.inf), jnp.int32(0), jnp.int32(0))

    @fg.hookimpl
    def wrap_update_rule(self, update_rule: fg.UpdateRule) -> fg.UpdateRule:
        """Return a rule that scales the changes of the parameters."""
        return ScaledUpdate(update_rule, self.registered_name)

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Read the metric after it was measured."""
        stage = get_decision_stage(self.monitor)
        return [fg.ScheduledAction("look", self.every, self.check_metric, stage)]

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Refuse a metric that is not measured when it is read."""
        check_metric_exists(run, self.monitor, "ReduceOnPlateau")
        check_metric_measured(run, self.monitor, as_trigger(self.every), "ReduceOnPlateau")

    def check_metric(self, run: fg.Run) -> fg.ReplaceState | None:
        """Update the scale by the value of the metric at this step."""
        value = read_measured_metric(run, self.monitor, "ReduceOnPlateau")
        if value is None:
            return None
        old_state = run.state.plugin_states[self.registered_name]
        new_state = jax.tree.map(
            lambda old, new: jax.device_put(new.astype(old.dtype), old.sharding),
            old_state,
            self.update(jax.device_get(old_state), value),
        )
        names = [
            name for name in run.engine.plugins.plugins if name.startswith(f"{self.plugin_name}:")
        ]
        scale_name = "scale" if len(names) == 1 else f"{self.monitor}/scale"
        run.log_scalars(self.plugin_name, {scale_name: float(new_state.scale)})
        return fg.ReplaceState(run.state.with_plugin_state(self, new_state))

    def update(self, state: PlateauState, value: float) -> PlateauState:
        """Return the state after a value of the metric, as NumPy arrays.

        Args:
            state: before it.
            value: of the metric.
        """
        assert self.mode is not None
        # Rounded as it is kept: or else a constant could be better than itself.
        with np.errstate(over="ignore"):
            value = float(state.best.dtype.type(value))
        scale, best = float(state.scale), float(state.best)
        improves = is_better(value, best, self.mode, atol=self.atol, rtol=self.rtol)
        best = value if improves else best
        if state.cooldown > 0:
            return _make_state(scale, best, 0, int(state.cooldown) - 1)
        num_failed = 0 if improves else int(state.num_failed) + 1
        if num_failed < self.patience:
            return _make_state(scale, best, num_failed, 0)
        scale = max(scale * self.factor, min(self.min_scale, scale))
        return _make_state(scale, best, 0, self.cooldown)


class ScaledUpdate(UpdateRuleWrapper):
    """A rule whose changes of the parameters are multiplied by the scale in a plugin's state.

    Args:
        update_rule: the rule within.
        state_name: the name of that plugin state in the train state.
    """

    def __init__(self, update_rule: fg.UpdateRule, state_name: str) -> None:
        super().__init__(update_rule)
        self._state_name = state_name

    def __call__(
        self, forward: Forward, state: fg.TrainState, batch: Any, ctx: fg.Context
    ) -> tuple[fg.TrainState, fg.Output]:
        new_state, output = self.update_rule(forward, state, batch, ctx)
        return self._scale_update(state, new_state), output

    def apply_gradients(
        self, state: fg.TrainState, grads: Any, output: fg.Output
    ) -> tuple[fg.TrainState, fg.Output]:
        new_state, output = self.update_rule.apply_gradients(state, grads, output)
        return self._scale_update(state, new_state), output

    def finalize(self, state: fg.TrainState) -> fg.TrainState:
        return self._scale_update(state, self.update_rule.finalize(state))

    def rewrap(self, update_rule: fg.UpdateRule) -> "ScaledUpdate":
        return ScaledUpdate(update_rule, self._state_name)

    def _scale_update(self, state: fg.TrainState, new_state: fg.TrainState) -> fg.TrainState:
        scale = state.plugin_states[self._state_name].scale

        def scale_leaf(old: Any, new: Any) -> Any:
            if old is new:
                return new
            scaled = old + scale.astype(new.dtype) * (new - old)
            # What is infinite from the beginning, such as a mask, has no difference.
            return jnp.where((scale == 1) | (new == old), new, scaled)

        return new_state.replace(module=jax.tree.map(scale_leaf, state.module, new_state.module))


def _make_state(scale: float, best: float, num_failed: int, cooldown: int) -> Any:
    arrays: Any = map(np.asarray, (scale, best, num_failed, cooldown))
    return PlateauState(*arrays)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
