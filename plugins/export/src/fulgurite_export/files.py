"""Reading files of a folder that may be damaged, or made to do harm.

A file is opened once and read once, while it is hashed; no more is read, and no more memory is
taken, than it has bytes. Links are not followed.
"""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fulgurite_export.errors import ExportError

_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_FLAGS |= getattr(os, "O_BINARY", 0)
_CHUNK = 1 << 24
_VARIABLE = re.compile(r"\$\w+|\$\{\w+\}")


def expand_path(path: str | os.PathLike[str]) -> Path:
    """Return a path with `~` and the variables of the environment expanded, as a shell would.

    Raises:
        ExportError: there is no such user or variable, and so there would be a folder of that
            name.
    """
    text = os.path.expandvars(os.path.expanduser(path))
    if text.startswith("~") or _VARIABLE.search(text):
        raise ExportError(
            f"{os.fspath(path)}: there is no such user or variable: give the path itself"
        )
    return Path(text)


class HashedFile:
    """A file of which every byte is hashed as it is read.

    Attributes:
        size: in bytes.

    Args:
        file: opened for reading.
        name: for errors.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.size = os.fstat(file.fileno()).st_size
        self._file = file
        self._name = name
        self._hash = hashlib.sha256()

    def check_size(self, size: int) -> None:
        """Raise `ExportError` unless the file has a number of bytes."""
        if self.size != size:
            raise ExportError(
                f"{self._name} has {self.size} bytes instead of {size}: copy the folder again"
            )

    def read(self, size: int) -> bytes:
        """Return the next bytes, exactly as many as `size`."""
        if size > self.size:
            raise ExportError(f"{self._name} ends too early: copy the folder again")
        data = self._file.read(size)
        if len(data) != size:
            raise ExportError(f"{self._name} ends too early: copy the folder again")
        self._hash.update(data)
        return data

    def fill(self, array: np.ndarray) -> None:
        """Read the next bytes into the memory of a contiguous array."""
        memory = memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        for start in range(0, len(memory), _CHUNK):
            part = memory[start : start + _CHUNK]
            if self._file.readinto(part) != len(part):  # type: ignore[attr-defined]
                raise ExportError(f"{self._name} ends too early: copy the folder again")
            self._hash.update(part)

    def check_hash(self, sha256: str) -> None:
        """Raise `ExportError` unless what was read, the whole file, has a hash."""
        if self._hash.hexdigest() != sha256:
            raise ExportError(
                f"{self._name} is not the file that was exported (its SHA-256 differs from that in "
                "manifest.json): copy the folder again"
            )


@contextmanager
def open_file(folder: Path, name: str) -> Iterator[HashedFile]:
    """Open a regular file of a folder.

    Args:
        folder: the folder.
        name: of the file, which this package chooses, and no manifest.

    Raises:
        ExportError: there is none, or it is a link, a directory or a device.
    """
    path = folder / name
    try:
        number = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno == errno.ELOOP or path.is_symlink():
            raise ExportError(f"{path} is a symbolic link: copy the file itself") from error
        raise ExportError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise ExportError(f"{path} is not a file")
    with os.fdopen(number, "rb", buffering=0) as file:
        yield HashedFile(file, str(path))  # type: ignore[arg-type]


def parse_json(data: bytes, name: str) -> Any:
    """Return JSON of strings, whole numbers, booleans, lists and objects.

    Args:
        data: the text, whose length the caller bounds.
        name: of the file, for errors.

    Raises:
        ExportError: it is not such, or an object has a key twice.
    """
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=build_object,
            parse_constant=_refuse,
            parse_float=_refuse,
        )
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{name} cannot be read: {error!s:.100}") from error


def build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; raise `ValueError` if it has a key twice, of which readers take one
    or the other."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("an object has a key twice")
    return values


def _refuse(text: str) -> Any:
    raise ValueError(f"{text[:20]} is not a whole number")
