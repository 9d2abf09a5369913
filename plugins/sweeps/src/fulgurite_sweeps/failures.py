"""Why the process of a trial failed, as far as its exit code and its log tell."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

from fulgurite.plugins import as_printable, redact_shapes

from fulgurite_sweeps.executors import LOST

_TAIL = 20_000
"""How many bytes of what a trial printed are searched for its error."""
_ERROR_LINE = re.compile(r"error: |[\w.]*(Error|Exception|RESOURCE_EXHAUSTED)\b")


def describe_failure(log: Path, start: int, code: int) -> str:
    """Return why a trial failed, as it printed it, and its exit code.

    Args:
        log: what it printed.
        start: where this start of the trial begins in it, in bytes.
        code: the exit code.
    """
    line = find_error_line(log, start)
    description = describe_code(code)
    return f"{line} ({description})" if line else description


def find_error_line(log: Path, start: int) -> str:
    """Return the line of a log that tells best what went wrong.

    Args:
        log: the file.
        start: where this start of the trial begins in it, in bytes.
    """
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start, size - _TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = list(_iter_own_lines(text))
    errors = [line for line in lines if _ERROR_LINE.match(line)]
    line = (errors or lines or [""])[-1].removeprefix("error: ")
    return redact_shapes(as_printable(line))[:500]


def _iter_own_lines(text: str) -> Iterator[str]:
    """Yield the lines that are not empty, without what Python prints of errors in `__del__` and the
    like, which end nothing and often come last.

    Args:
        text: what was printed.
    """
    is_ignored = False
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("Exception ignored "):
            is_ignored = True
        elif not is_ignored:
            yield line
        elif _ERROR_LINE.match(line):
            is_ignored = False


def describe_code(code: int) -> str:
    """Return what an exit code says; a negative one is the number of a signal."""
    if code >= 0:
        return f"exit code {code}"
    if code == LOST:
        return "the worker that ran it is gone"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else str(-code)
    memory = ", as if memory had run out" if -code == signal.SIGKILL else ""
    return f"killed by {name}{memory}"
