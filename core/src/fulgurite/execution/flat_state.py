"""How a train state crosses `jax.jit`: as a flat list of arrays, never as a tree of modules.

Flattening a tree of Equinox modules in Python at every call costs more than many small steps
themselves. And each scalar among a step's results costs a small step on a CPU up to half of its
time, so all scalars travel packed into one vector. The packed vectors are not donated: they stay
readable while the next steps run.

Each array that goes in and out costs the host 2 to 5 µs, more than a CPU needs to copy a small one.
So where there are many small arrays they travel end to end, too, in vectors that are donated. A
step may then round otherwise than one written by hand, because XLA fuses other operations; a few
arrays stay apart, where there is nothing to gain.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from fulgurite.errors import StateError
from fulgurite.training.state import (
    TrainState,
    check_not_consumed,
    deduplicate_arrays,
    tree_signature,
)
from fulgurite.tree.paths import from_keys
from fulgurite.tree.typecheck import shape_spec

Vectors = tuple[Array | np.ndarray, ...]
Part = tuple[jax.tree_util.PyTreeDef, tuple[int, ...]]
# Elements of a small array by platform, and how many arrays are many: 588 end to end took two
# thirds of the time, 18 gained nothing (two cores, jax 0.10.2).
_SMALL = {"cpu": 4096}
_MANY = 100


class VectorPacking:
    """The place of each of a list of arrays in few vectors. Numbers of 16, 32 and 64 bits travel as
    integers of so many bits, booleans among those of 32, anything else by its dtype. Those that
    pack alike are equal, for `jax.jit`.

    Args:
        structs: the shape and dtype of each array.
        parts: trees that some of the arrays are the leaves of, by name.
    """

    def __init__(self, structs: Sequence[Any], parts: Mapping[str, Part] | None = None) -> None:
        self._structs, self._parts = list(structs), dict(parts or {})
        ends: dict[Any, int] = {}
        self._offsets: list[tuple[int, int]] = []
        for struct in self._structs:
            start = ends.setdefault(_vector_dtype(struct.dtype), 0)
            ends[_vector_dtype(struct.dtype)] = start + struct.size
            self._offsets.append((list(ends).index(_vector_dtype(struct.dtype)), start))
        self.dtypes, self._hash = list(ends), hash(tuple(self._structs))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VectorPacking) and (self._structs, self._parts) == (
            other._structs,
            other._parts,
        )

    def __hash__(self) -> int:
        return self._hash

    def pack(self, values: Sequence[Array]) -> Vectors:
        """The vectors that hold `values`."""
        groups: list[list[Array]] = [[] for _ in self.dtypes]
        for value, (vector, _) in zip(values, self._offsets, strict=True):
            groups[vector].append(_bitcast(jnp.ravel(value), self.dtypes[vector]))
        return tuple(map(_concatenate, groups))

    def unpack(self, vectors: Sequence[Any]) -> list[Any]:
        """The values again, jax arrays of jax vectors and NumPy arrays of NumPy vectors."""
        return [
            _bitcast(vectors[vector][start : start + struct.size], struct.dtype).reshape(
                struct.shape
            )
            for struct, (vector, start) in zip(self._structs, self._offsets, strict=True)
        ]

    def get_subtree(self, vectors: Vectors, name: str) -> Any:
        """One of the trees; of NumPy arrays if the vectors are."""
        values, (treedef, places) = self.unpack(vectors), self._parts[name]
        return jax.tree.unflatten(treedef, [values[place] for place in places])

    def set_subtree(self, vectors: Vectors, name: str, part: Any) -> Vectors:
        """The vectors with another one of the trees."""
        values = self.unpack(vectors)
        for place, leaf in zip(self._parts[name][1], jax.tree.leaves(part), strict=True):
            values[place] = leaf
        return self.pack(values)


# Without shardings, the layouts of all engines share them.
_pack, _unpack = (
    jax.jit(function, static_argnums=0) for function in (VectorPacking.pack, VectorPacking.unpack)
)


class FlatState(NamedTuple):
    """A train state between two steps: arrays that the next step donates, many small ones end to
    end before the others, and packed scalars that it does not donate."""

    arrays: list[Any]
    packed: tuple[Any, ...]


class StateLayout:
    """The order of a state's leaves, and everything in it that is not an array.

    Args:
        state: of arrays or of specs.
        shardings: of each of its arrays, None where they may be anywhere.
    """

    def __init__(self, state: TrainState, shardings: list[NamedSharding] | None = None) -> None:
        keyed, self.treedef = jax.tree_util.tree_flatten_with_path(state)
        paths = [str(from_keys(keys)) for keys, _ in keyed]
        self._leaves = [shape_spec(leaf) if eqx.is_array(leaf) else leaf for _, leaf in keyed]
        self._key = tree_signature(state)
        self._arrays, self._scalars = [], []
        self._places: dict[int, NamedSharding] = {}
        self._whole = (
            None if shardings is None else NamedSharding(shardings[0].mesh, PartitionSpec())
        )
        arrays = [
            index
            for index, leaf in enumerate(self._leaves)
            if isinstance(leaf, jax.ShapeDtypeStruct)
        ]
        if shardings is not None:
            self._places = dict(zip(arrays, shardings, strict=True))
        for index in arrays:
            # Window and health are packed whole, because they are read while later steps run.
            scalar = self._leaves[index].shape == () or paths[index].startswith(
                ("metric_window.", "nonfinite.")
            )
            (self._scalars if scalar else self._arrays).append(index)
        small = [index for index in self._arrays if self._is_small(index)]
        self._small = small if len(small) >= _MANY else []
        self._large = sorted({*self._arrays} - {*self._small})
        self._arrays = [*self._small, *self._large]
        self._impls = {
            index: _impl(self._leaves[index]) for index in arrays if _is_key(self._leaves[index])
        }
        scalars = [self._leaves[index] for index in self._scalars]
        parts: dict[str, Part] = {}
        for name in ("metric_window", "nonfinite"):
            places = tuple(
                place for place, index in enumerate(self._scalars) if paths[index].startswith(name)
            )
            parts[name] = jax.tree.structure(getattr(state, name)), places
        plain = [
            jax.eval_shape(jax.random.key_data, one) if _is_key(one) else one for one in scalars
        ]
        self.packing = VectorPacking(plain, parts)
        self._bundle = VectorPacking([self._leaves[index] for index in self._small])
        self.shardings: FlatState | None = None
        if shardings is not None:
            vectors = [self._whole] * len(self._bundle.dtypes)
            large = [self._places[index] for index in self._large]
            self.shardings = FlatState(
                [*vectors, *large], (self._whole,) * len(self.packing.dtypes)
            )
        self._pack, self._unpack = self._jitted(self.packing, self._scalars)
        self._tie, self._untie = self._jitted(self._bundle, self._small)

    def matches(self, state: TrainState) -> bool:
        """Whether a state has this layout, down to shapes, dtypes and other leaves."""
        return tree_signature(state) == self._key

    def flatten(self, state: TrainState) -> FlatState:
        """The flat form of a state, outside of a trace, with its arrays where they belong, as
        arrays on the device that no other is the same as. A state that was consumed is an error."""
        leaves = self._flattened(state)
        arrays = [leaves[index] for index in self._arrays]
        host = any(issubclass(kind, np.ndarray | np.generic) for kind in {*map(type, leaves)})
        if (
            host
            or len({*map(id, arrays)}) < len(arrays)
            or any(array.is_deleted() for array in arrays)
        ):
            check_not_consumed(state)
            leaves = jax.tree.leaves(state := deduplicate_arrays(state))
        for index, place in self._places.items():
            if leaves[index].sharding != place:
                leaves[index] = jax.device_put(leaves[index], place)
        if self._whole is None and len(leaves[0].sharding.device_set) > 1:
            here = jnp.zeros(()).sharding  # the state is another engine's, on a mesh
            leaves = [jax.device_put(leaf, here) if eqx.is_array(leaf) else leaf for leaf in leaves]
        small = [leaves[index] for index in self._small]
        flat = FlatState(
            [*self._tie(small), *self._raw(leaves, self._large)],
            self._pack(self._raw(leaves, self._scalars)),
        )
        self.delete_copied(state)
        return flat

    def delete_copied(self, state: TrainState) -> None:
        """Lets go of those arrays of a state that a step does not: it went on with copies."""
        leaves = jax.tree.leaves(state) if self._small else []
        for index in self._small:
            leaves[index].delete()

    def unflatten(self, flat: FlatState) -> TrainState:
        """The state in its natural form, outside of a trace. Consumed as `flat` is, and by
        `consume`."""
        ends = len(self._bundle.dtypes)
        return self._joined(
            [*self._untie(flat.arrays[:ends]), *flat.arrays[ends:]], self._unpack(flat.packed)
        )

    def flatten_traced(self, state: TrainState) -> FlatState:
        """`split` inside a trace, its arrays apart."""
        leaves = self._flattened(state)
        return FlatState(
            self._raw(leaves, self._arrays), self.packing.pack(self._raw(leaves, self._scalars))
        )

    def unflatten_traced(self, flat: FlatState) -> TrainState:
        """`join` inside a trace, of arrays that are apart."""
        return self._joined(flat.arrays, self.packing.unpack(flat.packed))

    def tied(self, arrays: Sequence[Array]) -> list[Any]:
        """Arrays that are apart as they cross `jax.jit`, inside a trace."""
        return [*self._bundle.pack(arrays[: len(self._small)]), *arrays[len(self._small) :]]

    def apart(self, arrays: Sequence[Array]) -> list[Array]:
        """Each array for itself again, inside a trace."""
        ends = len(self._bundle.dtypes)
        return [*self._bundle.unpack(arrays[:ends]), *arrays[ends:]]

    def _flattened(self, state: TrainState) -> list[Any]:
        leaves, treedef = jax.tree.flatten(state)
        if treedef != self.treedef:
            raise StateError(
                "the train state has another structure than the module and plugins of this engine give it"
            )
        return leaves

    def _is_small(self, index: int) -> bool:
        leaf = self._leaves[index]
        whole = index not in self._places or self._places[index].is_fully_replicated
        return not _is_key(leaf) and whole and leaf.size <= _SMALL.get(jax.default_backend(), 0)

    def _jitted(self, packing: VectorPacking, indices: list[int]) -> tuple[Any, Any]:
        if not indices:
            return lambda values: (), lambda vectors: []
        if self._whole is None:
            return partial(_pack, packing), partial(_unpack, packing)
        places = [self._places[index] for index in indices]
        return jax.jit(packing.pack, out_shardings=self._whole), jax.jit(
            packing.unpack, out_shardings=places
        )

    def _raw(self, leaves: list[Any], indices: list[int]) -> list[Array]:
        # A typed key is no plain array to jit's fast path; its data is.
        return [jax.random.key_data(leaves[i]) if i in self._impls else leaves[i] for i in indices]

    def _joined(self, arrays: Sequence[Array], scalars: Sequence[Array]) -> TrainState:
        leaves = list(self._leaves)
        for index, array in zip([*self._arrays, *self._scalars], [*arrays, *scalars], strict=True):
            leaves[index] = array
        for index, impl in self._impls.items():
            leaves[index] = jax.random.wrap_key_data(leaves[index], impl=impl)
        return jax.tree.unflatten(self.treedef, leaves)


def _concatenate(vectors: list[Array]) -> Array:
    """One vector. XLA on CPU runs a kernel for each operand of a long concatenation, and only one
    for up to 16 numbers that are chosen by their place."""
    parts: list[Array] = []
    for single, run in groupby(vectors, lambda vector: vector.size == 1):
        rest = list(run)
        few = [rest[start : start + 16] for start in range(0, len(rest), 16)]
        parts += [_stack_scalars(some) for some in few] if single else rest
    return jnp.concatenate(parts)


def _stack_scalars(few: list[Array]) -> Array:
    return jax.lax.select_n(jnp.arange(len(few)), *(jnp.broadcast_to(one, len(few)) for one in few))


def _vector_dtype(dtype: Any) -> Any:
    if dtype == jnp.bool_:
        return jnp.dtype(jnp.int32)
    bits = 8 * jnp.dtype(dtype).itemsize
    return (
        jnp.dtype(f"int{bits}")
        if bits > 8 and not jnp.issubdtype(dtype, jnp.complexfloating)
        else jnp.dtype(dtype)
    )


def _bitcast(array: Any, dtype: Any) -> Any:
    """The array with its bits taken as `dtype`, or with booleans as numbers and numbers as
    booleans."""
    if array.dtype == dtype:
        return array
    if jnp.bool_ in (array.dtype, dtype):
        return array.astype(dtype)
    return (
        array.view(dtype)
        if isinstance(array, np.ndarray)
        else jax.lax.bitcast_convert_type(array, dtype)
    )


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _impl(struct: Any) -> Any:
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), struct)
    return found[0]
