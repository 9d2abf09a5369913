"""Write the tables and the line to the terminal."""

from typing import Any

from rich.console import Console
from rich.text import Text


class Screen(Console):
    """A console that prints texts as they are, and whose failure does not end the run.

    Once it cannot be written to, such as a pipe that nobody reads any more, nothing more is shown.
    """

    def __init__(self, **options: Any) -> None:
        # What the program prints while there is a line goes through here as well.
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, and leave it to the terminal to break the lines of texts."""
        is_text = all(isinstance(item, str | Text) for item in objects)
        super().print(*objects, **{"soft_wrap": is_text, **options})

    def __exit__(self, *details: Any) -> None:
        self.quiet = self.quiet or self.file.closed
        try:
            super().__exit__(*details)
        except OSError:
            self.quiet = True

    def on_broken_pipe(self) -> None:
        """Show nothing more; rich itself would end the process."""
        self.quiet = True
