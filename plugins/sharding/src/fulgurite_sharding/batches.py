"""How the batches of one structure are divided by a mesh, over devices and over processes."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError, DataError, PluginError
from fulgurite.plugins import ProcessShard, hash_tree, leaves_with_paths, shape_spec
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree


@dataclass(frozen=True, eq=False)
class BatchSharding:
    """Where the arrays of a batch go.

    Args:
        shardings: a sharding for each array of a batch; None leaves batches as they are.

    Raises:
        PluginError: `shardings` is not of the structure of the batch.
    """

    shardings: PyTree[NamedSharding] | None

    @staticmethod
    def build(batch: PyTree, shardings: Any) -> "BatchSharding":
        """Build one from what a strategy says.

        Args:
            batch: the batch, or its shapes.
            shardings: a sharding for each of its arrays, or None.
        """
        if shardings is None:
            return BatchSharding(None)
        structure = jax.tree.structure(batch)
        are_named = all(isinstance(leaf, NamedSharding) for leaf in jax.tree.leaves(shardings))
        if not are_named or jax.tree.structure(shardings) != structure:
            raise PluginError(
                "get_batch_shardings of a sharding strategy must return a NamedSharding for each "
                f"array of a batch {structure}"
            )
        return BatchSharding(shardings)

    def add_leading_axis(self) -> "BatchSharding":
        """Return the sharding of several batches along a new first axis, which is not divided."""
        return BatchSharding(
            jax.tree.map(
                lambda sharding: sharding.update(spec=PartitionSpec(None, *sharding.spec)),
                self.shardings,
            )
        )

    def find_divisibility_error(self, batch: PyTree) -> str | None:
        """Return what of this process's part of a batch does not divide by its devices, or None."""
        for path, leaf, sharding in self._iter_leaves(batch):
            if not is_local(leaf):
                continue
            num_parts_by_axis = _count_parts(leaf, sharding)
            for axis, num_parts in enumerate(num_parts_by_axis):
                if leaf.shape[axis] % num_parts:
                    return (
                        f"axis {axis} of {path or 'the array'} {list(leaf.shape)} does not divide "
                        f"into {num_parts} parts along the mesh's {sharding.spec[axis]!r}"
                    )
        return None

    def check(self, batch: PyTree, where: str) -> None:
        """Raise `DataError` if a batch does not divide by the devices.

        Args:
            batch: this process's part.
            where: which batch it is.
        """
        error = self.find_divisibility_error(batch)
        if error is not None:
            raise DataError(
                f"{where}: {error}. Choose a batch_size that is a multiple of it, and for what is "
                "left at the end of an epoch ArrayData(remainder='drop') or 'pad'"
            )

    def put(self, batch: PyTree) -> PyTree:
        """Return a batch as arguments of a compiled program."""
        if self.shardings is None:
            return batch
        if jax.process_count() > 1:
            return self.put_global(batch)
        # NumPy arrays stay on the host, and the executable divides them: to place them beforehand
        # took a fifth longer on eight simulated devices.
        return jax.tree.map(
            lambda leaf, sharding: (
                jax.device_put(leaf, sharding) if isinstance(leaf, jax.Array) else leaf
            ),
            batch,
            self.shardings,
        )

    def put_global(self, batch: PyTree) -> PyTree:
        """Return a batch as global arrays."""
        if self.shardings is None:
            return batch
        on_devices = jax.tree.map(_put_global, batch, self.shardings)
        count = _get_local_count(batch)
        if count is None:
            return on_devices
        total = _sum_over_processes(count, self.shardings.num_examples)
        return replace(on_devices, num_examples=total)

    def get_spec(self, batch: PyTree) -> PyTree:
        """Return shapes, dtypes and shardings of a batch that `put` gave."""
        if self.shardings is None:
            return batch
        return jax.tree.map(
            lambda spec, sharding: spec.update(sharding=sharding), shape_spec(batch), self.shardings
        )

    def get_fingerprint(self, batch: PyTree) -> dict[str, Any]:
        """Return what processes must have in common: the shapes of the whole batch, and a digest of
        what several of them hold, such as numbers without an axis and the rows of two that share a
        model."""
        if self.shardings is None:
            return {}
        shapes: list[str] = []
        facts: dict[str, Any] = {}
        for path, leaf, sharding in self._iter_leaves(batch):
            shape = list(leaf.shape)
            if not shape and is_local(leaf) and leaf is not _get_local_count(batch):
                facts[f"what is in {path or 'the array'}, which is one number"] = hash_tree(leaf)
            if shape and is_local(leaf):
                parts = _get_process_offsets(sharding, leaf.ndim)
                offsets = parts[jax.process_index()]
                name = f"what is in {path or 'the array'} at {sorted(offsets)} of the mesh"
                facts[name] = hash_tree(leaf)
                rows = {offset[0] for part in parts.values() for offset in part}
                shape[0] = shape[0] * len(rows) // len({offset[0] for offset in offsets})
            shapes.append(f"{path} {leaf.dtype}{shape}".strip())
        return {**facts, "the whole batch": ", ".join(shapes)}

    def get_process_shard(self, batch: PyTree) -> ProcessShard:
        """Return which part of each batch this process reads, and how many parts there are.

        Processes whose devices hold the same examples, such as two that share a model, read the
        same part.

        Args:
            batch: a whole batch, or its shapes.

        Raises:
            ConfigurationError: the parts overlap without being the same, or are not in the order of
                the examples.
        """
        shardings = jax.tree.leaves(self.shardings)
        if not shardings:
            return 0, 1
        sharding = shardings[0]
        offsets = _get_process_offsets(sharding, jax.tree.leaves(batch)[0].ndim)
        rows = {
            process: frozenset(offset[0] for offset in part) for process, part in offsets.items()
        }
        parts = sorted(set(rows.values()), key=min)
        if sum(map(len, parts)) != len(frozenset().union(*parts)):
            raise ConfigurationError(
                f"the mesh {dict(sharding.mesh.shape)} gives processes parts of a batch that "
                "overlap without being the same; choose axis sizes that divide by the devices of a "
                "process, or by which they divide"
            )
        if not _are_in_order(parts):
            raise ConfigurationError(
                f"the mesh {dict(sharding.mesh.shape)} gives a process parts of a batch that are "
                "not next to each other, so that examples, their random keys and predictions "
                "would be in another order than on one device: order its devices by process, as in "
                "np.reshape(sorted(jax.devices(), key=lambda device: (device.process_index, "
                "device.id)), shape)"
            )
        return parts.index(rows[jax.process_index()]), len(parts)

    def describe(self, batch: PyTree) -> str:
        """Return which part of each array of a batch lies on which devices, a line each."""
        lines = []
        for path, leaf, sharding in self._iter_leaves(batch):
            name = f"{path or 'the batch'} {leaf.dtype}{list(leaf.shape)}"
            lines.append(f"{name}: {_describe_sharding(leaf, sharding)}")
        return "\n".join(lines)

    def _iter_leaves(self, batch: PyTree) -> Iterator[tuple[Any, Any, NamedSharding]]:
        if self.shardings is None:
            return
        shardings = jax.tree.leaves(self.shardings)
        for (path, leaf), sharding in zip(leaves_with_paths(batch), shardings, strict=True):
            yield path, leaf, sharding


