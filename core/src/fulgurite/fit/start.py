"""What a fit begins with: a checkpoint of its own run, one of another run, or weights alone."""

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, GetAttrKey
from jaxtyping import Array, Key

from fulgurite.errors import CheckpointError, ConfigurationError, PluginError
from fulgurite.execution.program import (
    Program,
    get_state_shardings,
    init_plugin_states,
    with_shardings,
)
from fulgurite.fit.run import FitResult
from fulgurite.fit.snapshot import CheckpointRef, PathLike, Snapshot
from fulgurite.plugins.manager import PluginManager
from fulgurite.training.state import ModelInit, TrainState, as_model_init
from fulgurite.tree.paths import from_keys
from fulgurite.triggers import StepRange

if TYPE_CHECKING:
    from fulgurite.engine import Engine

T = TypeVar("T")
Place = CheckpointRef | str | PathLike
InitFrom = Place | None
Resume = InitFrom | int
WEIGHTS = {"module": "module", "model_state": "model_state"}
_STEP_PATH = re.compile(r"(?:(.+)/)?checkpoints/step-(0|[1-9][0-9]{0,11})/?")


def resolve_checkpoint(
    resume: Resume, state: TrainState | None, init_from: Any
) -> CheckpointRef | None:
    """Return the checkpoint that `Engine.fit(resume=...)` means, of the run itself where it names
    none; None for a fresh start, or where training continues from `state`.

    Args:
        resume: the argument of `fit`.
        state: the argument of `fit`.
        init_from: the argument of `fit`.

    Raises:
        ConfigurationError: the arguments exclude each other, or `resume` means nothing.
    """
    if state is not None and (init_from is not None or resume not in (None, "never")):
        raise ConfigurationError(
            "fit takes a state to continue from, or a checkpoint to start from, not both"
        )
    if resume is None or resume == "never":
        return None
    if isinstance(resume, CheckpointRef):
        return resume
    if isinstance(resume, bool) or not isinstance(resume, int | str | PathLike) or resume == "":
        raise ConfigurationError(
            f"resume is {resume!r}, not 'auto', 'never', 'latest', 'best', a step or path"
        )
    if resume == "auto":
        return CheckpointRef(None, optional=True)
    if isinstance(resume, int) or resume in ("latest", "best"):
        return CheckpointRef(None, resume)  # type: ignore[arg-type]
    return as_checkpoint_ref(resume)


def as_checkpoint_ref(path: str | PathLike) -> CheckpointRef:
    """Return a reference to the newest checkpoint of the run at `path`, or to the one that `path`
    itself is: `RUN/checkpoints/step-N`."""
    text = path.__fspath__() if isinstance(path, PathLike) else path
    match = _STEP_PATH.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return CheckpointRef(path)
    return CheckpointRef(match[1] or ".", int(match[2]))


def restore_host_states(plugins: PluginManager, snapshot: Snapshot | None) -> None:
    """Hand the host states in a snapshot to their plugins.

    Args:
        plugins: of the engine.
        snapshot: None is a fresh start, at which nothing is restored.
    """
    host_states = snapshot.host_states if snapshot else {}
    for hook in plugins.implementations("set_host_state"):
        kept = host_states.get(hook.plugin.name)
        if kept:
            hook(None, state=kept["state"], version=kept["version"])


def plan_step_range(
    snapshot: Snapshot | None,
    origin: int,
    steps: int | None,
    epochs: int | None,
    epoch_length: int | None,
) -> StepRange:
    """The span of a fit of so many steps or epochs; `epoch_length` is that of the first epoch, as
    far as it is known. A resumed fit keeps its span, unless it is asked for another length than
    before."""
    if snapshot is not None and snapshot.requested_length in (None, (steps, epochs)):
        return snapshot.step_range
    ends, end = (snapshot.step_range.epoch_ends if snapshot else ()), None
    if steps is not None:
        end = origin + steps
    elif epochs is not None and epochs <= len(ends):
        end = ends[epochs - 1]
    elif epochs is not None and ends:
        *_, before, last = (origin, *ends)
        end = last + (epochs - len(ends)) * (last - before)
    elif epochs is not None and epoch_length is not None:
        end = origin + epochs * epoch_length
    if snapshot and end is not None and end < (step := int(snapshot.state.step)):
        fix = (
            "ask for more, resume from an earlier one, or start afresh: resume='never', or another "
            "run directory"
        )
        raise CheckpointError(
            f"the checkpoint of step {step} is past step {end}, where this fit should end: {fix}"
        )
    return StepRange(origin, end, ends)


