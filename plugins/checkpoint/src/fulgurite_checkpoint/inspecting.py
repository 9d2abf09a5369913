"""What a checkpoint holds, and how two of them differ."""

import json
import os
from typing import Any

import fulgurite as fg
import jax
import numpy as np
from fulgurite.errors import CheckpointError
from fulgurite.plugins import as_printable
from fulgurite_runs import dumps, get_hyperparameters

from fulgurite_checkpoint import arrays, format, restoring
from fulgurite_checkpoint.differences import describe_differences, list_changes
from fulgurite_checkpoint.files import resolve_root
from fulgurite_checkpoint.listing import format_number, format_size
from fulgurite_checkpoint.references import resolve_step_path
from fulgurite_checkpoint.restoring import SavedCheckpoint

_KEY_SIZES = {"key<fry>": 8, "key<rbg>": 16, "key<urbg>": 16}
"""Bytes of a random key, by dtype."""


def open_checkpoint(path: str | os.PathLike[str]) -> SavedCheckpoint:
    """Return the checkpoint `RUN/checkpoints/step-N`, or the newest of `RUN` that is not damaged;
    its small files are verified."""
    reference = resolve_step_path(fg.CheckpointRef(path))
    root = resolve_root(reference.path or "")
    if not root.is_dir():
        raise CheckpointError(f"there is no run in {root}: check the path")
    if reference.step != "latest":
        entry = restoring.find_checkpoint(root, reference.step, None)
        return restoring.read_checkpoint(entry, "size")
    checkpoint = restoring.find_newest(root, lambda entry: restoring.read_checkpoint(entry, "size"))
    if checkpoint is None:
        raise CheckpointError(f"there is no checkpoint in {root}: check the path")
    return checkpoint


def describe_checkpoint(checkpoint: SavedCheckpoint) -> dict[str, Any]:
    """Return all of a checkpoint but the values of its arrays, as JSON."""
    commit = checkpoint.commit
    return {
        "step": commit.step,
        "attempt": commit.attempt,
        "wall_time": commit.wall_time,
        "metrics": commit.metrics,
        "timings": commit.timings,
        "step_range": checkpoint.index["step_range"],
        "arrays": {
            name: {"shape": list(shape), "dtype": dtype}
            for name, (shape, dtype) in checkpoint.specs.items()
        },
        "manifest": checkpoint.manifest,
    }


def format_checkpoint(checkpoint: SavedCheckpoint) -> str:
    """Return a checkpoint as text: arrays by path with dtype, shape and size, then the rest as
    indented JSON."""
    specs = {
        name: f"{dtype}[{','.join(map(str, shape))}]"
        for name, (shape, dtype) in checkpoint.specs.items()
    }
    sizes = {name: _compute_size(*spec) for name, spec in checkpoint.specs.items()}
    name_width = max(map(len, specs), default=0)
    spec_width = max(map(len, specs.values()), default=0)
    rows = [
        f"{name:{name_width}}  {spec:{spec_width}}  {format_size(sizes[name]):>8}"
        for name, spec in specs.items()
    ]
    total = f"{len(rows)} arrays, {format_size(sum(sizes.values()))}"
    description = describe_checkpoint(checkpoint)
    del description["arrays"]
    description = json.loads(dumps(description))  # metrics may be arrays
    lines = [str(checkpoint.path), "", *rows, total, "", json.dumps(description, indent=2)]
    return as_printable("\n".join(lines))