def is_in_process_order(sharding: NamedSharding) -> bool:
    """Return whether the first axis of an array is divided so that each process has rows that
    follow each other."""
    offsets = _get_process_offsets(sharding, 1)
    return _are_in_order({frozenset(offset[0] for offset in part) for part in offsets.values()})


def _are_in_order(parts: Collection[frozenset[int]]) -> bool:
    """Return whether each part has rows that follow each other."""
    rows = [row for part in sorted(parts, key=min) for row in sorted(part)]
    return rows == sorted(rows)


def _describe_sharding(leaf: Any, sharding: NamedSharding) -> str:
    """Return in words which part of an array each device of the mesh gets."""
    devices = ", ".join(str(device) for device in np.ravel(np.asarray(sharding.mesh.devices)))
    divisions = []
    num_copies = sharding.mesh.size
    for axis, names in enumerate(sharding.spec):
        axes = names if isinstance(names, tuple) else (names,)
        axes = [name for name in axes if name is not None]
        num_parts = prod(sharding.mesh.shape[name] for name in axes)
        if num_parts > 1:
            over = ", ".join(map(repr, axes))
            divisions.append(f"axis {axis} in {num_parts} parts over {over}")
            num_copies //= num_parts
    if not divisions:
        return f"whole on {'each of ' if sharding.mesh.size > 1 else ''}{devices}"
    division = "; ".join(divisions)
    if num_copies > 1:
        division += f"; {num_copies} devices have the same part"
    part = [
        size // num_parts if size % num_parts == 0 else None
        for size, num_parts in zip(leaf.shape, _count_parts(leaf, sharding), strict=True)
    ]
    if None in part:
        return (
            f"does not divide as training needs ({division}); an evaluation puts it whole on "
            f"each of {devices}"
        )
    return f"{part} on each of {devices} ({division})"


