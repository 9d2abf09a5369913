"""Where examples come from."""

from collections.abc import Sequence
from os import PathLike
from typing import Any

import fulgurite as fg
from fulgurite.errors import ConfigurationError
from numpy.typing import DTypeLike

from fulgurite_data.arrays import ArrayNode, ItemNode
from fulgurite_data.dataset import Dataset, check_window
from fulgurite_data.tokens import TokenNode, TokenWindows


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
        items: the sequence. Item `n` must be the same whenever it is read.
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
            int64 numbers from 0 to the number of tokens; without such a file it is one document.
        dtype: of the numbers in `.bin` files: uint16, uint32 or int32.

    Raises:
        DataError: a file is missing, empty or truncated.
    """

    node: TokenNode

    def __init__(
        self,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        dtype: DTypeLike = "uint16",
    ) -> None:
        files = [paths] if isinstance(paths, str | PathLike) else list(paths)
        super().__init__(TokenNode(files, dtype))

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
