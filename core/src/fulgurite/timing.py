"""Where the wall time of a run went, and how fast it goes."""

import statistics
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Timings:
    """Seconds and calls by name: `start` (tracing, making the state), `data` (waiting for batches),
    `dispatch` (handing steps to the device), `wait` (for the device: a step in flight, values of a
    record, a finite state), `compile`, and `PLUGIN.HOOK` or `PLUGIN.ACTION` for what plugins do on
    the host. Time in a nested account counts only there.

    Attributes:
        open: the accounts to which time is being booked now, the innermost last; displays read it
            on their own threads.
    """

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._inner = [0.0]
        self._steps: deque[float] = deque(maxlen=10_000)
        self._trained = 0.0
        self._begun = perf_counter()

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Books the time of the block to `name`."""
        begun = perf_counter()
        self._inner.append(0.0)
        self.open.append(name)
        try:
            yield
        finally:
            self.open.pop()
            spent = perf_counter() - begun
            self.add(name, spent - self._inner.pop())
            self._inner[-1] += spent

    def add(self, name: str, seconds: float, calls: int = 1) -> None:
        """Books `seconds` to `name`."""
        self.seconds[name] += seconds
        self.calls[name] += calls

    def stretch(self, steps: int) -> None:
        """Notes that `steps` steps took the time booked to data, dispatch and wait since the last
        call."""
        before, self._trained = (
            self._trained,
            sum(self.seconds[name] for name in ("data", "dispatch", "wait")),
        )
        self._steps.append((self._trained - before) / steps)

    @property
    def total(self) -> float:
        """Seconds since the accounts were opened."""
        return perf_counter() - self._begun

    @property
    def median_step(self) -> float:
        """Median seconds per step over the stretches between due points, without hooks; NaN before
        the first."""
        return statistics.median(self._steps) if self._steps else float("nan")

    def __repr__(self) -> str:
        rows = sorted(self.seconds.items(), key=lambda row: -row[1])
        return "\n".join(
            f"{name:32s} {seconds:9.3f} s  {self.calls[name]:8d} calls" for name, seconds in rows
        )


class Rate:
    """Steps a second since it was last asked; None the first time."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None

    def __call__(self, step: int, now: float) -> float | None:
        """The rate at `step` and the time `now`, in seconds."""
        last, self._last = self._last, (step, now)
        return None if last is None or now <= last[1] else (step - last[0]) / (now - last[1])
