"""Files that only grow, line by line, and can be cut back to where a checkpoint was."""

import errno
import os
import stat
from pathlib import Path
from typing import Any

from fulgurite.errors import CheckpointError
from fulgurite_runs.directory import sync_folder

_CHUNK = 1 << 16


class LineFile:
    """A file of whole lines, made if it is not there. It is opened once, links are not followed,
    and what is written is in the hands of the operating system at once.

    Attributes:
        size: how many bytes of whole lines it has.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = _opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self.size = os.fstat(self._descriptor).st_size
        if self.size == 0:
            sync_folder(path.parent)

    def append(self, text: str) -> None:
        """Writes whole lines. After an `OSError` the file ends with the line before."""
        data = text.encode("utf-8", "backslashreplace")
        size = self.size + len(data)
        try:
            if os.fstat(self._descriptor).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "it was deleted while it was written to")
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            os.ftruncate(self._descriptor, self.size)
            raise type(error)(error.errno, error.strerror, str(self.path)) from error
        self.size = size

    def repair(self) -> None:
        """Drops a last line that is not whole, as a process leaves it that was killed while it
        wrote."""
        end = self.size
        while end > 0:
            start = max(end - _CHUNK, 0)
            if (newline := os.pread(self._descriptor, end - start, start).rfind(b"\n")) >= 0:
                end = start + newline + 1
                break
            end = start
        self._cut(end)

    def rewind(self, size: int) -> None:
        """Drops everything after the first `size` bytes, which were whole lines; otherwise a
        `CheckpointError`."""
        if type(size) is not int or size < 0:
            raise CheckpointError(
                f"{self.path}: the checkpoint says it had {size!r} bytes, which is no size"
            )
        if size > self.size or (size and os.pread(self._descriptor, 1, size - 1) != b"\n"):
            raise CheckpointError(
                f"{self.path} is not the file that the checkpoint knows: it has {self.size} bytes, "
                f"of which the first "
                f"{size} should be lines of that run. Put the file back, or resume in another "
                f"directory"
            )
        self._cut(size)

    def sync(self) -> None:
        """Makes what was written durable."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Makes what was written durable and lets go of the file."""
        try:
            self.sync()
        finally:
            os.close(self._descriptor)

    def replace_by(self, other: "LineFile") -> None:
        """Puts the file `other`, of the same folder, in the place of this one, durably and at once,
        and goes on with it."""
        other.sync()
        os.replace(other.path, self.path)
        sync_folder(self.path.parent)
        os.close(self._descriptor)
        self._descriptor, self.size = other._descriptor, other.size

    def _cut(self, size: int) -> None:
        if size != self.size:
            os.ftruncate(self._descriptor, size)
            self.size = size
            self.sync()


def entry(position: Any, name: str) -> Any:
    """What a position says of the file `name`."""
    if not isinstance(position, dict) or name not in position:
        raise CheckpointError(
            f"the checkpoint's position of the log does not tell of {name}: {str(position)[:200]}"
        )
    return position[name]


def _opened(path: Path, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor
