"""Curves in a terminal, of braille patterns: each character has two dots by four."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter

from rich.text import Text

# The bit of each dot of a character, by row and column.
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800
_LABEL_WIDTH = 10


@dataclass(frozen=True)
class Line:
    """A curve to draw.

    Attributes:
        steps: increasing.
        values: as many.
        style: of rich, such as its colour.
    """

    steps: Sequence[int]
    values: Sequence[float]
    style: str


def draw(lines: Sequence[Line], width: int, height: int, *, log: bool = False) -> Text:
    """Return curves over each other, with the limits of their values and steps beside them.

    Args:
        lines: the curves; what is not finite, and on a logarithmic axis what is not positive, is
            left out.
        width: of everything, in characters.
        height: of the plot, in characters; the steps below it take one more.
        log: whether the axis of values is logarithmic.
    """
    points = [list(_iter_points(line, log)) for line in lines]
    flat = [point for line_points in points for point in line_points]
    if not flat:
        return Text("no number that can be drawn", "dim")
    first, last = min(step for step, _ in flat), max(step for step, _ in flat)
    low, high = min(value for _, value in flat), max(value for _, value in flat)
    columns = max(width - _LABEL_WIDTH - 1, 4)
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    for line, line_points in zip(lines, points, strict=True):
        dots = [
            (
                _scale(step, first, last, 2 * columns - 1),
                4 * height - 1 - _scale(value, low, high, 4 * height - 1),
            )
            for step, value in line_points
        ]
        for column, row in _connect(dots):
            bits, _ = cells.get((row // 4, column // 2), (0, ""))
            cells[row // 4, column // 2] = (bits | _BITS[row % 4][column % 2], line.style)
    text = Text(no_wrap=True)
    for row in range(height):
        share = 1 - row / max(height - 1, 1)
        is_labelled = row in (0, height - 1) or 2 * row == height - 1
        label = _format(low + share * (high - low), log) if is_labelled else ""
        text.append(f"{label:>{_LABEL_WIDTH}} ", "dim")
        characters = [cells.get((row, column), (0, "")) for column in range(columns)]
        # A span for each character would take most of the time of a view.
        for style, members in groupby(characters, key=itemgetter(1)):
            text.append("".join(chr(_BLANK + bits) for bits, _ in members), style)
        text.append("\n")
    steps = f"{first:,}".ljust(columns - len(f"{last:,}")) + f"{last:,}"
    return text.append(" " * (_LABEL_WIDTH + 1) + steps, "dim")


def _iter_points(line: Line, log: bool) -> Iterator[tuple[int, float]]:
    """Yield the points that can be drawn, with the values as they are on the axis."""
    for step, value in zip(line.steps, line.values, strict=True):
        if math.isfinite(value) and (value > 0 or not log):
            yield step, math.log10(value) if log else value


def _scale(value: float, low: float, high: float, most: int) -> int:
    if high <= low:
        return most // 2
    return round((value - low) / (high - low) * most)


def _connect(dots: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return dots with those between each and the next one."""
    connected = list(dots[:1])
    for (column, row), (next_column, next_row) in pairwise(dots):
        count = max(abs(next_column - column), abs(next_row - row), 1)
        connected += [
            (
                column + round(index * (next_column - column) / count),
                row + round(index * (next_row - row) / count),
            )
            for index in range(1, count + 1)
        ]
    return connected


def _format(value: float, log: bool) -> str:
    return f"{10**value if log else value:.4g}"
