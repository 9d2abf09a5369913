"""Several examples at once: pytrees of arrays whose first axis counts them, or of `Ragged` where
examples have unequal lengths."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from fulgurite.errors import DataError
from jax.tree_util import keystr

MASKED = (
    "is a masked array, whose mask would be lost: give array.filled(value), and the mask as an "
    "array of its own"
)
"""The rest of an error about values that are masked."""


@dataclass(frozen=True, eq=False)
class Ragged:
    """Arrays of unequal lengths, one for each example.

    Example:
        from fulgurite_data import Ragged

        ragged = Ragged(np.arange(5), np.array([2, 3]))
        [example.tolist() for example in ragged.split()]  # [[0, 1], [2, 3, 4]]

    Attributes:
        values: all of them one after the other, `(sum of lengths, ...)`.
        lengths: int64 `(examples,)`.
    """

    values: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.lengths)

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield the array of each example, as a walk over an array of examples does."""
        return iter(self.split())

    def split(self) -> list[np.ndarray]:
        """Return the array of each example."""
        return np.split(self.values, np.cumsum(self.lengths)[:-1]) if len(self) else []

    def take(self, order: np.ndarray) -> "Ragged":
        """Return some of the examples.

        Args:
            order: their numbers, int64 `(k,)`.
        """
        starts = np.cumsum(self.lengths) - self.lengths
        lengths = self.lengths[order]
        return Ragged(self.values[find_rows(starts[order], lengths)], lengths)


