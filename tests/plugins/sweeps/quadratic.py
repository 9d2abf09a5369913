"""A program whose trials are known by hand: the weight `w` of the loss `(w - 3)² / 2` begins at 0,
and is `3 - 3 (1 - lr)**n` after n steps of gradient descent.

It is started by its file, in processes of its own.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_checkpoint import Checkpointer
from fulgurite_cli import Experiment
from fulgurite_evaluators import Evaluator
from fulgurite_logging import JSONLLogger

HOLD = "QUADRATIC_HOLD"
"""The environment variable that names a folder: each run touches `PID` there before its 31st step,
and continues once there is a file `go`."""
PAUSE = "QUADRATIC_PAUSE"
"""The environment variable that holds seconds to wait before each step."""


class Quadratic(fg.Module):
    weight: jax.Array
    lr: float
    bad: str

    def __init__(self, lr: float, bad: str, *, key: Any = None) -> None:
        self.weight = jnp.zeros(())
        self.lr = lr
        self.bad = bad

    def compute_loss(self, target: jax.Array) -> jax.Array:
        return jnp.mean((self.weight - target) ** 2) / 2

    def training_step(self, batch: jax.Array, ctx: Any) -> fg.Output:
        return fg.Output(self.compute_loss(batch))

    def validation_step(self, batch: jax.Array, ctx: Any) -> fg.Output:
        score = jnp.nan if self.bad == "nan" else self.weight
        values = jnp.full(batch.shape, score)
        return fg.Output(
            self.compute_loss(batch), metrics={"score": fg.metrics.Mean.from_values(values)}
        )

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(self.lr)


class Batches:
    """The same batch again and again; it waits where the tests want to kill something."""

    def __iter__(self) -> Iterator[np.ndarray]:
        for number in range(10_000):
            if number == 30 and HOLD in os.environ:
                folder = Path(os.environ[HOLD])
                (folder / str(os.getpid())).touch()
                while not (folder / "go").exists():
                    time.sleep(0.02)
            time.sleep(float(os.environ.get(PAUSE, "0")))
            yield np.full(2, 3.0, np.float32)


def experiment(
    lr: float = 0.1,
    steps: int = 8,
    width: int = 1,
    bad: Literal["no", "nan", "raise", "exit", "kill"] = "no",
) -> Experiment:
    if bad == "raise":
        raise MemoryError("RESOURCE_EXHAUSTED: out of memory")
    if bad == "exit":
        sys.exit(7)
    if bad == "kill":
        os.kill(os.getpid(), 9)
    test = fg.ArrayData(np.full(2, 3.0, np.float32), batch_size=2)
    plugins = [Evaluator("test", test, every=2), Checkpointer(every=2), JSONLLogger()]
    engine = fg.Engine(steps=steps, plugins=plugins, autoload=False, log_every=2, stop_timeout=1)
    return Experiment(
        engine,
        lambda key: Quadratic(lr, bad),
        fg.DataSource(Batches(), resume="replay"),
    )
