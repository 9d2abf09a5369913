"""Compose the line about what a run is doing besides steps, such as an evaluation."""

from collections.abc import Iterator
from dataclasses import dataclass

from fulgurite.plugins import Activity, as_printable
from rich.console import Console, ConsoleOptions
from rich.text import Text

from fulgurite_progress.line import draw_bar, format_duration
from fulgurite_progress.numbers import format_bytes

LONGEST_BAR = 40


@dataclass(frozen=True)
class WorkLine:
    """How far an activity is.

    Attributes:
        activity: which one.
        seconds: since it was first seen.
    """

    activity: Activity
    seconds: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield one line of at most the console's width."""
        yield self.text(options.max_width)

    def text(self, width: int) -> Text:
        """Return the line in at most `width` columns, with the bar that there is room for."""
        parts = [as_printable(self.activity.text), f"{int(self.seconds)} s", self.count]
        text = "  ".join(part for part in parts if part)
        total, done = self.activity.total, self.activity.done
        # Of a save it is not known how small compression makes it.
        if total and 0 < done < total and self.activity.unit != "bytes":
            text += f"  {format_duration(self.seconds * (total - done) / done)} left"
        line = Text(text, "yellow")
        room = width - line.cell_len - 2
        if total:
            line.append(draw_bar(done / total, min(room, LONGEST_BAR), prefix="  "), "blue")
        line.truncate(width)
        line.no_wrap = True
        return line

    @property
    def count(self) -> str:
        """How much is done, and of how much, as far as it is known; empty where nothing counts."""
        total, done, unit = self.activity.total, self.activity.done, self.activity.unit
        if unit == "bytes":
            return f"{format_bytes(done)}/{format_bytes(total or 0)}" if total else ""
        if total is None:
            return f"{done:,} {unit}" if done else ""
        return f"{done:,}/{total:,} {unit}"
