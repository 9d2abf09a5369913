"""A checkpoint of the mean weights of others.

Izmailov et al. 2018, Averaging Weights Leads to Wider Optima and Better Generalization.
"""

import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import CheckpointError
from fulgurite_runs.json_codec import dumps

from fulgurite_checkpoint import arrays, format, restoring
from fulgurite_checkpoint.files import resolve_root, write_durably
from fulgurite_checkpoint.format import Commit
from fulgurite_checkpoint.inspecting import as_wide_dtype, load_arrays, load_values, parse_dtype
from fulgurite_checkpoint.restoring import SavedCheckpoint
from fulgurite_checkpoint.retention import publish

_WEIGHTS = ("module", "model_state")


def average_checkpoints(run: str | os.PathLike[str], last: int, out: Path) -> list[int]:
    """Write a run directory with one checkpoint of mean weights; return the steps of the others.

    It holds the mean of every float or complex array of module and model state, summed in double
    precision; of other arrays there, and of step and key, it holds those of the newest checkpoint.

    Args:
        run: the run whose checkpoints are averaged.
        last: how many of the newest.
        out: the new run directory.

    Raises:
        CheckpointError: `out` exists, there are fewer checkpoints, or one is damaged or has arrays
            of other shapes.
    """
    if last < 1:
        raise CheckpointError(f"--last is {last}; it must be a positive integer")
    if out.exists():
        raise CheckpointError(f"{out} already exists: choose another path")
    arrays.check_writable(out)
    root = resolve_root(run)
    entries = format.list_entries(root)[-last:]
    if len(entries) < last:
        raise CheckpointError(
            f"{root} has {len(entries)} checkpoints, not {last}: choose a smaller --last"
        )
    checkpoints = [restoring.read_checkpoint(entry, "full") for entry in entries]
    newest = checkpoints[-1]
    weights = _select_weights(newest)
    shapes = {
        name: jax.ShapeDtypeStruct(shape, parse_dtype(dtype))
        for name, (shape, dtype) in weights.items()
    }
    for checkpoint in checkpoints:
        arrays.check_same_specs(shapes, _select_weights(checkpoint), checkpoint.path)
    _write(out, newest, _compute_means(checkpoints, [*weights, "step", "key"]))
    return [checkpoint.commit.step for checkpoint in checkpoints]


def _compute_means(checkpoints: list[SavedCheckpoint], names: list[str]) -> dict[str, Any]:
    newest = load_arrays(checkpoints[-1], names)
    floats = [name for name, array in newest.items() if jnp.issubdtype(array.dtype, jnp.inexact)]
    sums = {
        name: np.asarray(newest[name]).astype(as_wide_dtype(newest[name].dtype)) for name in floats
    }
    for checkpoint in checkpoints[:-1]:
        for name, array in load_values(checkpoint, floats).items():
            sums[name] += array.astype(as_wide_dtype(array.dtype))
    means = {
        name: (total / len(checkpoints)).astype(newest[name].dtype) for name, total in sums.items()
    }
    return newest | means


def _write(out: Path, newest: SavedCheckpoint, means: dict[str, Any]) -> None:
    step = newest.commit.step
    path = format.get_checkpoint_folder(out) / f"saving-step-{step}"
    path.mkdir(parents=True)
    saving = arrays.start_saving(
        path / "arrays", {name: jnp.asarray(array) for name, array in means.items()}
    )
    saving.result()
    specs = {name: arrays.get_spec(array) for name, array in means.items()}
    contents = {
        "manifest.json": newest.manifest,
        "index.json": newest.index | {"arrays": specs, "pending_actions": []},
        "history.json": {"records": []},
        "host-0.json": {"host_states": {}, "data_position": None},
    }
    for name, content in contents.items():
        write_durably(path / name, dumps(content).encode())
    commit = Commit(
        step=step,
        attempt=1,
        hashes=[format.write_hashes(path, 0, 1)],
        logger_positions=[{}],
        metrics={},
        monitor=None,
        timings={},
        wall_time=time.time(),
    )
    format.write_commit(path, commit)
    publish(path, commit)


def _select_weights(checkpoint: SavedCheckpoint) -> dict[str, arrays.Spec]:
    return {name: spec for name, spec in checkpoint.specs.items() if _is_weight(name)}


def _is_weight(name: str) -> bool:
    prefixes = tuple(f"{part}{separator}" for part in _WEIGHTS for separator in ".[")
    return name in _WEIGHTS or name.startswith(prefixes)
