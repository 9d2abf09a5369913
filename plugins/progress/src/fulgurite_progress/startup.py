"""Show that a fit is starting, from its first moment until there is a run to show."""

import threading
from typing import Self

import fulgurite as fg
from fulgurite.plugins import as_printable
from rich.console import Console
from rich.text import Text

from fulgurite_progress.display import POLL_SECONDS, Stopwatch
from fulgurite_progress.live_line import LiveLine
from fulgurite_progress.notebook import CellLine
from fulgurite_progress.times import find_activity


class Startup:
    """A context that shows what is going on, and for how many seconds, until it is stopped or left:
    in a terminal or a notebook as one line, elsewhere as a line for each thing that takes a while.

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
        self._printed = ""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: LiveLine | None = None
        self._cell = CellLine() if console.is_jupyter else None
        if console.is_interactive:
            self._live = LiveLine(console, self._describe, refresh, stays=False)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
            return self
        self._show()
        self._thread = threading.Thread(
            target=self._show_until_ended, name="fulgurite startup", daemon=True
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

    def _show_until_ended(self) -> None:
        interval = POLL_SECONDS if self._cell is None else 1 / self._refresh
        while not self._ended.wait(interval):
            self._show()

    def _show(self) -> None:
        line = self._describe()
        if self._cell is not None:
            self._cell.show(line)
        elif self._stopwatch.activity != self._printed:
            self._printed = self._stopwatch.activity
            self._console.print(line)

    def _describe(self) -> Text:
        activity, _ = find_activity(self._timings)
        return Text(as_printable(self._stopwatch.describe(activity or "starting")), "yellow")
