"""Rows of files of tables: Parquet, and lines of JSON."""

import json
import mmap
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from fulgurite.errors import ConfigurationError, DataError
from numpy.typing import DTypeLike

from fulgurite_data.arrow import find_dtype, read_column
from fulgurite_data.content import Mark, look_at_files
from fulgurite_data.dtypes import StackedNode
from fulgurite_data.examples import merge_rows, take_rows
from fulgurite_data.extras import import_extra
from fulgurite_data.identity import hash_text
from fulgurite_data.nodes import Node
from fulgurite_data.passes import Pass

_MAX_GROUPS = 8
"""Groups of rows that are kept decoded."""
_SCANNED_BYTES = 2**24
"""Of a file of lines that are looked through at once."""


class ParquetNode(Node):
    """The rows of Parquet files. A group of rows is read as a whole, and the last eight are kept.

    Args:
        paths: the files.
        columns: which to read; None for all.

    Raises:
        DataError: a file is missing, damaged, empty, or has other columns than the first one.
    """

    def __init__(self, paths: Sequence[Path], columns: Sequence[str] | None) -> None:
        check_files(paths, "Parquet")
        self.paths = [*paths]
        self.columns = None if columns is None else [*columns]
        self._open()
        groups = []
        for number, file in enumerate(self._files):
            names = self._get_columns(number)
            missing = [name for name in names if name not in file.schema_arrow.names]
            if missing:
                raise DataError(
                    f"{self.paths[number]} has no column {missing[0]!r}; there are: "
                    f"{', '.join(file.schema_arrow.names)}"
                )
            self._check_dtypes(number, names)
            metadata = file.metadata
            groups += [
                (number, group, metadata.row_group(group).num_rows)
                for group in range(metadata.num_row_groups)
            ]
        self.groups = groups
        self.bounds = np.cumsum([0, *(size for _, _, size in groups)])
        self.length = int(self.bounds[-1])
        if not self.length:
            raise DataError(f"Parquet: there are no rows in {', '.join(map(str, paths))}")
        digest = hash_text(repr([size for _, _, size in groups]))
        self.stages = (
            f"Parquet({self.paths[0].name}, {len(paths)} files, {self.length} rows {digest}, "
            f"{', '.join(self._get_columns(0))})",
        )

    def look(self) -> Mark:
        return look_at_files(self.paths, self.columns)

    def read(self, indices: np.ndarray, at: Pass) -> Any:
        numbers = np.searchsorted(self.bounds, indices, side="right") - 1
        groups = np.unique(numbers)
        orders = [np.flatnonzero(numbers == group) for group in groups]
        parts = [
            take_rows(self._read_group(int(group)), indices[order] - self.bounds[group])
            for order, group in zip(orders, groups, strict=True)
        ]
        return merge_rows(parts, orders, lambda: self.stages[-1])

    def trace(self, index: int, at: Pass) -> str:
        group = int(np.searchsorted(self.bounds, index, side="right")) - 1
        number = self.groups[group][0]
        first = next(place for place, entry in enumerate(self.groups) if entry[0] == number)
        return f"row {index - int(self.bounds[first])} of {self.paths[number]}"

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process needs to open the files itself."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_files", "_cache", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def _open(self) -> None:
        parquet = import_extra("pyarrow.parquet", "parquet")
        files = []
        for path in self.paths:
            try:
                files.append(parquet.ParquetFile(path, memory_map=True))
            except (OSError, ValueError) as error:
                raise DataError(f"{path} is not a Parquet file, or truncated: {error}") from error
        self._files = files
        self._cache: OrderedDict[int, Any] = OrderedDict()
        self._lock = Lock()

    def _check_dtypes(self, number: int, names: Sequence[str]) -> None:
        """Raise `DataError` if a column of a file has another dtype than in the first one."""
        first, schema = self._files[0].schema_arrow, self._files[number].schema_arrow
        for name in names:
            expected, dtype = (
                find_dtype(first.field(name).type),
                find_dtype(schema.field(name).type),
            )
            if dtype != expected:
                raise DataError(
                    f"column {name!r} is {dtype} in {self.paths[number]}, and {expected} in "
                    f"{self.paths[0]}: write both with one type"
                )

    def _get_columns(self, number: int) -> list[str]:
        if self.columns is None:
            return self._files[0].schema_arrow.names
        return self.columns

    def _read_group(self, group: int) -> Any:
        with self._lock:
            if group in self._cache:
                self._cache.move_to_end(group)
                return self._cache[group]
            number, inner, _ = self.groups[group]
            try:
                table = self._files[number].read_row_group(inner, columns=self._get_columns(number))
            except (OSError, ValueError) as error:
                raise DataError(f"{self.paths[number]} is damaged: {error}") from error
            rows = {
                name: read_column(table.column(name), f"column {name!r} of {self.paths[number]}")
                for name in table.column_names
            }
            self._cache[group] = rows
            if len(self._cache) > _MAX_GROUPS:
                self._cache.popitem(last=False)
            return rows


