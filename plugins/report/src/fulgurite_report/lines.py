"""Read the lines of a file that grows."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

LONGEST_LINE = 1 << 24
"""The most bytes of a line that is read, as of `fulgurite_logging.iter_records`."""
_CHUNK = 1 << 20


class GrowingFile:
    """A file of JSON lines, of which each call returns what is new.

    A run that resumes cuts its records back to a checkpoint, and one that starts afresh sets them
    aside: then the file is read from its start.

    Args:
        path: the file, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0
        self._line_number = 0
        self.problem = ""

    def was_replaced(self) -> bool:
        """Return whether the file is not the one that was read, or has less in it."""
        try:
            status = os.stat(self._path)
        except OSError:
            return self._offset > 0
        return self._offset > 0 and (status.st_ino != self._inode or status.st_size < self._offset)

    def rewind(self) -> None:
        """Read from the start next time."""
        self._offset = 0
        self._line_number = 0
        self.problem = ""

    def iter_new(self) -> Iterator[dict[str, Any]]:
        """Yield the objects on the lines that are whole and were not read yet. A line that is
        damaged is passed over, and `problem` says where the first one is."""
        try:
            # A pipe would block forever.
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return
        except OSError as error:
            self._note(f"{self._path.name} cannot be read: {error.strerror}")
            return
        with open(descriptor, "rb") as file:
            self._inode = os.fstat(descriptor).st_ino
            file.seek(self._offset)
            while lines := file.readlines(_CHUNK):
                for line in lines:
                    if not line.endswith(b"\n"):
                        return  # the run is writing it
                    self._offset += len(line)
                    self._line_number += 1
                    value = self._parse(line)
                    if value is not None:
                        yield value

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        if len(line) > LONGEST_LINE:
            self.note_damage(f"longer than {LONGEST_LINE:,} bytes")
            return None
        try:
            value = _parse_json(line)
            if not isinstance(value, dict):
                raise ValueError("it is not an object")
        except (ValueError, RecursionError) as error:
            self.note_damage(str(error))
            return None
        return value

    def note_damage(self, reason: str) -> None:
        """Note that the line which was read last is not what it should be."""
        self._note(f"{self._path.name}, line {self._line_number}: {reason}")

    def _note(self, problem: str) -> None:
        self.problem = self.problem or problem


def _parse_json(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        # It takes neither the escape of half a surrogate pair nor deep nesting.
        return json.loads(line)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, and an empty one if it cannot be read, or holds none."""
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > LONGEST_LINE:
            return {}
        value = _parse_json(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
