"""Runs in the terminal, from their files, while they train."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from fulgurite_report.errors import ReportError
from fulgurite_report.keyboard import Keyboard
from fulgurite_report.lines_of_runs import LinePrinter
from fulgurite_report.run import (
    Run,
    drop_repeated,
    is_run,
    list_folders,
    make_name,
    name_folders,
)
from fulgurite_report.text import as_printable
from fulgurite_report.view import View

_ENDED = ("complete", "stopped", "killed")
_LARGEST_SHARE = 0.006
"""Of a core, below the 1 % that is promised: of long runs the files are looked at less often, and a
look that costs more than the one before is waited for afterwards."""
_PATIENCE = 60.0
"""Seconds for which a folder of runs is watched after all that are in it have ended: the next trial
of a sweep may be starting."""


def watch_runs(
    paths: Sequence[str | os.PathLike[str]], *, metric: str | None = None, interval: float = 2.0
) -> None:
    """Show runs until all of them have ended, or until `q` or Ctrl-C.

    A run that has not begun is waited for, and a folder is looked through for new runs each time.
    In a terminal curves and tables are drawn again where something changed; elsewhere lines say
    what is new.

    Args:
        paths: directories of runs, or of such that hold runs; they may not be there yet.
        metric: which to draw first, `SOURCE/NAME` or its end; None for the one by which the runs
            choose their best, or a loss.
        interval: seconds between two looks at the files.

    Raises:
        ReportError: a path is not a directory, or no run has such a metric.
    """
    watched = WatchedRuns([Path(path) for path in paths])
    watched.refresh()
    console = Console(markup=False, emoji=False, highlight=False)
    if console.is_terminal and sys.stdin is not None and sys.stdin.isatty():
        _watch_terminal(watched, console, View(watched.runs, metric), interval)
    else:
        _print_lines(watched, interval)


class WatchedRuns:
    """The runs at some paths, with those that begin meanwhile.

    Attributes:
        runs: those that there are; the list stays the same object.
        waiting: a sentence for each path at which there is none yet.

    Args:
        paths: directories of runs, or of such that hold runs.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.runs: list[Run] = []
        self.waiting: list[str] = []
        self._paths = paths
        self._was_alive = False
        self._ended_at: float | None = None

    def refresh(self) -> None:
        """Look for runs, and read what is new in each.

        Raises:
            ReportError: a path is a file.
        """
        self.waiting.clear()
        folders: list[Path] = []
        for path in self._paths:
            folders_there = list_folders(path)
            folders += folders_there
            if not folders_there:
                self.waiting.append(_describe_wait(path))
        folders = drop_repeated(folders)
        known = {run.path: run for run in self.runs}
        if known.keys() != set(folders):
            self.runs[:] = [known.get(folder) or Run(folder) for folder in folders]
            for run, name in zip(self.runs, name_folders(folders), strict=True):
                run.name = make_name(name)
        for run in self.runs:
            run.refresh()

    def is_over(self) -> bool:
        """Return whether all runs have ended, and no other is to be waited for."""
        if self.waiting or any(run.state not in _ENDED for run in self.runs):
            self._was_alive = True
            self._ended_at = None
            return False
        if not self._was_alive or all(is_run(path) for path in self._paths):
            return True
        if self._ended_at is None:
            self._ended_at = time.monotonic()
        return time.monotonic() - self._ended_at >= _PATIENCE

    def get_mark(self) -> list[object]:
        """Return what changes when there is something new to show."""
        marks: list[object] = [
            (run.state, run.num_records, len(run.checkpoints), len(run.attempts))
            for run in self.runs
        ]
        return marks + self.waiting


def _describe_wait(path: Path) -> str:
    if path.is_dir():
        return as_printable(f"waiting for a run in {path}")
    if path.exists():
        raise ReportError(f"{path} is not a directory: give that of a run")
    return as_printable(f"waiting for {path}, which is not there yet")


def _watch_terminal(watched: WatchedRuns, console: Console, view: View, interval: float) -> None:
    try:
        if not watched.is_over():
            _show_until_end(watched, console, view, interval)
    except KeyboardInterrupt:
        pass
    # The terminal has its former content again, and what was seen last stays below it.
    console.print(view.build(console.size, watched.waiting, has_keys=False))


def _show_until_end(watched: WatchedRuns, console: Console, view: View, interval: float) -> None:
    first = view.build(console.size, watched.waiting)
    with (
        Keyboard() as keyboard,
        Live(first, console=console, auto_refresh=False, screen=True) as live,
    ):
        size = console.size
        mark = watched.get_mark()
        pause = _Pause(interval)
        while not watched.is_over():
            key = keyboard.wait(pause.get_seconds())
            if key == "q":
                break
            watched.refresh()
            has_pressed = key is not None and view.press(key)
            new_mark = watched.get_mark()
            if has_pressed or new_mark != mark or console.size != size:
                size = console.size
                mark = new_mark
                live.update(view.build(size, watched.waiting), refresh=True)


def _print_lines(watched: WatchedRuns, interval: float) -> None:
    printer = LinePrinter()
    try:
        printer.print_new(watched.runs, watched.waiting)
        pause = _Pause(interval)
        while not watched.is_over():
            time.sleep(pause.get_seconds())
            watched.refresh()
            printer.print_new(watched.runs, watched.waiting)
    except KeyboardInterrupt:
        return
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
