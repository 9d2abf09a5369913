"""A checkpoint of the mean weights of others.

Izmailov et al. 2018, Averaging Weights Leads to Wider Optima and Better Generalization.
"""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import CheckpointError

from fulgurite_checkpoint import arrays, format, restoring
from fulgurite_checkpoint.files import resolve_root
from fulgurite_checkpoint.inspecting import as_wide_dtype, load_arrays, load_values, parse_dtype
from fulgurite_checkpoint.restoring import SavedCheckpoint
from fulgurite_checkpoint.weights import find_new, write_weights

_WEIGHTS = ("module", "model_state")


def average_checkpoints(
    run: str | os.PathLike[str], last: int, out: str | os.PathLike[str]
) -> list[int]:
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
    path = find_new(out)
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
    means = _compute_means(checkpoints, [*weights, "step", "key"])
    write_weights(path, newest.commit.step, means, newest.manifest, newest.index)
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


def _select_weights(checkpoint: SavedCheckpoint) -> dict[str, arrays.Spec]:
    return {name: spec for name, spec in checkpoint.specs.items() if _is_weight(name)}


def _is_weight(name: str) -> bool:
    prefixes = tuple(f"{part}{separator}" for part in _WEIGHTS for separator in ".[")
    return name in _WEIGHTS or name.startswith(prefixes)
