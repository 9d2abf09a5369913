"""What the tables and the line are written to."""

from typing import Any

from rich.console import Console
from rich.text import Text


class Screen(Console):
    """A console that prints texts as they are, and whose end is not that of the run: once it cannot
    be written to, such as a pipe that nobody reads any more, nothing more is shown."""

    def __init__(self, **options: Any) -> None:
        # What the program prints while there is a line goes through here as well.
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Leaves it to the terminal to break the lines of texts."""
        plain = all(isinstance(one, str | Text) for one in objects)
        super().print(*objects, **{"soft_wrap": plain, **options})

    def __exit__(self, *details: Any) -> None:
        self.quiet = self.quiet or self.file.closed
        try:
            super().__exit__(*details)
        except OSError:
            self.quiet = True

    def on_broken_pipe(self) -> None:
        """Without the end of the process that is rich's own."""
        self.quiet = True
