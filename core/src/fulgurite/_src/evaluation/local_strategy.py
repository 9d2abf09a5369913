"""What one of several processes computes alone, without waiting for the others."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from fulgurite._src.sharding import SingleDevice


class LocalStrategy(SingleDevice):
    """Computes on the first device of this process in the mesh, as its part of the mesh of all.

    Args:
        mesh: of all processes, whose axes traced code may name; None without one.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        super().__init__()
        self._local_mesh = None if mesh is None else _make_local_mesh(mesh)

    def mesh_context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._local_mesh is None else jax.set_mesh(self._local_mesh)

    def put_on_mesh(self, tree: PyTree) -> PyTree:
        return jax.tree.map(
            lambda leaf: leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf, tree
        )


def has_whole_arrays(tree: PyTree) -> bool:
    """Return whether each device of this process has the whole of every array."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return all(leaf.is_fully_replicated for leaf in leaves)


def _make_local_mesh(mesh: Mesh) -> Mesh:
    # Of the mesh, because `put_on_mesh` takes the parts that lie there.
    device = np.array(mesh.local_devices[:1]).reshape((1,) * len(mesh.axis_names))
    return Mesh(device, mesh.axis_names, axis_types=mesh.axis_types)
