"""Weights of a file into a module, each piece to the device that is to have it."""

import itertools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import CheckpointError, ConfigurationError, check_one_of
from fulgurite.plugins import (
    as_model_init,
    as_printable,
    find_wholes,
    is_array_like,
    leaves_with_paths,
)

from fulgurite_pretrained.files import WeightFiles, expand_path, open_weights
from fulgurite_pretrained.matching import Casting, Matches, Source, check_faults, join_rows, match
from fulgurite_pretrained.naming import PathMap, make_rules

Shardings = jax.sharding.Sharding | Callable[[str, jax.ShapeDtypeStruct], Any] | None
"""Where arrays go: all by one sharding, or each by that which a function of its path and shape
returns."""


def load_safetensors(
    path: str | os.PathLike[str],
    *,
    into: Any,
    map: PathMap | None = None,
    dtype: Casting = None,
    strict: bool = True,
    shardings: Shardings = None,
) -> Any:
    """Return a module with the weights of a safetensors file.

    Each device gets its own piece of an array, read as a slice of the file: no array is ever whole
    on a device that is to have a part of it.

    Args:
        path: of a file, of an index of shards `*.safetensors.index.json`, or of a folder with
            `model.safetensors` or its index.
        into: gives the structure: a module, whose arrays may be `jax.ShapeDtypeStruct`s; or a
            callable that makes it as `into(key=key)`, of which only the shapes are used.
        map: names in the file with paths in the module; see the guide. None where the names are
            the paths, as `save_safetensors` writes them.
        dtype: `match` to cast to the dtypes of the module; `file` for those of the file; None where
            both must be the same.
        strict: whether all arrays of both sides must fit. Otherwise what fits is taken, and a
            warning lists the rest, which stays as the module has it.
        shardings: where the arrays go; by default where those of the module are.

    Raises:
        CheckpointError: there is no such file, it is damaged, or it does not fit.
        ConfigurationError: the map cannot be read, or names what the module has not.

    Example:
        from fulgurite_pretrained import load_safetensors, save_safetensors

        mlp = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
        save_safetensors(mlp, "mlp.safetensors")
        same = load_safetensors("mlp.safetensors", into=mlp)
    """
    template = _as_template(into)
    needed = list_needed(template, shardings)
    with open_weights(expand_path(path)) as files:
        loaded = read_arrays(
            files, needed, map, dtype=dtype, strict=strict, wholes=find_wholes(template)
        )
    filled = replace_arrays(template, loaded)
    if isinstance(into, eqx.Module):
        return filled
    return fill_shapes(filled, lambda: as_model_init(into).build(None, jax.random.key(0))[0])


def read_arrays(
    files: WeightFiles,
    needed: Mapping[str, Any],
    path_map: PathMap | None,
    *,
    dtype: Casting = None,
    strict: bool = True,
    is_complete: bool = True,
    wholes: Mapping[str, str],
) -> dict[str, jax.Array]:
    """Return the arrays of a module that open files fill, by path.

    Args:
        files: the files.
        needed: arrays or shapes of the module, by path; their shardings say where the new ones go.
        path_map: names in the file with paths in the module.
        dtype: as for `load_safetensors`.
        strict: as for `load_safetensors`.
        is_complete: whether the map names every array of the module.
        wholes: of the module, as `find_wholes` returns them.

    Raises:
        CheckpointError: the files do not fit.
    """
    if dtype is not None:
        check_one_of(dtype, ("match", "file"), "load_safetensors: dtype")
    rules = make_rules(path_map, needed)
    matches = match(files.arrays, needed, rules, dtype, is_complete, wholes)
    check_faults(matches, files.path, strict)
    _check_copies(files, matches)
    loaded = {path: _make_array(files, path, needed[path], matches) for path in matches.sources}
    if matches.faults:
        warnings.warn(
            f"{files.path} fits the module in part: {len(loaded)} of its {len(needed)} arrays come "
            f"from it, and the others stay as they are:\n{join_rows(matches.faults)}",
            stacklevel=3,
        )
    return loaded


