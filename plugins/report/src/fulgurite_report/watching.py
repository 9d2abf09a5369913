"""Runs in the terminal, from their files, while they train."""

import os
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live

from fulgurite_report.keyboard import Keyboard
from fulgurite_report.lines_of_runs import LinePrinter
from fulgurite_report.run import Run, find_runs
from fulgurite_report.view import View

_ENDED = ("complete", "stopped", "killed")
_LARGEST_SHARE = 0.008
"""Of a core, below the 1 % that is promised: of long runs the files are looked at less often, and a
look that costs more than the one before is waited for afterwards."""


def watch_runs(
    paths: Sequence[str | os.PathLike[str]], *, metric: str | None = None, interval: float = 2.0
) -> None:
    """Show runs until all of them have ended, or until `q` or Ctrl-C.

    In a terminal curves and tables are drawn again where something changed; elsewhere lines say
    what is new.

    Args:
        paths: directories of runs, or of such that hold runs.
        metric: which to draw first, `SOURCE/NAME` or its end; None for the one by which the runs
            choose their best, or a loss.
        interval: seconds between two looks at the files.

    Raises:
        ReportError: there is no run, or none has such a metric.
    """
    runs = find_runs(paths)
    for run in runs:
        run.refresh()
    console = Console(markup=False, emoji=False, highlight=False)
    try:
        if console.is_terminal and sys.stdin is not None and sys.stdin.isatty():
            _watch_terminal(runs, console, View(runs, metric), interval)
        else:
            _print_lines(runs, interval)
    except KeyboardInterrupt:
        return


def _watch_terminal(runs: list[Run], console: Console, view: View, interval: float) -> None:
    if not _have_ended(runs):
        _show_until_end(runs, console, view, interval)
    # The terminal has its former content again, and what was seen last stays below it.
    console.print(view.build(console.size, has_keys=False))


def _show_until_end(runs: list[Run], console: Console, view: View, interval: float) -> None:
    with (
        Keyboard() as keyboard,
        Live(view.build(console.size), console=console, auto_refresh=False, screen=True) as live,
    ):
        size = console.size
        mark = _get_mark(runs)
        pause = _Pause(interval)
        while not _have_ended(runs):
            key = keyboard.wait(pause.get_seconds())
            if key == "q":
                break
            for run in runs:
                run.refresh()
            has_pressed = key is not None and view.press(key)
            new_mark = _get_mark(runs)
            if has_pressed or new_mark != mark or console.size != size:
                size = console.size
                mark = new_mark
                live.update(view.build(size), refresh=True)


def _print_lines(runs: list[Run], interval: float) -> None:
    printer = LinePrinter(runs)
    try:
        printer.print_new()
        pause = _Pause(interval)
        while not _have_ended(runs):
            time.sleep(pause.get_seconds())
            for run in runs:
                run.refresh()
            printer.print_new()
    except BrokenPipeError:
        # Python would write what is left when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Pause:
    """How long to wait between two looks at the files.

    Args:
        interval: at least, in seconds.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._spent = time.process_time()

    def get_seconds(self) -> float:
        """Return the seconds to wait, after those of a core that were spent since the last call."""
        previous = self._spent
        self._spent = time.process_time()
        return max(self._interval, (self._spent - previous) / _LARGEST_SHARE)


def _have_ended(runs: Sequence[Run]) -> bool:
    return all(run.state in _ENDED for run in runs)


def _get_mark(runs: Sequence[Run]) -> list[tuple[str, int, int, int]]:
    """Return what changes when there is something new to show."""
    return [(run.state, run.num_records, len(run.checkpoints), len(run.attempts)) for run in runs]
