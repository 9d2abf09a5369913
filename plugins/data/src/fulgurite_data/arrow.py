"""Columns of Arrow as NumPy arrays of the same dtype."""

from typing import Any

import numpy as np
from fulgurite.errors import DataError

from fulgurite_data.examples import Ragged
from fulgurite_data.extras import import_extra


def read_column(column: Any, where: str) -> np.ndarray | Ragged:
    """Return a column of a `pyarrow.Table` as an array `(rows, ...)`: numbers and bools in their
    dtype, strings as NumPy has them. Lists of one length are further axes, and lists of several
    lengths make a `Ragged`.

    Args:
        column: of a table.
        where: what errors call it.

    Raises:
        DataError: values are missing, or lists within lists have several lengths.
    """
    pa = import_extra("pyarrow", "parquet")
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    lengths = None
    shape = [len(array)]
    _check_complete(array, where)
    while hasattr(array.type, "value_type") and not pa.types.is_dictionary(array.type):
        sizes = array.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
        is_equal = len(sizes) == 0 or bool((sizes == sizes[0]).all())
        is_inner = lengths is not None or len(shape) > 1
        if not is_equal and is_inner:
            raise DataError(
                f"{where} has lists of {sizes.min()} to {sizes.max()} values within lists: only "
                "the first axis of examples may differ. Pad the inner ones"
            )
        list_type = array.type
        array = array.flatten()
        _check_complete(array, where)
        if is_equal:
            # Of a type that says how long its lists are, also where there is none.
            declared = getattr(list_type, "list_size", 0)
            shape.append(int(sizes[0]) if len(sizes) else declared)
        else:
            lengths = sizes
            shape = [len(array)]
    if pa.types.is_dictionary(array.type):  # as the categories of pandas are written
        array = array.dictionary_decode()
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        values = np.array(array.to_pylist(), np.str_).reshape(shape)
    else:
        values = array.to_numpy(zero_copy_only=False).reshape(shape)
        # Not the memory of Arrow, because functions of the user may write to it.
        values = values if values.flags.writeable else values.copy()
    return values if lengths is None else Ragged(values, lengths)


def find_dtype(kind: Any) -> str:
    """Return the name of the dtype that `read_column` gives a column, without reading it.

    Args:
        kind: the type of the column, a `pyarrow.DataType`.
    """
    pa = import_extra("pyarrow", "parquet")
    while hasattr(kind, "value_type") and not pa.types.is_dictionary(kind):
        kind = kind.value_type
    return "string" if pa.types.is_large_string(kind) else str(kind)


def _check_complete(array: Any, where: str) -> None:
    """Raise `DataError` if a value is missing, which NumPy could only have as a NaN."""
    if array.null_count:
        raise DataError(f"{where} has {array.null_count} missing values: fill them in, or filter")
