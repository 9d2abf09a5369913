"""What is left to do when training ends."""

from typing import Any

import equinox as eqx
import fulgurite as fg
import jax

from fulgurite_optimizers.constraints import Constraint
from fulgurite_optimizers.steps import StepsState


class Finishing:
    """The base of plugins whose update rule may have something left to do at the end of training."""

    @fg.hookimpl
    def schedule(self) -> list[fg.Scheduled]:
        """At the end, before it is evaluated."""
        return [fg.Scheduled("finish", fg.AtEnd(), finish, "evaluate", before=("evaluate",))]


def finish(run: fg.Run) -> fg.Replace | None:
    """Puts `run.rule.finish` of the state in the place of the state, with weights as constraints will have them, if any
    phase holds gradients of steps."""
    nodes = jax.tree.leaves(run.state.opt_state, is_leaf=lambda node: isinstance(node, StepsState))
    if not any(isinstance(node, StepsState) for node in nodes):
        return None
    arrays, static = eqx.partition(run.state, eqx.is_array)
    changing = [hook.plugin.plugin for hook in run.engine.plugins.implementations("after_update")]

    def finished(arrays: Any) -> Any:
        state = run.rule.finish(eqx.combine(arrays, static))
        module = state.module
        for constraint in [plugin for plugin in changing if isinstance(plugin, Constraint)]:
            module, _ = constraint.after_update(module, None)
        return eqx.filter(state.replace(module=module), eqx.is_array)

    places = jax.tree.map(lambda array: array.sharding, arrays)
    return fg.Replace(eqx.combine(jax.jit(finished, out_shardings=places)(arrays), static))
