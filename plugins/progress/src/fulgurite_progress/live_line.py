"""Lines that a terminal keeps up to date, one at a time: a fit may run within another one."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live

_LINES: list["LiveLine"] = []
"""Those that are shown in this process, or are taken away for one that came later."""


class LiveLine:
    """A line of a terminal that is kept up to date, with what the program prints above it.

    Args:
        console: of the terminal.
        render: returns what is shown now.
        refresh: how often per second.
        stays: whether the last of it stays when it is stopped.
    """

    def __init__(
        self, console: Console, render: Callable[[], RenderableType], refresh: float, *, stays: bool
    ) -> None:
        self._console = console
        self._render = render
        self._refresh = refresh
        self._stays = stays
        self._live: Live | None = None

    def start(self) -> None:
        """Begin to show it."""
        _LINES.append(self)
        self.resume()

    def stop(self) -> None:
        """Show it for the last time, or take it away; nothing happens the second time."""
        if self not in _LINES:
            return
        _LINES.remove(self)
        if self._live is None:
            if self._stays:
                self._console.print(self._render())
            return
        self._live.transient = not self._stays
        self._live.stop()

    def pause(self) -> None:
        """Take it away for a while."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def resume(self) -> None:
        """Show it, unless it was stopped, or is shown."""
        if self not in _LINES or self._live is not None:
            return
        # rich prints what the program prints above the line, unless it goes somewhere else, such
        # as into a file.
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            refresh_per_second=self._refresh,
            redirect_stdout=sys.stdout.isatty(),
            transient=True,
        )
        self._live.start(refresh=True)
        # A second signal ends the process on the spot, and the cursor would stay hidden.
        self._console.show_cursor(True)


@contextmanager
def pause_outer_line() -> Iterator[None]:
    """Have the line of a fit away while another one runs within it."""
    if not _LINES:
        yield
        return
    line = _LINES[-1]
    line.pause()
    try:
        yield
    finally:
        line.resume()
