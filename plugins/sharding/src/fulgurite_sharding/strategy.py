"""A sharding strategy on a mesh: the base class for plugins that say where arrays lie on it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite.plugins import SINGLE_PROCESS, ProcessShard, hash_tree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from fulgurite_sharding.agreement import (
    assert_equal_across_processes,
    iter_aligned_batches,
    raise_on_any_process,
)
from fulgurite_sharding.batches import BatchSharding, is_local


class MeshStrategy(fg.ShardingStrategy):
    """Shards everything over a mesh, as its four `get_..._shardings` say.

    A subclass overrides those that it needs.

    Example:
        from fulgurite_sharding import MeshStrategy
        from jax.sharding import NamedSharding, PartitionSpec as P


        class FirstAxis(MeshStrategy):
            def get_batch_shardings(self, batch):
                return jax.tree.map(lambda _: NamedSharding(self.mesh, P("data")), batch)


        strategy = FirstAxis(jax.make_mesh((jax.device_count(),), ("data",)))

    Args:
        mesh: the devices, with axes of type Auto.
        sync: how several processes agree; several of them need one.

    Raises:
        ConfigurationError: a process has no device in the mesh.
    """

    mesh: Mesh  # pyright: ignore[reportIncompatibleVariableOverride]
    replicated: NamedSharding  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, mesh: Mesh, sync: fg.ProcessSync = SINGLE_PROCESS) -> None:
        members = {device.process_index for device in mesh.devices.flat}
        missing = sorted(set(range(jax.process_count())) - members)
        if missing:
            raise ConfigurationError(
                f"the mesh {dict(mesh.shape)} has no device of process {missing[0]}, and all "
                f"{jax.process_count()} processes train together: make it of devices of each, such "
                "as jax.devices()"
            )
        self.mesh = mesh  # pyright: ignore[reportIncompatibleVariableOverride]
        self.sync = sync
        self.replicated = NamedSharding(mesh, PartitionSpec())  # pyright: ignore
        # A batch of every step asks for its sharding, and there are few shapes.
        self._build_cached = lru_cache(maxsize=64)(self._build_batch_sharding)

    def get_state_shardings(self, state: PyTree) -> PyTree[NamedSharding | None] | None:
        """Return a sharding for every array of a train state; None leaves each where it was made.

        Args:
            state: a `TrainState` with `jax.ShapeDtypeStruct`s for arrays.
        """
        return None

    def get_batch_shardings(self, batch: PyTree) -> PyTree[NamedSharding] | None:
        """Return a sharding for every array of a batch; None to leave batches as they are.

        Args:
            batch: a batch with `jax.ShapeDtypeStruct`s for arrays; with several processes they may
                be of one process's part.
        """
        return None

    def get_param_shardings(self, module: PyTree) -> PyTree[NamedSharding | None] | None:
        """Return a sharding for arrays of the module where its step uses them, such as whole where
        the state is divided; None for those that the compiler may place. Traced.

        With shardings on what enters and leaves the step alone, the compiler turned a fully sharded
        perceptron into a program that gathers batches and moves activations by all-to-all. With
        this constraint there are as many all-gathers as parameters, and one reduction.
        """
        return None

    def get_output_shardings(self, output: PyTree) -> PyTree[NamedSharding | None] | None:
        """Return a sharding for arrays of what the module's step returned; traced.

        None for those whose sharding the compiler may choose.
        """
        return None

    def check_processes(self) -> None:
        if jax.process_count() > 1 and self.sync is SINGLE_PROCESS:
            raise ConfigurationError(
                f"this is one of {jax.process_count()} processes, and no plugin makes them train "
                f"one model: {type(self).__name__} has no ProcessSync. Give it one, such as "
                "CoordinatedSync()"
            )

    def mesh_context(self) -> AbstractContextManager[Any]:
        return jax.set_mesh(self.mesh)

    def shard_state(self, spec: PyTree) -> PyTree[NamedSharding | None] | None:
        return self.get_state_shardings(spec)

    def shard_batch(self, batch: PyTree, *, beside: PyTree, is_stacked: bool = False) -> PyTree:
        return self._get_batch_sharding(batch, is_stacked).put(batch)

    def get_batch_spec(self, batch: PyTree, *, is_stacked: bool = False) -> PyTree:
        return self._get_batch_sharding(batch, is_stacked).get_spec(batch)

    def shard_eval_batch(self, batch: PyTree, *, beside: PyTree) -> PyTree:
        """Return the batch as global arrays.

        One that does not divide by the devices is whole on each of them: to pad it would change the
        results of a step that knows no mask.
        """
        sharding = self._get_batch_sharding(batch)
        if jax.process_count() == 1 and sharding.find_divisibility_error(batch):
            return self.replicate(batch)
        sharding.check(batch, "a batch to evaluate")
        return sharding.put_global(batch)

    def constrain_params(self, module: PyTree) -> PyTree:
        return _constrain(module, self.get_param_shardings(module))

    def constrain_output(self, output: PyTree) -> PyTree:
        return _constrain(output, self.get_output_shardings(output))

    def replicate(self, tree: PyTree) -> PyTree:
        return jax.tree.map(self._replicate_leaf, tree)

    def put_on_mesh(self, tree: PyTree) -> PyTree:
        if jax.process_count() > 1:
            local = [leaf for leaf in jax.tree.leaves(tree) if is_local(leaf)]
            if local:
                facts = {"the arrays of a model": hash_tree(local)}
                assert_equal_across_processes(self.sync, "arrays of a model", facts)
        return jax.tree.map(self._put_leaf_on_mesh, tree)

    def process_shard(self, get_batch_spec: Callable[[], PyTree | None]) -> ProcessShard:
        default = jax.process_index(), jax.process_count()
        if jax.process_count() == 1:
            return default
        batch = get_batch_spec()
        if batch is None:
            return default
        return self._get_batch_sharding(batch).get_process_shard(batch)

    def align_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches if jax.process_count() == 1 else iter_aligned_batches(batches, self.sync)

    def check_batch(self, batch: PyTree, where: str) -> None:
        self._get_batch_sharding(batch).check(batch, where)

    def check_same(self, name: str, get_facts: Callable[[], dict[str, Any]], batch: PyTree) -> None:
        if jax.process_count() > 1:
            facts = {**get_facts(), **self._get_batch_sharding(batch).get_fingerprint(batch)}
            assert_equal_across_processes(self.sync, name, facts)

    def raise_on_any_process(self, failure: Exception | None) -> None:
        if jax.process_count() > 1:
            raise_on_any_process(self.sync, failure)
        elif failure is not None:
            raise failure

    def describe(self, batch: PyTree) -> str:
        return self._get_batch_sharding(batch).describe(batch)

    def _get_batch_sharding(self, batch: PyTree, is_stacked: bool = False) -> BatchSharding:
        leaves, structure = jax.tree.flatten(batch)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        return self._build_cached(structure, shapes, is_stacked)

    def _build_batch_sharding(
        self, structure: Any, shapes: tuple[Any, ...], is_stacked: bool
    ) -> BatchSharding:
        if is_stacked:
            shapes = tuple((shape[1:], dtype) for shape, dtype in shapes)
        arrays = [
            jax.ShapeDtypeStruct(
                shape, jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
            )
            for shape, dtype in shapes
        ]
        spec = structure.unflatten(arrays)
        sharding = BatchSharding.build(spec, self.get_batch_shardings(spec))
        return sharding.add_leading_axis() if is_stacked else sharding

    def _replicate_leaf(self, leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = self._replicate_leaf(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        array = np.asarray(leaf)
        return jax.make_array_from_callback(array.shape, self.replicated, array.__getitem__)

    def _put_leaf_on_mesh(self, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            is_on_mesh = getattr(leaf.sharding, "mesh", None) == self.mesh
            if is_on_mesh or not leaf.is_fully_addressable:
                return leaf
        if jax.process_count() == 1:
            # An array that is not committed to a device is divided by the executable itself, which
            # moves no more of it than each device needs.
            is_committed = getattr(leaf, "committed", False)
            return jax.device_put(leaf, self.replicated) if is_committed else leaf
        return self._replicate_leaf(leaf)


def _constrain(tree: PyTree, shardings: PyTree[NamedSharding | None] | None) -> PyTree:
    """Return a traced tree whose arrays have the shardings given for them; None leaves an array to
    the compiler."""
    if shardings is None:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, structure.flatten_up_to(shardings), strict=True)
    constrained = [
        leaf if sharding is None else jax.lax.with_sharding_constraint(leaf, sharding)
        for leaf, sharding in pairs
    ]
    return structure.unflatten(constrained)
