"""What is evaluated: a module, its state, and where its random numbers come from."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.training.state import TrainState, check_has_state, check_not_consumed
from fulgurite._src.tree.specs import tree_signature
from fulgurite.errors import ModelError, PluginError, did_you_mean


class EvalTarget:
    """What is evaluated, flattened once for all batches.

    Attributes:
        leaves: the arrays.
        key: equal for targets that one compiled program can evaluate.

    Args:
        module: the module.
        model_state: its `eqx.nn.State`, or None.
        key: the root of the random streams.
        step: the number of updates that the module had.
    """

    def __init__(self, module: Any, model_state: Any, key: Any, step: Any) -> None:
        arrays, self._static = eqx.partition(
            (module, model_state, key, jnp.asarray(step)), eqx.is_array
        )
        self.leaves, self._treedef = jax.tree.flatten(arrays)
        self.key = self._treedef, tree_signature(self._static)

    def join(self, leaves: list[Any]) -> tuple[Any, Any, Any, Any]:
        """Return module, model state, key and step of these leaves."""
        return eqx.combine(jax.tree.unflatten(self._treedef, leaves), self._static)


def as_eval_target(model: Any, key: Key[Array, ""]) -> EvalTarget:
    """Return a model as what is evaluated.

    Args:
        model: a module, a pair of a module and its state, or a train state.
        key: the root of the random streams where the model brings none.

    Raises:
        ModelError: the model is something else.
    """
    check_not_consumed(model)
    if isinstance(model, TrainState):
        return EvalTarget(model.module, model.model_state, model.key, model.step)
    module, model_state = model if isinstance(model, tuple) else (model, None)
    if not isinstance(module, eqx.Module):
        raise ModelError(
            f"give a module, (module, state), a train state or a result, not {model!r}"
        )
    check_has_state(module, model_state)
    return EvalTarget(module, model_state, key, 0)


def apply_module_view(plugins: PluginManager, state: TrainState, name: str) -> TrainState:
    """Return the state with the module, and the model state if it comes with one, that a plugin
    makes of it.

    Args:
        plugins: of the engine.
        state: the state.
        name: of the view; `current` is the state as it is.
    """
    if name == "current":
        return state
    views = plugins.hooks.module_views.merge(state=state)
    if name not in views:
        raise PluginError(
            f"no plugin provides the weights {name!r}. {did_you_mean(name, ['current', *views])}"
        )
    view = views[name]
    if isinstance(view, tuple):
        module, model_state = view
        return state.replace(module=module, model_state=model_state)
    return state.replace(module=view)
