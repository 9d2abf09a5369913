"""Files and folders, local or remote, that hold checkpoints."""

import hashlib
import importlib.util
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite_runs import MAX_JSON_SIZE, expand_path, is_link, loads

CHUNK_SIZE = 4 * 2**20


class DamagedError(CheckpointError):
    """A checkpoint that is incomplete, or not as it was written."""


def resolve_root(path: str | os.PathLike[str]) -> Path:
    """Return a local path as a `pathlib.Path`, and one that begins with `gs://` as an
    `etils.epath.Path`, which has the same methods; `~` and variables such as `$HOME` are expanded.

    Raises:
        ConfigurationError: the path has another scheme, or a variable that is not set.
    """
    text = expand_path(path) if isinstance(path, str | os.PathLike) else ""
    if not text:
        raise ConfigurationError(f"{path!r} is not a path for checkpoints: give one")
    if "://" not in text:
        return Path(text)
    if not text.startswith("gs://"):
        # Orbax writes to no other remote storage.
        raise ConfigurationError(
            f"checkpoints cannot be stored at {text}: only local folders and gs:// are supported. "
            f"Mount it as a folder, and give that"
        )
    if importlib.util.find_spec("gcsfs") is None:
        raise ConfigurationError(f"{text} needs gcsfs: pip install 'fulgurite-checkpoint[gcs]'")
    from etils import epath
    from etils.epath import backend

    # The listings that gcsfs keeps of a folder miss what Orbax, or another process, writes there.
    backend.fsspec_backend.fs(text).dircache.use_listings_cache = False
    return epath.Path(text)  # type: ignore[return-value]


def iter_files(path: Path, prefix: str = "") -> Iterator[tuple[str, Path]]:
    """Yield the files below a directory by their names, with `/` between the parts.

    Args:
        path: the directory.
        prefix: put before each name.

    Raises:
        DamagedError: there is a link; we make none.
    """
    for child in sorted(path.iterdir(), key=lambda child: child.name):
        if is_link(child):
            raise DamagedError(f"{child} is a link, and a checkpoint contains no links")
        if child.is_dir():
            yield from iter_files(child, f"{prefix}{child.name}/")
        elif child.is_file():
            yield f"{prefix}{child.name}", child


def compute_checksum(path: Path) -> tuple[int, int]:
    """Return size in bytes and CRC-32 of a file."""
    size = 0
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_SIZE):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, crc


def get_size(path: Path) -> int:
    """Return the size of a file in bytes."""
    status: Any = path.stat()
    return status.st_size if isinstance(path, Path) else status.length


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file that `dumps` wrote.

    Raises:
        DamagedError: the file is missing, too large, or holds something else.
    """
    return parse_json(read_bytes(path), path)


def write_durably(path: Path, raw: bytes) -> None:
    """Write a file such that it is there with all of its content, durably, or not at all.

    Args:
        path: the file.
        raw: its content.
    """
    if not isinstance(path, Path):
        path.write_bytes(raw)  # a remote object appears whole
        return
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(raw)
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have the system write a local file or directory to the disk."""
    if isinstance(path, Path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_bytes(path: Path) -> bytes:
    """Return the content of a small file.

    Raises:
        DamagedError: the file is missing or too large.
    """
    try:
        # A pipe would block forever.
        if isinstance(path, Path) and not stat.S_ISREG(path.lstat().st_mode):
            raise DamagedError(f"{path} is not a regular file")
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_SIZE + 1)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error
    if len(raw) > MAX_JSON_SIZE:
        raise DamagedError(f"{path} is larger than {MAX_JSON_SIZE:,} bytes")
    return raw


def parse_json(raw: bytes, path: Path) -> dict[str, Any]:
    """Return the object in JSON that `dumps` wrote.

    Args:
        raw: the JSON.
        path: the file that it is from, for messages.

    Raises:
        DamagedError: it is something else.
    """
    try:
        content = loads(raw)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{path} is not JSON of a checkpoint: {error}") from error
    if not isinstance(content, dict):
        raise DamagedError(f"{path} is not JSON of a checkpoint: it holds no object")
    return content


def compute_sha256(raw: bytes) -> str:
    """Return the SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(raw).hexdigest()
