"""Columns of Arrow as NumPy arrays of the same dtype."""

from typing import Any

import numpy as np
from fulgurite.errors import DataError


def as_arrays(table: Any) -> dict[str, np.ndarray]:
    """Return the columns of a `pyarrow.Table` as arrays `(rows, ...)`.

    Args:
        table: of numbers and bools, and of lists of these that have one length in a column.

    Raises:
        DataError: a column has lists of several lengths, values that are missing, or no numbers.
    """
    return {
        name: _as_array(name, table.column(name).combine_chunks()) for name in table.schema.names
    }


def _as_array(name: str, column: Any) -> np.ndarray:
    import pyarrow as pa
    import pyarrow.types

    shape = [len(column)]
    _check_complete(name, column)
    while pa.types.is_nested(column.type) and hasattr(column.type, "value_type"):
        lengths = np.unique(column.value_lengths().to_numpy(zero_copy_only=False))
        if len(lengths) > 1:
            raise DataError(
                f"column {name!r} has examples of {lengths.min()} to {lengths.max()} values: a "
                "batch holds arrays of one shape. Pad them to one length, bucket them by length, "
                "or pack them"
            )
        shape.append(int(lengths[0]) if len(lengths) else 0)
        column = column.flatten()
        _check_complete(name, column)
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise DataError(
            f"column {name!r} is {kind}, and batches hold arrays of numbers or bools: encode it "
            "first, or leave it out with columns=[...]"
        )
    return column.to_numpy(zero_copy_only=False).reshape(shape)


def _check_complete(name: str, column: Any) -> None:
    """Raise `DataError` if a value is missing, which NumPy could only have as a NaN."""
    if column.null_count:
        raise DataError(
            f"column {name!r} has {column.null_count} missing values in these rows: fill them, or "
            "leave the rows or the column out"
        )