def find_rows(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the numbers of the rows in several spans, one span after the other.

    Args:
        starts: the first row of each span, int64 `(k,)`.
        lengths: the number of its rows, int64 `(k,)`.
    """
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - (ends - lengths), lengths)


def as_ragged(leaf: Any) -> Ragged:
    """Return arrays of examples, of equal lengths or not, as `Ragged`.

    Args:
        leaf: `Ragged`, or an array `(examples, length, ...)`.
    """
    if _is_ragged(leaf):
        return leaf
    lengths = np.full(len(leaf), leaf.shape[1], np.int64)
    return Ragged(leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), lengths)


def count_rows(rows: Any) -> int:
    """Return how many examples these are."""
    return len(jax.tree.leaves(rows)[0])


def take_rows(rows: Any, order: np.ndarray) -> Any:
    """Return some of several examples.

    Args:
        rows: the examples.
        order: the numbers of those to return, int64 `(k,)`.
    """
    return jax.tree.map(lambda leaf: leaf.take(order) if _is_ragged(leaf) else leaf[order], rows)


def split_rows(rows: Any) -> list[Any]:
    """Return a list of examples, each a pytree of arrays and numbers."""
    leaves, structure = jax.tree.flatten(rows)
    columns = [leaf.split() if _is_ragged(leaf) else leaf for leaf in leaves]
    return [structure.unflatten(example) for example in zip(*columns, strict=True)]


def stack_rows(
    examples: Sequence[Any],
    where: Callable[[], str],
    check: Callable[[str, Sequence[np.ndarray]], list[np.ndarray]] | None = None,
) -> Any:
    """Return examples as one pytree; leaves of unequal lengths as `Ragged`.

    Args:
        examples: pytrees of one structure, of arrays, numbers and strings; a list is an array.
        where: says what they come from, for an error.
        check: called with the path of a leaf and its array in each example; returns arrays of one
            dtype, or raises.

    Raises:
        DataError: their structures, or shapes besides the first axis, differ.
    """
    structure = jax.tree.structure(examples[0], is_leaf=_is_list)
    rows: list[list[Any]] = []
    for example in examples:
        leaves, other = jax.tree.flatten(example, is_leaf=_is_list)
        if other != structure:
            raise DataError(
                f"{where()}: examples have several structures, {structure} and {other}. Return the "
                "same keys for every example"
            )
        rows.append(leaves)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(examples[0], is_leaf=_is_list)]
    stacked = [
        _stack(path, column, where, check)
        for path, column in zip(paths, zip(*rows, strict=True), strict=True)
    ]
    return structure.unflatten(stacked)


def has_arrays(example: Any) -> bool:
    """Return whether an example holds anything: None and empty containers do not."""
    return bool(jax.tree.leaves(example, is_leaf=_is_list))


def find_dtypes(rows: Any, where: str) -> dict[str, np.dtype]:
    """Return the dtype of each leaf by its path; strings of any length have one dtype.

    Args:
        rows: examples, or one of them.
        where: what they come from, for an error.

    Raises:
        DataError: a leaf cannot be an array, or is an empty list.
    """
    leaves = jax.tree_util.tree_leaves_with_path(rows, is_leaf=_is_list)
    return {keystr(path): _get_dtype(keystr(path), leaf, where) for path, leaf in leaves}


def simplify_dtype(dtype: np.dtype) -> np.dtype:
    """Return a dtype without the length of its strings, which says nothing of their kind.

    Args:
        dtype: of an array.
    """
    return np.dtype(dtype.kind) if dtype.kind in "US" else dtype


def merge_rows(parts: Sequence[Any], orders: Sequence[np.ndarray], where: Callable[[], str]) -> Any:
    """Return the examples of several parts in their places.

    Args:
        parts: examples of one structure.
        orders: for each part, the places of its examples, int64.
        where: says what they come from, for an error.

    Raises:
        DataError: the structures of the parts differ.
    """
    if len(parts) == 1:
        return parts[0]
    places = np.argsort(np.concatenate(orders))
    structures = {jax.tree.structure(part) for part in parts}
    if len(structures) > 1:
        raise DataError(
            f"{where()}: the examples of several sources have several structures: "
            f"{', '.join(sorted(map(str, structures)))}. Map them to one"
        )
    return take_rows(_concatenate(parts, where), places)


def _get_dtype(path: str, leaf: Any, where: str) -> np.dtype:
    try:
        array = leaf.values if isinstance(leaf, Ragged) else np.asarray(leaf)
    except ValueError as error:
        raise DataError(f"{where}: data{path} cannot be an array: {error}") from error
    if isinstance(leaf, list) and not array.size:
        raise DataError(f"{where}: data{path} is an empty list, which has no dtype")
    return simplify_dtype(array.dtype)


def _is_list(node: Any) -> bool:
    return isinstance(node, list)


def _is_ragged(leaf: Any) -> bool:
    return isinstance(leaf, Ragged)


def _stack(
    path: Any,
    values: Sequence[Any],
    where: Callable[[], str],
    check: Callable[[str, Sequence[np.ndarray]], list[np.ndarray]] | None,
) -> Any:
    try:
        arrays = [np.asarray(value) for value in values]
    except ValueError as error:
        raise DataError(f"{where()}: data{keystr(path)} cannot be an array: {error}") from error
    if any(isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value) for value in values):
        raise DataError(f"{where()}: data{keystr(path)} {MASKED}")
    if check is not None:
        arrays = check(keystr(path), arrays)
    shapes = {array.shape for array in arrays}
    if len(shapes) == 1:
        return np.stack(arrays)
    if any(not shape for shape in shapes) or len({shape[1:] for shape in shapes}) > 1:
        raise DataError(
            f"{where()}: data{keystr(path)} has several shapes, such as "
            f"{' and '.join(map(str, sorted(shapes)[:2]))}. Only the first axis may differ; map "
            "them to one shape"
        )
    lengths = np.array([len(array) for array in arrays], np.int64)
    # An empty list says nothing of a dtype.
    full = [array for array in arrays if array.size] or arrays[:1]
    return Ragged(np.concatenate(full), lengths)


def _concatenate(parts: Sequence[Any], where: Callable[[], str]) -> Any:
    def join(path: Any, *leaves: Any) -> Any:
        if not any(map(_is_ragged, leaves)):
            if len({leaf.shape[1:] for leaf in leaves}) == 1:
                return np.concatenate(leaves)
            if any(leaf.ndim < 2 for leaf in leaves):
                raise DataError(
                    f"{where()}: data{keystr(path)} is an array in some sources and a number in "
                    "others. Map them to one shape"
                )
        leaves = tuple(as_ragged(leaf) for leaf in leaves)
        # Lists of lists that are all empty do not say how long the inner ones are.
        shapes = {leaf.values.shape[1:] for leaf in leaves if leaf.values.size}
        if len(shapes) > 1:
            raise DataError(
                f"{where()}: data{keystr(path)} has several shapes besides the first axis: "
                f"{' and '.join(map(str, sorted(shapes)))}. Map them to one"
            )
        values = [leaf.values for leaf in leaves if leaf.values.size] or [leaves[0].values]
        return Ragged(np.concatenate(values), np.concatenate([leaf.lengths for leaf in leaves]))

    return jax.tree_util.tree_map_with_path(join, *parts)
