"""Read the file of a run that wandb writes offline.

The file is a log as LevelDB writes it
(https://github.com/google/leveldb/blob/main/doc/log_format.md) behind seven bytes of header:
blocks of 32 KiB, in them chunks of a CRC (uint32), a length (uint16), a type (uint8: whole, first,
middle, last) and data, little-endian. Each record is a `wandb_internal_pb2.Record`.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_BLOCK = 32768
_CHUNK = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_IDENT = b":W&B"
# In bytes, far beyond any row; a file that is damaged may say that one continues forever.
_LARGEST_RECORD = 64 * 2**20


def read_run(path: str | Path) -> Iterator[Any]:
    """Yield the records of a run's file in order, up to its end or to where a killed process broke
    it off."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    record = bytearray()
    with open(path, "rb") as file:
        for kind, chunk in _iter_chunks(file):
            if kind in (_WHOLE, _FIRST):
                record.clear()
            record += chunk
            if len(record) > _LARGEST_RECORD:
                return
            if kind in (_WHOLE, _LAST):
                try:
                    yield Record.FromString(bytes(record))
                except DecodeError:
                    return


def _iter_chunks(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield type and data of the chunks of a run's file, up to its end or to one that is not
    whole."""
    header_size = len(_IDENT) + 3
    if not file.read(header_size).startswith(_IDENT):
        return
    offset = header_size
    while True:
        rest_of_block = _BLOCK - offset % _BLOCK
        if rest_of_block < _CHUNK.size:
            file.seek(rest_of_block, os.SEEK_CUR)
            offset += rest_of_block
        header = file.read(_CHUNK.size)
        if len(header) < _CHUNK.size:
            return
        _, length, kind = _CHUNK.unpack(header)
        chunk = file.read(length)
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or len(chunk) < length:
            return
        offset += _CHUNK.size + length
        yield kind, chunk


def find_last_step(path: Path) -> int:
    """Return the last step that a run's file holds scalars of, -1 if it holds none."""
    steps = (record.history.step.num for record in read_run(path) if record.HasField("history"))
    return max(steps, default=-1)
