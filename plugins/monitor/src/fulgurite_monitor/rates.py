"""Rates over the newest readings of some counters."""

from collections import deque
from collections.abc import Mapping

from fulgurite.errors import ConfigurationError, StateError


class RateWindow:
    """What is counted, per second, from the oldest to the newest of the last readings.

    Example:
        from fulgurite_monitor import RateWindow

        window = RateWindow(2)
        window.update(2.0, {"batches": 1, "examples": 2})  # None: one reading has no rate
        rates = window.update(2.5, {"batches": 2, "examples": 4})
        print(rates["batches"], rates["examples"])  # 2.0 4.0

    Args:
        size: the number of readings, at least 2.
    """

    def __init__(self, size: int) -> None:
        if size < 2:
            raise ConfigurationError(
                f"RateWindow: size is {size}; a rate is between two readings, so give 2 or more"
            )
        self._readings: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=size)

    def update(self, seconds: float, counts: Mapping[str, float]) -> dict[str, float] | None:
        """Take a reading, and return the rates by name; None for the first `size - 1` readings.

        Args:
            seconds: when it was made; later than the one before.
            counts: by name, since the same moment in each reading.

        Raises:
            StateError: the time did not increase.
        """
        if self._readings and seconds <= self._readings[-1][0]:
            raise StateError(
                f"RateWindow: a reading at {seconds} s follows one at {self._readings[-1][0]} s; "
                "time must increase"
            )
        self._readings.append((seconds, counts))
        if len(self._readings) < (self._readings.maxlen or 0):
            return None
        first_seconds, first = self._readings[0]
        elapsed = seconds - first_seconds
        return {name: (count - first.get(name, 0)) / elapsed for name, count in counts.items()}