def _count_parts(leaf: Any, sharding: NamedSharding) -> list[int]:
    """Return into how many parts each axis of an array is divided.

    The parts of other processes count only for a global array: a local one is this process's own.
    """
    offsets = _get_process_offsets(sharding, leaf.ndim)
    if is_local(leaf):
        parts = offsets[jax.process_index()]
    else:
        parts = set().union(*offsets.values())
    return [len({offset[axis] for offset in parts}) for axis in range(leaf.ndim)]


def is_local(leaf: Any) -> bool:
    """Return whether a leaf is this process's part, instead of a global array."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


@lru_cache(maxsize=256)
def _get_process_offsets(sharding: NamedSharding, rank: int) -> dict[int, set[tuple[int, ...]]]:
    """Return where the parts of each process begin, as if each axis were as long as there are
    devices."""
    if len(sharding.spec) > rank:
        raise PluginError(
            f"get_batch_shardings of a sharding strategy returned {sharding.spec} for an array "
            f"with {rank} axes"
        )
    parts: dict[int, set[tuple[int, ...]]] = {}
    shape = (sharding.mesh.size,) * rank
    for device, index in sharding.devices_indices_map(shape).items():
        offset = tuple(part.start or 0 for part in index)
        parts.setdefault(device.process_index, set()).add(offset)
    return parts


def _put_global(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if jax.process_count() == 1 or not is_local(leaf):
        return jax.device_put(leaf, sharding)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        with jax.set_mesh(None):
            data = np.asarray(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(_put_global(data, sharding), impl=jax.random.key_impl(leaf))
    return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))


def _get_local_count(batch: Any) -> Any:
    """Return what one of several processes says that its part of a batch counts, or None."""
    if jax.process_count() == 1 or not isinstance(batch, fg.Batch):
        return None
    count = batch.num_examples
    return count if count is not None and is_local(count) else None


def _sum_over_processes(count: Any, sharding: NamedSharding) -> jax.Array:
    """Return the sum of what each process counts, or of several such counts along a first axis.

    Args:
        count: of this process.
        sharding: of the sum.
    """
    local = np.asarray(count)
    mesh = sharding.mesh
    # By the first device of each process.
    parts = np.zeros((len(mesh.local_devices or []), *local.shape), local.dtype)
    parts[0] = local
    divided = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    add_up = _compile_sum(sharding)
    return add_up(jax.make_array_from_process_local_data(divided, parts))


@lru_cache(maxsize=64)
def _compile_sum(sharding: NamedSharding) -> Any:
    return jax.jit(lambda parts: parts.sum(0, dtype=parts.dtype), out_shardings=sharding)
