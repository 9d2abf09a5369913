"""Compose one line about a run, as much of it as there is room for."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console, ConsoleOptions
from rich.text import Text

BAR = 20
# Variants of the loss; they stand behind what the user logs.
_LAST_METRICS = ("batch_loss", "loss_average")


@dataclass(frozen=True)
class Line:
    """Where a run is. What does not fit into the width is left out, the least important first.

    Attributes:
        step: the updates so far.
        end: how many there will be, as far as it is known.
        rate: steps a second, or None.
        metrics: the newest, by name.
        activity: what is going on besides steps, or how the run ended.
        ended: whether it has ended.
    """

    step: int
    end: int | None
    rate: float | None = None
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
        for part in self._list_parts(has_bar=width is not None):
            if width is None or used_width + len(part.text) <= width:
                parts.append(part)
                used_width += len(part.text) + 2
        parts.sort(key=lambda part: part.position)
        line = Text("  ").join(Text(part.text, part.style) for part in parts)
        if width is not None:
            line.truncate(width)
        line.no_wrap = True
        return line

    def _list_parts(self, *, has_bar: bool) -> list["_Part"]:
        """Return the parts of the line, the most important first."""
        total = "" if self.end is None else f"/{self.end:,}"
        parts = [_Part(0, f"step {self.step:,}{total}", "bold")]
        if self.activity:
            parts.append(_Part(5, self.activity, "bold" if self.ended else "yellow"))
        if self.end is not None and self.rate and not self.ended:
            seconds_left = (self.end - self.step) / self.rate
            parts.append(_Part(3, f"{_format_duration(seconds_left)} left", "cyan"))
        names = sorted(self.metrics, key=_rank_metric)
        metrics = [_Part(4, f"{name} {self.metrics[name]:.4g}", "green") for name in names]
        parts += metrics[:1]
        if self.rate:
            parts.append(_Part(2, _format_rate(self.rate), "magenta"))
        if has_bar and self.end and not self.ended:
            filled = min(BAR, BAR * self.step // self.end)
            parts.append(_Part(1, "━" * filled + "╌" * (BAR - filled), "blue"))
        return parts + metrics[1:]


class _Part(NamedTuple):
    """A text of the line; `position` orders the texts from left to right."""

    position: int
    text: str
    style: str


def _format_rate(rate: float) -> str:
    if rate < 1:
        return f"{1 / rate:.3g} s/step"
    return f"{rate:,.0f} steps/s" if rate >= 100 else f"{rate:.3g} steps/s"


def _format_duration(seconds: float) -> str:
    minutes, whole_seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{whole_seconds:02}"
    return f"{minutes}:{whole_seconds:02}"


def _rank_metric(name: str) -> tuple[bool, bool]:
    """Return where a metric stands: the loss first, its variants, also of phases, last."""
    return name.rpartition("/")[2] in _LAST_METRICS, name != "loss"
