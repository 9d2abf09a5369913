"""Shapes, dtypes and signatures of trees, and copies of their arrays."""

from typing import Any
from zlib import crc32

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core.primitives import copy_p
from jaxtyping import Array, PyTree

from fulgurite._src.identity import ByIdentity
from fulgurite._src.tree.paths import is_array_like, leaves_with_paths
from fulgurite.errors import ModelError


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array: on the device, traced, or of NumPy."""
    return eqx.is_array(leaf) or isinstance(leaf, np.ndarray | np.generic)


def is_real_dtype(dtype: Any) -> bool:
    """Return whether a dtype is of booleans or of numbers that are not complex."""
    return any(jnp.issubdtype(dtype, kind) for kind in (np.bool_, np.integer, np.floating))


def shape_spec(tree: Any) -> Any:
    """Return the tree with a `jax.ShapeDtypeStruct` for each array.

    The dtypes are those that NumPy arrays get on a device.
    """
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jax.typeof(leaf).dtype), tree)


def shape_signature(tree: Any) -> tuple[Any, ...]:
    """Return a key of structure, shapes and dtypes of a tree of arrays.

    Trees with the same key share an executable of a compiled function.
    """
    leaves, treedef = jax.tree.flatten(tree)
    # The loop asks this of every batch; a list comprehension is faster than a generator.
    return treedef, tuple([(leaf.shape, leaf.dtype) for leaf in leaves])


def tree_signature(tree: PyTree) -> Any:
    """Return a key of structure, shapes and dtypes, and of the leaves that are not arrays.

    Trees with the same key share a `Program`.
    """
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple(map(leaf_signature, leaves))


def leaf_signature(leaf: Any) -> Any:
    """Return a hashable key of a leaf: shape and dtype of an array, else its value or identity."""
    if is_array_like(leaf):
        return leaf.shape, leaf.dtype
    try:
        hash(leaf)
    except TypeError:
        return ByIdentity(leaf)
    # With the type, because 1, 1.0 and True are equal.
    return type(leaf), leaf


def format_tree(tree: Any) -> str:
    """Return the leaves of a tree with dtypes and shapes on one line.

    Example:
        from fulgurite.plugins import format_tree

        # "image float32[64,28,28]"
        format_tree({"image": np.zeros((64, 28, 28), np.float32)})
    """
    return ", ".join(_format_leaf(path, leaf) for path, leaf in leaves_with_paths(tree))


def describe_structures(tree: Any, known: Any) -> tuple[str, str]:
    """Return what tells two trees of different structure apart: their arrays, or where these are
    alike, all that is static in them, such as the `spec` of a batch."""
    texts = format_tree(tree), format_tree(known)
    if texts[0] != texts[1]:
        return texts
    text, known_text = str(jax.tree.structure(tree)), str(jax.tree.structure(known))
    return f"{texts[0]} in {text}", f"{texts[1]} in {known_text}"


def total_size(tree: PyTree) -> tuple[int, int]:
    """Return the total number of elements in the arrays of a tree, and of bytes."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if is_array_like(leaf)]
    count = sum(leaf.size for leaf in arrays)
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)
    return count, num_bytes


