"""What a terminal shows of a curve that grows, without a second look at old values."""

import numpy as np

from fulgurite_report.curves import Curve, thin


class GrowingCurve:
    """A few points of a curve, and its best value.

    Each call looks at what was added since the one before. So the points are those of a curve that
    was thinned several times, which a screen of characters does not show.

    Args:
        curve: which grows, and is cut back now and then.
    """

    def __init__(self, curve: Curve) -> None:
        self._curve = curve
        self._points_state = (0, 0)
        self._steps = np.empty(0, np.int64)
        self._values = np.empty(0)
        self._best_state = (0, 0)
        self._mode = ""
        self._best: tuple[int, float] | None = None

    def get_points(self, most: int) -> tuple[list[int], list[float]]:
        """Return steps and values, at most about twice `most` of them."""
        start = self._get_start(self._points_state)
        steps, values = self._slice(start)
        if start > 0:
            steps = np.concatenate([self._steps, steps])
            values = np.concatenate([self._values, values])
        if len(steps) > 2 * most or start == 0:
            steps, values = thin(steps, values, most)
        self._steps, self._values = steps, values
        self._points_state = (len(self._curve.steps), self._curve.num_cuts)
        return steps.tolist(), values.tolist()

    def find_best(self, mode: str) -> tuple[int, float] | None:
        """Return step and value of the first smallest (`min`) or largest (`max`) value; None if no
        value is finite."""
        start = self._get_start(self._best_state) if mode == self._mode else 0
        if start == 0:
            self._best = None
        self._mode = mode
        self._best_state = (len(self._curve.steps), self._curve.num_cuts)
        steps, values = self._slice(start)
        finite = np.isfinite(values)
        steps, values = steps[finite], values[finite]
        if len(values):
            index = int(np.argmax(values) if mode == "max" else np.argmin(values))
            step, value = int(steps[index]), float(values[index])
            previous = self._best
            if previous is None or (value > previous[1] if mode == "max" else value < previous[1]):
                self._best = (step, value)
        return self._best

    def _get_start(self, state: tuple[int, int]) -> int:
        """Return the index of the first value that was not looked at.

        Args:
            state: how many values there were at the last look, and how often the curve had been
                cut.
        """
        count, num_cuts = state
        return count if num_cuts == self._curve.num_cuts else 0

    def _slice(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of the steps and values from an index on."""
        curve = self._curve
        return np.array(curve.steps[start:], np.int64), np.array(curve.values[start:])