def replace_arrays(module: Any, arrays: Mapping[str, Any]) -> Any:
    """Return a module with other arrays.

    Args:
        module: the module.
        arrays: by path; what they lack stays as it is.
    """
    paths, leaves = zip(*leaves_with_paths(module), strict=True)
    new = [arrays.get(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(module), new)


def fill_shapes(module: Any, make: Callable[[], Any]) -> Any:
    """Return a module with arrays of a new one in the place of shapes, such as those of random
    keys, which no file holds.

    Args:
        module: the module.
        make: returns a new one; it is called where there is a shape, and only then, because what a
            file has is not to be made twice.
    """
    leaves = leaves_with_paths(module)
    arrays = {path: leaf for path, leaf in leaves if not isinstance(leaf, jax.ShapeDtypeStruct)}
    return module if len(arrays) == len(leaves) else replace_arrays(make(), arrays)


def list_arrays(module: Any) -> dict[str, Any]:
    """Return the arrays of a module, or their shapes, that a file can hold, by path: random keys
    are none of them."""
    return {
        path: leaf
        for path, leaf in leaves_with_paths(module)
        if is_array_like(leaf) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    }


def _as_template(into: Any) -> Any:
    """Return the module, or its shapes, that is filled."""
    if isinstance(into, eqx.Module):
        return into
    model_init = as_model_init(into)
    template, state = eqx.filter_eval_shape(model_init.build, model_init.arrays, jax.random.key(0))
    if state is not None:
        raise ConfigurationError(
            "a model with an eqx.nn.State is given where a module is filled: give the module, and "
            "put what the file has of its state there yourself"
        )
    return template


def list_needed(template: Any, shardings: Shardings) -> dict[str, Any]:
    """Return the arrays of a module as shapes, by path, with the shardings that they get."""
    needed = {}
    for path, leaf in list_arrays(template).items():
        sharding = getattr(leaf, "sharding", None)
        if isinstance(shardings, jax.sharding.Sharding):
            sharding = shardings
        elif shardings is not None:
            sharding = shardings(path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        needed[path] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return needed


def _make_array(files: WeightFiles, path: str, leaf: Any, matches: Matches) -> jax.Array:
    """Return an array of a module, of which each device reads what it gets.

    Args:
        files: the open files.
        path: of the array.
        leaf: its shape, with its sharding.
        matches: has the sources of the array, and its dtype.
    """
    sharding = getattr(leaf, "sharding", None) or jnp.zeros(()).sharding
    sources = matches.sources[path]
    dtype = matches.dtypes[path]
    num_stacked = len(next(iter(sources)))

    def read(index: Any) -> np.ndarray:
        bounds = tuple(
            slice(*part.indices(size)[:2]) for part, size in zip(index, leaf.shape, strict=True)
        )
        stack, item = bounds[:num_stacked], bounds[num_stacked:]
        if not num_stacked:
            return _cast(_read_source(files, sources[()], item), dtype, path, files)
        result = np.empty([part.stop - part.start for part in bounds], dtype)
        ranges = [range(part.start, part.stop) for part in stack]
        for numbers in itertools.product(*ranges):
            place = tuple(n - part.start for n, part in zip(numbers, stack, strict=True))
            piece = _read_source(files, sources[numbers], item)
            result[place] = _cast(piece, dtype, path, files)
        return result

    return jax.make_array_from_callback(leaf.shape, sharding, read, dtype=dtype)


def _read_source(files: WeightFiles, source: Source, index: tuple[slice, ...]) -> np.ndarray:
    """Return a part of the array that fills a slot.

    Args:
        files: the open files.
        source: what fills the slot.
        index: of the part, in the axes of the module.
    """
    if source.start:
        first = slice(index[0].start + source.start, index[0].stop + source.start)
        index = (first, *index[1:])
    if source.is_transposed:
        return files.read(source.name, index[::-1]).T
    return files.read(source.name, index)


def _cast(array: np.ndarray, dtype: Any, path: str, files: WeightFiles) -> np.ndarray:
    """Return an array in the dtype of the module; an error if a finite number is none there.

    Args:
        array: as the file has it.
        dtype: of the module.
        path: in the module, for messages.
        files: the open files, for messages.
    """
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        result = array.astype(dtype)
    num_lost = int(np.sum(np.isfinite(array) & ~np.isfinite(result)))
    if num_lost:
        raise CheckpointError(
            f"{num_lost} numbers of {path} in {files.path} are too large for {dtype}: give a "
            f"module with {array.dtype}"
        )
    return result


def _check_copies(files: WeightFiles, matches: Matches) -> None:
    """Raise a CheckpointError if two arrays of a file that the map has for one differ."""
    for copies in matches.copies:
        if copies.path not in matches.sources:
            continue
        index = tuple(slice(0, size) for size in copies.shape)
        arrays = [_read_source(files, source, index) for source in copies.sources]
        if arrays[0].dtype != arrays[1].dtype or arrays[0].tobytes() != arrays[1].tobytes():
            name, other = (as_printable(source.name) for source in copies.sources)
            raise CheckpointError(
                f"{files.path}: {name} and {other} are one array of the module, and they differ. "
                "Give a module that has both"
            )
