"""Read the file of a run that wandb writes offline.

The file is a log as LevelDB writes it
(https://github.com/google/leveldb/blob/main/doc/log_format.md) behind seven bytes of header:
blocks of 32 KiB, in them chunks of a CRC (uint32), a length (uint16), a type (uint8: whole, first,
middle, last) and data, little-endian. Each record is a `wandb_internal_pb2.Record`.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768
_CHUNK = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_IDENT = b":W&B"


def read_run(path: str | Path) -> Iterator[Any]:
    """Yield the records of a run's file in order, up to its end or to where a killed process broke
    it off."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    data = Path(path).read_bytes()
    if not data.startswith(_IDENT):
        return
    offset = len(_IDENT) + 3
    record = b""
    while offset + _CHUNK.size <= len(data):
        rest_of_block = _BLOCK - offset % _BLOCK
        if rest_of_block < _CHUNK.size:
            offset += rest_of_block
            continue
        _, length, kind = _CHUNK.unpack_from(data, offset)
        offset += _CHUNK.size
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or offset + length > len(data):
            return
        chunk = data[offset : offset + length]
        offset += length
        record = chunk if kind in (_WHOLE, _FIRST) else record + chunk
        if kind in (_WHOLE, _LAST):
            try:
                yield Record.FromString(record)
            except DecodeError:
                return


def find_last_step(path: Path) -> int:
    """Return the last step that a run's file holds scalars of, -1 if it holds none."""
    steps = [record.history.step.num for record in read_run(path) if record.HasField("history")]
    return max(steps, default=-1)
