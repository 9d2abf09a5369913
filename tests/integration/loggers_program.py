"""A run with every logger; it kills itself at a given step of a given attempt."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_checkpoint import Checkpointer
from fulgurite_evaluators import Evaluator
from fulgurite_logging import CSVLogger, JSONLLogger
from fulgurite_tensorboard import TensorBoardLogger
from fulgurite_wandb import WandbLogger


class Line(fg.Module):
    weight: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.weight = jax.random.normal(key, (4,))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(
            ((batch["x"] @ self.weight - 1) ** 2).mean(), metrics={"norm": jnp.sum(self.weight**2)}
        )

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


class Kill:
    def __init__(self, step: int) -> None:
        self.step = step

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("kill", fg.At(self.step), self.kill)]

    def kill(self, run: fg.Run) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def main(run: Path, kill: int) -> None:
    """Trains for 40 steps, killed at step `kill` unless it is 0."""
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    plugins = [
        JSONLLogger(),
        CSVLogger(),
        TensorBoardLogger(),
        WandbLogger("tests", mode="offline"),
        Evaluator("test", fg.ArrayData({"x": x[:20]}, batch_size=10), every=8),
        Checkpointer(every=5),
        *([Kill(kill)] if kill else []),
    ]
    engine = fg.Engine(steps=40, run_dir=run, log_every=3, plugins=plugins, autoload=False)
    engine.fit(Line, fg.ArrayData({"x": x}, batch_size=10, shuffle=True), resume="auto")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
