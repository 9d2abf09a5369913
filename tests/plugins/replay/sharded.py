"""A program that trains on all devices, fully sharded, with a bad batch at step 8."""

from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_checkpoint import Checkpointer
from fulgurite_cli import Experiment, run
from fulgurite_replay import Capture
from fulgurite_sharding import FSDP

BAD_STEP, BAD_EXAMPLE = 8, 6


class Net(fg.Module):
    hidden: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        keys = jax.random.split(key)
        self.hidden = eqx.nn.Linear(4, 64, key=keys[0])
        self.out = eqx.nn.Linear(64, 1, key=keys[1])

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        hidden = jax.nn.relu(jax.vmap(self.hidden)(jnp.log(batch["x"])))
        return fg.Output(jnp.mean(jax.vmap(self.out)(hidden) ** 2))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


def experiment() -> Experiment:
    rng = np.random.default_rng(0)
    batches = [{"x": rng.uniform(1, 2, size=(8, 4)).astype(np.float32)} for _ in range(12)]
    batches[BAD_STEP - 1]["x"][BAD_EXAMPLE, 2] = 0
    plugins = [Checkpointer(every=5), FSDP(min_size=64), Capture(every=4), "replay_hint"]
    return Experiment(fg.Engine(steps=12, autoload=False, plugins=plugins), Net, batches)


if __name__ == "__main__":
    run(experiment)
