"""Keep the line of a run up to date: in a terminal or a notebook by the clock, elsewhere where
there is something new."""

import threading
from collections import deque
from dataclasses import replace
from time import monotonic
from typing import Any

import fulgurite as fg
from fulgurite.plugins import Activity, as_printable, redact_registered
from rich.console import Console, Group, RenderableType
from rich.text import Text

from fulgurite_progress.line import Line
from fulgurite_progress.live_line import LiveLine
from fulgurite_progress.notebook import WIDTH, CellLine
from fulgurite_progress.plain import LASTING_SECONDS, PlainLines
from fulgurite_progress.times import find_activity
from fulgurite_progress.work import WorkLine

POLL_SECONDS = 0.5
"""Between two looks whether there is something new for a pipe."""
# The rate is that of the last seconds, so that a pause shows and is forgotten.
RATE_WINDOW = 15.0


class Display:
    """Show one run on a console until it is stopped.

    Args:
        run: the run.
        console: where its line goes.
        refresh: how often per second the line in a terminal or a notebook is updated.
        hide: names of metrics that are left out.
    """

    def __init__(
        self, run: fg.Run, console: Console, refresh: float, hide: tuple[str, ...] = ()
    ) -> None:
        self.console = console
        self._run = run
        self._hide = hide
        self._metrics: dict[str, float] = {}
        # Times without compilation, and the steps at these times.
        self._progress: deque[tuple[float, int]] = deque([(monotonic(), run.step)])
        self._stopwatch = Stopwatch()
        self._per_step = _count_per_step(run.data)
        self._work: Activity | None = None
        self._plain_lines = PlainLines(monotonic())
        # Records that changed the metrics, and how many of them the last plain line has.
        self._num_records = 0
        self._num_printed = 0
        self._ending: str | None = None
        self._failed_step: int | None = None
        self._ended = threading.Event()
        self._live: LiveLine | None = None
        self._thread: threading.Thread | None = None
        self._cell = CellLine() if console.is_jupyter else None
        self._refresh = refresh
        self._compile_seconds = self._get_compile_seconds()
        if console.is_interactive:
            self._live = LiveLine(console, self.build_view, refresh, stays=True)

    def start(self) -> None:
        """Begin to show the run."""
        if self._live is not None:
            self._live.start()
        else:
            self._thread = threading.Thread(
                target=self._show_until_ended, name="fulgurite progress", daemon=True
            )
            self._thread.start()

    def stop(self, ending: str, failed_step: int | None = None) -> None:
        """Show the line for the last time.

        Args:
            ending: how the run ended.
            failed_step: the step that ended it, if that is not the newest one; the numbers so far
                are not its own.
        """
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
        self._ending = ending
        self._failed_step = failed_step
        if failed_step is not None:
            self._metrics.clear()
        if self._live is not None:
            self._live.stop()
        else:
            self._print_line()

    def log(self, record: fg.Record) -> None:
        """Take the numbers of an exact record into the line, unless they are of an evaluation,
        which has a line of its own."""
        if record.stream != "exact" or record.source in self._run.engine.evaluations:
            return
        prefix = "" if record.source == "train" else f"{record.source}/"
        for name, value in self._select_metrics(record.values).items():
            self._metrics[prefix + name] = value
        self._num_records += 1

    def print_evaluation(self, name: str, metrics: dict[str, Any]) -> None:
        """Print the numbers of an evaluation, above the line.

        Args:
            name: of the evaluation.
            metrics: by name.
        """
        numbers = self._select_metrics(metrics)
        names = sorted(numbers, key=lambda name: name != "loss")
        values = ", ".join(f"{name} {numbers[name]:.4g}" for name in names)
        text = redact_registered(f"step {self._run.step:,}, {name}: {values}")
        self.console.print(Text(as_printable(text), "green"))

    def _select_metrics(self, values: dict[str, Any]) -> dict[str, float]:
        """Return the numbers that are shown; a metric of a phase has the name `PHASE/NAME`."""
        return {
            name: value
            for name, value in values.items()
            if isinstance(value, int | float) and name.rpartition("/")[2] not in self._hide
        }

    def print_message(self, message: str) -> None:
        """Print a sentence of the run, above the line."""
        self.console.print(Text(as_printable(f"note: {message}")))

    def print_cost(self, name: str, compiled: Any, jaxpr: Any) -> None:
        """Print what an executable takes, above the line.

        Args:
            name: what it is called.
            compiled: the executable.
            jaxpr: the program as it was traced.
        """
        from fulgurite_progress.summary import format_cost

        # Waited for, or behind other work.
        total = self._get_compile_seconds()
        seconds = total - self._compile_seconds
        self._compile_seconds = total
        self.console.print(format_cost(name, compiled, jaxpr, seconds or None))

    def _get_compile_seconds(self) -> float:
        timings = self._run.timings
        return timings.seconds.get("compile", 0.0) + timings.background_seconds.get("compile", 0.0)

    def build_line(self) -> Line:
        """Return what is known at this moment; nothing is read from the device."""
        step = self._run.step if self._failed_step is None else self._failed_step
        activity, self._work = find_activity(self._run.timings)
        return Line(
            step,
            self._run.step_range.stop,
            self._measure_rate(step),
            dict(self._metrics),
            self._ending or self._stopwatch.describe(activity, step),
            per_step=self._per_step,
            ended=self._ending is not None,
        )

    def build_view(self) -> RenderableType:
        """Return what a terminal shows: the line, and below it how far an activity is that lasts
        and counts what it does."""
        line = self.build_line()
        work = self._get_work_line()
        if line.ended or work is None or not work.count or work.seconds < LASTING_SECONDS:
            return line
        return Group(replace(line, activity=""), work)

    def _get_work_line(self) -> WorkLine | None:
        """Return how far the activity of the newest line is; None where nothing describes it."""
        return None if self._work is None else WorkLine(self._work, self._stopwatch.seconds)

    def _measure_rate(self, step: int) -> float | None:
        """Return steps a second over the last seconds, without the time of compilation; None where
        no step was made."""
        timings = self._run.timings
        if "compile" not in timings.active_names:
            now = monotonic() - timings.seconds.get("compile", 0.0)
            self._progress.append((now, step))
            while len(self._progress) > 2 and now - self._progress[0][0] > RATE_WINDOW:
                self._progress.popleft()
        first_time, first_step = self._progress[0]
        last_time, last_step = self._progress[-1]
        if last_step > first_step and last_time > first_time:
            return (last_step - first_step) / (last_time - first_time)
        return None

    def _show_until_ended(self) -> None:
        """Print lines of a pipe, or update the cell of a notebook."""
        interval = POLL_SECONDS if self._cell is None else 1 / self._refresh
        while not self._ended.wait(interval):
            self._print_line()

    def _print_line(self) -> None:
        line = self.build_line()
        work = self._get_work_line()
        count = "" if work is None else work.count
        if self._cell is not None:
            if count:
                line = replace(line, activity=f"{line.activity}, {count}")
            self._cell.show(line.text(WIDTH))
            return
        num_records = self._num_records
        plain_line = self._plain_lines.choose(
            line,
            monotonic(),
            activity=self._stopwatch.activity,
            lasting=self._stopwatch.seconds,
            count=count,
            has_news=num_records != self._num_printed,
        )
        if plain_line is not None:
            self._num_printed = num_records
            self.console.print(plain_line.text())


def _count_per_step(data: Any) -> tuple[int, str] | None:
    """Return how much data has in a step, and of what, if it knows."""
    source = data.source if isinstance(data, fg.DataSource) else data
    count = getattr(source, "count_per_batch", None)
    return None if count is None else count()


class Stopwatch:
    """How long the newest activity lasts.

    Attributes:
        activity: the newest.
    """

    def __init__(self) -> None:
        self.activity = ""
        self._step = 0
        self._start = monotonic()

    @property
    def seconds(self) -> float:
        """For which the newest activity has lasted."""
        return monotonic() - self._start

    def describe(self, activity: str, step: int = 0) -> str:
        """Return an activity with its whole seconds, once it has lasted a second.

        Args:
            activity: what is going on now, or an empty string.
            step: at which; the same activity at another step begins again.
        """
        if (activity, step) != (self.activity, self._step):
            self.activity = activity
            self._step = step
            self._start = monotonic()
        seconds = int(self.seconds)
        return f"{activity} {seconds} s" if activity and seconds else activity
