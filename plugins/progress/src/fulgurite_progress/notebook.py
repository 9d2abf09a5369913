"""Keep one line in the output of a notebook's cell up to date."""

from typing import Any

from rich.text import Text

# What fits into a cell of usual width; a notebook does not say how wide it is.
WIDTH = 100


class CellLine:
    """A line in the output of the cell that is running. Each text replaces the one before."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: Text) -> None:
        """Show a text; rich makes HTML of its styles."""
        from IPython.display import display

        if self._handle is None:
            self._handle = display(text, display_id=True)
        else:
            self._handle.update(text)

    def hide(self) -> None:
        """Show nothing; an output of a cell cannot be taken away."""
        if self._handle is not None:
            self._handle.update({"text/plain": "", "text/html": ""}, raw=True)
