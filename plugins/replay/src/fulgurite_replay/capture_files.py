"""A step of a run on disk: the state before it, its batch, and what else it is replayed with."""

import math
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite.plugins import total_size
from fulgurite_checkpoint import restore_state, save_state
from fulgurite_runs import encode_readable, get_folder, is_link, loads, sync_folder

FOLDER = "captures"
"""The folder of a run that holds its captures: `step-N`, complete as soon as it has its name."""
_NAME = re.compile(r"step-([1-9][0-9]{0,11})")
_DTYPE = re.compile(r"(bool|b?float|u?int|complex)[a-z0-9_]*")
_FILE = "capture.json"
_STATE = "state"
_FORMAT = 1
_MAX_BYTES = 2**20
"""The most bytes of `capture.json` that are read."""
_MAX_BATCH_BYTES = 2**32
"""The most bytes of a batch that is captured."""
_BATCH = "captured_batch"
"""Under which the arrays of the batch stand among the states of plugins: no plugin has that name
while the run trains, and so the batch is written and checked as the state is."""


@dataclass(frozen=True, eq=False)
class Captured:
    """A step of a run as it was captured.

    Example:
        from fulgurite_replay import Captured

        print(Captured(38, "the loss", fg.StepRange(0, 50), {"x": np.ones((8, 3))}, None))

    Attributes:
        step: its number.
        reason: why it was captured: what of it was not finite, or the name of a function.
        step_range: of the fit.
        batch: its batch, as the data gave it; read from a file, zeros of its shapes.
        state: the state before it; None if it was not read.
        place: which batch of the data it is, as a sentence; None where that is not known.
        examples: what the data calls each of its examples; none where it does not know them.
    """

    step: int
    reason: str
    step_range: fg.StepRange
    batch: Any
    state: fg.TrainState | None
    place: str | None = None
    examples: tuple[str, ...] = ()


def list_captures(run: Path) -> dict[int, Path]:
    """Return the captures of a run by step.

    Args:
        run: its directory.
    """
    folder = get_folder(run, FOLDER)
    if not folder.is_dir():
        return {}
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in matches if match and not is_link(path)}


