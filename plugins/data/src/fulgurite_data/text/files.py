"""Files of text as documents."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import overload

from fulgurite.errors import DataError


class TextFiles(Sequence[str]):
    """The text of files in a folder, each file a document.

    Example:
        from pathlib import Path

        from fulgurite_data import TextFiles

        Path("books").mkdir(exist_ok=True)
        Path("books/a.txt").write_text("Once upon a time")
        documents = TextFiles("books")
        documents[0]  # 'Once upon a time'

    Attributes:
        folder: the folder.
        paths: the files, sorted by name.

    Args:
        folder: the folder.
        pattern: which files, as of `pathlib.Path.glob`; by default all `.txt` files in it and in
            its folders. `**` follows no links to folders.

    Raises:
        DataError: there is no such file.
    """

    def __init__(self, folder: str | PathLike[str], pattern: str = "**/*.txt") -> None:
        self.folder = Path(folder)
        self.paths = sorted(path for path in self.folder.glob(pattern) if path.is_file())
        if not self.paths:
            raise DataError(f"TextFiles: no file in {self.folder} matches {pattern}")

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Return the text of a file, or of several.

        Args:
            index: its number.

        Raises:
            DataError: it is gone, or is not UTF-8.
        """
        if isinstance(index, slice):
            return [_read(path) for path in self.paths[index]]
        return _read(self.paths[index])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # without the mark that some editors put first
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read as text: {error}. Convert it to UTF-8, or leave it out by the "
            "pattern"
        ) from error
