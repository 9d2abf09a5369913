"""Indices of operations that are outside of the array that is read or written."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn


@dataclass(frozen=True)
class Outside:
    """An index that is outside of an array.

    Attributes:
        index: the index.
        axis: of the array.
        position: where it stands among the indices; empty if there is a single one.
    """

    index: int
    axis: int
    position: tuple[int, ...]


def find_outside(equation: JaxprEqn, arrays: Sequence[Any]) -> Outside | None:
    """Return the first index of an operation that is outside of its array; None without one.

    Args:
        equation: any operation.
        arrays: what it receives.
    """
    name = equation.primitive.name
    if name == "gather":
        numbers = equation.params["dimension_numbers"]
        sizes = equation.params["slice_sizes"]
        return _look(arrays[0].shape, arrays[1], numbers.start_index_map, sizes)
    if name.startswith("scatter"):
        numbers = equation.params["dimension_numbers"]
        sizes = _get_window_sizes(numbers, arrays[0].shape, arrays[2].shape)
        return _look(arrays[0].shape, arrays[1], numbers.scatter_dims_to_operand_dims, sizes)
    if name.startswith("dynamic_") and arrays[0].ndim == 0:
        return None  # without an axis there is no index
    if name == "dynamic_slice":
        shape = arrays[0].shape
        starts = np.stack([np.asarray(start) for start in arrays[1 : 1 + len(shape)]])
        return _look(shape, starts, range(len(shape)), equation.params["slice_sizes"])
    if name == "dynamic_update_slice":
        shape = arrays[0].shape
        starts = np.stack([np.asarray(start) for start in arrays[2 : 2 + len(shape)]])
        return _look(shape, starts, range(len(shape)), arrays[1].shape)
    return None


def _look(
    shape: Sequence[int], indices: Any, axes: Sequence[int], sizes: Sequence[int]
) -> Outside | None:
    """Return the first index from which a slice does not fit into an array.

    Args:
        shape: of the array.
        indices: integers (..., axes), where slices begin.
        axes: of the array, in the order of the last axis of the indices.
        sizes: of the slices, by axis of the array.
    """
    indices = np.asarray(indices)
    if indices.size == 0:
        return None
    limits = np.asarray([shape[axis] - sizes[axis] for axis in axes])
    is_outside = (indices < 0) | (indices > limits)
    if not is_outside.any():
        return None
    *position, column = np.argwhere(is_outside)[0].tolist()
    index = int(indices[(*position, column)])
    return Outside(index, axes[column], tuple(position))


def _get_window_sizes(numbers: Any, shape: Sequence[int], update_shape: Sequence[int]) -> list[int]:
    """Return how much a scatter writes along each axis of its array.

    Args:
        numbers: the dimension numbers of the scatter.
        shape: of the array.
        update_shape: of what is written.
    """
    left_out = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = iter(numbers.update_window_dims)
    return [1 if axis in left_out else update_shape[next(windows)] for axis in range(len(shape))]
