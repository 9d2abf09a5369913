"""Functions that show what is spread over devices, gather it, and compare its replicas."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError, FulguriteError
from fulgurite.plugins import leaves_with_paths, resolve_path
from jax.experimental import multihost_utils
from jaxtyping import PyTree


class ReplicaError(FulguriteError):
    """Copies of one array, or of one part of it, that differ between devices."""


def bytes_per_device(tree: PyTree) -> int:
    """Return the bytes that each device holds of the arrays of a tree, or would hold of
    `jax.ShapeDtypeStruct`s with shardings."""
    return sum(
        _get_bytes_per_device(leaf) for leaf in jax.tree.leaves(tree) if _is_on_devices(leaf)
    )


def visualize_sharding(tree: PyTree, visualize: str | None = None) -> None:
    """Print a table of the arrays of a tree: path, shape, spec, bytes per device, and the total.

    Args:
        tree: any pytree.
        visualize: the path of an array with one or two dimensions, whose parts are drawn by
            `jax.debug.visualize_array_sharding`. It needs `rich`: `pip install
            'fulgurite-sharding[visualize]'`.

    Raises:
        ConfigurationError: the array cannot be drawn, or `rich` is not installed.
        PathError: there is no such array.
    """
    rows = [("path", "shape", "spec", "bytes per device")]
    for path, leaf in leaves_with_paths(tree):
        if _is_on_devices(leaf):
            spec = getattr(leaf.sharding, "spec", type(leaf.sharding).__name__)
            num_bytes = _get_bytes_per_device(leaf)
            rows.append((path, str(list(leaf.shape)), str(spec), f"{num_bytes:,}"))
    rows.append(("total", "", "", f"{bytes_per_device(tree):,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *texts, size in rows:
        cells = [text.ljust(width) for text, width in zip(texts, widths, strict=False)]
        print("  ".join([*cells, size.rjust(widths[-1])]))
    if visualize is not None:
        leaf = resolve_path(tree, visualize)
        if getattr(leaf, "ndim", 0) not in (1, 2):
            raise ConfigurationError(
                f"visualize_sharding: {visualize} is not an array with one or two dimensions"
            )
        if importlib.util.find_spec("rich") is None:
            raise ConfigurationError(
                "visualize_sharding(visualize=) needs rich: pip install "
                "'fulgurite-sharding[visualize]'"
            )
        jax.debug.visualize_array_sharding(leaf)


def gather(tree: PyTree) -> PyTree:
    """Return the tree with every array whole, as a NumPy array, in every process.

    Every process must call it. Arrays local to a process (NumPy arrays and its scalars, arrays on
    its own devices) are concatenated over all processes along the first axis, in their own dtypes.
    Typed keys become their data; leaves that are not arrays stay, numbers of Python too.
    """

    def gather_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            return leaf
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        is_wide = leaf.dtype != jax.dtypes.canonicalize_dtype(leaf.dtype)
        if is_wide and not isinstance(leaf, jax.Array):
            return _gather_wide(np.asarray(leaf))
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))

    return jax.tree.map(gather_leaf, tree)


def check_replicas(tree: PyTree, *, atol: float = 0.0, rtol: float = 0.0) -> None:
    """Compare all copies of each array, or of each part of one, over all devices and processes.

    Every process must call it.

    Args:
        tree: any pytree.
        atol: the largest difference that is allowed.
        rtol: how much more is allowed, as a share of the number in the first copy.

    Raises:
        ReplicaError: two copies differ by more than `atol + rtol * abs(first)`; it names path,
            device and largest difference.
    """
    tolerances = (atol, rtol)
    global_parts: dict[str, dict[tuple[int, ...], np.ndarray]] = {}
    failure: ReplicaError | None = None
    for path, leaf in leaves_with_paths(tree):
        if not isinstance(leaf, jax.Array):
            continue
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        try:
            parts = _get_parts(path, leaf, tolerances)
        except ReplicaError as error:
            failure = failure or error
            parts = {}
        if not leaf.is_fully_addressable:
            global_parts[path] = parts
    if global_parts:
        # All say whether theirs differ before any of them leaves: the others would wait for it.
        _raise_on_all(failure)
    elif failure is not None:
        raise failure
    for path, parts in global_parts.items():
        _check_processes(path, parts, tolerances)


def _get_parts(
    path: str, leaf: jax.Array, tolerances: tuple[float, float]
) -> dict[tuple[int, ...], np.ndarray]:
    """Return the parts of an array that this process has, by where they begin; raise a
    ReplicaError if two of its devices differ.

    Args:
        path: of the array, for the message.
        leaf: the array.
        tolerances: the absolute and the relative one.
    """
    parts: dict[tuple[int, ...], np.ndarray] = {}
    for shard in sorted(leaf.addressable_shards, key=lambda shard: shard.device.id):
        start = tuple(part.start or 0 for part in shard.index)
        data = np.asarray(shard.data)
        _compare(path, str(shard.device), parts.setdefault(start, data), data, tolerances)
    return parts


def _raise_on_all(failure: ReplicaError | None) -> None:
    """Raise what one process has found on all of them; every process must call it."""
    have_failed = multihost_utils.process_allgather(np.asarray(failure is not None))
    if failure is not None:
        raise failure
    if have_failed.any():
        raise ReplicaError(
            f"copies on the devices of process {int(np.argmax(have_failed))} differ; its error "
            "says which"
        )


def _gather_wide(array: np.ndarray) -> np.ndarray:
    """Return local arrays of all processes along the first axis, as bytes while they travel: jax
    would make 32 bits of 64."""
    if jax.process_count() == 1:
        return array
    array = np.ascontiguousarray(np.atleast_1d(array))
    all_bytes = multihost_utils.process_allgather(array.reshape(-1).view(np.uint8))
    return np.concatenate([part.view(array.dtype).reshape(array.shape) for part in all_bytes])


def _check_processes(
    path: str, parts: dict[tuple[int, ...], np.ndarray], tolerances: tuple[float, float]
) -> None:
    starts = np.asarray(list(parts), np.int64).reshape(len(parts), -1)
    all_starts = multihost_utils.process_allgather(starts)
    all_parts = multihost_utils.process_allgather(np.stack(list(parts.values())))
    first: dict[tuple[int, ...], np.ndarray] = {}
    for process, (keys, values) in enumerate(zip(all_starts, all_parts, strict=True)):
        for key, value in zip(keys, values, strict=True):
            _compare(
                path,
                f"process {process}",
                first.setdefault(tuple(map(int, key)), value),
                value,
                tolerances,
            )


def _compare(
    path: str, where: str, first: np.ndarray, other: np.ndarray, tolerances: tuple[float, float]
) -> None:
    """Raise a ReplicaError if two copies differ by more than is allowed.

    Args:
        path: of the array, for the message.
        where: the device or process of the other copy, for the message.
        first: the copy to compare with.
        other: the other copy.
        tolerances: the absolute and the relative one.
    """
    if np.array_equal(first, other, equal_nan=first.dtype.kind in "fcV"):
        return
    wide_dtype: Any = np.complex128 if first.dtype.kind == "c" else np.float64
    a, b = first.astype(wide_dtype), other.astype(wide_dtype)
    if np.array_equal(a, b, equal_nan=True):
        # Integers that float64 cannot distinguish.
        a, b = first.astype(np.longdouble), other.astype(np.longdouble)
    is_same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        difference = np.where(is_same, 0.0, np.abs(a - b))
    difference = np.where(np.isnan(difference), np.inf, difference)
    atol, rtol = tolerances
    # A share of infinity would allow everything.
    allowed = atol + rtol * np.where(np.isfinite(a), np.abs(a), 0)
    if np.any(difference > allowed):
        raise ReplicaError(
            f"{path}: the copy on {where} differs from the first one by up to "
            f"{float(np.max(difference)):.3g} (atol {atol:g}, rtol {rtol:g}). "
            "Devices that should hold the same numbers do not: look for random keys or data that "
            "differ by process"
        )


def _is_on_devices(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and leaf.sharding is not None


def _get_bytes_per_device(leaf: Any) -> int:
    return int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
