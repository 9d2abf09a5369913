"""The batches of one dispatch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fulgurite._src.tree.specs import put_beside


class BatchBuffer:
    """The batches of one dispatch, each copied as it comes.

    Args:
        size: the largest number of batches.
        is_stacked: whether the batches lie along a new first axis.
    """

    def __init__(self, size: int, *, is_stacked: bool) -> None:
        self._size = size
        self._is_stacked = is_stacked
        self._treedef: Any = None
        self._leaves: list[Any] = []
        self.first: Any = None
        self.count = 0

    def add(self, batch: Any) -> None:
        """Add a batch of the shapes of those before."""
        leaves, treedef = jax.tree.flatten(batch)
        if self.count == 0:
            self.first = batch
            self._treedef = treedef
            self._leaves = [self._allocate(leaf) for leaf in leaves]
        for place, leaf in zip(self._leaves, leaves, strict=True):
            if isinstance(place, list):
                place.append(leaf)
            else:
                place[self.count] = leaf
        self.count += 1

    def get_batches(self) -> Any:
        """Return the one batch, or all along a new first axis. What is past their number is never
        read."""
        if not self._is_stacked:
            return self.first
        stacked = [self._stack(place) for place in self._leaves]
        return jax.tree.unflatten(self._treedef, stacked)

    def _allocate(self, leaf: Any) -> Any:
        """Return a place for one leaf of all batches; a list, for those on the device."""
        if not self._is_stacked or isinstance(leaf, jax.Array):
            return []
        # In the dtype of the device: to cast what is past the last batch might overflow.
        return np.empty((self._size, *leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype))

    def _stack(self, place: Any) -> Any:
        if isinstance(place, list):
            # Arrays that were put on different devices cannot be stacked.
            place = put_beside(place, place[0])
            return jnp.stack([*place, *[place[-1]] * (self._size - len(place))])
        return place
