"""Whose weights are evaluated: those of a module, of a train state, of a plugin's view, or of a
checkpoint."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, GetAttrKey
from jaxtyping import Array, Key

from fulgurite.errors import ModelError, PluginError, did_you_mean
from fulgurite.execution.program import init_plugin_states, with_shardings
from fulgurite.fit.run import FitResult
from fulgurite.fit.snapshot import CheckpointRef
from fulgurite.fit.start import Place, as_checkpoint_ref, load_snapshot
from fulgurite.placing import state_shardings
from fulgurite.plugins.manager import PluginManager
from fulgurite.training.state import TrainState, as_model_init, check_has_state, check_not_consumed
from fulgurite.tree.paths import from_keys
from fulgurite.tree.specs import tree_signature

if TYPE_CHECKING:
    from fulgurite.engine import Engine


class EvalTarget:
    """What is evaluated: a module, its state, a root key and a step, flattened once for all
    batches."""

    def __init__(self, module: Any, model_state: Any, key: Any, step: Any) -> None:
        arrays, self._static = eqx.partition(
            (module, model_state, key, jnp.asarray(step)), eqx.is_array
        )
        self.leaves, self._treedef = jax.tree.flatten(arrays)
        self.key = self._treedef, tree_signature(self._static)

    def join(self, leaves: list[Any]) -> tuple[Any, Any, Any, Any]:
        """Module, model state, key and step of these leaves."""
        return eqx.combine(jax.tree.unflatten(self._treedef, leaves), self._static)


def as_eval_target(model: Any, key: Key[Array, ""]) -> EvalTarget:
    """A module, a pair of a module and its state, a train state or a result, to be evaluated; `key`
    is the root of the random streams where the model brings none."""
    model = model.state if isinstance(model, FitResult) else model
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


def get_module_view(plugins: PluginManager, state: TrainState, name: str) -> Any:
    """The module that a plugin makes of a state under the name `name`, `current` for the state's
    own."""
    if name == "current":
        return state.module
    views = plugins.ask("module_views", state=state)
    if name not in views:
        raise PluginError(
            f"no plugin gives the weights {name!r}. {did_you_mean(name, ['current', *views])}"
        )
    return views[name]


def load_weights(engine: "Engine", model: Any, weights: Place) -> TrainState:
    """A train state with what an evaluation needs of a checkpoint: no optimizer state, metric
    window or health. It is restored without a batch of the training data, on which the structure of
    the window depends."""
    reference = weights if isinstance(weights, CheckpointRef) else as_checkpoint_ref(weights)
    if isinstance(model, FitResult | TrainState):
        model = model.module if model.model_state is None else (model.module, model.model_state)
    source = as_model_init(model)

    def make(arrays: Any, key: Key[Array, ""]) -> TrainState:
        module, model_state = source.build(arrays, key)
        left_out: Any = None
        slices = init_plugin_states(engine.plugins, module, key)
        return TrainState(
            jnp.int32(0), module, model_state, left_out, key, left_out, left_out, slices
        )

    like: TrainState = eqx.filter_eval_shape(make, source.arrays, jax.random.key(0))
    shardings = state_shardings(engine.plugins, like, engine.mesh)
    like = like if shardings is None else with_shardings(like, shardings)
    parts = ["step", "key", "module", *(["model_state"] if like.model_state is not None else [])]
    parts += [
        str(from_keys((GetAttrKey("plugin_states"), DictKey(name)))) for name in like.plugin_states
    ]
    snapshot = load_snapshot(
        engine, replace(reference, map={part: part for part in parts}, optional=False), like
    )
    assert snapshot is not None
    return snapshot.state
