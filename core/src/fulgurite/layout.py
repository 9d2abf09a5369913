"""How a train state crosses `jax.jit`: as a flat list of arrays, never as a tree of modules.

Flattening a tree of Equinox modules in Python, at every call, costs more than many small steps themselves. And each
independent scalar among a step's results costs a small step on a CPU up to half of its time, so all scalars travel
packed into one vector a dtype. The packed vectors are not donated: they stay readable while the next steps run.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from fulgurite.errors import StateError
from fulgurite.packing import Packing, Vectors
from fulgurite.paths import from_keys
from fulgurite.state import TrainState, check_not_consumed


class Flat(NamedTuple):
    """A train state between two steps: arrays that the next step donates, and packed scalars that it does not."""

    arrays: list[Array]
    packed: Vectors


class Layout:
    """The order, shapes and dtypes of a state's leaves, and everything in it that is not an array.

    Arguments:
        state: a train state, of arrays or of `jax.ShapeDtypeStruct`s.
    """

    def __init__(self, state: TrainState) -> None:
        keyed, self.treedef = jax.tree_util.tree_flatten_with_path(state)
        self.paths = [str(from_keys(path)) for path, _ in keyed]
        self.leaves = [_struct(leaf) for _, leaf in keyed]
        is_array = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in self.leaves]
        packed = [ok and _packed(path, leaf) for ok, path, leaf in zip(is_array, self.paths, self.leaves, strict=True)]
        self.arrays = [index for index, ok in enumerate(is_array) if ok and not packed[index]]
        self.scalars = [index for index, yes in enumerate(packed) if yes]
        self.packing = Packing([self.leaves[index] for index in self.scalars])
        self._parts = {name: (jax.tree.structure(getattr(state, name)), self._within(name)) for name in ("window", "health")}
        self._pack = jax.jit(self.packing.pack)
        self._unpack = jax.jit(self.packing.unpack)
        self.key = self.treedef, tuple(map(hashable, self.leaves))

    def split(self, state: TrainState) -> Flat:
        """The flat form of a state, outside of a trace. A state that was consumed is an error."""
        leaves = self._leaves(state)
        if any(leaves[index].is_deleted() for index in self.arrays):
            check_not_consumed(state)
        return Flat([_raw(leaves[index]) for index in self.arrays], self._pack([leaves[i] for i in self.scalars]))

    def join(self, flat: Flat) -> TrainState:
        """The state in its natural form, outside of a trace."""
        return self._joined(flat.arrays, self._unpack(flat.packed))

    def split_traced(self, state: TrainState) -> Flat:
        """`split`, inside a trace."""
        leaves = self._leaves(state)
        return Flat([_raw(leaves[index]) for index in self.arrays], self.packing.pack([leaves[i] for i in self.scalars]))

    def join_traced(self, flat: Flat) -> TrainState:
        """`join`, inside a trace."""
        return self._joined(flat.arrays, self.packing.unpack(flat.packed))

    def part(self, packed: Vectors, name: str) -> Any:
        """The state's `window` or `health`, all of which is packed; of NumPy arrays where the vectors are."""
        values = self.packing.unpack(packed)
        structure, places = self._parts[name]
        return jax.tree.unflatten(structure, [values[place] for place in places])

    def with_part(self, packed: Vectors, name: str, part: Any) -> Vectors:
        """The vectors with another `window` or `health`. Traced."""
        values = self.packing.unpack(packed)
        for place, leaf in zip(self._parts[name][1], jax.tree.leaves(part), strict=True):
            values[place] = leaf
        return self.packing.pack(values)

    def _within(self, name: str) -> list[int]:
        return [place for place, index in enumerate(self.scalars) if self.paths[index].startswith(f"{name}.")]

    def _leaves(self, state: TrainState) -> list[Any]:
        leaves, treedef = jax.tree.flatten(state)
        if treedef != self.treedef:
            raise StateError("this train state has another structure than the module and plugins of this engine give it")
        return leaves

    def _joined(self, arrays: list[Array], scalars: list[Array]) -> TrainState:
        leaves = list(self.leaves)
        for index, array in zip(self.arrays, arrays, strict=True):
            leaves[index] = _typed(array, self.leaves[index])
        for index, scalar in zip(self.scalars, scalars, strict=True):
            leaves[index] = scalar
        return jax.tree.unflatten(self.treedef, leaves)


def _packed(path: str, leaf: jax.ShapeDtypeStruct) -> bool:
    """Scalars, and the whole of window and health, which are read while later steps run."""
    return not _is_key(leaf) and (leaf.shape == () or path.startswith(("window.", "health.")))


def _struct(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if eqx.is_array(leaf) else leaf


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _raw(leaf: Array) -> Array:
    """A typed key is no plain array to jit's fast path; its data is."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _typed(leaf: Array, struct: Any) -> Array:
    if not _is_key(struct):
        return leaf
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), struct)
    return jax.random.wrap_key_data(leaf, impl=found[0])


def hashable(leaf: Any) -> Any:
    """Something that tells leaves apart in a key: shape and dtype of an array, else value or identity."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, str(leaf.dtype)
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return type(leaf), leaf
