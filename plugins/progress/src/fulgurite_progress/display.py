"""The line of a run and who renews it: a terminal's by the clock, or plain lines at growing
intervals."""

import sys
import threading
from collections import deque
from collections.abc import Iterator
from time import monotonic

import fulgurite as fg
from rich.console import Console
from rich.live import Live

from fulgurite_progress.line import Line

FIRST_INTERVAL, LONGEST_INTERVAL = 2.0, 120.0
# The rate is that of the last seconds, so that a pause shows and is forgotten.
RATE_OVER = 15.0


class Display:
    """Shows one run on `console` until it is stopped."""

    def __init__(self, run: fg.Run, console: Console, refresh: float) -> None:
        self.console, self._run = console, run
        self._metrics: dict[str, float] = {}
        self._seen: deque[tuple[float, int]] = deque([(monotonic(), run.step)])
        self._how: str | None = None
        self._ended = threading.Event()
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        if console.is_interactive:
            # What is printed goes above the line, through rich, unless it goes somewhere else, such
            # as into a file.
            above, line = sys.stdout.isatty(), self.line
            self._live = Live(
                get_renderable=line,
                console=console,
                refresh_per_second=refresh,
                redirect_stdout=above,
            )

    def start(self) -> None:
        """Begins to show the run."""
        if self._live is not None:
            self._live.start(refresh=True)
            # A second signal ends the process on the spot, and the cursor would stay hidden.
            self.console.show_cursor(True)
        else:
            self._thread = threading.Thread(
                target=self._print_at_times, name="fulgurite progress", daemon=True
            )
            self._thread.start()

    def stop(self, how: str) -> None:
        """Shows the line for the last time; `how` the run ended."""
        self._how = how
        self._ended.set()
        if self._live is not None:
            self._live.stop()
        elif self._thread is not None:
            self._thread.join()
            self._print()

    def log(self, record: fg.Record) -> None:
        """Takes the numbers of an exact record into the line."""
        if record.stream != "exact":
            return
        prefix = "" if record.source == "train" else f"{record.source}/"
        for name, value in record.values.items():
            if isinstance(value, int | float):
                self._metrics[prefix + name] = value

    def line(self) -> Line:
        """What is known at this moment; nothing is read from the device."""
        step, end, accounts = self._run.step, self._run.step_range.stop, self._run.timings
        if "compile" not in accounts.active_names:
            now = monotonic() - accounts.seconds.get(
                "compile", 0.0
            )  # how fast steps are tells nothing of it
            self._seen.append((now, step))
            while len(self._seen) > 2 and now - self._seen[0][0] > RATE_OVER:
                self._seen.popleft()
        (begun, first), (last, newest) = self._seen[0], self._seen[-1]
        rate = (newest - first) / (last - begun) if newest > first and last > begun else None
        doing = self._how or activity(accounts.active_names)
        return Line(step, end, rate, dict(self._metrics), doing, ended=self._how is not None)

    def _print_at_times(self) -> None:
        for interval in intervals():
            if self._ended.wait(interval):
                break
            self._print()

    def _print(self) -> None:
        self.console.print(self.line().text())


def intervals() -> Iterator[float]:
    """The seconds before each plain line."""
    interval = FIRST_INTERVAL
    while True:
        yield interval
        interval = min(2 * interval, LONGEST_INTERVAL)


def activity(accounts: list[str]) -> str:
    """What is going on besides steps, of the accounts that are open; another thread may change them
    meanwhile."""
    accounts = list(accounts)
    name = next(iter(accounts), "")
    if name in ("compile", "wait"):  # for steps is waited
        return "compiling" if name == "compile" else ""
    if name.startswith("evaluate.") or ".evaluate" in name:
        return f"evaluating {accounts[-1].rpartition('.')[2]}"
    return "saving" if name.endswith(".save_checkpoint") else name
