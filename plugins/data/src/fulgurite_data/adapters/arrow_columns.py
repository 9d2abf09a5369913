"""Columns of Arrow as NumPy arrays of the same dtype."""

from typing import Any

import numpy as np
from fulgurite.errors import DataError

from fulgurite_data.examples import Ragged


def read_columns(table: Any) -> dict[str, np.ndarray | Ragged]:
    """Return the columns of a `pyarrow.Table` as arrays `(rows, ...)`, and as `Ragged` where the
    lists in a column have several lengths.

    Args:
        table: of numbers and bools, and of lists of these.

    Raises:
        DataError: a column has values that are missing, no numbers, or lists of several lengths
            within lists.
    """
    columns = (table.column(name).combine_chunks() for name in table.schema.names)
    return {
        name: _read_column(name, column)
        for name, column in zip(table.schema.names, columns, strict=True)
    }


def _read_column(name: str, column: Any) -> np.ndarray | Ragged:
    from pyarrow import types

    lengths = None
    shape = [len(column)]
    _check_complete(name, column)
    while hasattr(column.type, "value_type"):
        sizes = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
        is_equal = len(sizes) == 0 or bool((sizes == sizes[0]).all())
        if not is_equal and len(shape) > 1:
            raise DataError(
                f"column {name!r} has lists of {sizes.min()} to {sizes.max()} values within lists: "
                "only the first axis of examples may differ. Pad the inner ones"
            )
        column = column.flatten()
        _check_complete(name, column)
        if is_equal:
            shape.append(int(sizes[0]) if len(sizes) else 0)
        else:
            lengths = sizes
            shape = [len(column)]
    kind = column.type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise DataError(
            f"column {name!r} is {kind}, and batches hold arrays of numbers or bools: encode it "
            "first, or leave it out with columns=[...]"
        )
    values = column.to_numpy(zero_copy_only=False).reshape(shape)
    return values if lengths is None else Ragged(values, lengths)


def _check_complete(name: str, column: Any) -> None:
    """Raise `DataError` if a value is missing, which NumPy could only have as a NaN."""
    if column.null_count:
        raise DataError(
            f"column {name!r} has {column.null_count} missing values in these rows: fill them, or "
            "leave the rows or the column out"
        )