def compare_checkpoints(first: SavedCheckpoint, second: SavedCheckpoint) -> list[str]:
    """Return a line for each difference: arrays that only one has, other shapes and dtypes, other
    values, and what the runs are made of."""
    rows = []
    common_names = []
    for name in dict.fromkeys([*first.specs, *second.specs]):
        first_spec = first.specs.get(name)
        second_spec = second.specs.get(name)
        if first_spec == second_spec:
            common_names.append(name)
        else:
            rows.append(f"{name}: {_format_spec(first_spec)} | {_format_spec(second_spec)}")
    first_values = load_values(first, common_names)
    second_values = load_values(second, common_names)
    for name in common_names:
        if first_values[name].tobytes() != second_values[name].tobytes():
            rows.append(f"{name}: {_format_difference(first_values[name], second_values[name])}")
    rows += describe_differences(first.manifest, second.manifest)
    rows += list_changes(get_hyperparameters(first.manifest), get_hyperparameters(second.manifest))
    return [as_printable(row) for row in rows]


def load_values(checkpoint: SavedCheckpoint, names: list[str]) -> dict[str, np.ndarray]:
    """Return arrays of a checkpoint as NumPy arrays, verified; random keys as their data.

    Args:
        checkpoint: the checkpoint.
        names: the paths of the arrays.
    """
    values = {}
    for name, array in load_arrays(checkpoint, names).items():
        is_key = jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
        values[name] = np.asarray(jax.random.key_data(array) if is_key else array)
    return values


def load_arrays(checkpoint: SavedCheckpoint, names: list[str]) -> dict[str, jax.Array]:
    """Return arrays of a checkpoint, verified.

    Args:
        checkpoint: the checkpoint.
        names: the paths of the arrays.

    Raises:
        CheckpointError: one has 64 bits, and JAX is set to 32.
    """
    format.verify_files(checkpoint.path, checkpoint.commit, "full")
    specs = {}
    for name in names:
        shape, dtype = checkpoint.specs[name]
        spec = specs[name] = jax.ShapeDtypeStruct(shape, parse_dtype(dtype))
        if jax.dtypes.canonicalize_dtype(spec.dtype, allow_extended_dtype=True) != spec.dtype:
            raise CheckpointError(
                f"{checkpoint.path}: {name} is of {dtype}, of which JAX would read the half: run "
                "this again with the environment variable JAX_ENABLE_X64=1"
            )
    return arrays.load(checkpoint.path / "arrays", specs)


def as_wide_dtype(dtype: Any) -> Any:
    """Return the dtype in which numbers of another are added up and compared."""
    is_complex = jax.numpy.issubdtype(dtype, jax.numpy.complexfloating)
    return np.complex128 if is_complex else np.float64


def parse_dtype(name: str) -> Any:
    """Return the dtype of that name in an index."""
    if name.startswith("key<"):
        for implementation in ("threefry2x32", "rbg", "unsafe_rbg"):
            dtype = jax.random.key(0, impl=implementation).dtype
            if name == str(dtype):
                return dtype
    try:
        return jax.numpy.dtype(name)
    except (TypeError, ValueError, SyntaxError) as error:  # NumPy evaluates some names
        raise CheckpointError(
            f"arrays of dtype {name!r} cannot be read with this version of jax: use the one that "
            f"wrote them"
        ) from error


def _format_difference(first: np.ndarray, second: np.ndarray) -> str:
    if first.dtype.kind in "biu":
        return f"{np.count_nonzero(first != second)} of {first.size} differ"
    wide_dtype = as_wide_dtype(first.dtype)
    first = first.astype(wide_dtype)
    second = second.astype(wide_dtype)
    with np.errstate(invalid="ignore"):
        distances = np.abs(first - second)
    largest = float(np.max(distances[~np.isnan(distances)], initial=0.0))
    text = f"differs by up to {format_number(largest)}"
    num_nan = np.count_nonzero(np.isnan(first) != np.isnan(second))
    if num_nan:
        text += f", and {num_nan} of {first.size} are NaN on one side"
    return text


def _compute_size(shape: tuple[int, ...], dtype: str) -> int:
    item_size = _KEY_SIZES.get(dtype) or parse_dtype(dtype).itemsize
    return item_size * int(np.prod(shape, dtype=np.int64))


def _format_spec(spec: arrays.Spec | None) -> str:
    return "not there" if spec is None else f"{spec[1]}{list(spec[0])}"
