"""Records as tables of comma-separated values."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import fulgurite as fg
from fulgurite.errors import CheckpointError
from fulgurite_runs import json_codec

from fulgurite_logging.file_logger import FileLogger
from fulgurite_logging.files import LineFile, entry
from fulgurite_logging.writer import LogBackend

EXACT, TELEMETRY = "records.csv", "telemetry.csv"


@dataclass(eq=False)
class CSVLogger(FileLogger):
    """Writes scalars into the run's directory, one row per record and one column per `SOURCE/NAME`.

    `records.csv` holds the exact stream, its bytes depend only on the records; a resumed run
    continues where its checkpoint was. `telemetry.csv` holds the rest, with `attempt` and `wall`. A
    name that first appears later becomes a
    new column, empty in the rows before: the file is rewritten and replaces the old one atomically.
    A number that is not finite is `nan`, `inf` or `-inf`; arrays are JSON.
    """

    plugin_name = "csv"

    def backend(self, run: fg.Run, position: Any) -> LogBackend:
        assert run.run_dir is not None
        return Tables(run.run_dir.path, position)


class Tables:
    """The two files in `folder`, the exact one cut back to `position` unless that is None."""

    def __init__(self, folder: Path, position: Any) -> None:
        self._exact = Table(folder / EXACT, ["step"])
        self._telemetry = Table(folder / TELEMETRY, ["attempt", "wall", "step"])
        if position is not None:
            self._exact.rewind(entry(position, EXACT))

    def write(self, record: fg.Record) -> None:
        cells: dict[str, Any] = {"step": record.step}
        if record.stream == "telemetry":
            cells |= {"attempt": record.attempt, "wall": record.wall_time}
        cells |= {
            _flat(f"{record.source}/{name}"): record.values[name] for name in sorted(record.values)
        }
        (self._exact if record.stream == "exact" else self._telemetry).append(cells)

    def sync(self) -> None:
        self._exact.file.sync()
        self._telemetry.file.sync()

    def position(self) -> Any:
        return {EXACT: self._exact.position}

    def close(self) -> None:
        self._exact.file.close()
        self._telemetry.file.close()


class Table:
    """A file of comma-separated values that begins with the columns `first` and gets further ones
    as they come up."""

    def __init__(self, path: Path, first: Sequence[str]) -> None:
        self.file = LineFile(path)
        self.file.repair()
        if self.file.size == 0:
            self.file.append(_line(first))
        rows = self._rows()
        self._columns, self._count = dict.fromkeys(next(rows, [])), sum(1 for _ in rows)
        if [*self._columns][: len(first)] != list(first):
            raise CheckpointError(
                f"{path} is no table of this plugin: it should begin with {','.join(first)}. Move "
                f"it"
            )

    @property
    def position(self) -> dict[str, int]:
        """How many bytes, columns and rows there are, the header not counted."""
        return {"bytes": self.file.size, "columns": len(self._columns), "rows": self._count}

    def append(self, cells: dict[str, Any]) -> None:
        """Adds a row, given by column."""
        if new := [name for name in cells if name not in self._columns]:
            columns = [*self._columns, *new]
            self._rewrite(
                [*row, *[""] * (len(columns) - len(row))]
                for row in _with_header(columns, self._rows())
            )
            self._columns = dict.fromkeys(columns)
        self.file.append(_line([_cell(cells.get(name)) for name in self._columns]))
        self._count += 1

    def rewind(self, position: Any) -> None:
        """Goes back to the rows and columns that there were; a `CheckpointError` if these are not
        there."""
        size, columns, rows = (entry(position, name) for name in ("bytes", "columns", "rows"))
        if not _within(columns, 1, len(self._columns)) or not _within(rows, 0, self._count):
            raise CheckpointError(
                f"{self.file.path} is not the table that the checkpoint knows: it has "
                f"{len(self._columns)} columns and "
                f"{self._count} rows, which should be at least {columns!r} and {rows!r}. Put the "
                f"file back, or resume "
                "in another directory"
            )
        if columns < len(self._columns):
            self._columns = dict.fromkeys([*self._columns][:columns])
            self._rewrite(
                row[:columns]
                for row in _with_header([*self._columns], islice(self._rows(), rows + 1))
            )
        self.file.rewind(size)
        self._count = rows

    def _rows(self) -> Iterator[list[str]]:
        """The header and the rows, as they are in the file."""
        with open(self.file.path, encoding="utf-8", newline="") as text:
            try:
                yield from csv.reader(text, strict=True)
            except (csv.Error, UnicodeDecodeError) as error:
                raise CheckpointError(
                    f"{self.file.path} cannot be read: {error}. Move it away"
                ) from error

    def _rewrite(self, rows: Iterable[Sequence[str]]) -> None:
        path = self.file.path.with_suffix(".new")
        path.unlink(missing_ok=True)
        new = LineFile(path)
        text = io.StringIO()
        for row in rows:
            text.write(_line(row))
            if text.tell() > 1 << 20:
                new.append(text.getvalue())
                text = io.StringIO()
        new.append(text.getvalue())
        self.file.replace_by(new)


def _within(number: Any, low: int, high: int) -> bool:
    return type(number) is int and low <= number <= high


def _with_header(header: list[str], rows: Iterable[list[str]]) -> Iterator[list[str]]:
    """The rows with another header."""
    yield header
    yield from islice(rows, 1, None)


def _line(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _cell(value: Any) -> str:
    value = value.tolist() if hasattr(value, "tolist") else value
    if value is None or isinstance(value, str | bool):
        return "" if value is None else _flat(str(value))
    if isinstance(value, int | float):
        return repr(value)
    return json_codec.dumps(value)


def _flat(text: str) -> str:
    """On one line, so that every row is a line."""
    return " ".join(text.splitlines())
