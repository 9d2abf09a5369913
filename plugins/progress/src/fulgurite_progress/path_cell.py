"""Show a path in a table that may be too narrow for it."""

from collections.abc import Iterator
from dataclasses import dataclass

from fulgurite.plugins import as_printable, redact_registered
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.text import Text

SHORTEST = 12


@dataclass(frozen=True)
class PathCell:
    """A path that is cut on the left, because its end says which array or module it is.

    Attributes:
        path: such as `encoder.layers[0].weight`.
    """

    path: str

    @property
    def text(self) -> str:
        """The path without secrets and without what a terminal would obey."""
        return as_printable(redact_registered(self.path))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield one line of at most the width of the column."""
        width = options.max_width
        text = self.text
        if cell_len(text) > width:
            while text and cell_len(text) >= width:
                text = text[1:]
            text = f"…{text}"
        yield Text(text, no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return how narrow and how wide the column may be."""
        length = cell_len(self.text)
        return Measurement(min(length, SHORTEST), length).with_maximum(options.max_width)
