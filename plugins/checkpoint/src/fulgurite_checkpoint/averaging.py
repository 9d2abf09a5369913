"""A checkpoint of the mean weights of others (Izmailov et al. 2018, Averaging Weights Leads to
Wider Optima)."""

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
from fulgurite_checkpoint.format import Commit
from fulgurite_checkpoint.inspecting import as_wide_dtype, load_arrays, load_values, parse_dtype
from fulgurite_checkpoint.restoring import Read
from fulgurite_checkpoint.retention import publish

PARTS = ("module", "model_state")


def average_checkpoints(run: str | os.PathLike[str], last: int, out: Path) -> list[int]:
    """Writes a run directory `out` with one checkpoint: the mean over the newest `last` checkpoints
    of every float or complex array of module and model state, summed in double precision; of other
    arrays there, and of step and key, those of the newest. Gives their steps."""
    if last < 1:
        raise CheckpointError(f"--last is {last}; it must be a positive integer")
    if out.exists():
        raise CheckpointError(f"{out} already exists: choose another path")
    arrays.check_writable(out)
    root = format.resolve_root(run)
    found = format.list_entries(root)[-last:]
    if len(found) < last:
        raise CheckpointError(f"{root} has {len(found)} checkpoints, not {last}")
    kept = [restoring.read_checkpoint(entry, "full") for entry in found]
    newest = kept[-1]
    specs = {name: spec for name, spec in newest.saved.items() if _is_weight(name)}
    for one in kept:
        arrays.compare(
            {
                name: jax.ShapeDtypeStruct(shape, parse_dtype(dtype))
                for name, (shape, dtype) in specs.items()
            },
            {name: spec for name, spec in one.saved.items() if _is_weight(name)},
            one.path,
        )
    _write(out, newest, _means(kept, [*specs, "step", "key"]))
    return [one.commit.step for one in kept]


def _means(kept: list[Read], names: list[str]) -> dict[str, Any]:
    newest = load_arrays(kept[-1], names)
    floats = [name for name, array in newest.items() if jnp.issubdtype(array.dtype, jnp.inexact)]
    sums = {
        name: np.asarray(newest[name]).astype(as_wide_dtype(newest[name].dtype)) for name in floats
    }
    for one in kept[:-1]:
        for name, array in load_values(one, floats).items():
            sums[name] += array.astype(as_wide_dtype(array.dtype))
    return newest | {
        name: (total / len(kept)).astype(newest[name].dtype) for name, total in sums.items()
    }


def _write(out: Path, newest: Read, means: dict[str, Any]) -> None:
    step = newest.commit.step
    path = format.get_checkpoint_folder(out) / f"saving-step-{step}"
    path.mkdir(parents=True)
    arrays.save(
        path / "arrays", {name: jnp.asarray(array) for name, array in means.items()}
    ).result()
    index = newest.index | {
        "arrays": {name: arrays.get_spec(array) for name, array in means.items()},
        "pending": [],
    }
    texts = {
        "manifest.json": newest.manifest,
        "index.json": index,
        "host-0.json": {"host": {}, "position": None},
    }
    for name, content in texts.items():
        format.write(path / name, dumps(content).encode())
    commit = Commit(step, 1, [format.write_hashes(path, 0, 1)], [{}], {}, None, {}, time.time())
    format.write_commit(path, commit)
    publish(path, commit)


def _is_weight(name: str) -> bool:
    return (
        name.startswith(tuple(f"{part}{mark}" for part in PARTS for mark in ".[")) or name in PARTS
    )
