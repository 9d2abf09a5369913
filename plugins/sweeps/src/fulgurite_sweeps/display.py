"""A sweep in the terminal while it runs: a table of its trials, or, in a pipe, a line for each
thing that happens."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fulgurite.plugins import as_printable
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fulgurite_sweeps.journal import Journal, SweepDirectory
from fulgurite_sweeps.progress import add_progress
from fulgurite_sweeps.status import Standing, build_rows, count_states, read_standing
from fulgurite_sweeps.trials import Trial

_FEWEST_ROWS = 4
_OTHER_LINES = 4
"""Lines of the terminal that the table leaves free."""
_STYLES = {"running": "bold", "fail": "red", "pruned": "dim", "waiting": "dim"}


class _Screen(Console):
    """A console of which nothing ends the sweep: a terminal that is gone only shows nothing."""

    def __init__(self) -> None:
        super().__init__(markup=False, emoji=False, highlight=False)

    def on_broken_pipe(self) -> None:
        """Show nothing more; rich itself would end the process."""
        self.quiet = True


@contextmanager
def show_sweep(directory: SweepDirectory) -> Iterator[Callable[[str], None]]:
    """Show a sweep within the block; yield what takes a line for each thing that happens.

    Args:
        directory: of the sweep, which has begun.
    """
    screen = _Screen()
    tell = _make_teller(screen)
    if not screen.is_terminal:
        yield tell
        return
    view = View(directory, screen)
    live = Live(get_renderable=view.build, console=screen, refresh_per_second=2, transient=True)
    with suppress(OSError):
        live.start()
    try:
        yield tell
    finally:
        with suppress(OSError):
            live.stop()


def _make_teller(screen: Console) -> Callable[[str], None]:
    def tell(text: str) -> None:
        with suppress(OSError):  # the terminal may be gone, and the trials are to be waited for
            screen.print(as_printable(text), soft_wrap=True)
            screen.file.flush()

    return tell


class View:
    """Builds the table from the files of a sweep.

    Args:
        directory: of the sweep.
        console: for which it is.
    """

    def __init__(self, directory: SweepDirectory, console: Console) -> None:
        self._directory = directory
        self._console = console
        # Not that of the driver, which another thread uses at the same time.
        self._journal: Journal = directory.load()
        self._began = time.monotonic()

    def build(self) -> RenderableType:
        """Return the table as it stands now."""
        standing = read_standing(self._directory, self._journal)
        height = max(self._console.size.height - _OTHER_LINES, _FEWEST_ROWS)
        metrics = set(standing.metrics)
        trials = [add_progress(trial, metrics) for trial in choose_trials(standing, height)]
        header, *rows = build_rows(standing, trials)
        table = Table(box=None, pad_edge=False)
        for index, name in enumerate(header):
            justify: Any = "left" if index < 2 else "right"
            table.add_column(Text(as_printable(name)), justify=justify, no_wrap=True)
        for trial, cells in zip(trials, rows, strict=True):
            is_best = standing.best is not None and trial.number == standing.best.number
            style = "green" if is_best else _STYLES.get(trial.state, "")
            table.add_row(*(Text(as_printable(cell)) for cell in cells), style=style)
        num_hidden = len(standing.trials) - len(trials)
        hidden = f" ({num_hidden} not shown)" if num_hidden else ""
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        states = count_states(standing.trials)
        title = f"{self._directory.path}: {states}{hidden}, {minutes}:{seconds:02}"
        return Group(Text(as_printable(title), "bold", no_wrap=True), table)


def choose_trials(standing: Standing, count: int) -> list[Trial]:
    """Return which trials are shown where there is not room for all: those that run, the best one,
    and the newest of the others; by number.

    Args:
        standing: of the sweep.
        count: how many there is room for.
    """

    def get_rank(trial: Trial) -> tuple[bool, bool, bool, int]:
        is_best = standing.best is not None and trial.number == standing.best.number
        return trial.state != "running", not is_best, trial.state == "waiting", -trial.number

    chosen = sorted(standing.trials, key=get_rank)[:count]
    return sorted(chosen, key=lambda trial: trial.number)
