"""Several examples in one row of a fixed length, with what tells them apart."""

from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, Protocol

import jax
import numpy as np
from fulgurite.errors import ConfigurationError, DataError, error_context

from fulgurite_data.examples import find_rows
from fulgurite_data.nodes import Node, check_fixed, iter_chunks
from fulgurite_data.passes import Pass, start_pass
from fulgurite_data.plans import load_or_make

PackMethod = Literal["first_fit", "best_fit", "split"]
_CHUNK = 4096
"""Examples whose lengths are asked for at once."""
_ADDED = ("segments", "positions", "mask")


@dataclass(frozen=True)
class Pieces:
    """What several rows are made of, piece by piece, in order; each field int64 `(pieces,)`.

    Attributes:
        examples: the example that each is of.
        starts: its first element within that.
        lengths: the number of its elements.
        rows: the row it is in, counted from the first of these rows.
        places: where in the row it begins.
        planned: the number of elements of the whole example.
    """

    examples: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray
    places: np.ndarray
    planned: np.ndarray


class Plan(Protocol):
    """Which pieces make which row.

    Attributes:
        num_rows: how many rows there are.
    """

    num_rows: int

    def find_pieces(self, rows: np.ndarray) -> Pieces:
        """Return what some rows are made of.

        Args:
            rows: their numbers, int64 `(k,)`.
        """
        ...


