"""The plugin that ends training when a time is used up."""

import math
import re
from dataclasses import dataclass
from datetime import timedelta
from numbers import Real
from threading import TIMEOUT_MAX, Timer
from time import monotonic
from typing import Any

import fulgurite as fg
from fulgurite.errors import ConfigurationError
from fulgurite.plugins import hide_constructor_frames

# A thread can wait for 292 years, less the time that the machine has been up.
_LONGEST_WAIT = TIMEOUT_MAX / 2
_CLOCK = re.compile(r"(\d+):(\d+):(\d+):(\d+)")
_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


@dataclass
class _Clock:
    """The time that a run has used.

    Attributes:
        seconds_before: in attempts before this one.
        started: when this one began; None while nothing is trained.
        timer: asks to stop when the time is used up.
    """

    seconds_before: float = 0.0
    started: float | None = None
    timer: Timer | None = None

    @property
    def seconds_used(self) -> float:
        """The seconds of training so far, over all attempts."""
        if self.started is None:
            return self.seconds_before
        return self.seconds_before + monotonic() - self.started


@hide_constructor_frames
@dataclass(frozen=True, eq=False)
class TimeLimit(fg.Plugin):
    """Stops training after a time, counted over all attempts of a run.

    It stops as a signal does: between two steps or between two batches of an evaluation, when all
    processes have agreed, with the state saved. The run is not complete: with a larger limit, it
    resumes. A run whose time is used up makes no step. It takes nothing from the steps.

    Example:
        from fulgurite_stopping import TimeLimit

        engine = fg.Engine(steps=1000, plugins=[TimeLimit("7h30m")])
        result = engine.fit(model, data)

    Attributes:
        limit: seconds, a `datetime.timedelta`, units such as `"1d12h"`, `"7h30m"` or `"45s"`, or
            `"DAYS:HOURS:MINUTES:SECONDS"`.
    """

    plugin_name = "time_limit"

    limit: float | str | timedelta
    _clock = fg.PerFit(_Clock)

    def __post_init__(self) -> None:
        parse_duration(self.limit)

    @property
    def seconds(self) -> float:
        """The limit in seconds."""
        return parse_duration(self.limit)

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Start the clock, with what is left of the time."""
        clock = self._clock
        clock.started = monotonic()
        if run.is_complete:
            return
        seconds_left = self.seconds - clock.seconds_before
        if seconds_left > _LONGEST_WAIT:
            return
        reason = f"the time limit of {timedelta(seconds=self.seconds)} is used up"
        if seconds_left <= 0:
            run.request_stop(reason)
            return
        clock.timer = Timer(seconds_left, run.request_stop, [reason])
        clock.timer.daemon = True
        clock.timer.start()

    @fg.hookimpl
    def on_fit_end(self) -> None:
        """Stop the clock."""
        self._stop_clock()

    @fg.hookimpl
    def on_exception(self) -> None:
        """Stop the clock."""
        self._stop_clock()

    @fg.hookimpl
    def get_host_state(self) -> dict[str, float]:
        """Return the time that was used."""
        return {"seconds": self._clock.seconds_used}

    @fg.hookimpl
    def set_host_state(self, state: Any, version: int) -> None:
        """Go on from the time that was used before.

        Args:
            state: the value of `get_host_state`.
            version: of the plugin that wrote it.
        """
        seconds = state["seconds"]
        if type(seconds) not in (float, int) or not 0 <= seconds < math.inf:
            raise ValueError(f"seconds is {seconds!r:.100}, which a run never writes")
        self._clock.seconds_before = seconds
        self._clock.started = None

    def _stop_clock(self) -> None:
        clock = self._clock
        clock.seconds_before = clock.seconds_used
        clock.started = None
        if clock.timer is not None:
            clock.timer.cancel()
            clock.timer.join()
            clock.timer = None


def parse_duration(duration: float | str | timedelta) -> float:
    """Return a duration in seconds.

    Args:
        duration: as `TimeLimit` takes it.

    Raises:
        ConfigurationError: it is not a positive, finite time in one of these forms.
    """
    seconds = math.nan
    if isinstance(duration, timedelta):
        seconds = duration.total_seconds()
    elif isinstance(duration, str):
        seconds = _parse_text(duration)
    elif isinstance(duration, Real) and not isinstance(duration, bool):
        seconds = float(duration)
    if not 0 < seconds < math.inf:
        raise ConfigurationError(
            f"TimeLimit: limit is {duration!r}; give seconds, a timedelta, units such as '7h30m', "
            "or 'DAYS:HOURS:MINUTES:SECONDS'"
        )
    return seconds


def _parse_text(text: str) -> float:
    """Return seconds; NaN for a string of another form."""
    match = _CLOCK.fullmatch(text) or _UNITS.fullmatch(text)
    if match is None:
        return math.nan
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
