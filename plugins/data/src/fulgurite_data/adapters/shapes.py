"""Whether the examples of a batch have one shape."""

from typing import TypeVar

import jax
import numpy as np
from fulgurite.errors import DataError
from jax.tree_util import keystr

T = TypeVar("T")


def check_shapes(batch: T) -> T:
    """Return a batch; raise `DataError` if an array holds examples of several shapes, which NumPy
    has as an array of arrays.

    Args:
        batch: a pytree of NumPy arrays.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        is_nested = isinstance(leaf, np.ndarray) and leaf.dtype == object and leaf.size
        if is_nested and isinstance(leaf.flat[0], np.ndarray | list):
            shapes = sorted({np.shape(example) for example in leaf.flat})
            raise DataError(
                f"data{keystr(path)} has examples of the shapes {str(shapes[:4])[1:-1]}: a batch "
                "holds arrays of one shape. Pad them to one length, bucket them by length, or pack "
                "them"
            )
    return batch
