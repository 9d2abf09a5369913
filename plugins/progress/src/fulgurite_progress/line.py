"""One line about a run, as much of it as there is room for."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from rich.console import Console, ConsoleOptions
from rich.text import Text

BAR = 20
# Besides the loss; they stand behind what the user logs.
_LESS_TELLING = ("batch_loss", "loss_average")


@dataclass(frozen=True)
class Line:
    """Where a run is. What does not fit into the width is left out, the least telling first.

    Attributes:
        step: the updates so far.
        end: how many there will be, as far as it is known.
        rate: steps a second, or None.
        metrics: the newest, by name.
        doing: what is going on besides steps, or how the run ended.
        ended: whether it has ended.
    """

    step: int
    end: int | None
    rate: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    doing: str = ""
    ended: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """One line of at most the console's width."""
        yield self.text(options.max_width)

    def text(self, width: int | None = None) -> Text:
        """The line in at most `width` columns, or without a width the whole of it but for the
        bar."""
        chosen: list[tuple[int, str, str]] = []
        for place, (text, style) in self._parts(bar=width is not None):
            used = sum(len(one) + 2 for _, one, _ in chosen)
            if width is None or used + len(text) <= width:
                chosen.append((place, text, style))
        line = Text("  ").join(
            Text(text, style) for _, text, style in sorted(chosen, key=itemgetter(0))
        )
        if width is not None:
            line.truncate(width)
        line.no_wrap = True
        return line

    def _parts(self, *, bar: bool) -> list[tuple[int, tuple[str, str]]]:
        """Texts with their styles and places in the line, the most telling first."""
        of = "" if self.end is None else f"/{self.end:,}"
        parts = [(0, (f"step {self.step:,}{of}", "bold"))]
        if self.doing:
            parts.append((5, (self.doing, "yellow" if not self.ended else "bold")))
        left = None if self.end is None or not self.rate else (self.end - self.step) / self.rate
        if left is not None and not self.ended:
            parts.append((3, (f"{_clock(left)} left", "cyan")))
        names = sorted(self.metrics, key=lambda name: (name in _LESS_TELLING, name != "loss"))
        metrics = [(4, (f"{name} {self.metrics[name]:.4g}", "green")) for name in names]
        parts += metrics[:1]
        if self.rate:
            parts.append((2, (_speed(self.rate), "magenta")))
        if bar and self.end and not self.ended:
            done = min(BAR, BAR * self.step // self.end)
            parts.append((1, ("━" * done + "╌" * (BAR - done), "blue")))
        return parts + metrics[1:]


def _speed(rate: float) -> str:
    if rate < 1:
        return f"{1 / rate:.3g} s/step"
    return f"{rate:,.0f} steps/s" if rate >= 100 else f"{rate:.3g} steps/s"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
