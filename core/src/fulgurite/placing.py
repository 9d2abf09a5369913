"""Where arrays go: what a mesh and the shardings that plugins give mean for states, batches and
processes."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from fulgurite.consensus import LOCAL, ProcessSync
from fulgurite.data.iterator import ProcessShard
from fulgurite.data.sources import ArrayData, as_data
from fulgurite.errors import ConfigurationError, DataError, PluginError
from fulgurite.plugins.manager import PluginManager
from fulgurite.training.state import TrainState
from fulgurite.tree.paths import leaves_with_paths
from fulgurite.tree.specs import digest, shape_spec


def check_processes(mesh: Mesh | None, consensus: ProcessSync) -> None:
    """Several processes that no plugin makes train one model are an error."""
    if jax.process_count() > 1 and (mesh is None or consensus is LOCAL):
        gap = f"this is one of {jax.process_count()} processes, and no plugin makes them train one model"
        fix = "one that gives a mesh over all devices and a consensus, such as DataParallel() of fulgurite-sharding"
        raise ConfigurationError(f"{gap}: add {fix}")


def use_mesh(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Within it, what is traced may name the axes of `mesh`: `with_sharding_constraint(x,
    P("data"))`."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def replicated_sharding(mesh: Mesh | None) -> NamedSharding | None:
    """The sharding of what every device of a mesh has whole."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def replicate(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """A tree of host or local arrays, the same in every process, with every array whole on every
    device of `mesh`."""
    whole = replicated_sharding(mesh)
    if whole is None:
        return tree
    return jax.tree.map(
        lambda a: jax.make_array_from_callback(a.shape, whole, np.asarray(a).__getitem__), tree
    )


def state_shardings(
    plugins: PluginManager, like: TrainState, mesh: Mesh | None
) -> list[NamedSharding] | None:
    """A sharding for each array of a state of this kind, in the order of its leaves, or None
    without a plugin that shards states."""
    shardings = plugins.ask("state_sharding", state=like, mesh=mesh)
    if shardings is None:
        return None
    if mesh is None:
        raise PluginError("a plugin answers the hook state_sharding, but none the hook mesh")
    for hook in plugins.implementations("plugin_state_sharding"):
        own = hook(None, plugin_state=like.plugin_states.get(hook.plugin.name), mesh=mesh)
        if own is not None:
            shardings = shardings.replace(
                plugin_states={**shardings.plugin_states, hook.plugin.name: own}
            )
    found = jax.tree.leaves(shardings)
    arrays = [leaf for leaf in jax.tree.leaves(like) if isinstance(leaf, jax.ShapeDtypeStruct)]
    if len(found) != len(arrays) or not all(isinstance(one, NamedSharding) for one in found):
        wanted = f"a NamedSharding for each of the {len(arrays)} arrays of the state and None for its other leaves"
        raise PluginError(f"hook state_sharding must give {wanted}; it gave {len(found)} leaves")
    return found


def constrain_sharding(plugins: PluginManager, hook: str, **argument: PyTree) -> PyTree:
    """A traced tree, the only argument of `hook`, sharded as a plugin's answer to it says."""
    (tree,) = argument.values()
    shardings = plugins.ask(hook, **argument)
    if shardings is None:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    places = zip(leaves, treedef.flatten_up_to(shardings), strict=True)
    made = [
        leaf if place is None else jax.lax.with_sharding_constraint(leaf, place)
        for leaf, place in places
    ]
    return treedef.unflatten(made)


