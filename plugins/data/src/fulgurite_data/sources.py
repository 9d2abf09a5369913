"""Where examples come from."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import fulgurite as fg
from fulgurite.errors import ConfigurationError, check_callable
from numpy.typing import DTypeLike

from fulgurite_data.arrays import ArrayNode, ItemNode
from fulgurite_data.dataset import Dataset, check_window
from fulgurite_data.images import ImageNode
from fulgurite_data.records import RecordNode
from fulgurite_data.tables import JSONLinesNode, ParquetNode
from fulgurite_data.tokens import TokenNode, TokenWindows

_IMAGE_THREADS = 4
"""Where nobody says how many: each has two batches in memory."""


class Arrays(Dataset):
    """The rows of arrays in memory, or of memory maps.

    Example:
        from fulgurite_data import Arrays

        dataset = Arrays({"image": np.zeros((100, 8, 8), np.uint8), "label": np.arange(100)})
        batch = dataset.batch(32).read(0)

    Args:
        arrays: a pytree of arrays `(examples, ...)`, or an `fg.ArrayData` that has one.
    """

    def __init__(self, arrays: Any) -> None:
        super().__init__(ArrayNode(arrays))


class Items(Dataset):
    """The items of any sequence: an object with `__getitem__` and `__len__`, such as a dataset of
    PyTorch or Hugging Face.

    Example:
        from fulgurite_data import Items

        dataset = Items([{"x": np.ones(3), "y": n} for n in range(10)])
        batch = dataset.shuffle().batch(5).read(0)

    Args:
        items: the sequence. Item `n` must be the same whenever it is read, and its arrays have the
            dtypes of those of item 0.
        name: what errors call it; by default its class.
    """

    def __init__(self, items: Any, *, name: str | None = None) -> None:
        super().__init__(ItemNode(items, name))


class Tokens(Dataset):
    """The documents in files of tokens, `{"tokens": int32 (length,)}`. The files are memory-mapped:
    only what a batch holds is read. `write_tokens` writes them.

    Example:
        from fulgurite_data import Tokens, write_tokens

        write_tokens("text.bin", [[5, 6, 7], [8, 9], range(10, 30)])
        dataset = Tokens("text.bin")
        len(dataset)  # 3 documents
        batch = dataset.window(8).batch(2).read(0)  # {"tokens": ..., "targets": ...}

    Args:
        paths: of one file or several. A `.npy` file is an array of integers of one axis, a `.bin`
            file nothing but numbers. Where documents begin stands beside it in `NAME.offsets.npy`,
            int64 numbers from 0 to the number of tokens.
        dtype: of the numbers in `.bin` files: uint16, uint32 or int32.
        has_offsets: False for files that are one document each, with no such file beside them.

    Raises:
        DataError: a file is missing, empty or truncated.
    """

    node: TokenNode

    def __init__(
        self,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        dtype: DTypeLike = "uint16",
        has_offsets: bool = True,
    ) -> None:
        super().__init__(TokenNode(_as_paths(paths), dtype, has_offsets))

    @property
    def num_tokens(self) -> int:
        """Return how many tokens there are."""
        return len(self.node.stream)

    def window(self, size: int, *, stride: int | None = None, targets: bool = True) -> Dataset:
        """Return windows over all tokens, whatever documents they are of.

        Args:
            size: the number of tokens in a window.
            stride: how many tokens a window begins after the one before; by default `size`.
            targets: whether each comes with the token that follows each of its tokens,
                `{"tokens": (size,), "targets": (size,)}`.
        """
        size, stride = check_window(size, stride)
        return Dataset(TokenWindows(self.node, size, stride, targets))


class Images(Dataset):
    """The images in a folder, `{"image": uint8 (height, width, channels)}`, upright as their EXIF
    says. With a folder for each class in it, `label` is the number of the class, int32, in the
    order of the names. Needs the extra `images`.

    Example:
        from pathlib import Path

        from fulgurite_data import Images
        from PIL import Image

        for name in ("cat", "dog"):
            Path("pets", name).mkdir(parents=True)
            Image.new("RGB", (40, 30)).save(f"pets/{name}/1.png")
        dataset = Images("pets", size=(32, 32))
        dataset.classes  # ["cat", "dog"]

    Args:
        folder: of the images. Folders in it are looked through as well, and those that links in it
            lead to; hidden ones, such as `.cache`, are not.
        size: (height, width) that images are scaled to; without, all of a batch must have one size.
        mode: `RGB`, `L` for grey, `RGBA`.
        classes: the names of the folders, in the order of their labels, such as those of the
            training set for a test set that lacks some; by default all folders, sorted.
        threads: how many threads decode, see `Dataset.map`; 0 for none. By default four, unless a
            `map` of these images asks for processes.
        draft: whether JPEG files are decoded at 1/2, 1/4 or 1/8 of their size where that is at
            least `size`: several times as fast for large photos. The pixels are not exactly those
            of an image that is decoded as a whole and scaled then.

    Raises:
        DataError: the folder is missing, or has no images; a folder in it has none, or is not in
            `classes`.
    """

    node: ImageNode

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        size: tuple[int, int] | None = None,
        mode: str = "RGB",
        classes: Sequence[str] | None = None,
        threads: int | None = None,
        draft: bool = False,
    ) -> None:
        node = ImageNode(Path(folder), size, mode, classes, draft)
        if threads is None:
            node.default_threads = _IMAGE_THREADS
        else:
            node.use_workers(threads, 0)
        super().__init__(node)

    @property
    def classes(self) -> list[str]:
        """Return the names of the classes; none where images are in no folder."""
        return self.node.classes


class Parquet(Dataset):
    """The rows of Parquet files, as dictionaries by column. Lists in a column are arrays.

    A group of rows is read as a whole, and the last eight are kept. A random order over all rows
    would read a group for nearly each of them, so shuffle large files once, when they are written,
    and here only what fits: `Arrays(Parquet(...).read(range(n)))`.

    Needs the extra `parquet`.

    Example:
        import pyarrow as pa
        import pyarrow.parquet as pq
        from fulgurite_data import Parquet

        pq.write_table(pa.table({"x": [1.0, 2.0], "label": [0, 1]}), "table.parquet")
        batch = Parquet("table.parquet", columns=["x"]).batch(2).read(0)

    Args:
        paths: of one file or several.
        columns: which to read; all by default.

    Raises:
        DataError: a file is missing or damaged, or has other columns.
    """

    def __init__(
        self,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(ParquetNode(_as_paths(paths), columns))


class JSONLines(Dataset):
    """The lines of files of JSON, memory-mapped, as what each line holds.

    Example:
        from pathlib import Path

        from fulgurite_data import JSONLines

        Path("lines.jsonl").write_text('{"x": [1, 2], "label": 0}\\n{"x": [3], "label": 1}\\n')
        dataset = JSONLines("lines.jsonl")
        dataset.pad(4).batch(2).read(0)

    Args:
        paths: of one file or several.
        columns: which keys of the lines to read; all by default, and then each line has the same.
        dtypes: of the numbers under some keys. Those of the others are int64, float64 or bool, as
            in the first line, and a line with another one is an error: 1 is an integer, 1.0 is not.

    Raises:
        DataError: a file is missing, empty or truncated.
    """

    def __init__(
        self,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        columns: Sequence[str] | None = None,
        dtypes: Mapping[str, DTypeLike] | None = None,
    ) -> None:
        super().__init__(JSONLinesNode(_as_paths(paths), columns, dtypes))


class ArrayRecords(Dataset):
    """The records of ArrayRecord files. Needs the extra `array-record`.

    Example:
        from array_record.python.array_record_module import ArrayRecordWriter
        from fulgurite_data import ArrayRecords

        writer = ArrayRecordWriter("numbers.array_record", "group_size:1")
        for number in range(4):
            writer.write(np.float32(number).tobytes())
        writer.close()
        dataset = ArrayRecords(
            "numbers.array_record", decode=lambda record: np.frombuffer(record, np.float32)
        )

    Args:
        paths: of one file or several.
        decode: called with the bytes of a record; returns an example.

    Raises:
        DataError: a file is missing or damaged.
    """

    def __init__(
        self,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        decode: Callable[[bytes], Any],
    ) -> None:
        check_callable(decode, "ArrayRecords: decode")
        super().__init__(RecordNode(_as_paths(paths), decode))


def as_dataset(source: Any, where: str) -> Dataset:
    """Return what a user passed as a dataset.

    Args:
        source: a dataset, an `fg.ArrayData`, or a sequence.
        where: what it is an argument of.

    Raises:
        ConfigurationError: it is anything else.
    """
    if isinstance(source, Dataset):
        return source
    if isinstance(source, fg.ArrayData):
        return Arrays(source)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return Items(source)
    raise ConfigurationError(
        f"{where} is a {type(source).__name__}; it must be a dataset, an fg.ArrayData, or "
        "something with __getitem__ and __len__. Combine datasets before batch(), not batches"
    )


def _as_paths(paths: str | PathLike[str] | Sequence[str | PathLike[str]]) -> list[Path]:
    listed = [paths] if isinstance(paths, str | PathLike) else paths
    return [Path(path) for path in listed]
