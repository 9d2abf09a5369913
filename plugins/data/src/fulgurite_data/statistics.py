"""Mean and standard deviation of a dataset, in one exact pass."""

import math
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from fulgurite.errors import ConfigurationError, DataError, check_one_of

from fulgurite_data.content import Mark
from fulgurite_data.dataset import Dataset
from fulgurite_data.dtypes import is_real
from fulgurite_data.examples import Ragged
from fulgurite_data.nodes import Node, check_fixed, iter_chunks
from fulgurite_data.normalizing import Statistics
from fulgurite_data.passes import start_pass
from fulgurite_data.plans import check_seen

Per = Literal["channel", "element", "array"]
_CHUNK = 256
"""Examples that are read at once."""


def compute_statistics(
    dataset: Dataset,
    *names: str,
    per: Per = "channel",
    path: str | PathLike[str] | None = None,
) -> Statistics:
    """Return mean and standard deviation of arrays, in one pass over all examples.

    Each part of the data is summed up in float64 around its own mean, and the parts are put
    together (Chan, Golub and LeVeque, 1979), so that nothing is lost to cancellation.

    Args:
        dataset: dictionaries of arrays, the same in each epoch.
        names: of the arrays.
        per: `channel`: a number for each place of the last axis, or one where there is no axis, or
            but one whose length differs; `element`: for each place of the array; `array`: one.
        path: a file of JSON to save them in. If it is there already, they are read from it, and
            nothing is computed.

    Raises:
        DataError: the file is of another dataset, an array holds NaN, or there are no numbers.
        ConfigurationError: examples have several shapes that share no places; or there is a path,
            and a function holds what cannot be looked into.
    """
    check_one_of(per, get_args(Per), "compute_statistics: per")
    node = dataset.node
    check_fixed(node, "compute_statistics", "call it before shuffle() and map(rng=True)")
    if not names:
        raise ConfigurationError("compute_statistics: name at least one array")
    line = f"compute_statistics({', '.join(names)}, {per})"
    whole = node.identify().extend(line, Mark())
    identity = whole.list_for_file()
    if path is not None:
        where = f"compute_statistics, path={str(path)!r}"
        check_seen(whole, where, "leave path= out, and use Statistics.save and Statistics.load")
        if Path(path).exists():
            return _load(path, identity)
    moments = _sum_up(node, names, per)
    statistics = Statistics(
        {name: moment.mean for name, moment in moments.items()},
        {name: np.sqrt(moment.squares / moment.count) for name, moment in moments.items()},
        {name: moment.count for name, moment in moments.items()},
        identity,
    )
    if path is not None:
        statistics.save(path)
    return statistics


class _Moments:
    """Mean, and sum of squared differences to it, of numbers that come in parts."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = np.zeros(())
        self.squares = np.zeros(())

    def add(self, numbers: np.ndarray) -> None:
        """Add a part, float64 `(numbers, ...)`."""
        if len(numbers):
            self.merge(len(numbers), *_measure(numbers))

    def merge(self, count: int, mean: np.ndarray, squares: np.ndarray) -> None:
        """Add the moments of other numbers.

        Args:
            count: how many these are.
            mean: of them.
            squares: the sum of their squared differences to it.
        """
        total = self.count + count
        delta = mean - self.mean
        self.squares = self.squares + squares + delta**2 * (self.count * count / total)
        self.mean = self.mean + delta * (count / total)
        self.count = total

    def merge_places(self, other: "_Moments") -> None:
        """Add the numbers of all places of an array of one axis.

        Args:
            other: with moments for each of these places.
        """
        mean, squares = _measure(np.atleast_1d(other.mean))
        squares = other.squares.sum() + other.count * squares
        self.merge(other.count * other.mean.size, mean, squares)


def _measure(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean along the first axis, and the sum of squared differences to it."""
    mean = numbers.mean(0)
    squares = ((numbers - mean) ** 2).sum(0)
    # A mean of equal numbers is rounded, and the rest would be divided by itself.
    is_constant = (numbers == numbers[0]).all(0)
    return np.where(is_constant, numbers[0], mean), np.where(is_constant, 0, squares)


