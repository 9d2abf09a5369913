"""Safetensors files, alone or as the shards of an index, read a slice at a time."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite.plugins import as_printable

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
INDEX_SUFFIX = ".safetensors.index.json"

_MAX_JSON_BYTES = 64 * 2**20
"""An index of a million arrays takes less."""
_VARIABLE = re.compile(r"\$\w+|\$\{\w+\}")
_PICKLE_SUFFIXES = {".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"}
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
"""The dtypes of safetensors that its NumPy reader has, by their names in a file."""


@dataclass(frozen=True)
class StoredArray:
    """An array in a file, which is not read yet.

    Attributes:
        name: its name in the file.
        shape: its shape.
        dtype_name: as the file has it, such as `BF16`.
    """

    name: str
    shape: tuple[int, ...]
    dtype_name: str

    @property
    def dtype(self) -> Any:
        """The dtype; None for one that NumPy cannot read, such as float8."""
        name = _DTYPES.get(self.dtype_name)
        return None if name is None else jnp.dtype(name)

    def __str__(self) -> str:
        dtype = _DTYPES.get(self.dtype_name, self.dtype_name)
        return f"{dtype}{format_shape(self.shape)}"


class WeightFiles:
    """The arrays of a safetensors file or of several, by name.

    Attributes:
        path: of the file or index, for messages.
        arrays: what is in the files, by name.

    Args:
        path: of the file or index.
        readers: an open file of safetensors for each name.
    """

    def __init__(self, path: Path, readers: Mapping[str, Any]) -> None:
        self.path = path
        self._slices = {name: reader.get_slice(name) for name, reader in readers.items()}
        self._readers = readers
        self.arrays = {
            name: StoredArray(name, tuple(part.get_shape()), part.get_dtype())
            for name, part in self._slices.items()
        }

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Return a part of an array; nothing else of it is read.

        Args:
            name: of the array.
            index: a slice with bounds for each of its axes.
        """
        array = self.arrays[name]
        shape = tuple(part.stop - part.start for part in index)
        if 0 in shape:
            return np.empty(shape, array.dtype)
        if not shape:
            return np.asarray(self._readers[name].get_tensor(name))
        return self._slices[name][index]


def expand_path(path: str | os.PathLike[str]) -> Path:
    """Return a path with `~` and the variables of the environment expanded, as a shell would.

    Raises:
        ConfigurationError: there is no such user or variable, and so there would be a folder of
            that name.
    """
    text = os.path.expandvars(os.path.expanduser(path))
    if text.startswith("~") or _VARIABLE.search(text):
        raise ConfigurationError(
            f"{os.fspath(path)}: there is no such user or variable: give the path itself"
        )
    return Path(text)


@contextmanager
def open_weights(path: Path) -> Iterator[WeightFiles]:
    """Open a safetensors file, or all that an index names.

    Args:
        path: of a file, of an index `*.safetensors.index.json`, or of a folder with either.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = find_weights(path)
    with ExitStack() as stack:
        if path.name.endswith(INDEX_SUFFIX):
            yield WeightFiles(path, _open_shards(path, stack))
        else:
            reader = _open_file(path, stack)
            yield WeightFiles(path, {name: reader for name in reader.keys()})


def find_weights(path: Path) -> Path:
    """Return the path of the safetensors file or index that a path means.

    Raises:
        CheckpointError: there is none.
    """
    if path.suffix in _PICKLE_SUFFIXES and not path.is_dir():
        raise _make_pickle_error(path)
    if path.is_dir():
        for name in (INDEX_NAME, WEIGHTS_NAME):
            if (path / name).is_file():
                return path / name
        pickles = sorted(item for item in path.iterdir() if item.suffix in _PICKLE_SUFFIXES)
        if pickles:
            raise _make_pickle_error(pickles[0])
        raise CheckpointError(
            f"there is no {WEIGHTS_NAME} and no {INDEX_NAME} in {path}: give the path of the file"
        )
    index = path.with_name(path.name.removesuffix(".safetensors") + INDEX_SUFFIX)
    if not path.is_file() and index.is_file():
        return index
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}: check the path")
    if not path.name.endswith((".safetensors", INDEX_SUFFIX)):
        raise CheckpointError(
            f"{path} is neither *.safetensors nor *{INDEX_SUFFIX}, which are the files that are "
            "read"
        )
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises:
        CheckpointError: it is missing, too large, or holds something else.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(
                f"{path} has more than {_MAX_JSON_BYTES} bytes, which no file of its kind has"
            )
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no file {path}: check the path") from error
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} is not JSON: {as_printable(str(error))}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not an object of JSON")
    return value


def format_shape(shape: tuple[int, ...]) -> str:
    """Return a shape as a message has it; of a very long one the beginning."""
    return f"[{', '.join(map(str, shape[:8]))}{', ...' if len(shape) > 8 else ''}]"


def _open_file(path: Path, stack: ExitStack) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return stack.enter_context(safe_open(os.fspath(path), framework="numpy"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a safetensors file, or is damaged: {as_printable(str(error))}"
        ) from error


def _open_shards(path: Path, stack: ExitStack) -> dict[str, Any]:
    """Return the open file of each array that an index names."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path} has no weight_map, which says the file of each array")
    for file_name in weight_map.values():
        _check_file_name(file_name, path)
    readers: dict[str, Any] = {}
    for file_name in dict.fromkeys(weight_map.values()):
        shard = path.parent / file_name
        if not shard.is_file():
            raise CheckpointError(f"{path} names the file {file_name}, which is not beside it")
        reader = _open_file(shard, stack)
        for name in reader.keys():
            if weight_map.get(name) != file_name:
                raise CheckpointError(
                    f"{shard} has {as_printable(name)!r}, which {path.name} does not say of it: "
                    "one of the two was edited"
                )
            readers[name] = reader
    missing = sorted(weight_map.keys() - readers.keys())
    if missing:
        raise CheckpointError(
            f"{path} says that {weight_map[missing[0]]} has {as_printable(missing[0])!r}, and it "
            "has not"
        )
    return readers


def _check_file_name(file_name: Any, path: Path) -> None:
    """Raise a CheckpointError for a shard that is not a plain file beside its index: what was
    downloaded must not say which other files are read."""
    is_plain = isinstance(file_name, str) and file_name == os.path.basename(file_name)
    if not is_plain or "\\" in file_name or "\0" in file_name:
        raise CheckpointError(
            f"{path} names the file {as_printable(repr(file_name))}; a shard is a file beside it"
        )
    if not file_name.endswith(".safetensors"):
        raise CheckpointError(
            f"{path} names the file {as_printable(file_name)!r}; shards are *.safetensors"
        )


def _make_pickle_error(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} may hold a pickle, which can run any program when it is read, so it is not: give "
        "weights as safetensors, which the model's page on the hub has as a rule, or convert it "
        "where you trust it by safetensors.torch.save_file(torch.load(path), ...)"
    )
