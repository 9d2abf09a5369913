"""Event files: the records of TensorBoard, framed as TFRecords, in files that can be cut back.

The frame of a record is the length of its data (uint64), the masked CRC-32C of these eight bytes,
the data, and its masked CRC-32C (uint32 each, all little-endian).
"""

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
from fulgurite.errors import CheckpointError
from fulgurite_runs.directory import sync_folder
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")


def recorded(step: int, wall: float, summary: Any) -> Any:
    """The event of a summary."""
    return Event(wall_time=wall, step=step, summary=summary)


def started(step: int) -> Any:
    """Tells a server that a run goes on: what it has of this step and later ones is no longer
    so. A resumed run therefore gives the step after the restored one, whose records are in the
    file."""
    return Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START))


class EventFile:
    """A new event file; an existing one is an error. Each write goes to the operating system at
    once.

    Attributes:
        size: how many bytes of whole records it has.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
        )
        sync_folder(path.parent)
        self.append(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def append(self, event: Any) -> None:
        """Writes an event. After an `OSError` the file ends with the event before."""
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        framed = length + _FOOTER.pack(_masked_crc(length)) + data + _FOOTER.pack(_masked_crc(data))
        try:
            left = framed
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            os.ftruncate(self._descriptor, self.size)
            raise
        self.size += len(framed)

    def sync(self) -> None:
        """Makes what was written durable."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Makes what was written durable and closes the file."""
        try:
            self.sync()
        finally:
            os.close(self._descriptor)


def read_events(path: Path) -> Iterator[tuple[int, Any]]:
    """The events of a file with the position after each, up to the last complete one. Checksums are
    verified; a wrong one is a `CheckpointError`."""
    with open(path, "rb") as file:
        end = 0
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length, check = _HEADER.unpack(header)
            if check != _masked_crc(header[:8]):
                raise CheckpointError(f"{path}: the record at byte {end} is damaged")
            data = file.read(length)
            footer = file.read(_FOOTER.size)
            if len(footer) < _FOOTER.size:
                return
            if footer != _FOOTER.pack(_masked_crc(data)):
                raise CheckpointError(f"{path}: the record at byte {end} is damaged")
            end += _HEADER.size + length + _FOOTER.size
            yield end, Event.FromString(data)


def cut(path: Path, size: int) -> None:
    """Drops what comes after the first `size` bytes, which must be whole records; otherwise a
    `CheckpointError`."""
    with open(path, "r+b") as file:
        end, there = 0, os.fstat(file.fileno()).st_size
        while end < min(size, there) and len(header := file.read(_HEADER.size)) == _HEADER.size:
            end += _HEADER.size + _HEADER.unpack(header)[0] + _FOOTER.size
            file.seek(min(end, there))
        if end != size or there < size:
            raise CheckpointError(
                f"{path} is not the file that the checkpoint knows: it should hold {size} bytes of "
                f"whole records and "
                f"has {there}. Put the file back, or resume in another directory"
            )
        if there > size:
            file.truncate(size)
            os.fsync(file.fileno())


def _masked_crc(data: bytes) -> int:
    """The CRC-32C of data, rotated and shifted, as TFRecords have it, lest a CRC be computed of one
    that is stored."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
