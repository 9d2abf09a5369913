"""Examples of unequal lengths, each padded to one."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from fulgurite.errors import ConfigurationError, DataError
from jax.tree_util import keystr

from fulgurite_data.dtypes import is_numeric
from fulgurite_data.examples import Ragged, as_ragged, find_rows
from fulgurite_data.nodes import Node, measure_lengths
from fulgurite_data.passes import Pass


class Padded(Node):
    """The examples of another node, with arrays of one length, and a mask.

    Args:
        parent: the other node.
        size: the length.
        truncate: whether longer ones are cut.
        length_of: the array whose length the mask says; None where all have one.
    """

    def __init__(self, parent: Node, size: int, truncate: bool, length_of: str | None) -> None:
        options = ", truncate=True" if truncate else ""
        options += "" if length_of is None else f", length_of={length_of!r}"
        self.follow(parent, f"pad({size}{options})")
        self.parent = parent
        self.length = parent.length
        self.batch_size = parent.batch_size
        self.size = size
        self.truncate = truncate
        self.length_of = length_of

    def read(self, indices: np.ndarray, at: Pass) -> Any:
        rows = self.parent.read(indices, at)
        lengths = measure_lengths(rows, self.length_of, self.parent.stages)
        if not self.truncate and lengths.max() > self.size:
            too_long = int(np.argmax(lengths > self.size))
            raise DataError(
                f"{self.stages[-1]}: {self.parent.trace(int(indices[too_long]), at)} has "
                f"{lengths[too_long]} elements, more than {self.size}: pad to more, or say "
                "truncate=True"
            )
        if not self.truncate:
            check_lengths(
                rows,
                self.size,
                self.stages[-1],
                lambda row: self.parent.trace(int(indices[row]), at),
            )
        return pad_rows(rows, self.size, lengths, self.stages[-1])

    def trace(self, index: int, at: Pass) -> str:
        return self.parent.trace(index, at)


def check_lengths(rows: Any, size: int, stage: str, trace: Callable[[int], str]) -> None:
    """Raise `DataError` if an array is longer than what it is padded to, which would cut it.

    Args:
        rows: examples.
        size: the length.
        stage: what asks for it, for the error.
        trace: returns where the example of a row comes from.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(rows):
        if not isinstance(leaf, Ragged) and leaf.ndim < 2:
            continue
        lengths = as_ragged(leaf).lengths
        if lengths.max() > size:
            row = int(np.argmax(lengths > size))
            raise DataError(
                f"{stage}: data{keystr(path)} of {trace(row)} has {lengths[row]} elements, more "
                f"than {size}, and would lose some: leave it out or cut it with map(), or let "
                "length_of= name it"
            )


def pad_rows(rows: Any, size: int, lengths: np.ndarray, stage: str) -> dict[str, Any]:
    """Return examples with all arrays of one length, and `mask`, bool `(examples, size)`.

    Args:
        rows: dictionaries of arrays, and of numbers, which stay.
        size: the length.
        lengths: how many elements of each are real, int64 `(examples,)`.
        stage: what asks for it, for errors.
    """
    if not isinstance(rows, dict) or "mask" in rows:
        problem = "have a mask already" if isinstance(rows, dict) else "are not dictionaries"
        raise ConfigurationError(
            f"{stage}: examples {problem}; it adds one under 'mask': map() them to dictionaries "
            "without"
        )

    def pad(path: Any, leaf: Any) -> np.ndarray:
        if not isinstance(leaf, Ragged) and leaf.ndim < 2:
            return leaf
        ragged = as_ragged(leaf)
        sizes = np.minimum(ragged.lengths, size)
        values = ragged.values
        if not is_numeric(values.dtype):
            raise DataError(f"{stage}: data{keystr(path)} holds {values.dtype}, not numbers")
        out = np.zeros((len(sizes) * size, *values.shape[1:]), values.dtype)
        firsts = np.cumsum(ragged.lengths) - ragged.lengths
        out[find_rows(np.arange(len(sizes)) * size, sizes)] = values[find_rows(firsts, sizes)]
        return out.reshape(len(sizes), size, *values.shape[1:])

    padded = jax.tree_util.tree_map_with_path(pad, rows)
    return {**padded, "mask": np.arange(size) < np.minimum(lengths, size)[:, None]}
