"""How a train state crosses `jax.jit`: as a flat list of arrays, never as a tree of modules.

Flattening a tree of Equinox modules in Python at every call costs more than many small steps
themselves: 5,531 µs of 5,670 for 871 leaves. And each scalar among a step's results costs a small
step on a CPU up to half of its time, so all scalars travel packed into one vector per width. The
packed vectors are not donated: they stay readable while the next steps run.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from fulgurite._src.metrics.columns import find_columns
from fulgurite._src.training.state import TrainState, check_not_consumed
from fulgurite._src.tree.specs import deduplicate_arrays, put_beside, shape_spec, tree_signature
from fulgurite._src.tree.vectors import concatenate_vectors, join_scalars, split_into_scalars
from fulgurite.errors import StateError

Vectors = tuple[Array | np.ndarray, ...]


class Subtree(NamedTuple):
    """A tree whose leaves are among the packed arrays: its structure, and the indices of its
    leaves."""

    treedef: Any
    indices: tuple[int, ...]


class VectorPacking:
    """Where each of a list of arrays lies in few vectors.

    Numbers of 16, 32 and 64 bits travel as integers of as many bits, booleans among those of 32,
    anything else by its dtype. Two packings of the same arrays are equal, for `jax.jit`.

    Args:
        structs: the shape and dtype of each array.
        subtrees: trees that some of the arrays are the leaves of, by name.
        columns: the indices of numbers that lie side by side, because the program that unpacks them
            joins them to one vector, and splits such a vector before it packs them.
    """

    def __init__(
        self,
        structs: Sequence[Any],
        subtrees: Mapping[str, Subtree] | None = None,
        columns: Sequence[Sequence[int]] = (),
    ) -> None:
        self._structs = list(structs)
        self._subtrees = dict(subtrees or {})
        in_columns = {index for column in columns for index in column}
        others = [[index] for index in range(len(self._structs)) if index not in in_columns]
        self._runs = [*map(list, columns), *others]
        sizes: dict[Any, int] = {}
        # Of each array: which vector, and where in it.
        self._offsets: dict[int, tuple[int, int]] = {}
        for index in chain.from_iterable(self._runs):
            struct = self._structs[index]
            dtype = _get_vector_dtype(struct.dtype)
            start = sizes.setdefault(dtype, 0)
            sizes[dtype] = start + struct.size
            self._offsets[index] = (list(sizes).index(dtype), start)
        self.dtypes = list(sizes)
        self.specs = tuple(jax.ShapeDtypeStruct((sizes[dtype],), dtype) for dtype in sizes)
        self._hash = hash(tuple(self._structs))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, VectorPacking):
            return False
        return (self._structs, self._subtrees, self._runs) == (
            other._structs,
            other._subtrees,
            other._runs,
        )

    def __hash__(self) -> int:
        return self._hash

    def pack(self, values: Sequence[Array]) -> Vectors:
        """Return the vectors that hold `values`."""
        groups: list[list[Array]] = [[] for _ in self.dtypes]
        for first, *others in self._runs:
            vector, _ = self._offsets[first]
            numbers = _ravel(values[first])
            if others:
                numbers = join_scalars([values[index] for index in (first, *others)])
            groups[vector].append(_bitcast(numbers, self.dtypes[vector]))
        return tuple(map(concatenate_vectors, groups))

    def pack_on_host(self, values: Sequence[np.ndarray]) -> Vectors:
        """Return the vectors that hold `values`, as NumPy arrays."""
        groups: list[list[np.ndarray]] = [[] for _ in self.dtypes]
        for index, (vector, _) in self._offsets.items():
            groups[vector].append(_bitcast(np.ravel(values[index]), self.dtypes[vector]))
        return tuple(np.concatenate(group) for group in groups)

    def unpack(self, vectors: Sequence[Any]) -> list[Any]:
        """Return the values: jax arrays of jax vectors, NumPy arrays of NumPy vectors."""
        values: dict[int, Any] = {}
        for run in self._runs:
            vector, start = self._offsets[run[0]]
            struct = self._structs[run[0]]
            if len(run) == 1:
                values[run[0]] = _bitcast(_slice(vectors[vector], start, struct), struct.dtype)
            else:
                # All at once, because XLA joins again what was split only if nothing is between.
                spec = jax.ShapeDtypeStruct((len(run),), struct.dtype)
                numbers = _bitcast(_slice(vectors[vector], start, spec), struct.dtype)
                values.update(zip(run, _split(numbers), strict=True))
        return [values[index] for index in range(len(self._structs))]

    def get_subtree(self, vectors: Vectors, name: str) -> Any:
        """Return one of the trees; of NumPy arrays if the vectors are."""
        values = self.unpack(vectors)
        subtree = self._subtrees[name]
        return jax.tree.unflatten(subtree.treedef, [values[index] for index in subtree.indices])

    def replace_subtree(self, vectors: Vectors, name: str, before: Any, after: Any) -> Vectors:
        """Return the vectors with another one of the trees. Only leaves that differ are written.

        Args:
            vectors: the vectors.
            name: of the tree.
            before: the tree that `get_subtree` returned.
            after: the tree to write, made of `before`.
        """
        new_vectors = list(vectors)
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        for index, (old_leaf, leaf) in zip(self._subtrees[name].indices, pairs, strict=True):
            if leaf is old_leaf:
                continue
            vector, start = self._offsets[index]
            numbers = _bitcast(jnp.ravel(leaf), self.dtypes[vector])
            whole = jnp.asarray(new_vectors[vector])
            new_vectors[vector] = whole.at[start : start + numbers.size].set(numbers)
        return tuple(new_vectors)


# Without shardings, the layouts of all engines share these, and with them what jax compiled: a fit
# after others in a process begins a sixth sooner.
_pack = jax.jit(VectorPacking.pack, static_argnums=0)
_unpack = jax.jit(VectorPacking.unpack, static_argnums=0)


class FlatState(NamedTuple):
    """A train state between two steps: arrays that the next step donates, and packed scalars that
    it does not donate."""

    arrays: list[Any]
    packed: tuple[Any, ...]


class LeafPlan(NamedTuple):
    """How one leaf of a train state travels.

    Attributes:
        leaf_index: the index of the leaf in the flattened state.
        spec: its shape and dtype.
        is_packed: whether it travels in the packed vectors.
        sharding: where it lies; None where it may be anywhere.
        key_impl: the implementation of a typed random key, which travels as its data.
        wide_dtype: of numbers of less than a byte, the dtype in which they travel.
    """

    leaf_index: int
    spec: jax.ShapeDtypeStruct
    is_packed: bool
    sharding: NamedSharding | None
    key_impl: Any
    wide_dtype: Any


class StateLayout:
    """The order of a state's leaves, and everything in it that is not an array.

    Args:
        state: of arrays or of specs.
        shardings: of each of its arrays, None where they may be anywhere.
    """

    def __init__(self, state: TrainState, shardings: list[NamedSharding] | None = None) -> None:
        leaves, self.treedef = jax.tree.flatten(state)
        self._leaves = [shape_spec(leaf) if eqx.is_array(leaf) else leaf for leaf in leaves]
        self._signature = tree_signature(state)
        self._replicated = None
        if shardings is not None:
            self._replicated = NamedSharding(shardings[0].mesh, PartitionSpec())
        plans = _plan_leaves(state, self._leaves, shardings)
        self._array_plans = [plan for plan in plans if not plan.is_packed]
        self._packed_plans = [plan for plan in plans if plan.is_packed]
        structs = [_get_raw_spec(plan) for plan in self._packed_plans]
        positions = {plan.leaf_index: index for index, plan in enumerate(self._packed_plans)}
        columns = [[positions[index] for index in column] for column in find_columns(state)]
        self.packing = VectorPacking(structs, _find_subtrees(state, self._packed_plans), columns)
        self._pack, self._unpack = self._jit_packing()
        self.shardings: FlatState | None = None
        if self._replicated is not None:
            array_shardings = [plan.sharding for plan in self._array_plans]
            packed_shardings = (self._replicated,) * len(self.packing.dtypes)
            self.shardings = FlatState(array_shardings, packed_shardings)

    def matches(self, state: TrainState) -> bool:
        """Return whether a state has this layout, with equal shapes, dtypes and static leaves."""
        return tree_signature(state) == self._signature

    def make_flat_spec(self) -> FlatState:
        """Return the flat form of a state as `jax.ShapeDtypeStruct`s. Its arrays lie where those of
        a new state do: where `shardings` say so, or on the default device."""
        default = jax.device_put(np.int32(0)).sharding
        arrays = [
            _get_raw_spec(plan).update(sharding=plan.sharding or default)
            for plan in self._array_plans
        ]
        packed = self.packing.specs
        if self._replicated is not None:
            packed = tuple(spec.update(sharding=self._replicated) for spec in packed)
        return FlatState(arrays, packed)

    def flatten(self, state: TrainState) -> FlatState:
        """Return the flat form of a state, outside of a trace.

        Each array lies where it belongs, on the device, and no array is there twice. A state that
        was consumed is an error.
        """
        arrays, scalars = self._select_raw(state)
        # Where the module was put on a device, the scalars may be on another one still.
        return FlatState(arrays, put_beside(self._pack(scalars), arrays))

    def flatten_on_host(self, state: TrainState) -> FlatState:
        """Like `flatten`, and wait for the device: so the numbers are packed by NumPy, without a
        program, which takes a second to compile for 300 metrics."""
        if self._replicated is not None:
            return self.flatten(state)
        arrays, scalars = self._select_raw(state)
        vectors = self.packing.pack_on_host(jax.device_get(scalars))
        return FlatState(arrays, jax.device_put(vectors))

    def unflatten(self, flat: FlatState) -> TrainState:
        """Return the state in its natural form, outside of a trace. The next step consumes it as it
        consumes `flat`."""
        return self._unflatten_leaves(flat.arrays, self._unpack(flat.packed))

    def unflatten_on_host(self, flat: FlatState) -> TrainState:
        """Do as `unflatten`, and wait for the device: so the numbers are unpacked by NumPy, without
        a program, which took longer to compile than anything else at the end of a short fit."""
        if self._replicated is not None:
            return self.unflatten(flat)
        numbers = self.packing.unpack(jax.device_get(flat.packed))
        return self._unflatten_leaves(flat.arrays, jax.device_put(numbers))

    def flatten_traced(self, state: TrainState) -> FlatState:
        """Like `flatten` inside a trace."""
        leaves = self._flatten_checked(state)
        packed = self.packing.pack(_get_raw(leaves, self._packed_plans))
        return FlatState(_get_raw(leaves, self._array_plans), packed)

    def unflatten_traced(self, flat: FlatState) -> TrainState:
        """Do as `unflatten` inside a trace."""
        return self._unflatten_leaves(flat.arrays, self.packing.unpack(flat.packed))

    def _select_raw(self, state: TrainState) -> tuple[list[Array], list[Array]]:
        """Return the arrays that a step donates and those that travel packed, each where it belongs
        and none of them twice."""
        leaves = self._flatten_checked(state)
        if self._needs_copies(leaves):
            check_not_consumed(state)
            leaves = jax.tree.leaves(deduplicate_arrays(state))
        leaves = self._move(leaves)
        return _get_raw(leaves, self._array_plans), _get_raw(leaves, self._packed_plans)

    def _flatten_checked(self, state: TrainState) -> list[Any]:
        leaves, treedef = jax.tree.flatten(state)
        if treedef != self.treedef:
            raise StateError(
                "the train state has another structure than the module and plugins of this engine "
                "give it: continue from a state of the same model and plugins"
            )
        return leaves

    def _needs_copies(self, leaves: list[Any]) -> bool:
        """Return whether a leaf is on the host, occurs twice, or was consumed."""
        arrays = [leaves[plan.leaf_index] for plan in self._array_plans]
        if any(issubclass(kind, np.ndarray | np.generic) for kind in set(map(type, leaves))):
            return True
        if len(set(map(id, arrays))) < len(arrays):
            return True
        return any(array.is_deleted() for array in arrays)

    def _move(self, leaves: list[Any]) -> list[Any]:
        """Return the leaves, each array where it belongs."""
        leaves = list(leaves)
        for plan in (*self._array_plans, *self._packed_plans):
            if plan.sharding is not None and leaves[plan.leaf_index].sharding != plan.sharding:
                leaves[plan.leaf_index] = jax.device_put(leaves[plan.leaf_index], plan.sharding)
        if self._replicated is None and len(leaves[0].sharding.device_set) > 1:
            # The state is another engine's, on a mesh.
            one_device = jnp.zeros(()).sharding
            leaves = [
                jax.device_put(leaf, one_device) if eqx.is_array(leaf) else leaf for leaf in leaves
            ]
        return leaves

    def _jit_packing(self) -> tuple[Any, Any]:
        """Return the jitted `pack` and `unpack`."""
        if self._replicated is None:
            return partial(_pack, self.packing), partial(_unpack, self.packing)
        shardings = [plan.sharding for plan in self._packed_plans]
        return (
            jax.jit(self.packing.pack, out_shardings=self._replicated),
            jax.jit(self.packing.unpack, out_shardings=shardings),
        )

    def _unflatten_leaves(self, arrays: Sequence[Array], packed: Sequence[Array]) -> TrainState:
        leaves = list(self._leaves)
        plans = [*self._array_plans, *self._packed_plans]
        for plan, array in zip(plans, [*arrays, *packed], strict=True):
            if plan.key_impl:
                array = jax.random.wrap_key_data(array, impl=plan.key_impl)
            elif plan.wide_dtype:
                array = array.astype(plan.spec.dtype)
            leaves[plan.leaf_index] = array
        return jax.tree.unflatten(self.treedef, leaves)


def _plan_leaves(
    state: TrainState, leaves: list[Any], shardings: list[NamedSharding] | None
) -> list[LeafPlan]:
    """Return a plan for each array of a state: scalars, and all of its `packed_fields`, are packed,
    the latter because they are read while later steps run."""
    packed_whole = set()
    for name in TrainState.packed_fields:
        packed_whole |= _find_field_indices(state, name)
    indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    array_shardings = [None] * len(indices) if shardings is None else shardings
    plans = []
    for index, sharding in zip(indices, array_shardings, strict=True):
        spec = leaves[index]
        is_packed = spec.shape == () or index in packed_whole
        key_impl = _get_key_impl(spec) if _is_key(spec) else None
        wide_dtype = get_wide_dtype(spec.dtype)
        plans.append(LeafPlan(index, spec, is_packed, sharding, key_impl, wide_dtype))
    return plans


def _find_field_indices(state: TrainState, name: str) -> set[int]:
    """Return the indices of the leaves of one field among those of the state."""
    marks = jax.tree.map(lambda _: False, state)
    marks = marks.replace(**{name: jax.tree.map(lambda _: True, getattr(state, name))})
    return {index for index, is_inside in enumerate(jax.tree.leaves(marks)) if is_inside}


def _find_subtrees(state: TrainState, packed_plans: list[LeafPlan]) -> dict[str, Subtree]:
    """Return where the `packed_fields` of a state lie among its packed arrays."""
    subtrees = {}
    for name in TrainState.packed_fields:
        field_indices = _find_field_indices(state, name)
        positions = [
            position
            for position, plan in enumerate(packed_plans)
            if plan.leaf_index in field_indices
        ]
        subtrees[name] = Subtree(jax.tree.structure(getattr(state, name)), tuple(positions))
    return subtrees


def _get_raw(leaves: list[Any], plans: list[LeafPlan]) -> list[Array]:
    """Return the arrays of these plans, keys as their data: a typed key is not a plain array to the
    fast path of jit. Numbers of less than a byte become wider, because XLA chooses layouts for them
    at the border of a program that are not those of the arrays."""
    raw = []
    for plan in plans:
        leaf = leaves[plan.leaf_index]
        if plan.key_impl:
            leaf = jax.random.key_data(leaf)
        elif plan.wide_dtype:
            leaf = leaf.astype(plan.wide_dtype)
        raw.append(leaf)
    return raw


def _get_raw_spec(plan: LeafPlan) -> Any:
    """Return the shape and dtype in which a leaf travels."""
    if plan.key_impl:
        return jax.eval_shape(jax.random.key_data, plan.spec)
    if plan.wide_dtype:
        return jax.ShapeDtypeStruct(plan.spec.shape, plan.wide_dtype)
    return plan.spec


def get_wide_dtype(dtype: Any) -> Any:
    """Return a dtype of whole bytes that holds every number of `dtype`; None if that has them."""
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return jnp.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint8
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8:
        return jnp.bfloat16
    return None


def _ravel(value: Any) -> Any:
    """Return the values of an array, one after another."""
    # `jnp.ravel` takes ten times as long to trace, and there may be hundreds of numbers.
    return jax.lax.reshape(value, (value.size,))


def _slice(vector: Any, start: int, struct: Any) -> Any:
    """Return the part of a vector that begins at `start`, in the shape of `struct`."""
    if isinstance(vector, np.ndarray):
        return vector[start : start + struct.size].reshape(struct.shape)
    part = jax.lax.slice(vector, (start,), (start + struct.size,))
    return jax.lax.reshape(part, struct.shape)


def _split(vector: Any) -> list[Any]:
    """Return the numbers of a vector, each without an axis."""
    if isinstance(vector, np.ndarray):
        return [vector[index, ...] for index in range(vector.size)]
    return split_into_scalars(vector)


def _get_vector_dtype(dtype: Any) -> Any:
    """Return the dtype of the vector that numbers of `dtype` travel in."""
    if dtype == jnp.bool_:
        return jnp.dtype(jnp.int32)
    bits = 8 * jnp.dtype(dtype).itemsize
    if bits > 8 and not jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.dtype(f"int{bits}")
    return jnp.dtype(dtype)


def _bitcast(array: Any, dtype: Any) -> Any:
    """Return the array with its bits taken as `dtype`, or with booleans as numbers and numbers as
    booleans."""
    if array.dtype == dtype:
        return array
    if jnp.bool_ in (array.dtype, dtype):
        return array.astype(dtype)
    if isinstance(array, np.ndarray):
        return array.view(dtype)
    return jax.lax.bitcast_convert_type(array, dtype)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _get_key_impl(spec: Any) -> Any:
    """Return the implementation of a spec of typed keys, which only a traced key tells."""
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), spec)
    return impls[0]