def shape_summary(tree: PyTree) -> str:
    """Return a table of the arrays of a tree: path, shape, dtype, bytes.

    The last line holds the totals of elements and bytes.
    """
    rows = [("path", "shape", "dtype", "bytes")]
    for path, leaf in leaves_with_paths(tree):
        if is_array_like(leaf):
            _, num_bytes = total_size(leaf)
            rows.append((path, str(list(leaf.shape)), str(leaf.dtype), f"{num_bytes:,}"))
    count, num_bytes = total_size(tree)
    rows.append(("total", f"{count:,}", "", f"{num_bytes:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for *texts, size in rows:
        cells = [text.ljust(width) for text, width in zip(texts, widths, strict=False)]
        lines.append("  ".join([*cells, size.rjust(widths[-1])]))
    return "\n".join(lines)


def copy_arrays(tree: PyTree) -> PyTree:
    """Return the tree with a copy of every array, as a jax array; other leaves stay.

    Weak types are stripped: such a leaf would come back strong from a checkpoint and compile the
    step again.
    """
    # In a trace an array that is not a tracer, such as one that a function has in its closure,
    # becomes a constant of the program. Where the program is one of a mesh, to ask for the device
    # of that array is an error, and what leaves the program is a copy anyway.
    is_tracing = isinstance(put_constant(np.int32(0)), Tracer)
    return jax.tree.map(lambda leaf: _copy_leaf(leaf, is_tracing), tree)


def put_constant(value: np.ndarray | np.generic) -> Array:
    """Return a value that is known on the host as an array, or as a constant of a trace.

    `jnp.int32(0)` and `jnp.zeros(())` are programs of XLA, which take 30 ms each to compile in a
    new process, and 6 ms where a compilation cache has them.
    """
    return jax.device_put(value)


def deduplicate_arrays(tree: PyTree) -> PyTree:
    """Return the tree with a copy of each array that cannot be donated as it is.

    These are NumPy arrays, and arrays that are in the tree twice, such as an average of the weights
    that was made the module.
    """
    leaves, treedef = jax.tree.flatten(tree)
    leaf_ids: set[int] = set()
    unique_leaves = []
    for leaf in leaves:
        is_first = id(leaf) not in leaf_ids
        leaf_ids.add(id(leaf))
        is_usable = is_first and isinstance(leaf, jax.Array)
        unique_leaves.append(leaf if is_usable else copy_arrays(leaf))
    return treedef.unflatten(unique_leaves)


def put_beside(tree: PyTree, arrays: PyTree) -> PyTree:
    """Return a tree whose arrays that were put on another device are on the device of `arrays`.

    Args:
        tree: of arrays; those that were put nowhere stay as they are, because JAX moves them.
        arrays: a tree of arrays on one device; if they were put nowhere, JAX's default device.
    """
    leaves, treedef = jax.tree.flatten(tree)
    are_put = [_is_put(leaf) for leaf in leaves]
    # Most batches are NumPy arrays; to ask a jax array for its place takes 20 µs.
    if not any(are_put):
        return tree
    place = next(
        (_get_place(leaf) for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array)), None
    )
    if place is None or isinstance(place, jax.sharding.NamedSharding):
        return tree
    return treedef.unflatten(
        jax.device_put(leaf, place)
        if is_put and leaf.sharding.device_set != place.device_set
        else leaf
        for leaf, is_put in zip(leaves, are_put, strict=True)
    )


def get_default_device() -> Any:
    """Return the device that JAX computes on: that of an engine, within its methods."""
    device = getattr(jax.config, "jax_default_device", None)
    if isinstance(device, jax.Device):
        return device
    # None, or the name of a platform.
    return jax.local_devices(backend=device)[0]


def _get_place(leaf: jax.Array) -> jax.sharding.Sharding:
    """Return where a computation with an array takes place: an array that was put nowhere goes to
    the default device, as in JAX."""
    if leaf.committed:
        return leaf.sharding
    return jax.sharding.SingleDeviceSharding(get_default_device())


def _is_put(leaf: Any) -> bool:
    """Return whether a leaf is an array that was put on a device."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return False
    return leaf.committed


def check_same_structure(before: PyTree, after: PyTree, where: str) -> None:
    """Raise a ModelError unless two trees agree in structure, shapes, dtypes and other leaves.

    A plugin state that changed its shape would compile the step again without a word.

    Args:
        before: the tree that entered a step or hook.
        after: the tree that left it.
        where: what changed it, for the message.
    """
    old_leaves, old_treedef = jax.tree.flatten(before)
    new_leaves, new_treedef = jax.tree.flatten(after)
    if old_treedef != new_treedef:
        old_paths = {path for path, _ in leaves_with_paths(before)}
        new_paths = {path for path, _ in leaves_with_paths(after)}
        differing = ", ".join(sorted(old_paths ^ new_paths)[:3])
        place = f"at {differing}" if differing else "(the type or static fields of a node)"
        raise ModelError(f"{where} changed the structure of the state {place}; it must keep it")
    for index, (old, new) in enumerate(zip(old_leaves, new_leaves, strict=True)):
        if leaf_signature(old) != leaf_signature(new):
            path, _ = leaves_with_paths(before)[index]
            raise ModelError(
                f"{where} changed {path} from {format_tree(old)} to {format_tree(new)}; "
                "shape, dtype and other leaves must stay"
            )


def hash_tree(tree: PyTree) -> int:
    """Return a CRC-32 of the arrays of a tree that this process alone holds.

    Arrays that are divided among processes are left out: no process can read them.
    """
    number = 0
    for leaf in filter(is_array, jax.tree.leaves(tree)):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            continue
        data = jax.random.key_data(leaf) if is_key(leaf) else leaf
        number = crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data, number)
    return number


def _format_leaf(path: str, leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
        return f"{path} {leaf!r}"
    # The tree may be a single leaf, whose path is empty.
    return f"{path} {leaf.dtype}[{','.join(map(str, leaf.shape))}]".strip()


def _copy_leaf(leaf: Any, is_tracing: bool) -> Any:
    if not is_array(leaf):
        return leaf
    if is_key(leaf):
        data = jnp.copy(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    is_computed = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    if is_computed and not is_tracing and not leaf.weak_type:
        # A copy as a program took 12 ms to compile for each shape.
        return jax.device_put(leaf, _get_place(leaf), may_alias=False)
    # `jnp.array` makes the same copy of a tracer in five times the time.
    copied = copy_p.bind(leaf) if isinstance(leaf, Tracer) else jnp.array(leaf)
    return jax.lax.convert_element_type(copied, jax.dtypes.canonicalize_dtype(leaf.dtype))


def is_key(leaf: Any) -> bool:
    """Return whether an array holds typed random keys, which NumPy cannot hold."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
