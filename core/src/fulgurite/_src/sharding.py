"""Where arrays lie, and how several processes agree: the interface, and what one device needs.

Everything for several devices or processes is a plugin's, which answers the hook
`sharding_strategy`; `fulgurite_sharding.MeshStrategy` is the base class for a mesh.
"""

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from fulgurite._src.tree.paths import leaves_with_paths
from fulgurite._src.tree.specs import get_default_device, put_beside
from fulgurite.errors import ConfigurationError

FIT_START = "fit"
"""The name under which processes compare what they begin a fit with."""

ProcessShard = tuple[int, int]
"""`(index, count)`: which part of each batch a process reads, and how many parts there are."""


class ProcessSync:
    """How processes agree on what each sees for itself. This one is for a single process.

    If one of several processes decided alone from its clock, its signals or its files, it would
    enter a collective that the others do not. A strategy for several processes brings a subclass.

    Example:
        sync = fg.ProcessSync()
        sync.all_gather("batches", 10)  # [10]

    Attributes:
        signals: the signals that the training loop takes as requests to stop; this object handles
            any others.
    """

    signals: ClassVar[tuple[signal.Signals, ...]] = (signal.SIGINT, signal.SIGTERM)

    def reduce_requests(self, step: int, requests: frozenset[str]) -> frozenset[str]:
        """Return the requests that all processes agree on.

        Every process calls it equally often and at the same steps: at the end of each dispatch,
        before anything due there, and between the batches of an evaluation.

        Args:
            step: the number of completed updates.
            requests: this process's own: `action:NAME` for an action due by the clock,
                `stop:REASON`.
        """
        return requests

    def broadcast(self, fn: Callable[[], Any]) -> Any:
        """Return what `fn()` returns on the first process, a JSON value.

        The others wait and do not call it. If it raises, it raises everywhere. Every process calls
        this, in the same order, on the main thread.
        """
        return fn()

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """Return the JSON values of all processes, in their order.

        None continues before all have called it. It may be called on any thread.

        Args:
            name: what is gathered; for each name every process calls this equally often.
            value: this process's own.
        """
        return [value]


SINGLE_PROCESS = ProcessSync()
"""For a program of one process, where nothing is to be agreed on."""


