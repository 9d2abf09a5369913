"""What a fit begins with: a checkpoint of its own run, one of another run, or weights alone.

Which checkpoint is meant and where it lies is known to the active checkpointer only. The core
passes on what the user gave, with a template of the state, and gets a `Snapshot`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, GetAttrKey
from jaxtyping import Array, Key

from fulgurite._src.evaluation.target import apply_module_view
from fulgurite._src.execution.build import (
    build_module,
    get_state_shardings,
    init_plugin_states,
    with_shardings,
)
from fulgurite._src.execution.program import Program
from fulgurite._src.fit.engine_view import EngineView
from fulgurite._src.fit.result import FitResult
from fulgurite._src.fit.snapshot import (
    CheckpointRef,
    CheckpointSource,
    InitFrom,
    Resume,
    Snapshot,
)
from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.plugins.selection import RegisteredPlugin
from fulgurite._src.rng import make_root_key
from fulgurite._src.training.state import ModelInit, TrainState, as_model_init
from fulgurite._src.tree.paths import path_from_keys
from fulgurite.errors import (
    CheckpointError,
    ConfigurationError,
    FulguriteError,
    PluginError,
    error_context,
)

T = TypeVar("T")
WEIGHTS = {"module": "module", "model_state": "model_state"}
"""What `init_from` reads of a checkpoint unless its `map` says otherwise."""


def check_starting_point(resume: Resume, state: TrainState | None, init_from: InitFrom) -> None:
    """Raise `ConfigurationError` if the arguments of `Engine.fit` name two starting points.

    Args:
        resume: the argument of `fit`.
        state: the argument of `fit`.
        init_from: the argument of `fit`.
    """
    if isinstance(resume, CheckpointRef) and resume.view is not None:
        raise ConfigurationError(
            f"fit: resume names the weights {resume.view!r}, and a run resumes with everything "
            "that it had: leave view out"
        )
    if isinstance(resume, CheckpointRef) and resume.dtype is not None:
        raise ConfigurationError(
            "fit: resume asks for another dtype, and a run resumes with its own: leave dtype out, "
            "or begin another run by init_from="
        )
    if state is not None and (init_from is not None or resume not in (None, "never")):
        raise ConfigurationError(
            "fit takes a state to continue from, or a checkpoint to start from, not both"
        )


def load_snapshot(
    engine: EngineView,
    resume: Resume,
    template: TrainState,
    announce: Callable[[Snapshot], None] = lambda _: None,
) -> Snapshot | None:
    """Return what the active checkpointer reads; None for a fresh start.

    Args:
        engine: the engine that trains or evaluates.
        resume: the argument of `Engine.fit`.
        template: a state of `jax.ShapeDtypeStruct`s, like the one that is needed.
        announce: as of the hook `restore_checkpoint`.

    Raises:
        PluginError: no checkpointer is active.
        CheckpointError: there is no such checkpoint, and `resume` does not allow that.
    """
    if resume is None or resume == "never":
        return None
    restore = engine.plugins.hooks.restore_checkpoint
    owner = restore.get_owner()
    if owner is None:
        raise PluginError(
            f"no plugin can restore {_format_source(resume)}: add the Checkpointer of "
            "fulgurite-checkpoint to the plugins, or, for safetensors and folders of Hugging Face, "
            "the Pretrained of fulgurite-pretrained"
        )
    answer = restore.ask(resume=resume, template=template, engine=engine, announce=announce)
    is_optional = resume == "auto" or (isinstance(resume, CheckpointRef) and resume.optional)
    if answer is None and not is_optional:
        raise CheckpointError(
            f"plugin {owner.name!r} found no checkpoint for {_format_source(resume)}: "
            f"check the path"
        )
    return None if answer is None else answer[1]


def select_hyperparameters(resume: Resume, state: TrainState) -> TrainState:
    """Return the state of a checkpoint, in which shapes stand for the hyperparameters in the
    optimizer's state if those of the program are to be taken.

    Args:
        resume: the argument of `Engine.fit`.
        state: of the checkpoint.
    """
    if not isinstance(resume, CheckpointRef) or resume.hyperparameters == "checkpoint":
        return state

    def leave_out(path: Any, leaf: Any) -> Any:
        # `hyperparams` is the field of the state of `optax.inject_hyperparams`.
        is_hyperparameter = any(getattr(key, "name", None) == "hyperparams" for key in path)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_hyperparameter else leaf

    return state.replace(opt_state=jax.tree_util.tree_map_with_path(leave_out, state.opt_state))


def restore_host_states(plugins: PluginManager, snapshot: Snapshot | None) -> None:
    """Hand the host states in a snapshot to their plugins.

    Args:
        plugins: of the engine.
        snapshot: None is a fresh start, at which nothing is restored.

    Raises:
        CheckpointError: a plugin cannot restore its host state.
    """
    if snapshot is None:
        return
    entries = snapshot.host_states
    step = int(snapshot.state.step)

    def get_host_state(plugin: RegisteredPlugin) -> dict[str, Any] | None:
        entry = entries.get(plugin.name)
        return {"state": entry["state"], "version": entry["version"]} if entry else None

    @contextmanager
    def convert_error(plugin: RegisteredPlugin) -> Iterator[None]:
        try:
            yield
        except FulguriteError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"plugin {plugin.name!r} cannot restore the host state that the checkpoint of "
                f"step {step} holds for it, of version {entries[plugin.name]['version']} of that "
                f"state: {type(error).__name__}: {error}. Resume from another checkpoint, or start "
                "afresh with resume='never'"
            ) from error

    plugins.hooks.set_host_state.each(per_plugin=get_host_state, guard=convert_error)


def fill_missing_state(
    engine: EngineView,
    state: TrainState | None,
    program: Program,
    source: ModelInit,
    init_from: InitFrom,
) -> TrainState:
    """Return a state whose missing parts are initialized; all of it where there is no state.

    A new state takes from `init_from` what its map says, else the weights. Its optimizer state is
    initialized from the weights that were read, and what is read of the optimizer state replaces
    that.

    Args:
        engine: the engine that trains.
        state: a state to continue from, with `jax.ShapeDtypeStruct`s for what it lacks, or None.
        program: the program that initializes states.
        source: the model to initialize.
        init_from: the argument of `Engine.fit`.
    """
    key = make_root_key(engine.seed)
    if state is not None:
        if not _is_partial(state):
            return state
        return _fill_missing(state, program.init_state(source, key))
    if init_from is None:
        with engine.services.timings.describe("making the model"):
            return program.init_state(source, key)
    loaded = _load_part(engine, init_from, program.state_spec)
    weights = loaded.module, loaded.model_state
    if _is_partial(weights):
        initial = program.init_state(source, key)
        weights = _fill_missing(weights, (initial.module, initial.model_state))
    return _fill_missing(loaded, program.init_state(as_model_init(weights), key))


def _load_part(engine: EngineView, init_from: CheckpointSource, template: TrainState) -> TrainState:
    """Return a state with what `init_from` has of it, and shapes elsewhere.

    Args:
        engine: the engine that trains.
        init_from: the argument of `Engine.fit`.
        template: the shapes of the new state.
    """
    reference = as_checkpoint_ref(init_from)
    foreign = _read_weights(engine, reference, template)
    if foreign is not None:
        return foreign
    reference = replace(reference, map=reference.map or WEIGHTS, optional=False)
    snapshot = load_snapshot(engine, reference, template)
    assert snapshot is not None
    _check_begins_with_module(reference, snapshot)
    return snapshot.state


def _read_weights(
    engine: EngineView, reference: CheckpointRef, template: TrainState
) -> TrainState | None:
    """Return a state with the module that a plugin reads, of anything but a checkpoint, and shapes
    elsewhere; None if none does.

    Args:
        engine: the engine that trains or evaluates.
        reference: to the weights.
        template: the shapes of the state.
    """
    hook = engine.plugins.hooks.read_weights
    answer = hook.ask(source=reference, module=template.module, engine=engine)
    if answer is None:
        return None
    plugin, module = answer
    if jax.tree.structure(module) != jax.tree.structure(template.module):
        raise PluginError(
            f"plugin {plugin.name!r} returned another module in read_weights: it must have the "
            "structure of the one that it was given"
        )
    if reference.view not in (None, "current"):
        raise ConfigurationError(
            f"{reference.path} has weights alone, and the weights {reference.view!r} are made in "
            "training: leave view out"
        )
    return template.replace(module=module)


def load_weights(engine: EngineView, model: Any, weights: CheckpointSource) -> TrainState:
    """Return a train state with what an evaluation needs of a checkpoint.

    It has no optimizer state, metric window or non-finite tracker, and is restored without a batch
    of the training data, on which the structure of the window depends.

    Args:
        engine: the engine that evaluates.
        model: what `fit` takes, or a result or a train state; it gives the structure.
        weights: the checkpoint.
    """
    if isinstance(model, FitResult | TrainState):
        model = model.module if model.model_state is None else (model.module, model.model_state)
    model_init = as_model_init(model)
    template = _build_evaluation_template(engine, model_init)
    parts = ["step", "key", "module"]
    if template.model_state is not None:
        parts.append("model_state")
    for name in template.plugin_states:
        parts.append(str(path_from_keys((GetAttrKey("plugin_states"), DictKey(name)))))
    mapping = {part: part for part in parts}
    reference = as_checkpoint_ref(weights)
    foreign = _read_weights(engine, reference, template)
    if foreign is None:
        reference = replace(reference, map=mapping, optional=False)
        snapshot = load_snapshot(engine, reference, template)
        assert snapshot is not None
        state = snapshot.state
        view = reference.view or snapshot.module_view
    else:
        state = foreign.replace(step=jnp.int32(0), key=make_root_key(engine.seed))
        view = "current"
    if _is_partial(state):
        # A reference that is not strict may lack some, such as a checkpoint of a part of the
        # weights.
        init_state = partial(_init_evaluation_state, engine, model_init)
        initial: TrainState = eqx.filter_jit(init_state)(model_init.arrays, state.key)
        if engine.sharding.mesh is not None:
            initial = jax.tree.map(_put_like, template, initial)
        state = _fill_missing(state, initial)
    with error_context(
        lambda: (
            f"the checkpoint was asked for, or is the best, by the weights {view!r}: give the "
            "engine the plugin that makes them, or read those that were trained by "
            "CheckpointRef(..., view='current')"
        )
    ):
        return apply_module_view(engine.plugins, state, view)


def as_checkpoint_ref(source: CheckpointSource) -> CheckpointRef:
    """Return a reference to a checkpoint, of which only the checkpointer knows what its path is."""
    return source if isinstance(source, CheckpointRef) else CheckpointRef(source)


def _check_begins_with_module(reference: CheckpointRef, snapshot: Snapshot) -> None:
    """Raise `ConfigurationError` if a run is to begin with weights that a plugin makes of a state:
    it reads arrays of the checkpoint."""
    is_map_of_weights = reference.map == WEIGHTS
    view = reference.view or (snapshot.module_view if is_map_of_weights else "current")
    if view != "current":
        raise ConfigurationError(
            f"init_from: the checkpoint was asked for, or is the best, by the weights {view!r}, "
            "and init_from reads the module that was trained. Begin with the former by "
            "state = engine.load_weights(model, reference) and fit((state.module, "
            "state.model_state), data), in an engine with the plugin that makes them, or fit("
            "state.module, data) without a model state; or with the latter by "
            "CheckpointRef(..., view='current')"
        )


def _build_evaluation_template(engine: EngineView, model_init: ModelInit) -> TrainState:
    """Return the shapes of a state without optimizer state, metric window and non-finite
    tracker."""
    init_state = partial(_init_evaluation_state, engine, model_init)
    template: TrainState = eqx.filter_eval_shape(init_state, model_init.arrays, jax.random.key(0))
    shardings = get_state_shardings(engine.plugins, engine.sharding, template)
    return template if shardings is None else with_shardings(template, shardings)


def _init_evaluation_state(
    engine: EngineView, model_init: ModelInit, arrays: Any, key: Key[Array, ""]
) -> TrainState:
    """Return a state without what only training needs. Traced.

    Args:
        engine: the engine that evaluates.
        model_init: where the module comes from.
        arrays: of its model.
        key: the root key.
    """
    left_out: Any = None
    params_key = engine.services.make_params_key(model_init, key)
    module, model_state = build_module(engine.plugins, model_init, arrays, params_key)
    plugin_states = init_plugin_states(engine.plugins, module, model_state, key)
    return TrainState(
        jnp.int32(0), module, model_state, left_out, key, left_out, left_out, plugin_states
    )


def _put_like(spec: Any, leaf: Any) -> Any:
    """Return a leaf where the one of the same place in a template of shapes lies."""
    is_spec = isinstance(spec, jax.ShapeDtypeStruct)
    return jax.device_put(leaf, spec.sharding) if is_spec else leaf


def _is_partial(tree: Any) -> bool:
    """Return whether a tree has shapes where arrays are missing."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def _fill_missing(state: T, initial: T) -> T:
    """Return `state` with the arrays of `initial` where it has only their shapes."""
    return jax.tree.map(
        lambda leaf, initial_leaf: initial_leaf if isinstance(leaf, jax.ShapeDtypeStruct) else leaf,
        state,
        initial,
    )


def _format_source(resume: Resume) -> str:
    if isinstance(resume, CheckpointRef):
        return "the run" if resume.path is None else str(resume.path)
    return f"resume={resume!r}"