def _load(path: str | PathLike[str], identity: tuple[str, ...]) -> Statistics:
    saved = Statistics.load(path)
    if saved.identity != identity:
        raise DataError(
            f"{path} has the statistics of {'.'.join(saved.identity)}, not of "
            f"{'.'.join(identity)}: remove it, or choose another path"
        )
    return saved


def _sum_up(node: Node, names: Sequence[str], per: Per) -> dict[str, _Moments]:
    """Return the moments of arrays by name."""
    # By the shape of what a mean is of: that of a sequence depends on which lengths a part has.
    parts: dict[str, dict[tuple[int, ...], _Moments]] = {name: {} for name in names}
    at = start_pass(0)
    for indices in iter_chunks(node.length, _CHUNK):
        rows = node.read(indices, at)
        for name in parts:
            numbers = _get_numbers(rows, name, node, per)
            parts[name].setdefault(numbers.shape[1:], _Moments()).add(numbers)
    moments = {name: _join(name, by_shape, node, per) for name, by_shape in parts.items()}
    for name, moment in moments.items():
        if not moment.count or not moment.mean.size:
            raise DataError(
                f"compute_statistics: {name} of {'.'.join(node.stages)} has no numbers: there are "
                f"{node.length} examples"
            )
        if not np.isfinite(moment.mean).all():
            raise DataError(f"compute_statistics: {name} holds a number that is not finite")
        if not np.isfinite(moment.squares).all():
            raise DataError(
                f"compute_statistics: the squares of {name} are beyond float64: scale it by map()"
            )
    return moments


def _join(name: str, by_shape: dict[tuple[int, ...], _Moments], node: Node, per: Per) -> _Moments:
    """Return the moments of all parts of an array; of sequences whose lengths differ, which have
    no places in common, those of all their numbers.

    Args:
        name: of the array.
        by_shape: the moments by the shape of each.
        node: what the examples are of.
        per: as of `compute_statistics`.
    """
    if len(by_shape) < 2:
        return next(iter(by_shape.values()), _Moments())
    leaf = node.read(np.zeros(1, np.int64), start_pass(0))[name]
    num_axes = leaf.values.ndim if isinstance(leaf, Ragged) else leaf.ndim - 1
    if per == "element" or num_axes > 1:
        raise ConfigurationError(
            f"compute_statistics: examples of {name} have several shapes and therefore no mean "
            f"per {per}: choose per='array', or map() them to one shape"
        )
    joined = _Moments()
    for moment in by_shape.values():
        if moment.count and moment.mean.size:
            joined.merge_places(moment)
    return joined


def _get_numbers(rows: Any, name: str, node: Node, per: Per) -> np.ndarray:
    """Return the numbers that one mean is of along the first axis, float64."""
    if not isinstance(rows, dict) or name not in rows:
        raise ConfigurationError(f"compute_statistics: {node.stages[-1]} has no array {name!r}")
    leaf = rows[name]
    is_ragged = isinstance(leaf, Ragged)
    if is_ragged:
        leaf = leaf.values
    if is_ragged and per == "element":
        raise ConfigurationError(
            f"compute_statistics: examples of {name} have unequal lengths and therefore no mean "
            "of each element: choose per='channel' or 'array'"
        )
    if not is_real(leaf.dtype):
        raise ConfigurationError(
            f"compute_statistics: {name} of {node.stages[-1]} is {leaf.dtype}, and a mean is of "
            "real numbers: map() it to some, such as real and imaginary part"
        )
    numbers = leaf.astype(np.float64)
    if per == "element" or numbers.ndim == 1:
        return numbers
    if per == "array":
        return numbers.reshape(-1)
    return numbers.reshape(math.prod(numbers.shape[:-1]), numbers.shape[-1])
