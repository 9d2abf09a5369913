"""What is left to do when training ends."""

from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import NonFiniteError
from fulgurite.tree.paths import leaves_with_paths
from jaxtyping import Array, Bool, PyTree

from fulgurite_optimizers.constraints import Constraint
from fulgurite_optimizers.steps import StepsState


class FinalizeMixin:
    """The base of plugins whose update rule may have something left to do at the end of
    training."""

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """At the end, before it is evaluated."""
        return [
            fg.ScheduledAction(
                "finish", fg.AtEnd(), finalize_updates, "evaluate", before=("evaluate",)
            )
        ]


def finalize_updates(run: fg.Run) -> fg.ReplaceState | None:
    """Puts `run.update_rule.finish` of the state in the place of the state, with weights as
    constraints will have them, if any phase holds gradients of steps. What is not finite is an
    error as it is in a step, or is left out."""
    nodes = jax.tree.leaves(run.state.opt_state, is_leaf=lambda node: isinstance(node, StepsState))
    if not any(isinstance(node, StepsState) for node in nodes):
        return None
    arrays, static = eqx.partition(run.state, eqx.is_array)
    changing = [hook.plugin.plugin for hook in run.engine.plugins.implementations("after_update")]

    def finished(arrays: Any) -> Any:
        state = run.update_rule.finalize(eqx.combine(arrays, static))
        module = state.module
        for constraint in [plugin for plugin in changing if isinstance(plugin, Constraint)]:
            module, _ = constraint.after_update(module, None)
        whole = eqx.combine(arrays, static).module
        return eqx.filter(state.replace(module=module), eqx.is_array), _finite(module) | ~_finite(
            whole
        )

    places = jax.tree.map(lambda array: array.sharding, arrays)
    made, fine = jax.jit(finished, out_shardings=(places, run.engine.sharding.replicated))(arrays)
    if run.engine.on_nonfinite != "ignore" and not fine.all():
        if run.engine.on_nonfinite == "skip":
            return None
        path, _ = _floating(run.state.module)[fine.argmin()]
        raise NonFiniteError(run.step, f"the update of {path}, of the gradients that were left,")
    return fg.ReplaceState(eqx.combine(made, static))


def _finite(module: PyTree) -> Bool[Array, " arrays"]:
    """Which arrays are finite."""
    return jnp.array([jnp.isfinite(leaf).all() for _, leaf in _floating(module)], bool)


def _floating(module: PyTree) -> list[tuple[str, Any]]:
    return list(leaves_with_paths(eqx.filter(module, eqx.is_inexact_array)))