def fill_missing_state(
    engine: "Engine",
    state: TrainState | None,
    program: Program,
    source: ModelInit,
    init_from: InitFrom,
) -> TrainState:
    """The state with everything that it lacks made anew; all of it where there is no state.

    A new state takes from `init_from` what its map says, else the weights. Its optimizer is made
    from the weights that were read, and what is read of the optimizer's own state is put in after
    that.
    """
    key = jax.random.key(engine.seed)
    if state is not None:
        whole = not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
        return state if whole else _fill_missing(state, program.init_state(source, key))
    if init_from is None:
        return program.init_state(source, key)
    reference = init_from if isinstance(init_from, CheckpointRef) else as_checkpoint_ref(init_from)
    snapshot = load_snapshot(
        engine, replace(reference, map=reference.map or WEIGHTS, optional=False), program.state_spec
    )
    assert snapshot is not None
    read, state = snapshot.state, program.init_state(source, key)
    weights = _fill_missing((read.module, read.model_state), (state.module, state.model_state))
    return _fill_missing(read, program.init_state(as_model_init(weights), key))


def _fill_missing(read: T, initial: T) -> T:
    """What was read, and the initial arrays where nothing was."""
    return jax.tree.map(lambda a, b: b if isinstance(a, jax.ShapeDtypeStruct) else a, read, initial)


def load_snapshot(engine: "Engine", reference: CheckpointRef, like: TrainState) -> Snapshot | None:
    """The snapshot that the active checkpointer reads; None if there is none and that is fine."""
    where = "the run" if reference.path is None else reference.path
    restore = engine.plugins.get_single_impl("restore_checkpoint")
    if restore is None:
        raise PluginError(
            f"nothing can restore {where}: install fulgurite-checkpoint and add it to the plugins"
        )
    snapshot: Snapshot | None = restore(None, reference=reference, template=like, engine=engine)
    if snapshot is None and not reference.optional:
        raise CheckpointError(
            f"there is no checkpoint {reference.step!r} in {where}; check the path"
        )
    return None if snapshot is None else replace(snapshot, run_dir=reference.path)


def load_weights(engine: "Engine", model: Any, weights: Place) -> TrainState:
    """Return a train state with what an evaluation needs of a checkpoint.

    It has no optimizer state, metric window or non-finite tracker, and is restored without a batch
    of the training data, on which the structure of the window depends.

    Args:
        engine: the engine that evaluates.
        model: what `fit` takes, or a result or a train state; it gives the structure.
        weights: the checkpoint.
    """
    reference = weights if isinstance(weights, CheckpointRef) else as_checkpoint_ref(weights)
    if isinstance(model, FitResult | TrainState):
        model = model.module if model.model_state is None else (model.module, model.model_state)
    model_init = as_model_init(model)

    def init_state(arrays: Any, key: Key[Array, ""]) -> TrainState:
        module, model_state = model_init.build(arrays, key)
        left_out: Any = None
        plugin_states = init_plugin_states(engine.plugins, module, key)
        return TrainState(
            jnp.int32(0), module, model_state, left_out, key, left_out, left_out, plugin_states
        )

    template: TrainState = eqx.filter_eval_shape(init_state, model_init.arrays, jax.random.key(0))
    shardings = get_state_shardings(engine.plugins, engine.sharding, template)
    if shardings is not None:
        template = with_shardings(template, shardings)
    parts = ["step", "key", "module"]
    if template.model_state is not None:
        parts.append("model_state")
    for name in template.plugin_states:
        parts.append(str(from_keys((GetAttrKey("plugin_states"), DictKey(name)))))
    mapping = {part: part for part in parts}
    snapshot = load_snapshot(engine, replace(reference, map=mapping, optional=False), template)
    assert snapshot is not None
    return snapshot.state
