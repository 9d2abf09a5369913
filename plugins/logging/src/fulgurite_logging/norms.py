"""Log norms of gradients, updates and parameters, and learning rates."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import optax
from fulgurite import Selector
from fulgurite.errors import ConfigurationError
from fulgurite.plugins import hide_constructor_frames
from jaxtyping import Array, Float, PyTree

from fulgurite_logging.schedules import find_rates

QUANTITIES = ("gradients", "clipped_gradients", "updates", "parameters")


@hide_constructor_frames
@dataclass(frozen=True)
class NormMonitor(fg.Plugin):
    """Log Euclidean norms, only at log steps: at other steps nothing is computed.

    `norms/gradients` is that of the gradients as they were computed, before any plugin changes
    them; `norms/clipped_gradients` of the gradients as the optimizer receives them, only where a
    plugin changes them; `norms/updates` of what it returned; `norms/parameters` of the parameters
    after the update; float32 each. With groups there is also `norms/gradients/NAME` for each. If
    only a clock or a stop closes the window the value is NaN, because that is known too late.

    Example:
        from fulgurite_logging import NormMonitor

        monitor = NormMonitor(quantities=("gradients",), groups={"head": "layers[-1]"})
        engine = fg.Engine(steps=100, plugins=[monitor])

    Attributes:
        quantities: which of the four.
        groups: selections of the module by name: `fg.select(...)`, or a pattern for it.
        rename: `rename(name)` returns another name for `gradients/head` and the like; the plugin's
            name stays before it.
        where: what of the module the norms are of, groups as well: `fg.select(...)`, or a pattern
            for it; None for all of it.
        instance: tells several monitors apart, whose norms are `norms:INSTANCE/gradients` and the
            like.
    """

    quantities: tuple[str, ...] = QUANTITIES
    groups: Mapping[str, Selector | str] = field(default_factory=dict)
    rename: Callable[[str], str] | None = None
    where: Selector | str | None = None
    instance: str | None = None

    def __post_init__(self) -> None:
        if not self.quantities or not set(self.quantities) <= set(QUANTITIES):
            raise ConfigurationError(
                f"NormMonitor: quantities is {self.quantities!r}; it is a tuple of some of "
                f"{', '.join(QUANTITIES)}"
            )

    @fg.hookimpl
    def step_metrics(
        self, state: fg.TrainState, output: fg.Output, ctx: fg.Context
    ) -> dict[str, Any]:
        """Return the norms, computed behind a condition.

        Args:
            state: after the update.
            output: of the step.
            ctx: of the step.
        """
        trees = {
            "gradients": output.raw_grads,
            "clipped_gradients": output.grads,
            "updates": output.updates,
            "parameters": eqx.filter(state.module, eqx.is_inexact_array),
        }
        quantities = list(self.quantities)
        if "clipped_gradients" in quantities and _is_same(output.raw_grads, output.grads):
            quantities.remove("clipped_gradients")
        missing = [quantity for quantity in quantities if trees[quantity] is None]
        if missing:
            raise ConfigurationError(
                f"NormMonitor: the update rule gives no {' and no '.join(missing)}: have its "
                "output hold them, or choose others by {'norms': {'quantities': ('parameters',)}}"
            )
        if self.where is not None:
            selected = _as_selector(self.where)(state.module)
            trees = {name: eqx.filter(trees[name], selected) for name in quantities}
        specs = {name: _as_selector(group)(state.module) for name, group in self.groups.items()}

        def compute_norms() -> dict[str, Array]:
            norms = {}
            for quantity in quantities:
                norms[quantity] = compute_norm(trees[quantity])
                for name, spec in specs.items():
                    group = eqx.filter(trees[quantity], spec)
                    norms[f"{quantity}/{name}"] = compute_norm(group)
            return norms

        def skip_norms() -> dict[str, Array]:
            return {name: jnp.float32(jnp.nan) for name in jax.eval_shape(compute_norms)}

        values = jax.lax.cond(ctx.is_due("log"), compute_norms, skip_norms)
        return _as_metrics(values, self.rename)


@dataclass(frozen=True)
class LearningRateMonitor:
    """Log the learning rate of the step's update as `learning_rate/OPTIMIZER`, and that of each
    group of `optax.partition` as `learning_rate/OPTIMIZER/GROUP`. Where a rate is an array, such as
    that of all members of a population, the record holds the array.

    It reads the schedule, or the number, that an optimizer of optax was given, times whatever else
    its chain multiplies all updates with; or the rate in the state of one that is wrapped in
    `optax.inject_hyperparams`. If no optimizer shows its rate, that is an error.

    Example:
        from fulgurite_logging import LearningRateMonitor

        engine = fg.Engine(steps=100, plugins=[LearningRateMonitor()])

    Attributes:
        rename: `rename(name)` returns another name for that of an optimizer.
    """

    rename: Callable[[str], str] | None = None
    # Of the program that is being traced.
    _optimizers: dict[str, fg.OptimizerSpec] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @fg.hookimpl
    def wrap_update_rule(self, update_rule: fg.UpdateRule) -> fg.UpdateRule:
        """Note the optimizers of the rule, and return it as it is."""
        self._optimizers.clear()
        self._optimizers.update(update_rule.list_optimizers())
        return update_rule

    @fg.hookimpl
    def step_metrics(self, state: fg.TrainState) -> dict[str, Any]:
        """Return the rates of the optimizers."""
        states = state.opt_state
        if not isinstance(states, dict):
            states = {"default": states}
        rates = {}
        for name, opt_state in states.items():
            values = _find_learning_rates(opt_state)
            for number, value in enumerate(values, 1):
                label = name if len(values) == 1 else f"{name}/{number}"
                rates[label] = value
            if not values and name in self._optimizers:
                groups = find_rates(self._optimizers[name].optimizer, opt_state)
                rates |= {f"{name}/{group}".rstrip("/"): rate for group, rate in groups.items()}
        if not rates:
            raise ConfigurationError(
                "learning_rate: no optimizer shows its learning rate. Write "
                "optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), or leave learning_rate "
                "out"
            )
        return _as_metrics(rates, self.rename)


def _as_metrics(
    values: Mapping[str, Any], rename: Callable[[str], str] | None
) -> dict[str, fg.metrics.LastValue]:
    """Return values as metrics, under the names that a user gives them.

    Args:
        values: by name.
        rename: returns another name for each; None to keep them.

    Raises:
        ConfigurationError: two values have one name, so that one would be lost.
    """
    metrics = {}
    for name, value in values.items():
        new_name = name if rename is None else rename(name)
        if not isinstance(new_name, str) or new_name in metrics:
            raise ConfigurationError(
                f"rename({name!r}) returned {new_name!r}; it must return a string, another one for "
                "each name"
            )
        metrics[new_name] = fg.metrics.LastValue.from_values(value)
    return metrics


def _find_learning_rates(opt_state: Any) -> list[Any]:
    return [
        value
        for _, value in optax.tree.get_all_with_path(opt_state, "learning_rate")
        # A schedule's own state has the same name, and is not a number.
        if jnp.isscalar(value) or isinstance(value, jax.Array)
    ]


def compute_norm(tree: PyTree) -> Float[Array, ""]:
    """Return the Euclidean norm over all arrays of a tree, summed in float32; 0 without arrays."""
    squares = [
        jnp.sum(jnp.square(jnp.abs(leaf).astype(jnp.float32))) for leaf in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def _is_same(first: PyTree, second: PyTree) -> bool:
    """Return whether two trees of gradients hold the same traced arrays."""
    first_leaves = jax.tree.leaves(first)
    second_leaves = jax.tree.leaves(second)
    return len(first_leaves) == len(second_leaves) and all(map(is_, first_leaves, second_leaves))


def _as_selector(group: Selector | str) -> Selector:
    return fg.select(group) if isinstance(group, str) else group
