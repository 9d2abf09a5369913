"""The weights of an exported model: a safetensors file.

It is written by the library of that name. It is read here, because whoever loads a folder needs
JAX and NumPy alone, and because the file is hashed as it is read, once.
"""

from pathlib import Path

import numpy as np

from fulgurite_export.dtypes import DTYPES, as_stored, get_storage
from fulgurite_export.errors import ExportError
from fulgurite_export.files import HashedFile, open_file, parse_json
from fulgurite_export.manifest import MAX_MANIFEST, WEIGHTS_FILE, ArraySpec, Manifest

_LENGTH = 8
"""Bytes of the length of the header, with which the file begins."""


def write_weights(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays by name to the file of the weights in a folder."""
    from safetensors.numpy import save_file

    stored = {name: as_stored(array) for name, array in arrays.items()}
    save_file(stored, folder / WEIGHTS_FILE)


def read_weights(folder: Path, manifest: Manifest) -> list[np.ndarray]:
    """Return the weights, in the order of the manifest.

    Args:
        folder: the folder.
        manifest: which says what the file holds.

    Raises:
        ExportError: it holds anything else.
    """
    with open_file(folder, WEIGHTS_FILE) as file:
        file.check_size(manifest.weights_size)
        places = _read_header(file, manifest.weights)
        arrays: dict[str, np.ndarray] = {}
        # As they lie in the file, so that it is read once from its begin to its end.
        for spec in sorted(manifest.weights, key=lambda spec: places[spec.name]):
            shape = tuple(int(size) for size in spec.shape)
            array = _allocate(shape, spec)
            file.fill(array)
            arrays[spec.name] = array
        file.check_hash(manifest.weights_sha256)
    return [arrays[spec.name] for spec in manifest.weights]


def _allocate(shape: tuple[int, ...], spec: ArraySpec) -> np.ndarray:
    """Return memory for an array, of which the file is known to hold as many bytes."""
    try:
        return np.empty(shape, DTYPES[spec.dtype])
    except (MemoryError, ValueError) as error:
        raise ExportError(f"{spec.name!r:.100}, {spec}, does not fit into memory") from error


def _read_header(file: HashedFile, specs: tuple[ArraySpec, ...]) -> dict[str, tuple[int, int]]:
    """Return where each array begins and ends, after the header of a file, which must hold exactly
    these arrays, one after the other.

    Args:
        file: at its begin.
        specs: the arrays.
    """
    length = int.from_bytes(file.read(_LENGTH), "little")
    if length > min(MAX_MANIFEST, file.size - _LENGTH):
        raise ExportError(f"{WEIGHTS_FILE}: its header would be {length} bytes long")
    header = parse_json(file.read(length), WEIGHTS_FILE)
    if not isinstance(header, dict) or header.keys() != {spec.name for spec in specs}:
        raise ExportError(f"{WEIGHTS_FILE} does not hold the arrays that manifest.json lists")
    places = {}
    for spec in specs:
        dtype, shape = get_storage(spec.dtype, tuple(int(size) for size in spec.shape))
        count = DTYPES[spec.dtype].itemsize if dtype != "U8" or spec.dtype == "uint8" else 1
        for size in shape:
            count *= size
        entry = header[spec.name]
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if (
            not isinstance(offsets, list)
            or len(offsets) != 2
            or not all(type(offset) is int for offset in offsets)
            or entry != {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
            or offsets[1] - offsets[0] != count
        ):
            raise ExportError(f"{WEIGHTS_FILE}: {spec.name!r:.100} is not as in manifest.json")
        places[spec.name] = (offsets[0], offsets[1])
    end = 0
    for start, stop in sorted(places.values()):
        if start != end:
            raise ExportError(f"{WEIGHTS_FILE}: its arrays do not lie one after the other")
        end = stop
    if _LENGTH + length + end != file.size:
        raise ExportError(f"{WEIGHTS_FILE}: its arrays do not fill it")
    return places
