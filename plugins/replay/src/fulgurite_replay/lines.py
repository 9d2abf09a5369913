"""Files of a run to which each attempt adds lines of JSON."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fulgurite.errors import CheckpointError
from fulgurite_runs import MAX_JSON_SIZE, dumps, loads

_TOKENS = re.compile(rb'\\.|["{}\[\]]')
"""What opens or closes something in JSON, and what is escaped there."""


def append_line(path: Path, entry: Mapping[str, Any]) -> None:
    """Add a line to a file, which need not be there; only the holder of the run's lock calls it.

    Args:
        path: the file.
        entry: what the line holds, as of `dumps`.
    """
    with path.open("a+b") as file:
        # A process that was killed may have left a line without its end.
        file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
        start = b"" if file.read() in (b"", b"\n") else b"\n"
        file.write(start + dumps(entry).encode() + b"\n")


def iter_entries(path: Path, writer: str) -> Iterator[dict[str, Any]]:
    """Yield the objects in the lines of a file; nothing where there is none.

    Args:
        path: the file.
        writer: who writes such files, for errors.

    Raises:
        CheckpointError: a line is not an object of JSON, and not one that a killed process began
            either.
    """
    if not path.is_file():
        return
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            if len(line) > MAX_JSON_SIZE:
                raise ValueError(f"it has {len(line):,} bytes; the most is {MAX_JSON_SIZE:,}")
            entry = loads(line)
            if not isinstance(entry, dict):
                raise ValueError("it is not an object")
        except (ValueError, TypeError, KeyError) as error:
            # The end of a line that a killed process began, which the next attempt closed.
            if number == len(lines) or _is_cut_off(line):
                continue
            raise make_line_error(path, number, writer, error) from error
        yield entry | {"line": number}


def _is_cut_off(line: bytes) -> bool:
    """Return whether a line, which is not one of JSON, may lack its end: what is there of it opens
    more than it closes. A bracket within a string does not."""
    depth = 0
    in_string = False
    for match in _TOKENS.finditer(line):
        token = match[0]
        if token == b'"':
            in_string = not in_string
        elif not in_string and len(token) == 1:
            depth += 1 if token in b"{[" else -1
    # Where the power failed, what was not written is zeros.
    return in_string or depth > 0 or not line.strip(b"\0")


def make_line_error(path: Path, number: int, writer: str, error: Exception) -> CheckpointError:
    """Return the error for a line that was not written so.

    Args:
        path: of the file.
        number: of the line.
        writer: who writes such files.
        error: what is wrong.
    """
    return CheckpointError(
        f"{path}, line {number} is not a line of {writer}: {error!r}. Restore the file, or remove "
        "it"
    )
