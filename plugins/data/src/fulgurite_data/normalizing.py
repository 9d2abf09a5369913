"""Mean and standard deviation of arrays, and examples that are normalized by them."""

import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from fulgurite.errors import ConfigurationError, DataError

from fulgurite_data.dtypes import is_real
from fulgurite_data.examples import Ragged
from fulgurite_data.identity import hash_text
from fulgurite_data.nodes import Node
from fulgurite_data.passes import Pass
from fulgurite_data.writing import write_whole


@dataclass(frozen=True, eq=False)
class Statistics:
    """Mean and standard deviation of arrays over a dataset.

    Example:
        from fulgurite_data import Arrays, compute_statistics

        images = Arrays({"image": np.ones((10, 8, 8, 3), np.uint8), "label": np.arange(10)})
        statistics = compute_statistics(images, "image")
        statistics.mean["image"].shape  # (3,)

    Attributes:
        mean: by the name of the array, float64, of a shape that broadcasts with an example.
        std: likewise; of all numbers, so divided by their count.
        count: how many numbers each mean is of, by name.
        identity: of the dataset.

    Raises:
        DataError: a mean has no deviation, or a number is not finite, or a deviation negative.
    """

    mean: dict[str, np.ndarray]
    std: dict[str, np.ndarray]
    count: dict[str, int]
    identity: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("mean", "std"):
            numbers = {k: np.asarray(v, np.float64) for k, v in getattr(self, field).items()}
            object.__setattr__(self, field, numbers)
        if {*self.mean} != {*self.std}:
            raise DataError(
                f"Statistics: means are of {', '.join(self.mean)}, and deviations of "
                f"{', '.join(self.std)}: give both for each array"
            )
        for name, std in self.std.items():
            mean = self.mean[name]
            if not np.isfinite(mean).all() or not np.isfinite(std).all() or (std < 0).any():
                raise DataError(
                    f"Statistics: the mean of {name} is {mean}, and its deviation {std}: both must "
                    "be finite, and a deviation is not negative"
                )

    def save(self, path: str | PathLike[str]) -> None:
        """Write them to a file of JSON, from which `load` returns the same numbers.

        Args:
            path: of the file.
        """
        content = {
            "identity": list(self.identity),
            "count": self.count,
            "mean": {name: value.tolist() for name, value in self.mean.items()},
            "std": {name: value.tolist() for name, value in self.std.items()},
        }
        with write_whole(Path(path)) as file:
            file.write(json.dumps(content, indent=1).encode())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Statistics":
        """Return what `save` wrote.

        Args:
            path: of the file.

        Raises:
            DataError: it does not hold statistics.
        """
        try:
            content = json.loads(Path(path).read_text())
            return cls(
                {name: np.array(value, np.float64) for name, value in content["mean"].items()},
                {name: np.array(value, np.float64) for name, value in content["std"].items()},
                {name: int(value) for name, value in content["count"].items()},
                tuple(content["identity"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} does not hold statistics: {error!r}") from error


class Normalized(Node):
    """The examples of another node, with some arrays normalized.

    Args:
        parent: the other node.
        statistics: of the arrays.
    """

    def __init__(self, parent: Node, statistics: Statistics) -> None:
        mean, std = statistics.mean, statistics.std
        digest = hash_text(repr([(name, mean[name].tolist(), std[name].tolist()) for name in mean]))
        self.follow(parent, f"normalize({', '.join(mean)}, {digest})")
        self.parent = parent
        self.length = parent.length
        self.batch_size = parent.batch_size
        self.mean = mean
        # What does not vary is equal to its mean, and becomes 0.
        self.scale = {name: 1 / np.where(value > 0, value, 1) for name, value in std.items()}

    def read(self, indices: np.ndarray, at: Pass) -> Any:
        rows = self.parent.read(indices, at)
        missing = [name for name in self.mean if not isinstance(rows, dict) or name not in rows]
        if missing:
            raise ConfigurationError(
                f"{self.stages[-1]}: examples have no array {missing[0]!r}: normalize before map()"
            )
        changed = {name: self._normalize(name, rows[name]) for name in self.mean}
        return {**rows, **changed}

    def read_lengths(self, indices: np.ndarray, at: Pass, leaf: str | None) -> np.ndarray:
        return self.parent.read_lengths(indices, at, leaf)

    def trace(self, index: int, at: Pass) -> str:
        return self.parent.trace(index, at)

    def _normalize(self, name: str, leaf: Any) -> Any:
        if isinstance(leaf, Ragged):
            return Ragged(self._normalize(name, leaf.values), leaf.lengths)
        if not is_real(leaf.dtype):
            raise ConfigurationError(
                f"{self.stages[-1]}: data[{name!r}] is {leaf.dtype}, and normalized are real "
                "numbers: map() it to some, such as real and imaginary part"
            )
        mean = self.mean[name]
        size = leaf.shape[1:]
        if not _is_broadcast(mean.shape, size):
            raise ConfigurationError(
                f"{self.stages[-1]}: data[{name!r}] has examples of shape {size}, and its "
                f"statistics are of shape {mean.shape}: compute them of data like this one"
            )
        return ((leaf - mean) * self.scale[name]).astype(np.float32)


def _is_broadcast(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Return whether an array of one shape is broadcast to another one, by the rule of NumPy."""
    ends = to[len(to) - len(shape) :]
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(shape, ends, strict=True))
