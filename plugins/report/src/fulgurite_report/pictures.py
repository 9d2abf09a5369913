"""The pictures that `fulgurite-tensorboard` wrote into the directory of a run.

An event file is a sequence of records: the length of the data (uint64), its checksum, the data, and
the checksum of that. The data is an `Event` of TensorBoard in the encoding of protocol buffers,
where each field is a number with its type, and its value. Of an event only the step, and of its
summary only names and pictures are read.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HEADER = struct.Struct("<QI")
_FOOTER_SIZE = 4
_LONGEST_EVENT = 1 << 26
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# The numbers of the fields in event.proto and summary.proto of TensorBoard.
_EVENT_STEP, _EVENT_SUMMARY = 2, 5
_SUMMARY_VALUE = 1
_VALUE_TAG, _VALUE_IMAGE = 1, 4
_IMAGE_PNG = 4


@dataclass(frozen=True)
class Picture:
    """A picture of a run.

    Attributes:
        name: such as `train/samples/0`.
        step: at which it was made.
        png: the file.
    """

    name: str
    step: int
    png: bytes


def iter_pictures(run: Path) -> Iterator[Picture]:
    """Yield the pictures of a run; of what is damaged nothing."""
    folder = run / "tensorboard"
    if folder.is_symlink():
        return
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        if path.is_file() and not path.is_symlink():
            split = path.parent.relative_to(folder).as_posix()
            prefix = "" if split == "." else f"{split}/"
            for event in _iter_events(path):
                try:
                    yield from _list_pictures(event, prefix)
                except (IndexError, ValueError):
                    break


def _iter_events(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length, _ = _HEADER.unpack(header)
            if length > min(size, _LONGEST_EVENT):
                return
            data = file.read(length)
            if len(file.read(_FOOTER_SIZE)) < _FOOTER_SIZE:
                return
            yield data


def _list_pictures(event: bytes, prefix: str) -> list[Picture]:
    step = 0
    pictures = []
    for number, value in _iter_fields(event):
        if number == _EVENT_STEP and isinstance(value, int):
            step = value
        if number != _EVENT_SUMMARY or not isinstance(value, bytes):
            continue
        for summary_number, item in _iter_fields(value):
            if summary_number == _SUMMARY_VALUE and isinstance(item, bytes):
                pictures += _read_value(item)
    return [Picture(f"{prefix}{name}", step, png) for name, png in pictures]


def _read_value(value: bytes) -> list[tuple[str, bytes]]:
    """Return name and file of the picture in a value of a summary; an empty list if it is something
    else."""
    name = ""
    png = b""
    for number, item in _iter_fields(value):
        if number == _VALUE_TAG and isinstance(item, bytes):
            name = item.decode(errors="replace")
        if number == _VALUE_IMAGE and isinstance(item, bytes):
            for image_number, content in _iter_fields(item):
                if image_number == _IMAGE_PNG and isinstance(content, bytes):
                    png = content
    return [(name, png)] if png.startswith(_SIGNATURE) else []


def _iter_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field: an integer, or bytes.

    Raises:
        IndexError, ValueError: the data is not such a message.
    """
    position = 0
    while position < len(data):
        key, position = _read_integer(data, position)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, position = _read_integer(data, position)
            yield number, value
            continue
        length = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            length, position = _read_integer(data, position)
        if length is None or position + length > len(data):
            raise ValueError(f"a field of type {kind}")
        yield number, data[position : position + length]
        position += length


def _read_integer(data: bytes, position: int) -> tuple[int, int]:
    """Return the integer of seven bits a byte at a position, and the position behind it."""
    value = 0
    shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        shift += 7
        if byte < 0x80:
            return value, position
