"""Keys of a terminal, one at a time."""

import os
import select
import sys
import termios
import tty
from contextlib import AbstractContextManager
from typing import Any


class Keyboard(AbstractContextManager["Keyboard", None]):
    """Reads keys without waiting for the end of a line, inside its block."""

    def __enter__(self) -> "Keyboard":
        self._descriptor = sys.stdin.fileno()
        self._former: list[Any] = termios.tcgetattr(self._descriptor)
        tty.setcbreak(self._descriptor)
        return self

    def __exit__(self, *_: object) -> None:
        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._former)

    def wait(self, seconds: float) -> str | None:
        """Return the key that is pressed within a time; None if none is. The end of the input
        counts as `q`."""
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return None
        return os.read(self._descriptor, 16).decode(errors="replace") or "q"
