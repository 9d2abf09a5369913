"""Loads weights on eight simulated devices, and checks which pieces are read for which.

JAX_NUM_CPU_DEVICES=8 python sharded_loading.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import optax
from fulgurite_pretrained import Pretrained, load_safetensors
from fulgurite_pretrained.files import WeightFiles
from fulgurite_sharding import FSDP, gather
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from safetensors.numpy import save_file

WIDTH = 64


class Net(eqx.Module):
    """A stack of layers, and one that is the transpose in the file."""

    stack: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        make = eqx.filter_vmap(lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key))
        self.stack = make(jax.random.split(key, 3))
        self.out = eqx.nn.Linear(WIDTH, 2 * WIDTH, use_bias=False, key=key)

    def __call__(self, x: Any) -> Any:
        for number in range(3):
            layer = jax.tree.map(lambda leaf, number=number: leaf[number], self.stack)
            x = jax.nn.tanh(layer(x))
        return self.out(x)


MAP = {
    "h.*.weight": "stack[*].weight.T",
    "h.*.bias": "stack[*].bias",
    "out": "out.weight.T",
}


def main(folder: str) -> None:
    assert jax.device_count() == 8
    path = Path(folder) / "net.safetensors"
    rng = np.random.default_rng(0)
    arrays = {"out": rng.normal(size=(WIDTH, 2 * WIDTH)).astype(np.float32)}
    for number in range(3):
        arrays[f"h.{number}.weight"] = rng.normal(size=(WIDTH, WIDTH)).astype(np.float32)
        arrays[f"h.{number}.bias"] = rng.normal(size=WIDTH).astype(np.float32)
    save_file(arrays, path)
    stacked = np.stack([arrays[f"h.{number}.weight"].T for number in range(3)])

    sizes: list[int] = []
    whole_read = WeightFiles.read

    def read(self: WeightFiles, name: str, index: Any) -> np.ndarray:
        piece = whole_read(self, name, index)
        sizes.append(piece.size)
        return piece

    WeightFiles.read = read  # type: ignore[method-assign]

    # By shardings of one's own.
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))

    def choose(path: str, shape: Any) -> NamedSharding:
        if not path.endswith("weight"):
            return NamedSharding(mesh, P())
        return NamedSharding(mesh, P(*[None] * (len(shape.shape) - 2), "a", "b"))

    net = load_safetensors(path, into=Net, map=MAP, shardings=choose)
    np.testing.assert_array_equal(net.stack.weight, stacked)
    np.testing.assert_array_equal(net.out.weight, arrays["out"].T)
    assert {shard.data.shape for shard in net.out.weight.addressable_shards} == {(32, 32)}
    assert {shard.data.shape for shard in net.stack.weight.addressable_shards} == {(3, 16, 32)}
    assert max(sizes) == 32 * 32, max(sizes)

    # As a fit lays them out.
    sizes.clear()
    data = fg.ArrayData((np.ones((8, WIDTH), np.float32), np.ones(8, np.float32)), 8)
    plugins = [FSDP(min_size=256), Pretrained(MAP, into="model")]
    engine = fg.Engine(steps=1, plugins=plugins)
    result = engine.fit(make_task, data, init_from=path)
    assert max(sizes) == 2 * WIDTH * WIDTH // 8, max(sizes)
    shapes = {shard.data.shape for shard in result.module.model.out.weight.addressable_shards}
    assert shapes == {(2 * WIDTH // 8, WIDTH)}, shapes
    np.testing.assert_array_equal(gather(result.module.model.stack.weight), stacked)
    sizes.clear()
    evaluated = engine.evaluate(make_task, data, weights=path)
    assert max(sizes) == 2 * WIDTH * WIDTH // 8, max(sizes)
    assert evaluated == engine.evaluate(result, data)
    print("loaded")


def make_task(key: Any) -> fg.Task:
    return fg.Task(
        Net(key=key),
        loss=lambda preds, batch: (preds.mean(1) - batch[1]) ** 2,
        optimizer=optax.sgd(0.0),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
