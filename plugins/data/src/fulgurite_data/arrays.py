"""Examples in arrays in memory, in memory maps, and in any sequence."""

from collections.abc import Mapping
from mmap import mmap
from typing import Any

import fulgurite as fg
import jax
import numpy as np
from fulgurite.errors import ConfigurationError, DataError, error_context
from jax.tree_util import keystr

from fulgurite_data.content import Mark, choose_rows, look_at
from fulgurite_data.dtypes import StackedNode
from fulgurite_data.examples import MASKED
from fulgurite_data.identity import describe_function
from fulgurite_data.nodes import Node
from fulgurite_data.passes import Pass

_NUM_SEEN = 8
"""Items of a sequence of another kind than a list that are read to tell it from others."""


class ArrayNode(Node):
    """The rows of arrays.

    Args:
        arrays: a pytree of arrays `(examples, ...)`.

    Raises:
        DataError: they are not arrays of one length.
    """

    def __init__(self, arrays: Any) -> None:
        if isinstance(arrays, fg.ArrayData):
            if arrays.shuffle:
                raise ConfigurationError(
                    "this ArrayData is shuffled; a dataset takes its arrays in order: leave "
                    "shuffle=True out, and call .shuffle()"
                )
            arrays = arrays.arrays
        leaves = jax.tree_util.tree_leaves_with_path(arrays)
        lengths = {keystr(path): _get_length(path, leaf) for path, leaf in leaves}
        if len(set(lengths.values())) != 1:
            listed = ", ".join(f"data{name} has {length}" for name, length in lengths.items())
            raise DataError(
                f"arrays of a dataset have one number of examples; {listed or 'there are none'}"
            )
        self.arrays = jax.tree.map(_as_stored, arrays)
        (self.length,) = set(lengths.values())
        kinds = ", ".join(
            f"{keystr(path)}: {leaf.dtype}{list(leaf.shape[1:])}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(self.arrays)
        )
        self.stages = (f"Arrays({self.length} of {kinds})",)

    def look(self) -> Mark:
        leaves = jax.tree_util.tree_leaves_with_path(self.arrays)
        return look_at([(keystr(path), leaf) for path, leaf in leaves])

    def read(self, indices: np.ndarray, at: Pass) -> Any:
        # A copy also where they are consecutive: functions of the user may write to it.
        # In the byte order of this machine, as all that is put together with it.
        return jax.tree.map(
            lambda array: array[indices].astype(array.dtype.newbyteorder("="), copy=False),
            self.arrays,
        )

    def trace(self, index: int, at: Pass) -> str:
        return f"example {index} of Arrays"

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process needs: of a memory map where it is, and not its contents."""
        leaves, structure = jax.tree.flatten(self.arrays)
        # A structure of jax cannot be sent, a tree of numbers can.
        numbers = structure.unflatten(range(len(leaves)))
        return {**self.__dict__, "arrays": numbers, "leaves": [*map(_describe_file, leaves)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        leaves = [_open_file(leaf) for leaf in state.pop("leaves")]
        self.__dict__.update(state)
        self.arrays = jax.tree.map(lambda number: leaves[number], state["arrays"])


class ItemNode(StackedNode):
    """The items of a sequence: anything with `__getitem__` and `__len__`.

    Args:
        items: with `__getitems__(list of numbers)` as well, it is asked for many at once.
        name: what errors call it.

    Raises:
        ConfigurationError: it is not a sequence.
    """

    dtype_advice = "Give each item arrays of one dtype, such as np.float32(x)"

    def __init__(self, items: Any, name: str | None = None) -> None:
        if not hasattr(items, "__getitem__") or not hasattr(items, "__len__"):
            raise ConfigurationError(
                f"a dataset needs something with __getitem__ and __len__, not {items!r:.100}. From "
                "an iterator no example can be read without those before it"
            )
        if isinstance(items, Mapping):
            raise ConfigurationError(
                f"Items: a dictionary with {', '.join(map(repr, [*items][:4]))} is not a sequence "
                "of examples: give Arrays a dictionary of arrays, and Items a list of dictionaries"
            )
        self.items = items
        self.length = len(items)
        self.name = name or describe_function(type(items))
        self.stages = (f"Items({self.name}, {self.length})",)

    def look(self) -> Mark:
        if type(self.items) in (list, tuple):
            return look_at(self.items)
        numbers = choose_rows(self.length, _NUM_SEEN)
        first, second = (look_at([self._read(number) for number in numbers]) for _ in range(2))
        if first != second:
            return Mark(unseen=("an item that differs from read to read",))
        return first

    def read_examples(self, indices: np.ndarray, at: Pass) -> list[Any]:
        numbers = indices.tolist()
        if hasattr(self.items, "__getitems__"):
            with error_context(lambda: f"in {self.stages[-1]}, examples {numbers[:10]}"):
                answer = self.items.__getitems__(numbers)
                items = [] if isinstance(answer, Mapping) else list(answer)
                if len(items) != len(numbers):
                    raise DataError(
                        f"__getitems__ of {self.name} returned a {type(answer).__name__} for "
                        f"{len(numbers)} numbers, and not a list with an item for each"
                    )
                return items
        return [self._read(number) for number in numbers]

    def trace(self, index: int, at: Pass) -> str:
        return f"example {index} of {self.name}"

    def _read(self, number: int) -> Any:
        with error_context(lambda: f"in {self.stages[-1]}, example {number}"):
            return self.items[number]


class _File:
    """Where a memory map is, for another process."""

    def __init__(self, array: np.memmap) -> None:
        self.arguments = {
            "filename": str(array.filename),
            "dtype": array.dtype,
            "offset": array.offset,
            "shape": array.shape,
            "order": "C" if array.flags.c_contiguous else "F",
        }

    def open(self) -> np.memmap:
        return np.memmap(mode="r", **self.arguments)


def _get_length(path: Any, leaf: Any) -> int:
    shape = np.shape(leaf)
    if not shape or isinstance(leaf, str):
        raise DataError(
            f"data{keystr(path)} is {leaf!r:.60}; give arrays whose first axis counts examples"
        )
    if np.ma.is_masked(leaf):
        raise DataError(f"data{keystr(path)} {MASKED}")
    return shape[0]


def _as_stored(leaf: Any) -> np.ndarray:
    return leaf if isinstance(leaf, np.memmap) else np.asarray(leaf)


def _describe_file(leaf: np.ndarray) -> Any:
    if isinstance(leaf, np.memmap) and isinstance(leaf.base, mmap) and leaf.filename:
        return _File(leaf)
    return np.asarray(leaf)


def _open_file(leaf: Any) -> np.ndarray:
    return leaf.open() if isinstance(leaf, _File) else leaf
