"""Numbers over steps, and fewer of them where a screen could not show all."""

import math
from array import array
from bisect import bisect_left
from typing import Any

import numpy as np

_LINEAR = 4 / 5
"""The share of the parts of equal width; the others are of equal width on a logarithmic axis."""

_LARGEST_STEP = 2**63


class Curve:
    """The values of one name, by step.

    Attributes:
        stream: `exact` or `telemetry`.
        steps: increasing.
        values: as many.
        num_cuts: how often something else changed than that a value came at the end.
    """

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.num_cuts = 0
        self.steps = array("q")
        self.values = array("d")

    def add(self, step: int, value: float) -> None:
        """Add a value. What a later attempt does again replaces what it had not saved.

        Args:
            step: of the value.
            value: the value.
        """
        steps = self.steps
        if steps and step <= steps[-1]:
            start = bisect_left(steps, step)
            del steps[start:]
            del self.values[start:]
            self.num_cuts += 1
        steps.append(step)
        self.values.append(value)

    def insert(self, step: int, value: float) -> None:
        """Add a value of the other stream, which takes nothing back: each stream is in the order of
        its steps, and the two are read one after the other. Where both have a step, that of the
        first stays.

        Args:
            step: of the value.
            value: the value.
        """
        place = bisect_left(self.steps, step)
        if place == len(self.steps):
            self.add(step, value)
        elif self.steps[place] != step:
            self.steps.insert(place, step)
            self.values.insert(place, value)
            self.num_cuts += 1

    @property
    def last(self) -> float:
        """The newest value."""
        return self.values[-1]

    def find_best(self, mode: str) -> tuple[int, float] | None:
        """Return step and value of the first smallest (`min`) or largest (`max`) value; None if no
        value is finite."""
        values = np.frombuffer(self.values)
        finite = np.isfinite(values)
        if not finite.any():
            return None
        if mode == "max":
            index = int(np.argmax(np.where(finite, values, -np.inf)))
        else:
            index = int(np.argmin(np.where(finite, values, np.inf)))
        return self.steps[index], self.values[index]

    def thin(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and values, at most about `most` of them, see `thin`."""
        return thin(np.frombuffer(self.steps, np.int64), np.frombuffer(self.values), most)


def thin(steps: np.ndarray, values: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return copies of steps and values, at most about `most` of them.

    The steps are divided into parts, some of equal width and some of equal width on a logarithmic
    axis. Of each part the smallest and the largest value stay, at their steps, and the first one
    that is not finite; so do the first and the last value of all.

    Args:
        steps: int64, increasing.
        values: float64, as many.
        most: about how many are returned.
    """
    if len(steps) <= most:
        return steps.copy(), values.copy()
    parts = np.searchsorted(_divide(steps, most // 2), steps, side="right")
    starts = np.flatnonzero(np.diff(parts, prepend=parts[0] - 1))
    finite = np.isfinite(values)
    indices_to_keep = [np.array([0, len(steps) - 1])]
    for extreme, filler in ((np.minimum, np.inf), (np.maximum, -np.inf)):
        candidates = np.where(finite, values, filler)
        extremes = extreme.reduceat(candidates, starts)
        counts = np.diff(starts, append=len(steps))
        hits = np.flatnonzero((candidates == np.repeat(extremes, counts)) & finite)
        indices_to_keep.append(_take_first(hits, parts))
    indices_to_keep.append(_take_first(np.flatnonzero(~finite), parts))
    indices = np.unique(np.concatenate(indices_to_keep))
    return steps[indices], values[indices]


def _divide(steps: np.ndarray, count: int) -> np.ndarray:
    """Return the limits of about `count` parts."""
    first = float(steps[0])
    last = float(steps[-1])
    num_linear = max(int(_LINEAR * count), 1)
    linear = np.linspace(first, last, num_linear, endpoint=False)[1:]
    logarithmic = np.geomspace(max(first, 1.0), max(last, 2.0), count - num_linear + 1)[1:-1]
    return np.unique(np.concatenate([linear, logarithmic]))


def _take_first(indices: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Return the first of the indices in each part."""
    return indices[np.unique(parts[indices], return_index=True)[1]]


def add_values(curves: dict[str, Curve], record: dict[str, Any], stream: str) -> None:
    """Add the scalars of a record to the curves, by `SOURCE/NAME`; each number of an array has the
    name `SOURCE/NAME[INDEX]`.

    Raises:
        LookupError, TypeError, ValueError, OverflowError: it is not such a record.
    """
    source = record["source"]
    step = record["step"]
    # Before there is a curve of it.
    if type(step) is not int or abs(step) >= _LARGEST_STEP:
        raise ValueError(f"its step is {step!r}")
    for name, value in record["values"].items():
        key = f"{source}/{name}"
        # Nearly all are plain numbers, and there may be millions.
        numbers = ((key, value),) if type(value) is float else _list_numbers(key, value)
        for number_key, number in numbers:
            curve = curves.get(number_key)
            if curve is None:
                curve = curves[number_key] = Curve(stream)
            if curve.stream == stream:
                curve.add(step, number)
            else:
                curve.insert(step, number)


def _list_numbers(key: str, value: Any) -> list[tuple[str, float]]:
    """Return the numbers of a value as the loggers write it, with their names."""
    if isinstance(value, int | float):
        return [(key, _as_float(value))]
    if not isinstance(value, dict):
        return []
    if "$float" in value:
        return [(key, float(value["$float"]))]
    return [
        number
        for index, item in enumerate(value.get("$array", []))
        for number in _list_numbers(f"{key}[{index}]", item)
    ]


def _as_float(value: float) -> float:
    """Return a number of JSON as a float; integers there may be larger than any."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
