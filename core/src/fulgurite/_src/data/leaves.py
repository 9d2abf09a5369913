"""The leaves of a batch: arrays of numbers, in dtypes that jax keeps without changing a value.

Without x64, jax keeps 64 bits as 32: int64 as int32, float64 as float32. That a float is rounded is
what everyone expects; that an integer wraps, or that a float becomes infinite, is an error.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from fulgurite.errors import DataError

_PLAIN_KINDS = "biufc"
# One look at a character decides for nearly every batch, because the loop asks this of each leaf of
# each batch. Other dtypes may be native as well, and are only looked at more closely.
_NATIVE_CHARS = "?bBhHiIefF"
_INT, _UINT, _FLOAT, _COMPLEX = map(np.dtype, ("int32", "uint32", "float32", "complex64"))
_NARROWED = {"q": _INT, "l": _INT, "Q": _UINT, "L": _UINT, "d": _FLOAT, "D": _COMPLEX}
"""What jax keeps of a wide dtype without x64, by the character of that."""
_LIMITS = {dtype: (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)) for dtype in (_INT, _UINT)}
"""Of integers; to ask `np.iinfo` takes as long as a look at the numbers of a small array."""


def as_arrays(batch: Any, *, copy: bool = False) -> Any:
    """Return a batch with an array for every leaf.

    Args:
        batch: a pytree of arrays and numbers.
        copy: whether each array is copied, because the source writes to it again.

    Raises:
        DataError: a leaf does not hold numbers, or not such as jax keeps.
    """
    leaves = jax.tree.leaves(batch)
    if not all(map(_is_native, leaves)):
        if not all(map(_is_plain, leaves)):
            batch = _convert_leaves(batch)
        _check_range(batch)
    return jax.tree.map(lambda array: array.copy(), batch) if copy else batch


def as_array(path: tuple[Any, ...], leaf: Any) -> np.ndarray | jax.Array:
    """Return a leaf as an array: jax arrays as they are, all else by NumPy.

    Args:
        path: where the leaf is in the data, a key path of `jax.tree_util`.
        leaf: an array or a number.

    Raises:
        DataError: it does not hold numbers.
    """
    if isinstance(leaf, jax.Array):
        return leaf
    if np.ma.is_masked(leaf):
        raise DataError(
            f"data{keystr(path)} is a masked array, whose mask would be lost: give "
            "array.filled(value), and the mask as an array of its own"
        )
    array = np.asarray(leaf)
    # bfloat16 and its like are of kind V to NumPy, as are records, which jax does not know
    if array.dtype.kind in _PLAIN_KINDS or (
        array.dtype.kind == "V" and jnp.issubdtype(array.dtype, np.number)
    ):
        return array
    hint = " (or an integer that is too large for 64 bits)" if isinstance(leaf, int) else ""
    raise DataError(
        f"data{keystr(path)} is a {type(leaf).__name__} of dtype {array.dtype}{hint}, but batches "
        "hold arrays of numbers or bools: encode it first."
    )


def as_stored_array(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
    """Return a leaf as an array that stays in memory, or on disk where it is there: to convert a
    whole memory map would read it into memory.

    Args:
        path: as of `as_array`.
        leaf: as of `as_array`.
    """
    array = as_array(path, leaf)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise DataError(
            f"data{keystr(path)} holds typed random keys, which stay on a device: store "
            "jax.random.key_data(keys), and let the step make keys of it with "
            "jax.random.wrap_key_data"
        )
    if isinstance(leaf, np.memmap):
        return leaf
    return as_native(path, np.asarray(array))


def as_native(path: tuple[Any, ...], array: np.ndarray) -> np.ndarray:
    """Return an array in the dtype that jax gives it.

    Args:
        path: as of `as_array`.
        array: of any dtype that jax knows.

    Raises:
        DataError: it holds a number outside of the range of that dtype.
    """
    dtype = get_native_dtype(array)
    if dtype.itemsize < array.dtype.itemsize and not _fits(array, dtype):
        _check_leaf_range(path, array)
    return array.astype(dtype, copy=False)


def has_x64() -> bool:
    """Return whether jax keeps 64 bits here; each thread has a setting of its own."""
    return jax.dtypes.canonicalize_dtype(np.int64) == np.int64


def get_native_dtype(array: np.ndarray) -> np.dtype:
    """Return the dtype that jax gives an array."""
    # jax does not know dtypes whose bytes are in the other order.
    return jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))


def _is_native(leaf: Any) -> bool:
    if type(leaf) is np.ndarray:
        return leaf.dtype.char in _NATIVE_CHARS and leaf.dtype.isnative
    return isinstance(leaf, jax.Array)


def _is_plain(leaf: Any) -> bool:
    if type(leaf) is np.ndarray:
        return leaf.dtype.kind in _PLAIN_KINDS and leaf.dtype.isnative
    return isinstance(leaf, jax.Array)


def _convert_leaves(batch: Any) -> Any:
    for path, node in jax.tree_util.tree_leaves_with_path(batch, is_leaf=_is_list_of_numbers):
        if _is_list_of_numbers(node):
            raise DataError(
                f"data{keystr(path)} is a list of {len(node)} numbers, each an array of its own: "
                "give one array, np.asarray(...)"
            )

    def convert(path: tuple[Any, ...], leaf: Any) -> np.ndarray | jax.Array:
        array = as_array(path, leaf)
        # jax does not know dtypes whose bytes are in the other order, as files of FITS have them.
        if isinstance(array, jax.Array):
            return array
        return array.astype(array.dtype.newbyteorder("="), copy=False)

    return jax.tree_util.tree_map_with_path(convert, batch)


def _is_list_of_numbers(node: Any) -> bool:
    return (
        isinstance(node, list)
        and len(node) > 1
        and all(isinstance(item, int | float) for item in node)
    )


def _check_range(batch: Any) -> None:
    """Raise `DataError` if an array holds a number outside of the range of the dtype that jax gives
    it."""
    if has_x64():
        return
    for index, leaf in enumerate(jax.tree.leaves(batch)):
        if not isinstance(leaf, np.ndarray):
            continue
        dtype = _NARROWED.get(leaf.dtype.char)
        if dtype is not None and not _fits(leaf, dtype):
            path, _ = jax.tree_util.tree_leaves_with_path(batch)[index]
            _check_leaf_range(path, leaf)


def _check_leaf_range(path: tuple[Any, ...], array: np.ndarray) -> None:
    """Do so for one array, which jax would narrow, number by number."""
    dtype = get_native_dtype(array)
    with np.errstate(over="ignore"):
        narrowed = array.astype(dtype)
    if dtype.kind in "iu":
        is_changed = narrowed != array
    else:
        is_changed = np.isfinite(array) & ~np.isfinite(narrowed)
    if not is_changed.any():
        return
    index = tuple(map(int, np.argwhere(is_changed)[0]))
    place = f" at {list(index)}" if index else ""
    raise DataError(
        f"data{keystr(path)} holds {array[index]}{place}, which is outside the range of {dtype}: "
        f"jax keeps {array.dtype} as {dtype}, so it would become {narrowed[index]}. Keep 64 bits: "
        "jax.config.update('jax_enable_x64', True). Or encode it so that it fits, such as a time "
        "as the difference to the first one, or an id as two words, ids.view(np.uint32).reshape("
        "-1, 2). Or keep it on the host, out of the batch: predictions come in the order of the "
        "data"
    )


def _fits(array: np.ndarray, dtype: np.dtype) -> bool:
    """Return whether all numbers of an array are in the range of a dtype, as far as two passes over
    it can tell; False where there is an infinity."""
    if not array.size:
        return True
    if dtype.kind in "iu":
        # As integers of Python, which compare exactly whatever the dtypes.
        lowest, highest = _LIMITS[dtype]
        return lowest <= int(array.min()) and int(array.max()) <= highest
    if dtype.kind == "c":
        part = np.finfo(dtype).dtype
        return _fits(np.real(array), part) and _fits(np.imag(array), part)
    # These two leave NaN out.
    largest = max(-np.fmin.reduce(array, axis=None), np.fmax.reduce(array, axis=None))
    return bool(np.isnan(largest) or largest <= np.finfo(dtype).max)
