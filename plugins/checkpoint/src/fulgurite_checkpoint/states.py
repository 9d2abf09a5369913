"""The state of a loop of one's own, saved and restored."""

import os

import fulgurite as fg
import jax
from fulgurite.errors import CheckpointError, ConfigurationError, StateError
from fulgurite.plugins import CheckpointSource, check_not_consumed, format_tree
from fulgurite_runs import describe_model

from fulgurite_checkpoint import arrays, restoring
from fulgurite_checkpoint.files import resolve_root
from fulgurite_checkpoint.format import Entry
from fulgurite_checkpoint.references import as_checkpoint_ref
from fulgurite_checkpoint.restoring import SavedCheckpoint
from fulgurite_checkpoint.weights import find_new, write_run


def save_state(state: fg.TrainState, out: str | os.PathLike[str]) -> None:
    """Write a whole train state, optimizer and metrics included, for a loop over `Engine.step`; a
    `Checkpointer` does that for `fit`.

    Which batches come next is the loop's own business. The weights are also read by
    `fit(init_from=out)` and `engine.evaluate(weights=out)`.

    Args:
        state: the state; it stays usable.
        out: the new directory, such as `f"states/{step}"`.

    Raises:
        CheckpointError: `out` exists.
        ConfigurationError: this is one of several processes.
        StateError: a later step consumed the state.

    Example:
        from fulgurite_checkpoint import restore_state, save_state

        engine = fg.Engine(steps=100)
        state = engine.init_state(model, data)
        save_state(state, "states/0")
        state = restore_state("states/0", like=engine.init_state(model, data))
    """
    if not isinstance(state, fg.TrainState):
        raise StateError(f"save_state takes a train state, not {type(state).__name__}")
    if jax.process_count() > 1:
        raise ConfigurationError(
            "save_state is for one process: with several, train by fit with a Checkpointer"
        )
    check_not_consumed(state)
    path = find_new(out)
    step = int(state.step)
    manifest = {
        "configuration": None,
        "program": None,
        "plugins": [],
        "model": describe_model(format_tree(state.module)),
        "settings": {"steps": 1, "epochs": None},
    }
    index = {
        "step_range": fg.StepRange(step, step).to_json(),
        "metrics": {},
        "stop_reason": "save_state",
        "state_only": True,
    }
    write_run(path, step, arrays.flatten_state(state), manifest, index)


def restore_state(
    source: CheckpointSource, *, like: fg.TrainState, fills_in: bool = False
) -> fg.TrainState:
    """Return a train state that was saved by `save_state`, or by a `Checkpointer`, bit for bit.

    Every file is compared with its hash first.

    Args:
        source: the directory, or a `CheckpointRef` for another step of a run than the newest.
        like: a state of the same model, optimizer and plugins, such as that of `init_state`: its
            shapes, devices and functions count, not its numbers. It stays usable.
        fills_in: whether what a checkpoint of weights alone lacks is taken from `like`; by default
            such a checkpoint is an error.

    Raises:
        CheckpointError: there is none, it is damaged, or an array has another shape or dtype.
        ConfigurationError: the reference asks for a part of the state.
    """
    reference = as_checkpoint_ref(source)
    if reference.path is None or (reference.map, reference.view) != (None, None):
        raise ConfigurationError(
            f"restore_state reads a whole state: {source!r} must have a path, and no map or view. "
            "Parts are for fit(init_from=...)"
        )
    root = resolve_root(reference.path)
    step = reference.step
    if step == "latest":
        checkpoint = restoring.find_newest(root, _read)
    else:
        checkpoint = _read(restoring.find_checkpoint(root, step, None))
    if checkpoint is None:
        raise CheckpointError(f"there is no state in {root}: check the path")
    has_weights_alone = checkpoint.index.get("weights_only", False)
    if has_weights_alone and not fills_in:
        raise CheckpointError(
            f"{checkpoint.path} holds weights alone: read them by engine.load_weights, or by "
            "fit(init_from=...)"
        )
    needed = arrays.flatten_state(like)
    if has_weights_alone:
        needed = {name: array for name, array in needed.items() if name in checkpoint.specs}
    arrays.check_same_specs(needed, checkpoint.specs, checkpoint.path)
    loaded = restoring.load_verified(checkpoint, needed, "full")
    return arrays.unflatten_state(like, loaded)


def _read(entry: Entry) -> SavedCheckpoint:
    return restoring.read_checkpoint(entry, "full")
