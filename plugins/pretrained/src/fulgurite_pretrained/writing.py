"""The arrays of a module into safetensors files."""

import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from fulgurite.errors import ConfigurationError, as_int, did_you_mean
from fulgurite.plugins import is_array_like, leaves_with_paths

from fulgurite_pretrained.files import INDEX_SUFFIX, expand_path
from fulgurite_pretrained.naming import PathMap, Rule, make_rules
from fulgurite_pretrained.reading import list_arrays

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"([0-9]+)([KMG]B)")
_WRITABLE = {
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
}


def save_safetensors(
    module: Any,
    path: str | os.PathLike[str],
    *,
    map: PathMap | None = None,
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the arrays of a module into a safetensors file.

    `load_safetensors` reads it with the same map, and any program that reads safetensors without
    one. A file that exists is replaced at once, when the new one is complete; shards that an
    earlier file of that name was divided into are removed.

    Args:
        module: the module.
        path: of the file, `*.safetensors`. Of several shards it is the beginning of their names,
            `NAME-00001-of-00002.safetensors`, beside which `NAME.safetensors.index.json` says what
            is where.
        map: as for `load_safetensors`: where several names are for one array, the first is written.
            None writes the paths of the module as names.
        max_shard_size: in bytes, or such as `"5GB"`; None for one file.
        metadata: strings by name for the head of the file.

    Raises:
        ConfigurationError: an array has no name by the map, or a dtype that the format has not.

    Example:
        from fulgurite_pretrained import save_safetensors

        linear = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        names = {"fc.weight": "weight", "fc.bias": "bias"}
        save_safetensors(linear, "head.safetensors", map=names)
    """
    write_weights(module, expand_path(path), map, max_shard_size, metadata)


def write_weights(
    module: Any,
    path: Path,
    path_map: PathMap | None,
    max_shard_size: int | str | None,
    metadata: Mapping[str, str] | None,
) -> None:
    """Do what `save_safetensors` does, with its arguments."""
    if path.suffix != ".safetensors":
        raise ConfigurationError(f"save_safetensors: {path} must end with .safetensors")
    if not all(isinstance(text, str) for text in (metadata or {}).values()):
        raise ConfigurationError(
            f"save_safetensors: metadata is {metadata!r:.100}; its values must be strings, which "
            "is all that the format has"
        )
    arrays = list_arrays(module)
    _check_arrays(module, arrays)
    rules = make_rules(path_map, arrays)
    _check_named(arrays, rules)
    shards = _split_into_shards(_iter_items(arrays, rules), _as_bytes(max_shard_size))
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(shards) == 1:
        _write(path, shards[0], metadata)
        _remove_earlier(path, {path.name})
        return
    weight_map = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        name = f"{path.stem}-{number:05}-of-{len(shards):05}.safetensors"
        _write(path.with_name(name), shard, metadata)
        weight_map |= dict.fromkeys((item.name for item in shard), name)
        total += sum(item.num_bytes for item in shard)
    index_path = path.with_name(path.stem + INDEX_SUFFIX)
    write_json(index_path, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _remove_earlier(path, {index_path.name, *weight_map.values()})


def _remove_earlier(path: Path, written: set[str]) -> None:
    """Remove the file, or the index and shards, that an earlier module was written to: they would
    be read instead of the new ones.

    Args:
        path: as of `save_safetensors`.
        written: the names of the new files.
    """
    shard = re.compile(rf"{re.escape(path.stem)}-\d{{5}}-of-\d{{5}}\.safetensors")
    index_name = path.stem + INDEX_SUFFIX
    if index_name not in written:  # first, as long as it names files that are there
        path.with_name(index_name).unlink(missing_ok=True)
    for other in path.parent.iterdir():
        is_earlier = other.name == path.name or shard.fullmatch(other.name) is not None
        if is_earlier and other.name not in written:
            other.unlink()


def write_json(path: Path, value: Any) -> None:
    """Write a JSON value, at once."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(part, path)


@dataclass(frozen=True)
class _Item:
    """An array of a file, which is made when it is written.

    Attributes:
        name: in the file.
        parts: arrays of the module, each with an index in its stack.
        is_transposed: whether the file has the transpose.
    """

    name: str
    parts: tuple[tuple[Any, tuple[int, ...]], ...]
    is_transposed: bool

    @property
    def num_bytes(self) -> int:
        """How many bytes the array takes."""
        return sum(
            array.nbytes // max(1, math.prod(array.shape[: len(index)]))
            for array, index in self.parts
        )

    def make(self) -> np.ndarray:
        """Return the array, contiguous: safetensors 0.8 writes wrong numbers of any other."""
        arrays = [np.asarray(array)[index] for array, index in self.parts]
        array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        array = array.T if self.is_transposed else array
        # Not `np.ascontiguousarray`, which makes a scalar a vector.
        return np.array(array, order="C")


def _iter_items(arrays: Mapping[str, Any], rules: list[Rule]) -> Iterator[_Item]:
    """Yield what a file has for the arrays of a module, each once.

    Args:
        arrays: of the module, by path.
        rules: of the map.
    """
    written: set[tuple[str, tuple[int, ...]]] = set()
    for rule in rules:
        for numbers in _list_numbers(arrays, rule):
            slots = [target.find_slot(numbers) for target in rule.targets]
            keys = {(slot.path, slot.index) for slot in slots if slot is not None}
            if None in slots or keys <= written:
                continue
            written |= keys
            parts = tuple((arrays[slot.path], slot.index) for slot in slots if slot is not None)
            yield _Item(rule.make_name(numbers), parts, rule.targets[0].is_transposed)


def _list_numbers(arrays: Mapping[str, Any], rule: Rule) -> list[tuple[int, ...]]:
    """Return the numbers of the layers that the first target of a rule stands for."""
    if not rule.targets:
        return []
    result = []
    for indices, path in rule.targets[0].paths.items():
        sizes = iter(arrays[path].shape)
        ranges = [range(next(sizes)) if index is None else [index] for index in indices]
        result += itertools.product(*ranges)
    return sorted(result)


def _check_arrays(module: Any, arrays: Mapping[str, Any]) -> None:
    """Raise a ConfigurationError for an array that cannot be written."""
    for path, leaf in leaves_with_paths(module):
        if is_array_like(leaf) and path not in arrays:
            raise ConfigurationError(
                f"save_safetensors: {path} is a random key, which safetensors cannot hold: make it "
                "in the step, from ctx.key(), or leave it out of the module that is saved"
            )
    for path, leaf in arrays.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ConfigurationError(f"save_safetensors: {path} is a shape, without numbers")
        if str(leaf.dtype) not in _WRITABLE:
            raise ConfigurationError(
                f"save_safetensors: {path} has the dtype {leaf.dtype}, which the NumPy writer of "
                "safetensors has not: cast it, such as to bfloat16"
            )
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ConfigurationError(
                f"save_safetensors: other processes hold parts of {path}: gather the module first, "
                "by fulgurite_sharding.gather(module), and write it in one process"
            )


def _check_named(arrays: Mapping[str, Any], rules: list[Rule]) -> None:
    """Raise a ConfigurationError for an array of a module that a map does not name."""
    named = {path for rule in rules for target in rule.targets for path in target.paths.values()}
    unnamed = sorted(arrays.keys() - named)
    if unnamed:
        raise ConfigurationError(
            f"map: there is no name for {', '.join(unnamed[:8])} of the module. Where adapters are "
            f"meant, merge and remove them first. {did_you_mean(unnamed[0], named)}"
        )


def _split_into_shards(items: Iterator[_Item], max_bytes: int | None) -> list[list[_Item]]:
    """Return the items in groups of at most so many bytes, or one alone that has more."""
    shards: list[list[_Item]] = [[]]
    size = 0
    for item in items:
        if max_bytes is not None and shards[-1] and size + item.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.num_bytes
    return shards


def _as_bytes(size: int | str | None) -> int | None:
    size = as_int(size)
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is not None:
        size = int(match[1]) * _UNITS[match[2]]
    if size is not None and (type(size) is not int or size < 1):
        raise ConfigurationError(
            f"save_safetensors: max_shard_size is {size!r}; it must be a positive number of bytes, "
            "or such as '5GB'"
        )
    return size


def _write(path: Path, items: list[_Item], metadata: Mapping[str, str] | None) -> None:
    """Write one file, at once."""
    from safetensors.numpy import save_file

    part = path.with_name(path.name + ".part")
    arrays = {item.name: item.make() for item in items}
    part.touch()
    mode = part.stat().st_mode
    save_file(arrays, part, metadata=None if metadata is None else dict(metadata))
    part.chmod(mode)  # safetensors gives only the owner access
    os.replace(part, path)
