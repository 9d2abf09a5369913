"""Write records as tables of comma-separated values."""

import csv
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import fulgurite as fg
from fulgurite.errors import CheckpointError
from fulgurite_runs import dumps

from fulgurite_logging.file_logger import FileLogger
from fulgurite_logging.files import (
    LONGEST_LINE,
    LineFile,
    UnreadableLineError,
    UnreadableRecords,
    check_cut,
    get_entry,
    open_regular_file,
)
from fulgurite_logging.writer import LogBackend

EXACT_FILE = "records.csv"
TELEMETRY_FILE = "telemetry.csv"
_LONGEST_ROW = LONGEST_LINE - (1 << 20)
"""In characters. A row grows by a comma with each column that comes later."""
MAX_DIGITS = 18
"""Of a step; Python reads no number of thousands of digits."""


@dataclass(eq=False)
class CSVLogger(FileLogger):
    """Write scalars into the run's directory, one row per record and one column per `SOURCE/NAME`.

    `records.csv` holds the exact stream, its bytes depend only on the records; a resumed run
    continues where its checkpoint was. `telemetry.csv` holds the rest, with `attempt` and
    `wall_time`. A name that first appears later becomes a new column, empty in the rows before: the
    file is rewritten and replaces the old one atomically. A number that is not finite is `nan`,
    `inf` or `-inf`; arrays are JSON. A record of more than 15 million characters is left out with
    one warning: the file could not be read with it.

    Example:
        from fulgurite_logging import CSVLogger

        # Or by name: plugins=["csv"].
        engine = fg.Engine(steps=100, run_dir="runs/digits", plugins=[CSVLogger()])
    """

    plugin_name = "csv"

    def open_backend(self, run: fg.LoggedRun, position: Any) -> LogBackend:
        assert run.run_dir is not None
        return CSVBackend(run.run_dir.path, position)

    def check_position(self, folder: Path, position: Any, step: int | None) -> None:
        entry = get_entry(position, EXACT_FILE)
        path = folder / EXACT_FILE
        size = get_entry(entry, "bytes")
        num_columns = get_entry(entry, "columns")
        num_rows = get_entry(entry, "rows")
        # With columns that came later, a row has other bytes than it had.
        num_columns_now = _count_columns(path)
        if num_columns_now is None:
            raise CheckpointError(
                f"{path} cannot be read as the table that the checkpoint knows. Put the file back, "
                "or resume in another directory"
            )
        is_same_layout = num_columns == num_columns_now
        if is_same_layout:
            check_cut(path, size, step, _get_step)
        if (
            not _is_int_within(num_columns, 1, num_columns_now)
            or not _is_int_within(num_rows, 0, 2**31)
            or (is_same_layout and _count_lines(path, size) != 1 + num_rows)
        ):
            raise CheckpointError(
                f"{path} is not the table that the checkpoint knows: its first {size!r:.100} bytes "
                f"should hold {num_columns!r:.100} columns and {num_rows!r:.100} rows"
            )


class CSVBackend:
    """The two files in `folder`, the exact one cut back to `position` unless that is None."""

    def __init__(self, folder: Path, position: Any) -> None:
        self._unreadable = UnreadableRecords("csv")
        with ExitStack() as stack:
            self._exact = Table(folder / EXACT_FILE, ["step"])
            stack.callback(self._exact.close)
            self._telemetry = Table(folder / TELEMETRY_FILE, ["attempt", "wall_time", "step"])
            stack.callback(self._telemetry.close)
            if position is not None:
                self._exact.rewind(get_entry(position, EXACT_FILE))
            stack.pop_all()

    def write(self, record: fg.Record) -> None:
        cells: dict[str, Any] = {"step": record.step}
        table = self._exact
        if record.stream == "telemetry":
            cells |= {"attempt": record.attempt, "wall_time": record.wall_time}
            table = self._telemetry
        for name in sorted(record.values):
            cells[_join_lines(f"{record.source}/{name}")] = record.values[name]
        try:
            table.append(cells)
        except UnreadableLineError as error:
            self._unreadable.warn(record, error)

    def sync(self) -> None:
        self._exact.file.sync()
        self._telemetry.file.sync()

    def get_position(self) -> Any:
        return {EXACT_FILE: self._exact.position}

    def close(self) -> None:
        with ExitStack() as stack:  # the second one is closed, too, where the first one fails
            stack.callback(self._telemetry.close)
            stack.callback(self._exact.close)


