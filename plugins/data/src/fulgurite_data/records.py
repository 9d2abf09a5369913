"""Records of ArrayRecord files, decoded by a function."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fulgurite.errors import DataError

from fulgurite_data.arrays import ItemNode
from fulgurite_data.content import Mark, look_at_files
from fulgurite_data.extras import import_extra
from fulgurite_data.identity import describe_function
from fulgurite_data.tables import check_files


class DecodedRecords:
    """A sequence of the examples in ArrayRecord files.

    Args:
        paths: the files.
        decode: called with the bytes of a record; returns an example.

    Raises:
        DataError: a file is missing or damaged.
    """

    def __init__(self, paths: Sequence[Path], decode: Callable[[bytes], Any]) -> None:
        reader = import_extra("array_record.python.array_record_data_source", "array-record")
        check_files(paths, "ArrayRecords")
        self.decode = decode
        try:
            self._source = reader.ArrayRecordDataSource([str(path) for path in paths])
            self._length = len(self._source)
        except (RuntimeError, ValueError, OSError) as error:
            listed = ", ".join(map(str, paths))
            raise DataError(f"ArrayRecords: {listed} cannot be read: {error}") from error

    def __len__(self) -> int:
        """Return the number of records."""
        return self._length

    def __getitem__(self, index: int) -> Any:
        """Return an example."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several examples, which the files are asked for at once."""
        return [self.decode(record) for record in self._source.__getitems__(indices)]


class RecordNode(ItemNode):
    """The examples in ArrayRecord files.

    Args:
        paths: the files.
        decode: as of `DecodedRecords`.
    """

    items: DecodedRecords

    def __init__(self, paths: Sequence[Path], decode: Callable[[bytes], Any]) -> None:
        name = f"{paths[0].name}, {len(paths)} files, {describe_function(decode)}"
        super().__init__(DecodedRecords(paths, decode), name)
        self.paths = paths

    def look(self) -> Mark:
        return look_at_files(self.paths, self.items.decode)
