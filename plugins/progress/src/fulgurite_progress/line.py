"""Compose one line about a run, as much of it as there is room for."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text

# A bar takes what the rest of the line leaves, from 5 to 20 columns.
SHORTEST_BAR, LONGEST_BAR = 5, 20


@dataclass(frozen=True)
class Line:
    """Where a run is. What does not fit into the width is left out, the least important first.

    Attributes:
        step: the updates so far.
        end: how many there will be, as far as it is known.
        rate: steps a second, or None.
        per_step: how much is in a step, and of what, such as `(512, "tokens")`; None if the data
            does not know.
        metrics: the newest, by name.
        activity: what is going on besides steps, or how the run ended.
        ended: whether it has ended.
    """

    step: int
    end: int | None
    rate: float | None = None
    per_step: tuple[int, str] | None = field(default=None, kw_only=True)
    metrics: dict[str, float] = field(default_factory=dict)
    activity: str = ""
    ended: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield one line of at most the console's width."""
        yield self.text(options.max_width)

    def text(self, width: int | None = None) -> Text:
        """Return the line in at most `width` columns, or without a width the whole of it but for
        the bar."""
        parts: list[_Part] = []
        used_width = 0
        for part in self._list_parts():
            part_width = cell_len(part.text)
            if width is None or used_width + part_width <= width:
                parts.append(part)
                used_width += part_width + 2
        parts.sort(key=lambda part: part.position)
        if width is not None:
            parts += self._make_bar(width - used_width)
        line = Text("  ").join(Text(part.text, part.style) for part in parts)
        if width is not None:
            line.truncate(width)
        line.no_wrap = True
        return line

    def _list_parts(self) -> list["_Part"]:
        """Return the parts of the line, the most important first."""
        total = "" if self.end is None else f"/{self.end:,}"
        step = _Part(0, f"step {self.step:,}{total}", "bold")
        activity: list[_Part] = []
        if self.activity:
            activity = [_Part(4, self.activity, "bold" if self.ended else "yellow")]
        names = sorted(self.metrics, key=lambda name: name != "loss")
        metrics = [_Part(1, f"{name} {self.metrics[name]:.4g}", "green") for name in names]
        # How a run ended matters more than its numbers, and these more than what it is doing now.
        first = activity + metrics[:1] if self.ended else metrics[:1] + activity
        left: list[_Part] = []
        if self.end is not None and self.rate and not self.ended and self.step < self.end:
            seconds_left = (self.end - self.step) / self.rate
            left = [_Part(2, f"{format_duration(seconds_left)} left", "cyan")]
        # An activity takes the place of the time left, not that of a metric.
        rest = metrics[1:] + left if activity else left + metrics[1:]
        if self.rate:
            rest.append(_Part(3, _format_rate(self.rate), "magenta"))
            if self.per_step is not None:
                count, unit = self.per_step
                rest.append(_Part(3, f"{count * self.rate:,.0f} {unit}/s", "magenta"))
        return [step, *first, *rest]

    def _make_bar(self, room: int) -> list["_Part"]:
        """Return a bar of at most `room` columns; it is the last of the line, so that nothing moves
        when its width changes."""
        if not self.end or self.ended:
            return []
        bar = draw_bar(self.step / self.end, min(room, LONGEST_BAR))
        return [_Part(5, bar, "blue")] if bar else []


class _Part(NamedTuple):
    """A part of the line; `position` orders the parts from left to right."""

    position: int
    text: str
    style: str


def draw_bar(share: float, width: int, prefix: str = "") -> str:
    """Return a bar; an empty string where there is no room for one.

    Args:
        share: of it that is filled.
        width: in columns.
        prefix: stands before it.
    """
    if width < SHORTEST_BAR:
        return ""
    filled = min(width, int(width * share))
    return prefix + "━" * filled + "╌" * (width - filled)


def _format_rate(rate: float) -> str:
    if rate < 1:
        return f"{1 / rate:.3g} s/step"
    return f"{rate:,.0f} steps/s" if rate >= 100 else f"{rate:.3g} steps/s"


def format_duration(seconds: float) -> str:
    """Return seconds as minutes and seconds, or with hours."""
    minutes, whole_seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{whole_seconds:02}"
    return f"{minutes}:{whole_seconds:02}"