class ShardingStrategy(ABC):
    """Decides where states, batches and outputs lie, and makes processes act alike.

    It sees trees of arrays or of shapes, never where they come from. A plugin gives one through the
    hook `sharding_strategy`.

    Example:
        class OneDevice:
            @fg.hookimpl
            def sharding_strategy(self):
                return fg.SingleDevice()


        engine = fg.Engine(steps=100, plugins=[OneDevice()])

    Attributes:
        mesh: the devices that everything lies on; None for one device.
        sync: how several processes agree.
        replicated: the sharding of what every device has whole; None for one device.
        batch_sharding: that of every array of a batch, for `source.device_put(sharding)`; None for
            one device, and where it depends on the array: use `shard_batch` there.
    """

    mesh: Mesh | None = None
    sync: ProcessSync = SINGLE_PROCESS
    replicated: NamedSharding | None = None
    batch_sharding: NamedSharding | None = None

    @property
    def name(self) -> str:
        """What errors call it."""
        return type(self).__name__

    @abstractmethod
    def check_processes(self) -> None:
        """Raise `ConfigurationError` if this cannot make several processes train one model."""

    @abstractmethod
    def mesh_context(self) -> AbstractContextManager[Any]:
        """Return a context in which traced code may name the axes of the mesh, as in
        `with_sharding_constraint(x, P("data"))`."""

    @abstractmethod
    def shard_state(self, spec: PyTree) -> PyTree[NamedSharding | None] | None:
        """Return a sharding for every array of a train state, and None for its other leaves.

        Args:
            spec: the state, with `jax.ShapeDtypeStruct`s for arrays.

        Returns:
            A tree like `spec`; None to leave everything on one device.
        """

    @abstractmethod
    def shard_batch(self, batch: PyTree, *, beside: PyTree, is_stacked: bool = False) -> PyTree:
        """Return a batch of training as arguments of a program compiled for `get_batch_spec`.

        NumPy arrays may stay as they are: the program moves them to its devices, and no more of
        them than each device needs.

        Args:
            batch: this process's part.
            beside: the arrays of the train state, which the program gets as well.
            is_stacked: whether it is several batches along a new first axis.
        """

    @abstractmethod
    def get_batch_spec(self, batch: PyTree, *, is_stacked: bool = False) -> PyTree:
        """Return what to compile for batches like one that `shard_batch` gave: shapes, dtypes and
        shardings."""

    @abstractmethod
    def shard_eval_batch(self, batch: PyTree, *, beside: PyTree) -> PyTree:
        """Return a batch of an evaluation, which may be of any size, as `shard_batch` does.

        Args:
            batch: this process's part.
            beside: the arrays of what is evaluated, which the program gets as well.
        """

    @abstractmethod
    def constrain_params(self, module: PyTree) -> PyTree:
        """Return the module, traced, as its step shall find it on the devices."""

    @abstractmethod
    def constrain_output(self, output: PyTree) -> PyTree:
        """Return what the module's step returned, traced, as it shall lie on the devices."""

    @abstractmethod
    def replicate(self, tree: PyTree) -> PyTree:
        """Return host or local arrays, the same in every process, whole on every device."""

    @abstractmethod
    def put_on_mesh(self, tree: PyTree) -> PyTree:
        """Return arrays as arguments of a program on the mesh.

        They may be a process's own, the same on each, or lie on the mesh already, where they stay.
        """

    @abstractmethod
    def process_shard(self, get_batch_spec: Callable[[], PyTree | None]) -> ProcessShard:
        """Return which part of each batch this process reads, and how many parts there are.

        Args:
            get_batch_spec: returns the shapes of a whole batch; None where each process has data of
                its own.
        """

    @abstractmethod
    def align_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of an evaluation, equally many on each process."""

    @abstractmethod
    def check_batch(self, batch: PyTree, where: str) -> None:
        """Raise `DataError` if a batch does not divide by the devices.

        Args:
            batch: this process's part.
            where: which batch it is, for the error.
        """

    @abstractmethod
    def check_same(self, name: str, get_facts: Callable[[], dict[str, Any]], batch: PyTree) -> None:
        """Raise `ConfigurationError` on every process if they differ.

        Each would train something else, or wait for what the others never do.

        Args:
            name: of the comparison; every process makes it equally often.
            get_facts: returns what must be equal, JSON values by what they are.
            batch: this process's part of a batch, whose shapes are compared as well.
        """

    @abstractmethod
    def raise_on_any_process(self, failure: Exception | None) -> None:
        """Raise `failure` if there is one, and `ProcessError` if another process has one."""

    @abstractmethod
    def describe(self, batch: PyTree) -> str:
        """Return where each array of a batch goes, a line each, for people."""


class SingleDevice(ShardingStrategy):
    """Leaves the train state where it was made or put, and moves batches to it.

    Example:
        strategy = fg.SingleDevice()
        print(strategy.describe(next(iter(data))))  # where each array of a batch goes

    Args:
        sync: how processes agree, for a plugin that decides when training stops.
    """

    def __init__(self, sync: ProcessSync = SINGLE_PROCESS) -> None:
        self.sync = sync

    def check_processes(self) -> None:
        if jax.process_count() > 1:
            raise ConfigurationError(
                f"this is one of {jax.process_count()} processes, and no plugin makes them train "
                "one model: add one that gives a mesh over all devices and a ProcessSync, such as "
                "DataParallel() of fulgurite-sharding"
            )

    def mesh_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def shard_state(self, spec: PyTree) -> None:
        return None

    def shard_batch(self, batch: PyTree, *, beside: PyTree, is_stacked: bool = False) -> PyTree:
        return put_beside(batch, beside)

    def get_batch_spec(self, batch: PyTree, *, is_stacked: bool = False) -> PyTree:
        return batch

    def shard_eval_batch(self, batch: PyTree, *, beside: PyTree) -> PyTree:
        return put_beside(batch, beside)

    def constrain_params(self, module: PyTree) -> PyTree:
        return module

    def constrain_output(self, output: PyTree) -> PyTree:
        return output

    def replicate(self, tree: PyTree) -> PyTree:
        return tree

    def put_on_mesh(self, tree: PyTree) -> PyTree:
        return tree

    def process_shard(self, get_batch_spec: Callable[[], PyTree | None]) -> ProcessShard:
        return jax.process_index(), jax.process_count()

    def align_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches

    def check_batch(self, batch: PyTree, where: str) -> None:
        pass

    def check_same(self, name: str, get_facts: Callable[[], dict[str, Any]], batch: PyTree) -> None:
        pass

    def raise_on_any_process(self, failure: Exception | None) -> None:
        if failure is not None:
            raise failure

    def describe(self, batch: PyTree) -> str:
        place = (
            "whole on the device of the train state, which is "
            f"{get_default_device()} unless the module was put on another"
        )
        return "\n".join(
            f"{path or 'the batch'} {leaf.dtype}{list(leaf.shape)}: {place}"
            for path, leaf in leaves_with_paths(batch)
        )
