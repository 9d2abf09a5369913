"""Files that only grow, line by line, and can be cut back to where a checkpoint was."""

import errno
import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fulgurite import Record
from fulgurite.errors import CheckpointError
from fulgurite_runs import check_in_place, sync_folder

LONGEST_LINE = 1 << 24
"""The most bytes of a line of records that is read."""
_CHUNK = 1 << 16
_LONGEST_CHECKED_LINE = 1 << 20
"""Of longer lines it is not looked at which step they are of."""


class UnreadableLineError(ValueError):
    """A record makes a line that could not be read again."""


class UnreadableRecords:
    """Tells, once for each source, of records that a logger leaves out, because the whole file
    could not be read with them.

    Args:
        logger: its name.
    """

    def __init__(self, logger: str) -> None:
        self._logger = logger
        self._sources: set[str] = set()

    def warn(self, record: Record, error: UnreadableLineError) -> None:
        """Warn of a record, unless one of its source was left out before."""
        if record.source in self._sources:
            return
        self._sources.add(record.source)
        warnings.warn(
            f"{self._logger} leaves a record of {record.source!r} out, of step {record.step} "
            f"first: {error}. Log less at once",
            stacklevel=2,
        )


class LineFile:
    """A file of whole lines, created if it does not exist.

    It is opened once and links are not followed. Each write goes to the operating system at once.

    Attributes:
        path: where it is.
        size: how many bytes of whole lines it has.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = open_regular_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            self.size = os.fstat(self._descriptor).st_size
            if self.size == 0:
                sync_folder(path.parent)
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, text: str) -> None:
        """Write whole lines. After an `OSError` the file ends with the line before."""
        data = text.encode("utf-8", "backslashreplace")
        size = self.size + len(data)
        try:
            check_in_place(self._descriptor, self.path)
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            os.ftruncate(self._descriptor, self.size)
            raise type(error)(error.errno, error.strerror, str(self.path)) from error
        self.size = size

    def repair(self) -> None:
        """Drop a last line that is not whole, as a process leaves it that was killed while it
        wrote."""
        end = self.size
        while end > 0:
            start = max(end - _CHUNK, 0)
            newline = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        self._truncate(end)

    def rewind(self, size: int) -> None:
        """Drop everything after the first `size` bytes.

        Raises:
            CheckpointError: there are no such bytes, or they are not whole lines.
        """
        _check_size(self._descriptor, self.path, size)
        self._truncate(size)

    def sync(self) -> None:
        """Make what was written durable; raise `FileNotFoundError` if the file was deleted or
        replaced, so that nobody would find it."""
        check_in_place(self._descriptor, self.path)
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Make what was written durable and close the file."""
        try:
            self.sync()
        finally:
            os.close(self._descriptor)

    def replace_with(self, other: "LineFile") -> None:
        """Move the file `other`, of the same folder, over this one, durably and atomically, and
        continue with it."""
        other.sync()
        os.replace(other.path, self.path)
        sync_folder(self.path.parent)
        os.close(self._descriptor)
        self._descriptor = other._descriptor
        self.size = other.size

    def _truncate(self, size: int) -> None:
        if size != self.size:
            os.ftruncate(self._descriptor, size)
            self.size = size
            self.sync()


def check_cut(path: Path, size: Any, step: int | None, get_step: Callable[[bytes], Any]) -> None:
    """Raise `CheckpointError` if a file of lines cannot be cut back to its first `size` bytes, or
    if what is left then are not the lines up to a step.

    Args:
        path: the file.
        size: as a checkpoint says.
        step: up to which everything was written; None to look at the size alone.
        get_step: returns the step of a line; None if it is of no step.
    """
    if not path.exists() and size == 0:
        return
    try:
        descriptor = open_regular_file(path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. Put the file back, or resume in another directory"
        ) from error
    with open(descriptor, "rb") as file:
        _check_size(descriptor, path, size)
        if step is None:
            return
        file.seek(max(size - _LONGEST_CHECKED_LINE, 0))
        before, _, last_line = file.read(size - file.tell()).rstrip(b"\n").rpartition(b"\n")
        next_line = file.readline(_LONGEST_CHECKED_LINE)
    last_step = get_step(last_line) if before or size < _LONGEST_CHECKED_LINE else None
    next_step = get_step(next_line) if next_line.endswith(b"\n") else None
    if (last_step is not None and last_step > step) or (next_step is not None and next_step < step):
        raise CheckpointError(
            f"{path} is not the file that the checkpoint knows, or not as far as {size} bytes: the "
            f"records of the steps up to {step} do not end there, but between {last_step} and "
            f"{next_step}"
        )


def _check_size(descriptor: int, path: Path, size: Any) -> None:
    if type(size) is not int or size < 0:
        raise CheckpointError(
            f"{path}: the checkpoint says it had {size!r} bytes, which is not a size"
        )
    file_size = os.fstat(descriptor).st_size
    if size > file_size or (size and os.pread(descriptor, 1, size - 1) != b"\n"):
        raise CheckpointError(
            f"{path} is not the file that the checkpoint knows: it has {file_size} bytes, of which "
            f"the first {size} should be lines of that run. Put the file back, or resume in "
            f"another directory"
        )


def get_entry(position: Any, name: str) -> Any:
    """Return what a position from a checkpoint holds under `name`.

    Raises:
        CheckpointError: it holds no such thing.
    """
    if not isinstance(position, dict) or name not in position:
        raise CheckpointError(
            f"the checkpoint's position of the log does not tell of {name}: {str(position)[:200]}"
        )
    return position[name]


def open_regular_file(path: Path, flags: int) -> int:
    """Return the descriptor of a file; raise `OSError` for a link, a pipe or anything else.

    Args:
        path: the file.
        flags: as of `os.open`.
    """
    # A pipe would block until somebody opens its other end.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor
