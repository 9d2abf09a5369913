"""The dtypes that arrays of an exported model may have, and how safetensors stores them."""

import ml_dtypes
import numpy as np

_STORED = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""What safetensors calls them."""
_STORED_AS_BYTES = ("complex128", "int4", "uint4", "float8_e4m3b11fnuz")
"""What safetensors has no name for. An array of these is stored as bytes, in one more axis."""
DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, None) or name) for name in (*_STORED, *_STORED_AS_BYTES)
}
"""Every dtype by its name."""
WIDE = ("int64", "uint64", "float64", "complex128")
"""What JAX has with `jax_enable_x64` alone."""


def get_storage(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the dtype in words of safetensors, and the shape, by which an array is stored.

    Args:
        dtype: the name of its dtype.
        shape: its shape.
    """
    if dtype in _STORED:
        return _STORED[dtype], shape
    return "U8", (*shape, DTYPES[dtype].itemsize)


def as_stored(array: np.ndarray) -> np.ndarray:
    """Return an array as it is stored: contiguous, in the order of its axes, and as bytes if
    safetensors has no name for its dtype.

    safetensors 0.8 writes the memory of an array, whatever its strides.
    """
    array = np.array(array, order="C")  # `ascontiguousarray` would give a scalar an axis
    if array.dtype.name in _STORED:
        return array
    return array.reshape(-1).view(np.uint8).reshape(*array.shape, array.dtype.itemsize)
