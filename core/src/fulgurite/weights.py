"""Whose weights are evaluated: those of a module, of a train state, of a plugin's view, or of a checkpoint."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, GetAttrKey
from jaxtyping import Array, Key

from fulgurite.errors import ModelError, PluginError, did_you_mean
from fulgurite.paths import from_keys
from fulgurite.placing import state_shardings
from fulgurite.plugins import PluginManager, merge
from fulgurite.program import placed, slices_of
from fulgurite.resume import Place, of_path, snapshot_of
from fulgurite.run import Result
from fulgurite.runs import Checkpoint
from fulgurite.state import TrainState, check_has_state, check_not_consumed, key_of, source_of

if TYPE_CHECKING:
    from fulgurite.engine import Engine


class Subject:
    """What is evaluated: a module, its state, a root key and a step, flattened once for all batches."""

    def __init__(self, module: Any, model_state: Any, key: Any, step: Any) -> None:
        arrays, self._static = eqx.partition((module, model_state, key, jnp.asarray(step)), eqx.is_array)
        self.leaves, self._treedef = jax.tree.flatten(arrays)
        self.key = self._treedef, key_of(self._static)

    def join(self, leaves: list[Any]) -> tuple[Any, Any, Any, Any]:
        """Module, model state, key and step of these leaves."""
        return eqx.combine(jax.tree.unflatten(self._treedef, leaves), self._static)


def subject_of(model: Any, key: Key[Array, ""]) -> Subject:
    """A module, a pair of a module and its state, a train state or a result, to be evaluated; `key` is the root of the
    random streams where the model brings none."""
    model = model.state if isinstance(model, Result) else model
    check_not_consumed(model)
    if isinstance(model, TrainState):
        return Subject(model.module, model.model_state, model.key, model.step)
    module, model_state = model if isinstance(model, tuple) else (model, None)
    if not isinstance(module, eqx.Module):
        raise ModelError(f"give a module, (module, state), a train state or a result, not {model!r}")
    check_has_state(module, model_state)
    return Subject(module, model_state, key, 0)


def view_of(plugins: PluginManager, state: TrainState, name: str) -> Any:
    """The module that a plugin makes of a state under the name `name`, `current` for the state's own."""
    if name == "current":
        return state.module
    views = merge(plugins.call("module_views", state=state), "module view")
    if name not in views:
        raise PluginError(f"no plugin gives the weights {name!r}. {did_you_mean(name, ['current', *views])}")
    return views[name]


def restored_weights(engine: "Engine", model: Any, weights: Place) -> TrainState:
    """A train state with what an evaluation needs of a checkpoint: no optimizer state, metric window or health. It is
    restored without a batch of the training data, on which the structure of the window depends."""
    reference = weights if isinstance(weights, Checkpoint) else of_path(weights)
    if isinstance(model, Result | TrainState):
        model = model.module if model.model_state is None else (model.module, model.model_state)
    source = source_of(model)

    def make(arrays: Any, key: Key[Array, ""]) -> TrainState:
        module, model_state = source.build(arrays, key)
        left_out: Any = None
        slices = slices_of(engine.plugins, module, key)
        return TrainState(jnp.int32(0), module, model_state, left_out, key, left_out, left_out, slices)

    like: TrainState = eqx.filter_eval_shape(make, source.arrays, jax.random.key(0))
    shardings = state_shardings(engine.plugins, like, engine.mesh)
    like = like if shardings is None else placed(like, shardings)
    parts = ["step", "key", "module", *(["model_state"] if like.model_state is not None else [])]
    parts += [str(from_keys((GetAttrKey("plugins"), DictKey(name)))) for name in like.plugins]
    snapshot = snapshot_of(engine, replace(reference, map={part: part for part in parts}, optional=False), like)
    assert snapshot is not None
    return snapshot.state
