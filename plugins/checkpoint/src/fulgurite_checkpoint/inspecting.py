"""What a checkpoint holds, and how two of them differ."""

import json
import os
from typing import Any

import fulgurite as fg
import jax
import numpy as np
from fulgurite.errors import CheckpointError

from fulgurite_checkpoint import arrays, format, restoring
from fulgurite_checkpoint.listing import format_number, format_size, strip_control_characters
from fulgurite_checkpoint.references import resolve_step_path
from fulgurite_checkpoint.restoring import Read


def open_checkpoint(path: str | os.PathLike[str]) -> Read:
    """The checkpoint `RUN/checkpoints/step-N`, or the newest of `RUN` that is whole; its small
    files, verified."""
    reference = resolve_step_path(fg.CheckpointRef(path))
    root = format.resolve_root(reference.path or "")
    if not root.is_dir():
        raise CheckpointError(f"there is no run in {root}: check the path")
    if reference.step != "latest":
        return restoring.read_checkpoint(
            restoring.find_checkpoint(root, reference.step, None), "size"
        )
    kept = restoring.find_newest(root, lambda entry: restoring.read_checkpoint(entry, "size"))
    if kept is None:
        raise CheckpointError(f"there is no checkpoint in {root}")
    return kept


def describe_checkpoint(kept: Read) -> dict[str, Any]:
    """All of it but the values of the arrays, as JSON."""
    rows = {
        name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in kept.saved.items()
    }
    commit = {
        name: getattr(kept.commit, name)
        for name in ("step", "attempt", "wall", "metrics", "timers")
    }
    return commit | {"span": kept.index["span"], "arrays": rows, "manifest": kept.manifest}


def format_checkpoint(kept: Read) -> str:
    """The same for people: arrays by path with dtype, shape and size, then the rest as indented
    JSON."""
    told = describe_checkpoint(kept)
    rows = [
        (name, f"{dtype}[{','.join(map(str, shape))}]", _bytes(shape, dtype))
        for name, (shape, dtype) in kept.saved.items()
    ]
    wide, wider = (
        max(map(len, column), default=0)
        for column in ([row[0] for row in rows], [row[1] for row in rows])
    )
    lines = [
        f"{name:{wide}}  {spec:{wider}}  {format_size(count):>8}" for name, spec, count in rows
    ]
    total = f"{len(rows)} arrays, {format_size(sum(count for *_, count in rows))}"
    del told["arrays"]
    return strip_control_characters(
        "\n".join([str(kept.path), "", *lines, total, "", json.dumps(told, indent=2)])
    )


def compare_checkpoints(first: Read, second: Read) -> list[str]:
    """A line for each difference: arrays that are there once, other shapes and dtypes, other
    values, and what the runs are made of."""
    rows, same = [], []
    for name in dict.fromkeys([*first.saved, *second.saved]):
        one, two = first.saved.get(name), second.saved.get(name)
        if one == two:
            same.append(name)
        else:
            rows.append(f"{name}: {_format_spec(one)} | {_format_spec(two)}")
    left, right = load_values(first, same), load_values(second, same)
    for name in same:
        if left[name].tobytes() != right[name].tobytes():
            rows.append(f"{name}: {_describe_difference(left[name], right[name])}")
    return [
        strip_control_characters(row)
        for row in rows + restoring.describe_differences(first.manifest, second.manifest)
    ]


def load_values(kept: Read, names: list[str]) -> dict[str, np.ndarray]:
    """Arrays of a checkpoint as NumPy arrays, verified; keys as their data."""
    read = load_arrays(kept, names)
    return {
        name: np.asarray(jax.random.key_data(one) if _is_key(one.dtype) else one)
        for name, one in read.items()
    }


def load_arrays(kept: Read, names: list[str]) -> dict[str, jax.Array]:
    """Arrays of a checkpoint, verified."""
    format.verify(kept.path, kept.commit, "full")
    specs = {
        name: jax.ShapeDtypeStruct(kept.saved[name][0], parse_dtype(kept.saved[name][1]))
        for name in names
    }
    return arrays.load(kept.path / "arrays", specs)


def _describe_difference(left: np.ndarray, right: np.ndarray) -> str:
    if left.dtype.kind in "biu":
        return f"{np.count_nonzero(left != right)} of {left.size} differ"
    first, second = left.astype(as_wide_dtype(left.dtype)), right.astype(as_wide_dtype(right.dtype))
    with np.errstate(invalid="ignore"):
        apart = np.abs(first - second)
    apart = apart[~np.isnan(apart)]
    odd = np.count_nonzero(np.isnan(first) != np.isnan(second))
    nan = f", and {odd} of {left.size} are NaN on one side" if odd else ""
    return f"differs by up to {format_number(float(np.max(apart, initial=0.0)))}{nan}"


def as_wide_dtype(dtype: Any) -> Any:
    """The dtype in which numbers of another are added up and compared."""
    return np.complex128 if jax.numpy.issubdtype(dtype, jax.numpy.complexfloating) else np.float64


def parse_dtype(name: str) -> Any:
    """The dtype that an index calls so."""
    if name.startswith("key<"):
        for implementation in ("threefry2x32", "rbg", "unsafe_rbg"):
            if name == str(dtype := jax.random.key(0, impl=implementation).dtype):
                return dtype
    try:
        return jax.numpy.dtype(name)
    except TypeError as error:
        raise CheckpointError(f"arrays of dtype {name!r} are unknown here") from error


def _is_key(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    key = {"key<fry>": 8, "key<rbg>": 16, "key<urbg>": 16}
    each = key.get(dtype) or parse_dtype(dtype).itemsize
    return each * int(np.prod(shape, dtype=np.int64))


def _format_spec(spec: Any) -> str:
    return "not there" if spec is None else f"{spec[1]}{list(spec[0])}"