class Table:
    """A file of comma-separated values that gets further columns as they come up.

    Args:
        path: where it is; it is created if it does not exist.
        first_columns: the columns that it begins with.
    """

    def __init__(self, path: Path, first_columns: Sequence[str]) -> None:
        self.file = LineFile(path)
        try:
            self._read_layout(first_columns)
        except BaseException:
            with suppress(OSError):  # the first failure is the one to tell
                self.file.close()
            raise

    def close(self) -> None:
        """Make what was written durable and close the file."""
        self.file.close()

    @property
    def position(self) -> dict[str, int]:
        """The numbers of bytes, columns and rows, the header not counted as a row."""
        return {"bytes": self.file.size, "columns": len(self._columns), "rows": self._num_rows}

    def append(self, cells: dict[str, Any]) -> None:
        """Add a row, whose cells are given by column.

        Raises:
            UnreadableLineError: it is too long to be read again; it is not added.
        """
        columns = [*dict.fromkeys([*self._columns, *cells])]
        row = _format_row([_format_cell(cells.get(name)) for name in columns])
        if len(row) > _LONGEST_ROW:
            raise UnreadableLineError(
                f"its row has {len(row):,} characters, and {_LONGEST_ROW:,} are the most"
            )
        if len(columns) > len(self._columns):
            rows = _replace_header(columns, self._iter_rows())
            self._rewrite([*old, *[""] * (len(columns) - len(old))] for old in rows)
            self._columns = dict.fromkeys(columns)
        self.file.append(row)
        self._num_rows += 1

    def rewind(self, position: Any) -> None:
        """Drop the rows and columns that came after a `position`.

        Raises:
            CheckpointError: the table does not have what it had then.
        """
        size = get_entry(position, "bytes")
        num_columns = get_entry(position, "columns")
        num_rows = get_entry(position, "rows")
        if not (
            _is_int_within(num_columns, 1, len(self._columns))
            and _is_int_within(num_rows, 0, self._num_rows)
        ):
            raise CheckpointError(
                f"{self.file.path} is not the table that the checkpoint knows: it has "
                f"{len(self._columns)} columns and {self._num_rows} rows, which should be at least "
                f"{num_columns!r} and {num_rows!r}. Put the file back, or resume in another "
                "directory"
            )
        if num_columns < len(self._columns):
            columns = [*self._columns][:num_columns]
            rows = _replace_header(columns, islice(self._iter_rows(), num_rows + 1))
            self._rewrite(row[:num_columns] for row in rows)
            self._columns = dict.fromkeys(columns)
        self.file.rewind(size)
        self._num_rows = num_rows

    def _read_layout(self, first_columns: Sequence[str]) -> None:
        """Read columns and rows of the file, which gets a header if it is empty."""
        path = self.file.path
        self.file.repair()
        if self.file.size == 0:
            self.file.append(_format_row(first_columns))
        rows = self._iter_rows()
        header = next(rows, [])
        self._columns = dict.fromkeys(header)  # a set that keeps the order
        self._num_rows = sum(1 for _ in rows)
        if len(self._columns) < len(header):
            raise CheckpointError(
                f"{path} is not a table of this plugin: a column occurs twice. Move it away"
            )
        if header[: len(first_columns)] != list(first_columns):
            raise CheckpointError(
                f"{path} is not a table of this plugin: it should begin with "
                f"{','.join(first_columns)}. Move it away"
            )

    def _iter_rows(self) -> Iterator[list[str]]:
        """Yield the header and the rows, as they are in the file."""
        # The arrays that are written as cells may be longer. It holds for the whole process, so it
        # is only raised.
        csv.field_size_limit(max(csv.field_size_limit(), LONGEST_LINE))
        with open(self.file.path, encoding="utf-8", newline="") as text:
            try:
                while line := text.readline(LONGEST_LINE):
                    yield _parse_row(line)
            except (csv.Error, UnicodeDecodeError) as error:
                raise CheckpointError(
                    f"{self.file.path} cannot be read: {error}. Move it away"
                ) from error

    def _rewrite(self, rows: Iterable[Sequence[str]]) -> None:
        path = self.file.path.with_suffix(".new")
        path.unlink(missing_ok=True)
        file = LineFile(path)
        try:
            text = io.StringIO()
            for row in rows:
                text.write(_format_row(row))
                if text.tell() > 1 << 20:
                    file.append(text.getvalue())
                    text = io.StringIO()
            file.append(text.getvalue())
            self.file.replace_with(file)
        except BaseException:
            with suppress(OSError):  # the first failure is the one to tell
                file.close()
            path.unlink(missing_ok=True)
            raise


def _count_columns(path: Path) -> int | None:
    """Return how many columns a table has; None where it cannot be read."""
    try:
        descriptor = open_regular_file(path, os.O_RDONLY)
        with open(descriptor, encoding="utf-8", newline="") as text:
            return len(next(csv.reader(text, strict=True), []))
    except (OSError, csv.Error, UnicodeDecodeError):
        return None


def _count_lines(path: Path, size: int) -> int:
    """Return the number of lines in the first bytes of a file."""
    count = 0
    with open(open_regular_file(path, os.O_RDONLY), "rb") as file:
        while size > 0 and (chunk := file.read(min(size, 1 << 20))):
            count += chunk.count(b"\n")
            size -= len(chunk)
    return count


def _get_step(line: bytes) -> int | None:
    cell = line.partition(b",")[0]
    return int(cell) if cell.isdigit() and len(cell) <= MAX_DIGITS else None


def _is_int_within(number: Any, low: int, high: int) -> bool:
    return type(number) is int and low <= number <= high


def _replace_header(header: list[str], rows: Iterable[list[str]]) -> Iterator[list[str]]:
    yield header
    yield from islice(rows, 1, None)


def _parse_row(line: str) -> list[str]:
    """Return the cells of a row; raise `csv.Error` if it is none.

    A row is a line, so that no quotation mark makes one of the whole file.
    """
    if len(line) == LONGEST_LINE:
        raise csv.Error(f"a line has {LONGEST_LINE:,} characters or more")
    return next(csv.reader([line], strict=True))


def _format_row(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _format_cell(value: Any) -> str:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None:
        return ""
    if isinstance(value, str | bool):
        return _join_lines(str(value))
    if isinstance(value, int | float):
        return repr(value)
    return dumps(value)


def _join_lines(text: str) -> str:
    """Return the text on one line, so that every row is a line."""
    return " ".join(text.splitlines())
