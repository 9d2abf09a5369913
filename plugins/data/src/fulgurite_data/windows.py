"""Windows over consecutive examples."""

from typing import Any

import jax
import numpy as np
from fulgurite.errors import ConfigurationError, DataError
from jax.tree_util import keystr

from fulgurite_data.examples import Ragged
from fulgurite_data.indexing import ENDLESS
from fulgurite_data.nodes import Node
from fulgurite_data.passes import Pass


class Windowed(Node):
    """Windows of consecutive examples, stacked along an axis in front.

    Args:
        parent: the examples.
        size: how many are in a window.
        stride: how many examples a window begins after the one before.
    """

    def __init__(self, parent: Node, size: int, stride: int) -> None:
        self.follow(parent, f"window({size}, stride={stride})")
        if parent.length >= ENDLESS:
            raise ConfigurationError(
                f"window: {parent.stages[-1]} never ends: put repeat() after window()"
            )
        self.parent = parent
        self.size = size
        self.stride = stride
        self.length = max((parent.length - size) // stride + 1, 0)
        if not self.length:
            raise DataError(
                f"{parent.length} examples do not fill a window of {size} ({'.'.join(self.stages)})"
            )

    def read(self, indices: np.ndarray, at: Pass) -> Any:
        numbers = indices[:, None] * self.stride + np.arange(self.size)
        rows = self.parent.read(numbers.reshape(-1), at)
        return jax.tree_util.tree_map_with_path(self._fold, rows)

    def trace(self, index: int, at: Pass) -> str:
        return f"the window from {self.parent.trace(index * self.stride, at)} on"

    def _fold(self, path: Any, leaf: Any) -> np.ndarray:
        if isinstance(leaf, Ragged):
            raise DataError(
                f"{self.stages[-1]}: data{keystr(path)} has examples of unequal lengths, which do "
                "not make windows. Cut them into rows: pack(length, how='split')"
            )
        return leaf.reshape(-1, self.size, *leaf.shape[1:])
