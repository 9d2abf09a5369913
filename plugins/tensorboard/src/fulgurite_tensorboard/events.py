"""Write and read event files: TensorBoard's events, framed as TFRecords, which can be cut back.

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
from fulgurite_runs import check_in_place, sync_folder
from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")


def build_summary_event(step: int, wall_time: float, summary: Any) -> Any:
    """Return the event of a summary.

    Args:
        step: the step of the run.
        wall_time: seconds since 1970.
        summary: a `Summary` of TensorBoard.
    """
    return Event(wall_time=wall_time, step=step, summary=summary)


def build_start_event(step: int) -> Any:
    """Return the event by which a server drops what it has read of this step and later ones.

    A resumed run therefore gives the step after the restored one, whose records are in the file.
    """
    return Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START))


class EventFile:
    """A new event file; an existing one is an error.

    Each write goes to the operating system at once.

    Example:
        from fulgurite_tensorboard import EventFile, read_events
        from tensorboard.compat.proto.event_pb2 import Event

        file = EventFile("events.out.tfevents.1")
        file.append(Event(step=1, wall_time=0.0))
        file.close()
        events = list(read_events(file.path))

    Attributes:
        path: where it is.
        size: how many bytes of whole records it has.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.size = 0
        self._descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
        )
        try:
            sync_folder(self.path.parent)
            self.append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, event: Any) -> None:
        """Write an event. After an `OSError` the file ends with the event before."""
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        framed = length + _pack_crc(length) + data + _pack_crc(data)
        try:
            check_in_place(self._descriptor, self.path)
            unwritten = framed
            while unwritten:
                unwritten = unwritten[os.write(self._descriptor, unwritten) :]
        except OSError:
            os.ftruncate(self._descriptor, self.size)
            raise
        self.size += len(framed)

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


def read_events(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield the events of a file with the position after each, up to the last complete one.

    Raises:
        CheckpointError: a checksum is wrong, or a record is not an event.
    """
    with open(path, "rb") as file:
        file_size = os.fstat(file.fileno()).st_size
        end = 0
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length, _ = _HEADER.unpack(header)
            if header[8:] != _pack_crc(header[:8]):
                raise CheckpointError(f"{path}: the record at byte {end} is damaged")
            if length > file_size:
                return  # this many bytes cannot even be asked for
            data = file.read(length)
            footer = file.read(_FOOTER.size)
            if len(footer) < _FOOTER.size:
                return
            if footer != _pack_crc(data):
                raise CheckpointError(f"{path}: the record at byte {end} is damaged")
            end += _HEADER.size + length + _FOOTER.size
            try:
                event = Event.FromString(data)
            except DecodeError as error:
                raise CheckpointError(
                    f"{path}: the record that ends at byte {end} is not an event: {error}"
                ) from error
            yield end, event


def truncate_events(path: Path, size: int) -> None:
    """Drop what comes after the first `size` bytes of a file.

    Raises:
        CheckpointError: these bytes are not there, or they are not whole records.
    """
    with open(path, "r+b") as file:
        file_size = os.fstat(file.fileno()).st_size
        end = 0
        while end < min(size, file_size):
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                break
            length, _ = _HEADER.unpack(header)
            end += _HEADER.size + length + _FOOTER.size
            file.seek(min(end, file_size))
        if end != size or file_size < size:
            raise CheckpointError(
                f"{path} is not the file that the checkpoint knows: it should hold {size} bytes of "
                f"whole records and has {file_size}. Put the file back, or resume in another "
                "directory"
            )
        if file_size > size:
            file.truncate(size)
            os.fsync(file.fileno())


def _pack_crc(data: bytes) -> bytes:
    """Return the CRC-32C of data as TFRecords store it: rotated and shifted, lest a checksum be
    computed of data that holds its own."""
    crc = google_crc32c.value(data)
    return _FOOTER.pack(((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
