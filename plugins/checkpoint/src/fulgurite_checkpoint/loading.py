"""The model of a run, without an engine."""

import os
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import equinox as eqx
import fulgurite as fg
import jax
from fulgurite.errors import CheckpointError
from fulgurite.plugins import as_model_init, find_wholes

from fulgurite_checkpoint import arrays, restoring
from fulgurite_checkpoint.files import resolve_root
from fulgurite_checkpoint.format import Entry
from fulgurite_checkpoint.matching import Matches, match, pick
from fulgurite_checkpoint.references import resolve_step_path
from fulgurite_checkpoint.restoring import SavedCheckpoint

_MODEL_FIELDS = ("module", "model_state")


def load(
    run: str | os.PathLike[str],
    step: int | Literal["latest", "best"] = "latest",
    *,
    model: Any,
    strict: bool = True,
    view: Literal["current"] | None = None,
) -> Any:
    """Return the model of a checkpoint: its module, or the pair of module and `eqx.nn.State`.

    Needs no engine and no data. Weights that a plugin makes, such as averages and adapters, are
    read by `engine.load_weights` instead.

    Args:
        run: the directory of a run, of `Checkpointer(directory=)` or of `save_weights`, or
            `RUN/checkpoints/step-N`.
        step: a step, the newest one, or the best by the metric of the run.
        model: gives the structure: a module, a pair of a module and its state, or a callable that
            makes either as `model(key=key)`. None of its numbers are used if `strict`.
        strict: whether each array must be in the checkpoint, with the same shape and dtype, and no
            other one. Otherwise what has the shape comes, floating-point numbers in the dtype of
            the model, and a warning lists the rest, which stays as it is in the model; a callable
            is given `jax.random.key(0)`.
        view: `current` for the weights that were trained, although the best are those that a plugin
            made of them.

    Raises:
        CheckpointError: there is no such checkpoint, it does not fit, or it is damaged.

    Example:
        from fulgurite_checkpoint import Checkpointer, load

        engine = fg.Engine(steps=10, run_dir="runs/digits", plugins=[Checkpointer()])
        engine.fit(model, data)
        module = load("runs/digits", model=model)
    """
    reference = resolve_step_path(fg.CheckpointRef(run, step, view=view))
    assert reference.path is not None
    _check_view(view)
    root = resolve_root(reference.path)
    if not root.is_dir():
        raise CheckpointError(f"there is no run in {root}: check the path")
    model_init = as_model_init(model)

    def read(entry: Entry) -> fg.TrainState:
        checkpoint = restoring.read_checkpoint(entry, "full")
        if reference.step == "best" and view is None:
            _check_is_trained(checkpoint)
        return _read_model(checkpoint, model_init, _get_name(model), strict)

    if reference.step == "latest":
        state = restoring.find_newest(root, read)
    else:
        state = read(restoring.find_checkpoint(root, reference.step, None))
    if state is None:
        raise CheckpointError(f"there is no checkpoint in {root}: check the path")
    return state.module if state.model_state is None else (state.module, state.model_state)


def _read_model(
    checkpoint: SavedCheckpoint, model_init: Any, model_name: str, strict: bool
) -> fg.TrainState:
    """Return a state that holds the model of a checkpoint and nothing else.

    Args:
        checkpoint: the checkpoint.
        model_init: builds the model that gives the structure.
        model_name: of its class, for errors.
        strict: as for `load`.
    """
    key = jax.random.key(0)
    shapes = _make_state(eqx.filter_eval_shape(model_init.build, model_init.arrays, key))
    needed = arrays.flatten_state(shapes)
    matches = _match(needed, checkpoint, find_wholes(shapes))
    if strict and matches.differences:
        raise CheckpointError(
            f"{checkpoint.path} does not fit {model_name}:\n"
            f"{arrays.join_rows(matches.differences)}\n"
            "Give the model that was saved, also load(..., strict=False), which takes what "
            "fits, or engine.load_weights(model, run) where a plugin has changed the model"
        )
    if not matches.specs:
        raise CheckpointError(
            f"nothing of {checkpoint.path} fits {model_name}:\n"
            f"{arrays.join_rows(matches.rest)}\nGive the model that was saved"
        )
    loaded = restoring.load_verified(checkpoint, matches.specs, "full")
    parts = pick(matches, needed, loaded, checkpoint.path)
    if matches.differences:
        warnings.warn(
            f"{checkpoint.path} fits {model_name} in part: {matches.describe()}",
            stacklevel=2,
        )
        shapes = _make_state(model_init.build(model_init.arrays, key))
    return arrays.unflatten_state(shapes, parts)


def _match(
    needed: Mapping[str, Any], checkpoint: SavedCheckpoint, wholes: Mapping[str, str]
) -> Matches:
    """Return what of a checkpoint comes into a model.

    Args:
        needed: shapes by path.
        checkpoint: the checkpoint.
        wholes: of the model, as `find_wholes` returns them.
    """
    saved = {
        name: spec
        for name, spec in checkpoint.specs.items()
        if name.startswith(tuple(f"{field}{end}" for field in _MODEL_FIELDS for end in ".["))
    }
    names = sorted({*needed, *saved})
    pairs = [(name if name in needed else None, name if name in saved else None) for name in names]
    return match(needed, saved, pairs, wholes)


def _check_view(view: str | None) -> None:
    if view not in (None, "current"):
        raise CheckpointError(
            f"load: view is {view!r}, which a plugin makes: read it by engine.load_weights(model, "
            "fg.CheckpointRef(run, view=...)), in an engine with that plugin"
        )


def _check_is_trained(checkpoint: SavedCheckpoint) -> None:
    """Raise a `CheckpointError` if it is not by the weights of the module that this is the best."""
    module_view = checkpoint.find_module_view(None)
    if module_view != "current":
        raise CheckpointError(
            f"{checkpoint.path} is the best by the weights {module_view!r}, which a plugin makes: "
            "read them by engine.load_weights(model, fg.CheckpointRef(run, 'best')), in an engine "
            "with that plugin, or those that were trained by load(..., view='current')"
        )


def _make_state(model: tuple[Any, eqx.nn.State | None]) -> fg.TrainState:
    """Return a state that holds nothing else than a model."""
    left_out: Any = None
    module, model_state = model
    return fg.TrainState(left_out, module, model_state, left_out, left_out, left_out, left_out, {})


def _get_name(model: Any) -> str:
    module = model[0] if isinstance(model, tuple) else model
    while isinstance(module, partial):
        module = module.func
    return getattr(module, "__name__", type(module).__name__)
