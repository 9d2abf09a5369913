"""Where the wall time of a run went, and how fast it goes."""

import statistics
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter


@dataclass(eq=False)
class Activity:
    """What the program is doing, in words, for those that show it on their own threads.

    Example:
        from fulgurite.plugins import Activity


        def check(batches, activity: Activity) -> None:
            for batch in batches:
                activity.done += 1


        with fg.Timings().describe("checking the batches", total=2, unit="batches") as activity:
            check([1, 2], activity)

    Attributes:
        text: such as `evaluating test`.
        total: of what it does, such as batches, as far as that is known.
        unit: of what it counts, such as `batches`.
        depth: how many names were being timed when it began.
        done: how many of them are done; whoever does them counts.
    """

    text: str
    total: int | None
    unit: str
    depth: int
    done: int = 0


class Timings:
    """Seconds and calls by name.

    The names are `start` (tracing, making the state), `check` (trying losses and evaluations before
    the first step), `data` (waiting for batches), `dispatch` (handing steps to the device), `wait`
    (for the device: a step in flight, values of a record, a finite state), `compile`,
    `evaluate.NAME`, and `PLUGIN.HOOK` or `PLUGIN.ACTION` for what plugins do on the host.
    `timing_table` of `fulgurite-progress` shows them in the words of users.

    Example:
        timings = fg.Timings()
        with timings.time("data"):
            batch = next(iter(data))
        print(timings)

    Attributes:
        background_seconds: of what was done behind other work, by name: `compile` is what XLA
            compiled while the program did something else. They are not part of `seconds`.
        active_names: the names for which time is being measured now, the innermost last; displays
            read it on their own threads.
        activities: what is going on in more words than those names, the innermost last; see
            `describe`.
        seconds: by name. Time of a nested measurement counts only there.
        calls: by name.
    """

    def __init__(self) -> None:
        self.active_names: list[str] = []
        self.activities: list[Activity] = []
        self.background_seconds: dict[str, float] = defaultdict(float)
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._inner = [0.0]
        self._steps: deque[float] = deque(maxlen=10_000)
        self._step_seconds = 0.0
        self._start = perf_counter()
        self._end: float | None = None

    @contextmanager
    def time(self, name: str, calls: int = 1) -> Iterator[None]:
        """Add the time of the block to `name`.

        Args:
            name: what the block does.
            calls: how often it does it; 0 for what continues an earlier block.
        """
        start = perf_counter()
        self._inner.append(0.0)
        self.active_names.append(name)
        try:
            yield
        finally:
            self.active_names.pop()
            elapsed = perf_counter() - start
            self.add(name, elapsed - self._inner.pop(), calls)
            self._inner[-1] += elapsed

    @contextmanager
    def describe(self, text: str, total: int | None = None, unit: str = "") -> Iterator[Activity]:
        """Say what the block does, for displays; its time counts as it would without.

        Args:
            text: in words, such as `evaluating test`.
            total: of what it does, if it will count that in `Activity.done`, as far as it is known.
            unit: of what it counts, in the plural.
        """
        activity = Activity(text, total, unit, len(self.active_names))
        self.activities.append(activity)
        try:
            yield activity
        finally:
            self.activities.remove(activity)

    def stop(self) -> None:
        """Have `total` stay what it is."""
        self._end = perf_counter()

    def add(self, name: str, seconds: float, calls: int = 1) -> None:
        """Add seconds to a name.

        Args:
            name: what took them.
            seconds: how many.
            calls: how often it was done.
        """
        self.seconds[name] += seconds
        self.calls[name] += calls

    def note_step_durations(self, num_steps: int) -> None:
        """Note that a number of steps took the time added to data, dispatch and wait since the last
        call."""
        previous = self._step_seconds
        self._step_seconds = sum(self.seconds[name] for name in ("data", "dispatch", "wait"))
        self._steps.append((self._step_seconds - previous) / num_steps)

    @property
    def total(self) -> float:
        """The seconds since this was made; of a fit that is over, those that it took."""
        return (self._end or perf_counter()) - self._start

    @property
    def step_durations(self) -> list[float]:
        """The newest 10,000 seconds per step, oldest first: each a mean between two steps at which
        anything was due, without hooks."""
        return list(self._steps)

    @property
    def median_step(self) -> float:
        """The median of `step_durations`; 1 ms before the first, as GoMLX has it."""
        return statistics.median(self._steps) if self._steps else 1e-3

    def __repr__(self) -> str:
        rows = sorted(self.seconds.items(), key=lambda row: -row[1])
        lines = [
            f"{name:32s} {seconds:9.3f} s  {self.calls[name]:8d} calls" for name, seconds in rows
        ]
        for name, seconds in self.background_seconds.items():
            lines.append(f"{f'{name} in background':32s} {seconds:9.3f} s")
        return "\n".join(lines)


class StepRate:
    """How many steps a second were done since the last call; None the first time."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None

    def __call__(self, step: int, now: float) -> float | None:
        """Return the rate.

        Args:
            step: the number of completed updates.
            now: seconds of a monotonic clock.
        """
        previous = self._last
        self._last = (step, now)
        if previous is None:
            return None
        previous_step, previous_time = previous
        if now <= previous_time:
            return None
        return (step - previous_step) / (now - previous_time)
