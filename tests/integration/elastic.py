"""Run by test_elastic.py: trains on that many simulated devices in a layout, from what is there on,
to a step; prints what it began and ended with as JSON."""

import hashlib
import json
import sys
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import optax
from fulgurite_checkpoint import Checkpointer
from fulgurite_sharding import FSDP, DataParallel, TensorParallel, gather
from jax.sharding import PartitionSpec as P

RULES = [("layers[0].weight", P("model", None)), ("layers[1].weight", P(None, "model"))]
LAYOUTS = {"data": DataParallel(), "fsdp": FSDP(min_size=64), "tensor": TensorParallel(RULES)}


class Net(fg.Module):
    """Two layers, with dropout between them."""

    layers: list[eqx.nn.Linear]
    drop: eqx.nn.Dropout

    def __init__(self, *, key: Any) -> None:
        keys = jax.random.split(key)
        self.layers = [eqx.nn.Linear(16, 64, key=keys[0]), eqx.nn.Linear(64, 8, key=keys[1])]
        self.drop = eqx.nn.Dropout(0.2)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        def apply(x: Any, key: Any) -> Any:
            return self.layers[1](self.drop(jax.nn.relu(self.layers[0](x)), key=key))

        preds = jax.vmap(apply)(batch["x"], ctx.keys("default", len(batch["x"])))
        return fg.Output(((preds - batch["y"]) ** 2).mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


@dataclass(frozen=True, eq=False)
class Began:
    """Keeps what the run begins with."""

    state: dict[str, Any] = field(default_factory=dict)

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        self.state.update(step=run.step, bits=bits(run.state), parts=parts(run.state))


def bits(state: fg.TrainState) -> str:
    """A hash of everything that a state holds, wherever it lies."""
    leaves = jax.tree.leaves(gather(eqx.filter(state, eqx.is_array)))
    return hashlib.sha256(
        b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in leaves)
    ).hexdigest()


def parts(state: fg.TrainState) -> list[list[int]]:
    """The shapes that each device has of the first layer's weight, and of Adam's average of its
    gradients."""
    first = [state.module.layers[0].weight, state.opt_state[1][0].mu.layers[0].weight]
    return [list(leaf.sharding.shard_shape(leaf.shape)) for leaf in first]


def main(run: str, layout: str, devices: int, steps: int) -> None:
    jax.config.update("jax_num_cpu_devices", devices)
    x = np.random.default_rng(0).normal(size=(48, 16)).astype(np.float32)
    data = fg.ArrayData({"x": x, "y": np.tanh(x[:, :8])}, 16, shuffle=True)
    began = Began()
    plugins = [LAYOUTS[layout], Checkpointer(99), began]
    engine = fg.Engine(steps=steps, log_every=1, run_dir=run, plugins=plugins, autoload=False)
    result = engine.fit(Net, data, resume="auto")
    assert int(result.state.step) == steps
    results = {
        "began": began.state,
        "ended": {"bits": bits(result.state), "parts": parts(result.state)},
    }
    print(json.dumps({**results, "losses": result.history["train/loss"].tolist()}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
