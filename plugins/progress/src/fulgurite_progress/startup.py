"""Show that a fit is starting, from its first moment until there is a run to show."""

import sys
import threading
from itertools import repeat
from typing import Self

import fulgurite as fg
from rich.console import Console
from rich.live import Live
from rich.text import Text

from fulgurite_progress.display import Stopwatch, iter_intervals
from fulgurite_progress.notebook import CellLine
from fulgurite_progress.times import describe_activity


class Startup:
    """A context that shows what is going on, and for how many seconds, until it is stopped or left:
    in a terminal or a notebook as one line, elsewhere as lines at growing intervals.

    Args:
        timings: of the fit.
        console: where the line goes.
        refresh: how often per second the line in a terminal or a notebook is updated.
    """

    def __init__(self, timings: fg.Timings, console: Console, refresh: float) -> None:
        self._timings = timings
        self._console = console
        self._refresh = refresh
        self._stopwatch = Stopwatch()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None
        self._cell = CellLine() if console.is_jupyter else None
        if console.is_interactive:
            self._live = Live(
                get_renderable=self._describe,
                console=console,
                refresh_per_second=refresh,
                redirect_stdout=sys.stdout.isatty(),
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start(refresh=True)
            self._console.show_cursor(True)
            return self
        self._show()
        self._thread = threading.Thread(
            target=self._show_at_times, name="fulgurite startup", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the line away; nothing happens the second time."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._cell is not None:
            self._cell.hide()
        if self._live is not None:
            self._live.stop()

    def _show_at_times(self) -> None:
        intervals = iter_intervals() if self._cell is None else repeat(1 / self._refresh)
        for interval in intervals:
            if self._ended.wait(interval):
                break
            self._show()

    def _show(self) -> None:
        if self._cell is None:
            self._console.print(self._describe())
        else:
            self._cell.show(self._describe())

    def _describe(self) -> Text:
        activity = describe_activity(self._timings.active_names) or "starting"
        return Text(self._stopwatch.describe(activity), "yellow")
