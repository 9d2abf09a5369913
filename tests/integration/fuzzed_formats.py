"""Edits of files by their structure: what is edited still is JSON, TOML, a table, or a log with the
right checksums, so that it gets past the first check of its reader."""

import csv
import io
import json
import struct
import tomllib
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from edits import Edit, edit_value
from fulgurite_tensorboard.events import _pack_crc

ByteEdit = tuple[int, int, bytes]
"""Start, length and new bytes of a piece."""
ValueEdit = tuple[int, Edit, Any]
"""The number of a place, what is done there, and the value for it."""
_BLOCK = 32768
_CHUNK = struct.Struct("<IHB")


def edit_bytes(content: bytes, edits: list[ByteEdit]) -> bytes:
    """Return the content, in which pieces are replaced."""
    for start, length, new in edits:
        begin = start % (len(content) + 1)
        content = content[:begin] + new + content[begin + length % 50 :]
    return content


@dataclass(frozen=True)
class Values:
    """A format whose content is JSON-like values.

    Attributes:
        parse: returns the content of a file.
        format: returns the file with a content.
    """

    parse: Callable[[bytes], Any]
    format: Callable[[Any], bytes]

    def edit(
        self, content: bytes, value_edits: list[ValueEdit], byte_edits: list[ByteEdit]
    ) -> bytes:
        """Return a file in which values are edited."""
        values = self.parse(content)
        for number, edit, new_value in value_edits:
            edit_value(values, number, edit, new_value)
        return self.format(values)


@dataclass(frozen=True)
class Frames:
    """A format of records of bytes, each with its length and checksum.

    Attributes:
        split: returns the records of a file.
        join: returns the file of records.
    """

    split: Callable[[bytes], list[bytes]]
    join: Callable[[list[bytes]], bytes]

    def edit(
        self, content: bytes, value_edits: list[ValueEdit], byte_edits: list[ByteEdit]
    ) -> bytes:
        """Return a file in which bytes within records are edited."""
        records = self.split(content)
        for number, byte_edit in enumerate(byte_edits):
            chosen = value_edits[number][0] if number < len(value_edits) else byte_edit[0]
            index = chosen % len(records)
            records[index] = edit_bytes(records[index], [byte_edit])
        return self.join(records)


def _parse_lines(content: bytes) -> list[Any]:
    return [json.loads(line) for line in content.splitlines()]


def _format_lines(values: list[Any]) -> bytes:
    return "".join(json.dumps(value, separators=(",", ":")) + "\n" for value in values).encode()


def _format_toml(table: Any) -> bytes:
    lines = [f"{json.dumps(key)} = {_format_toml_value(table[key])}\n" for key in table]
    return "".join(lines).encode()


def _format_toml_value(value: Any) -> str:
    if value is None:
        return "1979-05-27"  # which JSON has not
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)} = {_format_toml_value(value[key])}" for key in value]
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_format_toml_value, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)


def _parse_table(content: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(content.decode(), newline="")))


def _format_table(rows: list[Any]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        with suppress(csv.Error):
            writer.writerow(row if isinstance(row, list) else [row])
    return text.getvalue().encode(errors="surrogatepass")


def _split_events(content: bytes) -> list[bytes]:
    records = []
    offset = 0
    while offset < len(content):
        (length,) = struct.unpack_from("<Q", content, offset)
        records.append(content[offset + 12 : offset + 12 + length])
        offset += 16 + length
    return records


def _join_events(records: list[bytes]) -> bytes:
    parts = []
    for record in records:
        length = struct.pack("<Q", len(record))
        parts += [length, _pack_crc(length), record, _pack_crc(record)]
    return b"".join(parts)


def _split_log(content: bytes) -> list[bytes]:
    """Return the records of wandb's file, the first of which is its header."""
    records = [content[:7]]
    offset = 7
    is_begun = False
    while offset + _CHUNK.size <= len(content):
        _, length, kind = _CHUNK.unpack_from(content, offset)
        offset += _CHUNK.size
        chunk = content[offset : offset + length]
        records[-1:] = [records[-1] + chunk] if is_begun else [records[-1], chunk]
        is_begun = kind in (2, 3)
        offset += length
        if _BLOCK - offset % _BLOCK < _CHUNK.size:
            offset += _BLOCK - offset % _BLOCK
    return records


def _join_log(records: list[bytes]) -> bytes:
    content = records[0]
    for record in records[1:]:
        is_first = True
        while is_first or record:
            rest_of_block = _BLOCK - len(content) % _BLOCK
            if rest_of_block < _CHUNK.size:
                content += bytes(rest_of_block)
                rest_of_block = _BLOCK
            chunk = record[: rest_of_block - _CHUNK.size]
            record = record[len(chunk) :]
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[
                is_first, not record
            ]
            crc = zlib.crc32(bytes([kind]) + chunk)
            content += _CHUNK.pack(crc, len(chunk), kind) + chunk
            is_first = False
    return content


JSON = Values(json.loads, lambda value: json.dumps(value).encode())
JSON_LINES = Values(_parse_lines, _format_lines)
TOML = Values(lambda content: tomllib.loads(content.decode()), _format_toml)
TABLE = Values(_parse_table, _format_table)
EVENTS = Frames(_split_events, _join_events)
LOG = Frames(_split_log, _join_log)
TEXT = Values(
    lambda content: content.decode().splitlines(),
    lambda lines: "\n".join(map(str, lines)).encode(errors="surrogatepass"),
)