def write_capture(run: Path, captured: Captured) -> tuple[Path, int]:
    """Write a capture, whole or not at all; return its folder, and how many bytes its arrays have.

    Args:
        run: the directory of the run.
        captured: the step, with its state.

    Raises:
        ConfigurationError: the batch consists of something else than arrays in dictionaries, lists,
            tuples and `fg.Batch`, or is larger than 4 GiB.
    """
    assert captured.state is not None
    # On JAX's devices a batch has the dtypes that the step sees.
    arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(captured.batch)]
    if total_size(arrays)[1] > _MAX_BATCH_BYTES:
        raise ConfigurationError(
            f"the batch of step {captured.step} has {total_size(arrays)[1]:,} bytes, and at most "
            f"{_MAX_BATCH_BYTES:,} can be captured"
        )
    content = {
        "format": _FORMAT,
        "step": captured.step,
        "reason": captured.reason,
        "step_range": captured.step_range.to_json(),
        "batch": _describe(captured.batch),
        "place": captured.place,
    }
    text = encode_readable(content | {"examples": list(captured.examples)}, _FILE)
    if len(text.encode()) > _MAX_BYTES:
        # The step can be replayed without the names of its examples.
        text = encode_readable(content, _FILE)
    if len(text.encode()) > _MAX_BYTES:
        raise ConfigurationError(
            f"the batch of step {captured.step} has so many arrays that it cannot be captured"
        )
    folder = get_folder(run, FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{captured.step}"
    for leftover in folder.glob(".step-*.*"):  # of a process that was killed
        shutil.rmtree(leftover)
    temporary = folder / f".step-{captured.step}.new"
    temporary.mkdir()
    state = _add_batch(captured.state, arrays)
    save_state(state, temporary / _STATE)
    with (temporary / _FILE).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(temporary)
    if path.exists():
        path.rename(folder / f".step-{captured.step}.old")  # until the new one is in its place
    temporary.rename(path)
    sync_folder(folder)
    shutil.rmtree(folder / f".step-{captured.step}.old", ignore_errors=True)
    return path, total_size(state)[1]


def remove_oldest(run: Path, max_to_keep: int) -> None:
    """Remove the captures that were written first, until at most `max_to_keep` are left.

    Their steps do not tell: a run may begin again, or go back, and then captures an earlier step.

    Args:
        run: the directory of the run.
        max_to_keep: how many stay.
    """
    paths = sorted(list_captures(run).values(), key=lambda path: path.stat().st_mtime_ns)
    for path in paths[: max(len(paths) - max_to_keep, 0)]:
        shutil.rmtree(path)


def read_capture(path: Path) -> Captured:
    """Return what a capture says of its step, with a batch of zeros and without its state.

    Args:
        path: its folder.

    Raises:
        CheckpointError: it is not one of `Capture`, or damaged.
    """
    try:
        content = loads(_read_bounded(path / _FILE))
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, and this reads {_FORMAT}")
        step, reason = content["step"], content["reason"]
        if type(step) is not int or step < 1 or not isinstance(reason, str):
            raise ValueError("its step is not a number from 1 on, or its reason not a string")
        step_range = fg.StepRange.from_json(content["step_range"])
        numbers = [step_range.start, step_range.stop, *step_range.epoch_ends]
        if any(type(number) is not int for number in numbers if number is not None):
            raise ValueError("its range of steps does not consist of numbers")
        place, examples = content.get("place"), content.get("examples", [])
        if not isinstance(place, str | None) or not isinstance(examples, list):
            raise ValueError("it does not say where the data has its batch")
        if not all(isinstance(example, str) for example in examples):
            raise ValueError("the names of its examples are not strings")
        batch = _build(content["batch"])
        if total_size(batch)[1] > _MAX_BATCH_BYTES:
            raise ValueError(f"its batch has more than {_MAX_BATCH_BYTES:,} bytes")
    except (OSError, ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"{path} is not a capture that can be read: {error!r}. Replay the step from the data "
            "of the run, --from checkpoint"
        ) from error
    return Captured(step, reason, step_range, batch, None, place, tuple(examples))


def read_state(path: Path, batch: Any, like: fg.TrainState) -> tuple[fg.TrainState, Any]:
    """Return the state of a capture and its batch, both compared with their hashes.

    Args:
        path: its folder.
        batch: that of `read_capture`.
        like: a state of the same program.

    Raises:
        CheckpointError: it is damaged, or of another program.
    """
    leaves, structure = jax.tree.flatten(batch)
    specs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    template = _add_batch(like, specs)
    state = restore_state(path / _STATE, like=template)
    arrays = state.plugin_states[_BATCH]
    return _remove_batch(state), jax.tree.unflatten(structure, arrays)


def _add_batch(state: fg.TrainState, arrays: list[Any]) -> fg.TrainState:
    return state.replace(plugin_states={**state.plugin_states, _BATCH: arrays})


def _remove_batch(state: fg.TrainState) -> fg.TrainState:
    states = {name: value for name, value in state.plugin_states.items() if name != _BATCH}
    return state.replace(plugin_states=states)


def _read_bounded(path: Path) -> bytes:
    # A pipe would block, and a link may lead anywhere.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        raw = file.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
    return raw


def _describe(tree: Any) -> Any:
    """Return what a batch consists of as JSON, with the shape and dtype of each array."""
    if tree is None:
        return None
    if isinstance(tree, fg.Batch):
        if not isinstance(tree.spec, None | bool | int | float | str):
            raise ConfigurationError(
                f"the spec of a batch that is captured is a string or a number, not {tree.spec!r}"
            )
        parts = {"value": tree.value, "mask": tree.mask, "num_examples": tree.num_examples}
        return {"batch": _describe(parts), "spec": tree.spec}
    if type(tree) is dict and all(isinstance(key, str) for key in tree):
        return {"dict": [[key, _describe(value)] for key, value in tree.items()]}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_describe(value) for value in tree]}
    if not jax.tree_util.all_leaves([tree]):
        raise ConfigurationError(
            "a batch that is captured consists of arrays in dictionaries, lists, tuples and "
            f"fg.Batch, not of {type(tree).__name__}: without pickle no other can be read again"
        )
    array = jnp.asarray(tree)
    if _DTYPE.fullmatch(str(array.dtype)) is None:
        raise ConfigurationError(
            f"a batch that is captured consists of numbers, not of {array.dtype}: let the data "
            "yield jax.random.key_data(keys)"
        )
    return {"shape": list(array.shape), "dtype": str(array.dtype)}


def _build(content: Any) -> Any:
    """Return a batch of zeros from what `_describe` wrote.

    Raises:
        ValueError: it wrote something else.
    """
    if content is None:
        return None
    match content:
        case {"batch": parts, "spec": None | bool() | int() | float() | str() as spec}:
            return fg.Batch(**_build(parts), spec=spec)
        case {"dict": [*items]}:
            return {str(key): _build(value) for key, value in items}
        case {"list": [*values]}:
            return [_build(value) for value in values]
        case {"tuple": [*values]}:
            return tuple(_build(value) for value in values)
        case {"shape": [*shape], "dtype": str() as dtype}:
            return _make_zeros(shape, dtype)
    raise ValueError(f"{content!r} is not a part of a batch")


def _make_zeros(shape: list[Any], dtype: str) -> np.ndarray:
    """Return zeros, of which the system has yet to give the memory.

    Raises:
        ValueError: these are no shape and dtype of an array of numbers.
    """
    if any(type(size) is not int or size < 0 for size in shape) or len(shape) > 32:
        raise ValueError(f"{shape!r} is not a shape")
    if _DTYPE.fullmatch(dtype) is None:
        raise ValueError(f"{dtype!r:.100} is not a dtype of numbers")
    if math.prod(shape) > _MAX_BATCH_BYTES:
        raise ValueError(f"an array of shape {shape!r} is too large")
    return np.zeros(shape, jnp.dtype(dtype))