class JSONLinesNode(StackedNode):
    """The lines of files of JSON. 8 bytes for each line are kept; the files are memory-mapped.

    Args:
        paths: the files.
        columns: which keys of the lines to read; None for all.
        dtypes: of keys.

    Raises:
        DataError: a file is missing, empty or truncated.
    """

    dtype_advice = "Say which one it is: JSONLines(..., dtypes={key: 'float32'})"

    def __init__(
        self,
        paths: Sequence[Path],
        columns: Sequence[str] | None,
        dtypes: Mapping[str, DTypeLike] | None = None,
    ) -> None:
        check_files(paths, "JSONLines")
        self.dtypes = {name: _as_dtype(name, dtype) for name, dtype in (dtypes or {}).items()}
        self.paths = [*paths]
        self.columns = None if columns is None else [*columns]
        self._maps = [_map_file(path) for path in self.paths]
        self.starts = [_find_lines(content) for content in self._maps]
        self.bounds = np.cumsum([0, *(len(starts) - 1 for starts in self.starts)])
        self.length = int(self.bounds[-1])
        if not self.length:
            raise DataError(f"JSONLines: there are no lines in {', '.join(map(str, paths))}")
        for number, starts in enumerate(self.starts):
            if len(starts) > 1:
                self._load_line(number, len(starts) - 2)  # where a truncated file is cut off
        digest = hash_text(repr([len(content) for content in self._maps]))
        self.stages = (
            f"JSONLines({self.paths[0].name}, {len(paths)} files, {self.length} lines {digest})",
        )
        if self.dtypes:
            listed = ", ".join(f"{name}: {dtype}" for name, dtype in self.dtypes.items())
            self.stages = (f"{self.stages[0]} as {listed}",)

    def look(self) -> Mark:
        return look_at_files(self.paths, self.columns)

    def read_examples(self, indices: np.ndarray, at: Pass) -> list[Any]:
        return [self._convert(index, at) for index in indices.tolist()]

    def trace(self, index: int, at: Pass) -> str:
        number, line = self._find(index)
        return f"line {line + 1} of {self.paths[number]}"

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process needs to map the files itself."""
        return {name: value for name, value in self.__dict__.items() if name != "_maps"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._maps = [_map_file(path) for path in self.paths]

    def _convert(self, index: int, at: Pass) -> Any:
        """Return a line, with arrays of the dtypes that were asked for."""
        value = self._parse(index)
        if not self.dtypes:
            return value
        if not isinstance(value, dict) or any(name not in value for name in self.dtypes):
            raise DataError(f"{self.trace(index, at)} lacks some of {', '.join(self.dtypes)}")
        arrays = {
            name: _cast(
                value[name], dtype, lambda name=name: f"{name!r} in {self.trace(index, at)}"
            )
            for name, dtype in self.dtypes.items()
        }
        return {**value, **arrays}

    def _find(self, index: int) -> tuple[int, int]:
        number = int(np.searchsorted(self.bounds, index, side="right")) - 1
        return number, index - int(self.bounds[number])

    def _load_line(self, number: int, line: int) -> Any:
        """Return what a line of a file holds."""
        low, high = self.starts[number][line : line + 2]
        try:
            return json.loads(self._maps[number][low:high])
        except ValueError as error:
            hint = ", or the file is truncated" if high == len(self._maps[number]) else ""
            raise DataError(
                f"line {line + 1} of {self.paths[number]} is not JSON{hint}: {error}"
            ) from error

    def _parse(self, index: int) -> Any:
        number, line = self._find(index)
        value = self._load_line(number, line)
        if self.columns is None:
            return value
        if not isinstance(value, dict) or any(name not in value for name in self.columns):
            raise DataError(
                f"line {line + 1} of {self.paths[number]} lacks some of {', '.join(self.columns)}"
            )
        return {name: value[name] for name in self.columns}


def _as_dtype(name: str, dtype: DTypeLike) -> np.dtype:
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise ConfigurationError(f"JSONLines: the dtype of {name!r} is {dtype!r}") from error
    if kind.kind not in "iufb":
        raise ConfigurationError(
            f"JSONLines: the dtype of {name!r} is {kind}; it must be one of numbers or bools"
        )
    return kind


def _cast(value: Any, dtype: np.dtype, where: Callable[[], str]) -> np.ndarray:
    """Return a number, or lists of numbers, as an array of a dtype that holds them."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(f"{where()} cannot be an array: {error}") from error
    if array.size and array.dtype.kind not in "iufb":
        raise DataError(f"{where()} is {value!r:.60}, and not of numbers")
    with np.errstate(invalid="ignore", over="ignore"):  # which the comparisons find
        cast = array.astype(dtype)
    # Floats are rounded, as everywhere; another number is not that of the file.
    is_infinite = dtype.kind == "f" and (np.isfinite(array) & ~np.isfinite(cast)).any()
    if is_infinite or (dtype.kind != "f" and not np.array_equal(cast, array)):
        raise DataError(f"{where()} is {value!r:.60}, which {dtype} does not hold")
    return cast


def check_files(paths: Sequence[Path], kind: str) -> None:
    """Raise unless there are files.

    Args:
        paths: of the files.
        kind: what they are for.
    """
    if not paths:
        raise ConfigurationError(f"{kind}: give the path of at least one file")
    for path in paths:
        if not path.is_file():
            raise DataError(f"{kind}: the file {path} is missing")


def _map_file(path: Path) -> Any:
    with path.open("rb") as file:
        if not path.stat().st_size:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _find_lines(content: Any) -> np.ndarray:
    """Return where lines begin that are not empty, and the end of the last one."""
    starts = [np.zeros(1, np.int64)]
    for low in range(0, len(content), _SCANNED_BYTES):
        part = np.frombuffer(content[low : low + _SCANNED_BYTES], np.uint8)
        starts.append(np.flatnonzero(part == ord("\n")) + low + 1)
    bounds = np.concatenate(starts)
    if bounds[-1] != len(content):
        bounds = np.append(bounds, len(content))
    # Empty lines at the end, but not the last one's end.
    while len(bounds) > 1 and not bytes(content[bounds[-2] : bounds[-1]]).strip():
        bounds = bounds[:-1]
    return bounds
