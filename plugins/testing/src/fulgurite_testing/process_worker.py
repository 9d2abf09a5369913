"""One of the two processes of the check `processes`.

It trains the tiny model with a plugin that a function of a file builds:
`python -m fulgurite_testing.process_worker PORT RUN_DIR FILE FUNCTION PROCESS`.
"""

import hashlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import numpy as np
from fulgurite_sharding import MeshStrategy
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fulgurite_testing.compare import get_arrays
from fulgurite_testing.tiny import TinyModel, tiny_data, tiny_engine

MESSAGE_SIZE = 2**16
"""Bytes of a message between the processes."""


class CollectiveSync(fg.ProcessSync):
    """Synchronizes by collectives, with one message per process."""

    def reduce_requests(self, step: int, requests: frozenset[str]) -> frozenset[str]:
        gathered = self.all_gather("requests", sorted(requests))
        return frozenset(request for answer in gathered for request in answer)

    def broadcast(self, fn: Callable[[], Any]) -> Any:
        return self.all_gather("decided", fn() if jax.process_index() == 0 else None)[0]

    def all_gather(self, name: str, value: Any) -> list[Any]:
        text = json.dumps(value).encode().ljust(MESSAGE_SIZE)
        gathered = multihost_utils.process_allgather(np.frombuffer(text, np.uint8))
        return [json.loads(bytes(message)) for message in np.asarray(gathered)]


class DataParallelStrategy(MeshStrategy):
    """Replicates the state on both processes, and divides batches."""

    def get_state_shardings(self, state: fg.TrainState) -> Any:
        return jax.tree.map(
            lambda leaf: self.replicated if isinstance(leaf, jax.ShapeDtypeStruct) else None, state
        )

    def get_batch_shardings(self, batch: Any) -> Any:
        return jax.tree.map(lambda leaf: NamedSharding(self.mesh, PartitionSpec("data")), batch)


class TwoProcesses:
    """Trains one model in both processes, for plugins without a strategy of their own."""

    @fg.hookimpl
    def sharding_strategy(self) -> fg.ShardingStrategy:
        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
        return DataParallelStrategy(mesh, CollectiveSync())


def main(port: str, run_dir: str, file: str, function: str, process: str) -> None:
    """Train, and print a digest of the state.

    Args:
        port: of the coordinator.
        run_dir: the run directory of both processes.
        file: the path of a Python file.
        function: the qualified name of what builds the plugin in that file.
        process: the index of this process, 0 or 1.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process), initialization_timeout=120)
    plugin = load_function(file, function)()
    strategy = getattr(type(plugin), "sharding_strategy", None)
    companions = [] if hasattr(strategy, "fulgurite_impl") else [TwoProcesses()]
    result = tiny_engine(plugin, *companions, run_dir=run_dir).fit(TinyModel, tiny_data())
    if result.failures:
        raise SystemExit(f"failed: {result.failures}")
    digest = hashlib.sha256()
    for path, array in get_arrays(
        jax.tree.map(_as_whole_array, (result.module, result.state.step))
    ).items():
        digest.update(path.encode() + array.tobytes())
    print("state", digest.hexdigest(), flush=True)


def load_function(file: str, function: str) -> Callable[[], Any]:
    """Import a file as a module, with its packages, and return one of its functions or classes.

    Args:
        file: the path of a Python file.
        function: the qualified name.
    """
    path = Path(file)
    package = path.parent
    while (package / "__init__.py").is_file():
        package = package.parent
    sys.path.insert(0, str(package))
    name = ".".join(path.with_suffix("").relative_to(package).parts)
    value: Any = importlib.import_module(name)
    for part in function.split("."):
        value = getattr(value, part)
    return value


def _as_whole_array(leaf: Any) -> Any:
    """Return an array of both processes as a NumPy array; each process may hold a part of it."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf.sharding, NamedSharding):
        replicated = NamedSharding(leaf.sharding.mesh, PartitionSpec())
        leaf = jax.jit(lambda array: array, out_shardings=replicated)(leaf)
    return np.asarray(leaf.addressable_data(0))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        # JAX would wait for the other process at exit, and that one for this.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
