"""The plugin that averages the weights in the step."""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError, check_one_of
from fulgurite.plugins import hide_constructor_frames
from jaxtyping import Array, Int, PyTree

from fulgurite_averaging.rules import EMA, Mean, Rule
from fulgurite_averaging.statistics import list_scales, set_scales

Statistics = Literal["averaged", "current"]

_NEVER = 2**31 - 1


class AverageState(eqx.Module):
    """What `Average` holds on the device.

    Attributes:
        module: the average of the floating-point arrays of the module, None elsewhere; at least
            float32.
        model_state: likewise of the model state; None if it is not averaged.
        scales: float32, the averages of what each `eqx.nn.BatchNorm` of mode `batch` divides its
            statistics by.
        count: int32, how often the average was updated.
        num_updates: int32, how often the weights were updated since the average began.
        after: int32, the step after which it begins.
    """

    module: PyTree
    model_state: PyTree
    scales: tuple[Array, ...]
    count: Int[Array, ""]
    num_updates: Int[Array, ""]
    after: Int[Array, ""]


@hide_constructor_frames
@dataclass(frozen=True)
class Average(fg.Plugin):
    """Averages the weights, in the compiled step. Training itself stays as it is, bit for bit.

    The average is part of the train state: sharded as the weights, saved, resumed. It is a module
    view under its name: for `Evaluator(..., module_view="averaged")`, and
    `engine.evaluate(result.view("averaged"), data)`. Several averages have several names.

    Example:
        from fulgurite_averaging import EMA, Average

        engine = fg.Engine(steps=100, plugins=[Average(EMA(half_life=20))])
        result = engine.fit(model, data)
        print(engine.evaluate(result.view("averaged"), data))

    Attributes:
        rule: `EMA(...)` or `Mean(...)`.
        name: of the view.
        statistics: the model state of the view, such as the statistics of BatchNorm: `averaged` as
            the weights are, or the `current` one, for `recompute_statistics`. What is not a
            floating-point array is always the current one.
    """

    plugin_name = "average"
    after = ("lookahead",)

    rule: Rule
    name: str = "averaged"
    statistics: Statistics = "averaged"

    def __post_init__(self) -> None:
        if not isinstance(self.rule, EMA | Mean):
            raise ConfigurationError(
                f"Average: rule is {self.rule!r}; give EMA(decay) or Mean(after=...)"
            )
        if not isinstance(self.name, str) or not self.name or self.name == "current":
            raise ConfigurationError(
                f"Average: name is {self.name!r}; give the view a name, which is not 'current'"
            )
        check_one_of(self.statistics, get_args(Statistics), "Average: statistics")

    @property
    def instance(self) -> str:
        """Several averages have different names."""
        return self.name

    @fg.hookimpl
    def init_plugin_state(self, module: Any, model_state: Any) -> AverageState:
        """Return an average that is the initial weights.

        Args:
            module: the module.
            model_state: its state.
        """
        after = self.rule.after
        return AverageState(
            module=_as_averages(module),
            model_state=_as_averages(self._select_statistics(model_state)),
            scales=list_scales(module, self._select_statistics(model_state)),
            count=jnp.int32(0),
            num_updates=jnp.int32(0),
            after=jnp.int32(after if isinstance(after, int) else _NEVER),
        )

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Set the step after which an average begins, if it is a part of the run."""
        if isinstance(self.rule.after, int):
            return []
        return [fg.ScheduledAction("begin", fg.AtStart(), self.set_begin, "decide")]

    def set_begin(self, run: fg.Run) -> fg.ReplaceState:
        """Return the state in which the step is set after which the average begins. It begins
        afresh: weights of an earlier fit are not part of it."""
        start, stop = run.step_range.start, run.step_range.stop
        if stop is None:
            raise ConfigurationError(
                f"Average: the mean begins after {self.rule.after} of the run, but its length is "
                "not known at its start: give Mean(after=) a number of steps"
            )
        state = run.state
        average = state.plugin_states[self.registered_name]
        begin = start + round(float(self.rule.after) * (stop - start))
        counts = {"count": 0, "num_updates": 0, "after": begin}
        average = replace(
            average,
            **{
                name: jax.device_put(jnp.int32(number), getattr(average, name).sharding)
                for name, number in counts.items()
            },
        )
        return fg.ReplaceState(state.with_plugin_state(self, average))

    @fg.hookimpl
    def after_update(
        self, module: Any, plugin_state: AverageState, output: fg.Output, ctx: fg.Context
    ) -> tuple[Any, AverageState]:
        """Update the average.

        Args:
            module: the module after its update.
            plugin_state: the average.
            output: of the step, with the new model state.
            ctx: the context of the step.
        """
        is_update = True if output.is_update is None else output.is_update
        return module, self._update(
            plugin_state, module, output.model_state, ctx.step + 1, is_update
        )

    @fg.hookimpl
    def after_finalize(
        self, module: Any, plugin_state: AverageState, model_state: Any, step: Array
    ) -> tuple[Any, AverageState]:
        """Update the average by the weights after the update at the end of training.

        Args:
            module: the module after that update.
            plugin_state: the average.
            model_state: of the module.
            step: the number of completed steps.
        """
        return module, self._update(plugin_state, module, model_state, step, True)

    def _update(
        self, state: AverageState, module: Any, model_state: Any, step: Array, is_update: Any
    ) -> AverageState:
        """Return the average after a step.

        Args:
            state: the average before.
            module: after the step.
            model_state: after the step.
            step: the number of completed steps.
            is_update: whether the step changed the weights. One that only accumulates gradients
                does not count.
        """
        model_state = self._select_statistics(model_state)
        new = (module, model_state, list_scales(module, model_state))
        averages = (state.module, state.model_state, state.scales)
        is_counted = is_update & (step > state.after)
        num_updates = jnp.where(is_counted, state.num_updates + 1, state.num_updates)
        is_due = is_counted & (num_updates % self.rule.every == 0)
        weight = jnp.where(is_due, self.rule.compute_weight(state.count), 0.0)
        if isinstance(self.rule, Mean):
            # Until it begins, the mean is the weights themselves.
            weight = jnp.where(step <= state.after, 1.0, weight)

        def update() -> Any:
            return jax.tree.map(
                lambda average, leaf: _interpolate(average, leaf, weight),
                averages,
                _select_floats(new),
            )

        if self.rule.every == 1:
            averages = update()
        else:
            averages = jax.lax.cond(weight > 0, update, lambda: averages)
        return AverageState(
            module=averages[0],
            model_state=averages[1],
            scales=averages[2],
            count=jnp.where(is_due, state.count + 1, state.count),
            num_updates=num_updates,
            after=state.after,
        )

    @fg.hookimpl
    def module_views(self, state: fg.TrainState) -> dict[str, Any]:
        """Return the average as a module, with its model state."""
        average = state.plugin_states[self.registered_name]
        module = _fill_averages(average.module, state.module)
        if average.model_state is None:
            return {self.name: module}
        model_state = _fill_averages(average.model_state, state.model_state)
        return {self.name: (module, set_scales(state.module, model_state, average.scales))}

    def _select_statistics(self, model_state: Any) -> Any:
        return model_state if self.statistics == "averaged" else None


def _select_floats(tree: PyTree) -> PyTree:
    return eqx.filter(tree, eqx.is_inexact_array)


def _as_averages(tree: PyTree) -> PyTree:
    """Return the floating-point arrays of a tree; an average of small changes needs float32."""
    return jax.tree.map(
        lambda leaf: leaf.astype(np.promote_types(leaf.dtype, np.float32)), _select_floats(tree)
    )


def _interpolate(average: Array, leaf: Array, weight: Array) -> Array:
    """Return the average after a leaf that counts `weight`. Both ends are exact: a weight of 1, and
    a leaf that equals the average, also one that is infinite, such as a mask."""
    leaf = leaf.astype(average.dtype)
    # Of complex numbers the weight is real, also where jax is told to promote nothing by itself.
    with jax.numpy_dtype_promotion("standard"):
        moved = average + weight.astype(average.real.dtype) * (leaf - average)
    return jnp.where((weight == 1) | (leaf == average), leaf, moved)


def _fill_averages(averages: PyTree, tree: PyTree) -> PyTree:
    """Return a tree with averages in the place of its floating-point arrays."""
    casted = jax.tree.map(
        lambda average, leaf: average.astype(leaf.dtype), averages, _select_floats(tree)
    )
    return eqx.combine(casted, tree)
