"""The rest of the work of an update rule when training ends."""

from functools import partial
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import NonFiniteError
from fulgurite.plugins import RegisteredPlugin, leaves_with_paths
from jaxtyping import Array, Bool, PyTree

from fulgurite_optimizers.steps import StepsState


class FinalizeMixin(fg.Plugin):
    """The base of plugins whose update rule may have gradients left at the end of training."""

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Finalize at the end, before the evaluation there."""
        return [
            fg.ScheduledAction(
                "finish", fg.AtEnd(), finalize_updates, "evaluate", before=("evaluate",)
            )
        ]


def finalize_updates(run: fg.Run) -> fg.ReplaceState | None:
    """Replace the state by `run.update_rule.finalize(state)`, as changed by the hook
    `after_finalize` of plugins, if any phase holds gradients of steps.

    A result that is not finite is treated as in a step, by `Engine(on_nonfinite=)`.
    """
    nodes = jax.tree.leaves(run.state.opt_state, is_leaf=_is_steps_state)
    pending = [node.num_accumulated for node in nodes if _is_steps_state(node)]
    if not any(np.any(jax.device_get(count) > 0) for count in pending):
        return None
    arrays, static = eqx.partition(run.state, eqx.is_array)
    shardings = jax.tree.map(lambda array: array.sharding, arrays)
    new_arrays, is_fine = jax.jit(
        partial(_finalize_arrays, run, static),
        out_shardings=(shardings, run.engine.sharding.replicated),
    )(arrays)
    if run.engine.on_nonfinite != "ignore" and not is_fine.all():
        if run.engine.on_nonfinite == "skip":
            return None
        path, _ = _list_floating(run.state.module)[is_fine.argmin()]
        raise NonFiniteError(run.step, f"the update of {path}, of the gradients that were left,")
    return fg.ReplaceState(eqx.combine(new_arrays, static))


def _finalize_arrays(
    run: fg.Run, static: PyTree, arrays: PyTree
) -> tuple[PyTree, Bool[Array, " arrays"]]:
    """Return the arrays of the new state, and which arrays of the module are finite or were not
    before either. Traced."""
    before = eqx.combine(arrays, static)
    state = run.update_rule.finalize(before)
    plugin_states = dict(state.plugin_states)

    def accept(plugin: RegisteredPlugin, answer: Any) -> PyTree:
        module, plugin_state = answer
        if plugin.name in plugin_states:
            plugin_states[plugin.name] = plugin_state
        return module

    module = run.engine.plugins.hooks.after_finalize.fold(
        "module",
        state.module,
        run.step,
        per_plugin=lambda plugin: {"plugin_state": plugin_states.get(plugin.name)},
        accept=accept,
        model_state=state.model_state,
        step=state.step,
    )
    is_fine = _check_finite(module) | ~_check_finite(before.module)
    new = state.replace(module=module, plugin_states=plugin_states)
    return eqx.filter(new, eqx.is_array), is_fine


def _is_steps_state(node: Any) -> bool:
    return isinstance(node, StepsState)


def _check_finite(module: PyTree) -> Bool[Array, " arrays"]:
    """Return, for each floating-point array, whether it is finite."""
    return jnp.array([jnp.isfinite(leaf).all() for _, leaf in _list_floating(module)], bool)


def _list_floating(module: PyTree) -> list[tuple[str, Any]]:
    return list(leaves_with_paths(eqx.filter(module, eqx.is_inexact_array)))
