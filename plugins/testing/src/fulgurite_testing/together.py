"""Run by the check `processes`: one of two processes that train the tiny model with a plugin, made
by a function of a file. `python -m fulgurite_testing.together PORT RUN FILE FUNCTION PROCESS`."""

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

from fulgurite_testing.bits import arrays
from fulgurite_testing.tiny import TinyModel, tiny_data, tiny_engine

SIZE = 2**16
"""Bytes of a message between the processes."""


class CollectiveSync(fg.ProcessSync):
    """Agrees by collectives, one message a process."""

    def reduce_requests(self, step: int, requests: frozenset[str]) -> frozenset[str]:
        gathered = self.all_gather("requests", sorted(requests))
        return frozenset(request for answer in gathered for request in answer)

    def broadcast(self, fn: Callable[[], Any]) -> Any:
        return self.all_gather("decided", fn() if jax.process_index() == 0 else None)[0]

    def all_gather(self, name: str, value: Any) -> list[Any]:
        text = json.dumps(value).encode().ljust(SIZE)
        gathered = multihost_utils.process_allgather(np.frombuffer(text, np.uint8))
        return [json.loads(bytes(message)) for message in np.asarray(gathered)]


class DataParallelStrategy(MeshStrategy):
    """Keeps every array whole on both processes, and divides batches."""

    def get_state_shardings(self, state: fg.TrainState) -> Any:
        return jax.tree.map(
            lambda leaf: self.replicated if isinstance(leaf, jax.ShapeDtypeStruct) else None, state
        )

    def get_batch_shardings(self, batch: Any) -> Any:
        return jax.tree.map(lambda leaf: NamedSharding(self.mesh, PartitionSpec("data")), batch)


class BothProcesses:
    """Trains one model in both processes."""

    @fg.hookimpl
    def sharding_strategy(self) -> fg.ShardingStrategy:
        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
        return DataParallelStrategy(mesh, CollectiveSync())


def main(port: str, run: str, file: str, function: str, process: str) -> None:
    """Trains, and prints a digest of the state."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process), initialization_timeout=120)
    plugin = load(file, function)()
    marked = {
        name
        for name in dir(type(plugin))
        if hasattr(getattr(type(plugin), name, None), "fulgurite_impl")
    }
    beside = [] if "sharding_strategy" in marked else [BothProcesses()]
    result = tiny_engine(plugin, *beside, run_dir=run).fit(TinyModel, tiny_data())
    if result.failures:
        raise SystemExit(f"failed: {result.failures}")
    digest = hashlib.sha256()
    for path, array in arrays(jax.tree.map(_whole, (result.module, result.state.step))).items():
        digest.update(path.encode() + array.tobytes())
    print("state", digest.hexdigest(), flush=True)


def load(file: str, function: str) -> Callable[[], Any]:
    """What a file calls `function`."""
    path = Path(file)
    package = path.parent
    while (package / "__init__.py").is_file():
        package = package.parent
    sys.path.insert(0, str(package))
    name = ".".join(path.with_suffix("").relative_to(package).parts)
    found: Any = importlib.import_module(name)
    for part in function.split("."):
        found = getattr(found, part)
    return found


def _whole(leaf: Any) -> Any:
    """An array of both processes as NumPy's; each may hold but a part of it."""
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
        # JAX would wait for the other process on the way out, and that one for this.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