class SplitPlan:
    """All examples one after the other, cut into rows. 8 bytes for each example are kept.

    Args:
        lengths: of the examples.
        size: of a row.
    """

    def __init__(self, lengths: np.ndarray, size: int) -> None:
        self.ends = np.cumsum(lengths)
        self.size = size
        self.total = int(self.ends[-1]) if len(lengths) else 0
        self.num_rows = -(-self.total // size)

    def find_pieces(self, rows: np.ndarray) -> Pieces:
        lows = rows * self.size
        highs = np.minimum(lows + self.size, self.total)
        firsts = np.searchsorted(self.ends, lows, side="right")
        lasts = np.searchsorted(self.ends, highs - 1, side="right")
        counts = lasts - firsts + 1
        examples = find_rows(firsts, counts)
        numbers = np.repeat(np.arange(len(rows)), counts)
        begins = np.where(examples > 0, self.ends[examples - 1], 0)
        starts = np.maximum(begins, lows[numbers])
        lengths = np.minimum(self.ends[examples], highs[numbers]) - starts
        planned = self.ends[examples] - begins
        pieces = (examples, starts - begins, lengths, numbers, starts - lows[numbers], planned)
        is_empty = lengths == 0
        if is_empty.any():
            pieces = tuple(field[~is_empty] for field in pieces)
        return Pieces(*pieces)


class FitPlan:
    """Whole examples, each in the first row that has room, or in the one with least room left. A
    number of rows is open at a time; when none has room, all of them are done. 16 bytes for each
    example are kept.

    Args:
        lengths: of the examples; those that are empty are left out.
        rows: the row of each, -1 for those that are empty.
    """

    def __init__(self, lengths: np.ndarray, rows: np.ndarray) -> None:
        examples = np.flatnonzero(rows >= 0)
        order = np.argsort(rows[examples], kind="stable")
        self.examples = examples[order]
        self.lengths = lengths[self.examples]
        self.num_rows = int(rows.max(initial=-1)) + 1
        self.bounds = np.searchsorted(rows[self.examples], np.arange(self.num_rows + 1))

    def find_pieces(self, rows: np.ndarray) -> Pieces:
        firsts = self.bounds[rows]
        counts = self.bounds[rows + 1] - firsts
        members = find_rows(firsts, counts)
        lengths = self.lengths[members]
        numbers = np.repeat(np.arange(len(rows)), counts)
        ends = np.cumsum(lengths)
        before = np.append(0, ends)[np.cumsum(counts) - counts]
        places = ends - lengths - before[numbers]
        starts = np.zeros_like(lengths)
        return Pieces(self.examples[members], starts, lengths, numbers, places, lengths)


class Packed(Node):
    """Rows of examples.

    Args:
        parent: the examples: dictionaries of arrays of one length.
        size: of a row.
        how: see `Dataset.pack`.
        num_open: see `Dataset.pack`.
        mask_first: see `Dataset.pack`.
        length_of: see `Dataset.pack`.
        path: see `Dataset.pack`.

    Raises:
        DataError: an example is too long, there is none, or the file is of another dataset.
    """

    def __init__(
        self,
        parent: Node,
        size: int,
        *,
        how: PackMethod,
        num_open: int,
        mask_first: bool,
        length_of: str | None,
        path: str | PathLike[str] | None = None,
    ) -> None:
        options = f", open_rows={num_open}" if how != "split" else ""
        options += ", mask_first=True" if mask_first else ""
        self.follow(parent, f"pack({size}, {how!r}{options})")
        check_fixed(parent, "pack", "pack() first, and shuffle() the rows, or the batches")
        self.parent = parent
        self.size = size
        self.mask_first = mask_first
        place = "" if path is None else f", planned in {path}"
        self.source_of_plan = f"in {self.stages[-1]}{place}"

        def make_plan() -> dict[str, np.ndarray]:
            lengths = find_lengths(parent, length_of)
            if how == "split":
                return {"lengths": lengths}
            self._check_lengths(lengths)
            return {
                "lengths": lengths,
                "rows": assign_rows(lengths, size, num_open, how == "best_fit"),
            }

        plan = load_or_make(path, self.identify, make_plan)
        if len(plan["lengths"]) != parent.length:
            raise DataError(
                f"{path} has the plan of {len(plan['lengths'])} examples, and there are "
                f"{parent.length}: remove it, or choose another path"
            )
        self.plan: Plan = SplitPlan(size=size, **plan) if how == "split" else FitPlan(**plan)
        self.length = self.plan.num_rows
        if not self.length:
            raise DataError(f"there is nothing to pack: {'.'.join(parent.stages)} has no elements")

    def read(self, indices: np.ndarray, at: Pass) -> Any:
        pieces = self.plan.find_pieces(indices)
        with error_context(lambda: self.source_of_plan):
            values = self.parent.read_pieces(
                pieces.examples, pieces.starts, pieces.lengths, pieces.planned, at
            )
        self._check_keys(values)
        shape = (len(indices), self.size)
        # Where in the rows, laid one after the other, each element goes.
        places = find_rows(pieces.rows * self.size + pieces.places, pieces.lengths)

        def spread(elements: np.ndarray) -> np.ndarray:
            out = np.zeros((shape[0] * shape[1], *elements.shape[1:]), elements.dtype)
            out[places] = elements
            return out.reshape(*shape, *elements.shape[1:])

        begins = np.cumsum(pieces.lengths) - pieces.lengths
        positions = np.arange(len(places)) - np.repeat(begins, pieces.lengths)
        first_pieces = np.searchsorted(pieces.rows, pieces.rows)
        numbers = np.arange(len(first_pieces)) - first_pieces + 1
        segments = spread(np.repeat(numbers, pieces.lengths).astype(np.int32))
        rows = jax.tree.map(spread, values)
        mask = segments > 0
        positions = spread(positions.astype(np.int32))
        if self.mask_first:
            mask &= positions > 0
        return {**rows, "segments": segments, "positions": positions, "mask": mask}

    def trace(self, index: int, at: Pass) -> str:
        first = int(self.plan.find_pieces(np.array([index])).examples[0])
        return f"row {index}, which begins with {self.parent.trace(first, at)},"

    def _check_lengths(self, lengths: np.ndarray) -> None:
        longest = int(np.argmax(lengths)) if len(lengths) else 0
        if len(lengths) and lengths[longest] > self.size:
            too_long = int(np.argmax(lengths > self.size))
            raise DataError(
                f"{self.stages[-1]}: {self.parent.trace(too_long, start_pass(0))} has "
                f"{lengths[too_long]} elements, more than a row of {self.size}. Make rows longer, "
                "cut examples with map(), or pack with how='split'"
            )

    def _check_keys(self, values: Any) -> None:
        if not isinstance(values, dict):
            raise ConfigurationError(
                f"{self.stages[-1]}: examples are {type(values).__name__}, not dictionaries of "
                "arrays: map them to {'tokens': ...}"
            )
        taken = [name for name in _ADDED if name in values]
        if taken:
            raise ConfigurationError(
                f"{self.stages[-1]}: examples have {', '.join(taken)} already, which pack() adds: "
                "rename them with map()"
            )


def find_lengths(parent: Node, leaf: str | None) -> np.ndarray:
    """Return the lengths of all examples, int64.

    Args:
        parent: the examples, the same in each pass.
        leaf: the array that has the length, or None.
    """
    at = start_pass(0)
    parts = [
        parent.read_lengths(indices, at, leaf) for indices in iter_chunks(parent.length, _CHUNK)
    ]
    return np.concatenate([np.empty(0, np.int64), *parts])


def assign_rows(lengths: np.ndarray, size: int, num_open: int, is_best: bool) -> np.ndarray:
    """Return the row of each example, int64, -1 for those that are empty.

    Args:
        lengths: of the examples, none above `size`.
        size: of a row.
        num_open: how many rows are open.
        is_best: whether the open row with least room is taken, instead of the first with room.
    """
    rows = np.full(len(lengths), -1, np.int64)
    room = np.full(num_open, size, np.int64)
    first_row = 0
    for index, length in enumerate(lengths.tolist()):
        if not length:
            continue
        fits = room >= length
        number = int(np.where(fits, room, size + 1).argmin() if is_best else fits.argmax())
        if not fits[number]:
            first_row += num_open
            room[:] = size
            number = 0
        room[number] -= length
        rows[index] = first_row + number
    return _renumber(rows)


def _renumber(rows: np.ndarray) -> np.ndarray:
    """Return numbers of rows without those of rows that stayed empty."""
    used, numbers = np.unique(rows[rows >= 0], return_inverse=True)
    if len(used):
        rows[rows >= 0] = numbers
    return rows