def put_shared(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """A tree of arrays that may be a process's own, the same on each, or lie elsewhere, as
    arguments of a program on `mesh`."""

    def share(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and (
            not leaf.is_fully_addressable or getattr(leaf.sharding, "mesh", 0) == mesh
        ):
            return leaf
        if jax.process_count() == 1:
            # What is not committed to a device goes where it is wanted, no more of it than that.
            return (
                jax.device_put(leaf, replicated_sharding(mesh))
                if getattr(leaf, "committed", False)
                else leaf
            )
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(
                replicate(jax.random.key_data(leaf), mesh), impl=jax.random.key_impl(leaf)
            )
        return replicate(leaf, mesh)

    return tree if mesh is None else jax.tree.map(share, tree)


@dataclass(frozen=True, eq=False)
class BatchSharding:
    """Places batches of one structure. `shardings` has a sharding for each array of a batch; None
    leaves them as they are."""

    shardings: PyTree[NamedSharding] | None

    @staticmethod
    def from_hooks(plugins: PluginManager, batch: PyTree, mesh: Mesh | None) -> "BatchSharding":
        """As plugins say, for batches like this one."""
        shardings = plugins.ask("batch_sharding", batch=shape_spec(batch), mesh=mesh)
        structure = jax.tree.structure(batch)
        named = all(isinstance(one, NamedSharding) for one in jax.tree.leaves(shardings))
        if shardings is not None and not (named and jax.tree.structure(shardings) == structure):
            raise PluginError(
                f"hook batch_sharding must give a NamedSharding for each array of a batch {structure}"
            )
        return BatchSharding(shardings)

    def with_leading_axis(self) -> "BatchSharding":
        """For several batches along a new first axis."""
        return BatchSharding(
            jax.tree.map(
                lambda one: one.update(spec=PartitionSpec(None, *one.spec)), self.shardings
            )
        )

    def divisibility_error(self, batch: PyTree) -> str | None:
        """What of this process's part of a batch does not divide by its devices, or None."""
        if self.shardings is None:
            return None
        for (path, leaf), sharding in zip(
            leaves_with_paths(batch), jax.tree.leaves(self.shardings), strict=True
        ):
            if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                continue
            own = _process_offsets(sharding, leaf.ndim)[jax.process_index()]
            for axis, size in enumerate(leaf.shape):
                if size % (parts := len({at[axis] for at in own})):
                    over = f"{parts} parts along the mesh's {sharding.spec[axis]!r}"
                    return f"axis {axis} of {path or 'the array'} {list(leaf.shape)} does not divide into {over}"
        return None

    def check(self, batch: PyTree, what: str) -> None:
        """A `DataError` if a batch does not divide by the devices."""
        if misfit := self.divisibility_error(batch):
            rest = "what is left at the end of an epoch ArrayData(remainder='drop') or 'pad'"
            raise DataError(
                f"{what}: {misfit}. Choose a batch_size that is a multiple of it, and for {rest}"
            )

    def __call__(self, batch: PyTree) -> PyTree:
        """The batch as arguments for a program compiled for `specs` of it. In one process NumPy
        arrays stay, because to place them beforehand is slower."""
        if self.shardings is None:
            return batch
        if jax.process_count() > 1:
            return self.put_global(batch)
        return jax.tree.map(
            lambda a, s: jax.device_put(a, s) if isinstance(a, jax.Array) else a,
            batch,
            self.shardings,
        )

    def put_global(self, batch: PyTree) -> PyTree:
        """The batch as global arrays."""
        return batch if self.shardings is None else jax.tree.map(_global, batch, self.shardings)

    def specs(self, batch: PyTree) -> PyTree:
        """Shapes, dtypes and shardings of a batch that `__call__` gave."""
        if self.shardings is None:
            return batch
        return jax.tree.map(
            lambda spec, at: spec.update(sharding=at), shape_spec(batch), self.shardings
        )

    def fingerprint(self, batch: PyTree) -> dict[str, Any]:
        """What processes must say alike: the shapes of the whole batch, and what is in the rows
        that several of them have, such as two that share a model."""
        if self.shardings is None:
            return {}
        whole, told = list[str](), dict[str, Any]()
        for (path, leaf), sharding in zip(
            leaves_with_paths(batch), jax.tree.leaves(self.shardings), strict=True
        ):
            shape = list(leaf.shape)
            if shape and not (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
                parts = _process_offsets(sharding, leaf.ndim)
                own = parts[jax.process_index()]
                told[f"what is in {path or 'the array'} at {sorted(own)} of the mesh"] = digest(
                    leaf
                )
                rows = {at[0] for part in parts.values() for at in part}
                shape[0] = shape[0] * len(rows) // len({at[0] for at in own})
            whole.append(f"{path} {leaf.dtype}{shape}".strip())
        return told | {"the whole batch": ", ".join(whole)}


def shard_batch(plugins: PluginManager, batch: PyTree, mesh: Mesh | None) -> PyTree:
    """A batch for evaluation, as global arrays. One that does not divide by the devices is whole on
    each of them: to pad it would change the results of a step that knows no mask."""
    placing = BatchSharding.from_hooks(plugins, batch, mesh)
    if jax.process_count() == 1 and placing.divisibility_error(batch):
        return replicate(batch, mesh)
    placing.check(batch, "a batch to evaluate")
    return placing.put_global(batch)


def process_shard(plugins: PluginManager, data: Any, mesh: Mesh | None) -> ProcessShard:
    """Which part of each batch of `data` this process reads, and how many parts there are.
    Processes whose devices hold the same examples, such as two that share a model, read the same
    part."""
    source = as_data(data).source
    if jax.process_count() == 1 or mesh is None or not isinstance(source, ArrayData):
        return jax.process_index(), jax.process_count()
    batch = next(iter(source))
    placing = BatchSharding.from_hooks(plugins, batch, mesh)
    sharding, leaf = next(iter(jax.tree.leaves(placing.shardings)), None), jax.tree.leaves(batch)[0]
    if sharding is None:
        return 0, 1
    rows = {
        process: {at[0] for at in part}
        for process, part in _process_offsets(sharding, leaf.ndim).items()
    }
    parts = sorted(set(map(frozenset, rows.values())), key=min)
    if sum(map(len, parts)) != len(frozenset().union(*parts)):
        gap = f"the mesh {dict(mesh.shape)} gives processes parts of a batch that overlap without being the same"
        fix = "choose axis sizes that divide by the devices of a process, or by which they divide"
        raise ConfigurationError(f"{gap}; {fix}")
    return parts.index(frozenset(rows[jax.process_index()])), len(parts)


@lru_cache(maxsize=256)
def _process_offsets(sharding: NamedSharding, rank: int) -> dict[int, set[tuple[int, ...]]]:
    """Where the parts of each process begin, as if each axis were as long as there are devices."""
    if len(sharding.spec) > rank:
        raise PluginError(f"hook batch_sharding gave {sharding.spec} for an array with {rank} axes")
    parts: dict[int, set[tuple[int, ...]]] = {}
    for device, index in sharding.devices_indices_map((sharding.mesh.size,) * rank).items():
        parts.setdefault(device.process_index, set()).add(tuple(one.start or 0 for one in index))
    return parts


def _global(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if jax.process_count() == 1 or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        return jax.device_put(leaf, sharding)
    return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))
