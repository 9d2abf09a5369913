"""Choose the lines about a run that a pipe or a file gets."""

from collections.abc import Iterator
from dataclasses import replace

from fulgurite_progress.line import Line

FIRST_INTERVAL, LONGEST_INTERVAL = 2.0, 120.0
SHORTEST_PAUSE = 1.0
"""Seconds between the lines of two log steps, and later a hundredth of the time so far."""
LASTING_SECONDS = 1.0
"""An activity that is shorter has no line."""


def iter_intervals() -> Iterator[float]:
    """Yield the seconds before each line that is a sign of life."""
    interval = FIRST_INTERVAL
    while True:
        yield interval
        interval = min(2 * interval, LONGEST_INTERVAL)


class PlainLines:
    """Chooses lines that say something new: one for each log step, one for each activity that
    lasts, and at growing intervals one for steps that nothing was logged of, or for an activity
    that counts.

    Args:
        now: when the run began, in seconds of a monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._last_line = now
        self._intervals = iter_intervals()
        self._interval = next(self._intervals)
        self._step: int | None = None
        self._activity: tuple[int, str] | None = None
        self._count = ""

    def choose(
        self, line: Line, now: float, *, activity: str, lasting: float, count: str, has_news: bool
    ) -> Line | None:
        """Return the line to print now; None for none.

        Args:
            line: what is known of the run.
            now: in seconds of the same clock.
            activity: what is going on besides steps, or an empty string.
            lasting: for how many seconds it has been.
            count: how far it is, or an empty string.
            has_news: whether metrics were logged since the last line.
        """
        if line.ended:
            return line
        is_sign_due = now >= self._last_line + self._interval
        is_line_due = self._is_pause_over(now) if has_news else is_sign_due
        # The numbers of the last step are in the line that says how the run ended.
        has_numbers = line.step not in (self._step, line.end)
        is_new = (line.step, activity) != self._activity and lasting >= LASTING_SECONDS
        is_further = is_sign_due and count != self._count
        has_activity = bool(activity) and (is_new or is_further)
        if not has_activity and not (has_numbers and is_line_due):
            return None
        if not has_numbers:
            line = replace(line, metrics={}, rate=None)
        self._last_line = now
        self._step = line.step
        if has_activity:
            self._activity = line.step, activity
            self._count = count
            activity = ", ".join(part for part in (line.activity, count) if part)
        line = replace(line, activity=activity if has_activity else "")
        if is_sign_due:
            self._interval = next(self._intervals)
        return line

    def _is_pause_over(self, now: float) -> bool:
        """Return whether enough time has passed for the line of another log step."""
        if self._step is None:
            return True
        pause = min(max(SHORTEST_PAUSE, (now - self._began) / 100), LONGEST_INTERVAL)
        return now >= self._last_line + pause
