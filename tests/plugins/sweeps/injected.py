"""A program whose trials may be members of a population: what its arguments change are numbers in
the optimizer's state and in the module. It is started by its file, in processes of its own."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_checkpoint import Checkpointer
from fulgurite_cli import Experiment
from fulgurite_evaluators import Evaluator
from fulgurite_logging import JSONLLogger
from quadratic import HOLD


class Regression(fg.Module):
    """A perceptron, whose rate is one for the optimizer, and whose scale is an array."""

    net: eqx.nn.MLP
    scale: jax.Array
    lr: float
    baked: float

    def __init__(self, lr: float, scale: float, baked: float, *, key: Any) -> None:
        self.net = eqx.nn.MLP(4, 2, 8, 1, key=key)
        self.scale = jnp.asarray(scale, jnp.float32)
        self.lr = lr
        self.baked = baked

    def training_step(self, batch: Any, ctx: Any) -> fg.Output:
        preds = jax.vmap(self.net)(batch["x"]) * jax.lax.stop_gradient(self.scale)
        return fg.Output(jnp.mean((preds - batch["y"]) ** 2))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.inject_hyperparams(optax.sgd)(learning_rate=self.lr)


class Waiting:
    """Batches that wait before the fourth, where the tests want to kill something."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        for number in range(1000):
            if number == 4 and HOLD in os.environ:
                folder = Path(os.environ[HOLD])
                (folder / str(os.getpid())).touch()
                while not (folder / "go").exists():
                    time.sleep(0.02)
            yield self._batches[number % len(self._batches)]


def make_batches() -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    return [
        {
            "x": random.normal(size=(8, 4)).astype(np.float32),
            "y": random.normal(size=(8, 2)).astype(np.float32),
        }
        for _ in range(4)
    ]


def experiment(
    lr: float = 0.1,
    scale: float = 1.0,
    baked: float = 0.0,
    hidden: float = 0.0,
    steps: int = 6,
    seed: int = 0,
) -> Experiment:
    assert hidden >= 0
    batches = make_batches()
    plugins = [Evaluator("test", batches[:1], every=2), Checkpointer(every=2), JSONLLogger()]
    engine = fg.Engine(
        steps=steps, seed=seed, plugins=plugins, autoload=False, log_every=2, stop_timeout=1
    )
    data = fg.DataSource(Waiting(batches), resume="replay")
    return Experiment(engine, lambda key: Regression(lr, scale, baked, key=key), data)
