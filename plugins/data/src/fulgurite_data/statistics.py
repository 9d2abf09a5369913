"""Mean and standard deviation of a dataset, in one exact pass."""

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
        per: `channel`: a number for each place of the last axis, or one where there is no axis;
            `element`: for each place of the array; `array`: one.
        path: a file of JSON to save them in. If it is there already, they are read from it, and
            nothing is computed.

    Raises:
        DataError: the file is of another dataset, an array holds NaN, or there are no numbers.
        ConfigurationError: there is a path, and a function holds what cannot be looked into.
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
        if not len(numbers):
            return
        mean = numbers.mean(0)
        squares = ((numbers - mean) ** 2).sum(0)
        total = self.count + len(numbers)
        delta = mean - self.mean
        self.squares = self.squares + squares + delta**2 * (self.count * len(numbers) / total)
        self.mean = self.mean + delta * (len(numbers) / total)
        self.count = total


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
    moments = {name: _Moments() for name in names}
    at = start_pass(0)
    for indices in iter_chunks(node.length, _CHUNK):
        rows = node.read(indices, at)
        for name in names:
            moments[name].add(_get_numbers(rows, name, node, per))
    for name, moment in moments.items():
        if not moment.count:
            raise DataError(
                f"compute_statistics: {name} of {'.'.join(node.stages)} has no numbers: there are "
                f"{node.length} examples"
            )
        if not np.isfinite(moment.mean).all():
            raise DataError(f"compute_statistics: {name} holds a number that is not finite")
    return moments


def _get_numbers(rows: Any, name: str, node: Node, per: Per) -> np.ndarray:
    """Return the numbers that one mean is of along the first axis, float64."""
    if not isinstance(rows, dict) or name not in rows:
        raise ConfigurationError(f"compute_statistics: {node.stages[-1]} has no array {name!r}")
    leaf = rows[name]
    if isinstance(leaf, Ragged):
        if per == "element":
            raise ConfigurationError(
                f"compute_statistics: examples of {name} have unequal lengths, so there is no mean "
                "of each element: choose per='channel' or 'array'"
            )
        leaf = leaf.values if leaf.values.ndim > 1 else leaf.values[:, None]
    if not is_real(leaf.dtype):
        raise ConfigurationError(
            f"compute_statistics: {name} of {node.stages[-1]} is {leaf.dtype}, and a mean is of "
            "real numbers: map() it to some, such as real and imaginary part"
        )
    numbers = leaf.astype(np.float64)
    if per == "element" or numbers.ndim == 1:
        return numbers
    return numbers.reshape(-1) if per == "array" else numbers.reshape(-1, numbers.shape[-1])
