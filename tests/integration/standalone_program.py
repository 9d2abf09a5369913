"""A run whose checkpoints another process evaluates, with every logger; that process can be made to
kill itself."""

import os
import signal
import time
from concurrent.futures import Future
from typing import Any

import fulgurite as fg
import fulgurite_cli
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_checkpoint import Checkpointer
from fulgurite_cli import Experiment
from fulgurite_evaluators import Evaluator, EveryCheckpoint, LastCheckpoint, read_results
from fulgurite_logging import CSVLogger, JSONLLogger, media
from fulgurite_tensorboard import TensorBoardLogger
from fulgurite_wandb import WandbLogger

SAVES = (10, 20, 30)
KILL = "KILL_EVALUATION"
"""The environment variable that says when the evaluating process kills itself: `evaluating 20`
while it evaluates step 20, `logged 20` when the loggers have the result, which does not count
yet."""


class Line(fg.Module):
    weight: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.weight = jax.random.normal(key, (4,))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        loss = ((batch["x"] @ self.weight - 1) ** 2).mean()
        shown = {"weight": lambda: media.Histogram.from_values(self.weight, bins=2)}
        return fg.Output(loss, metrics={"norm": jnp.sum(self.weight**2)}, media=shown)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


class KilledEvaluator(Evaluator):
    """Dies while it evaluates, if it is told to."""

    def evaluate(self, state: fg.TrainState, step: int) -> dict[str, Any]:
        if self.name == "slow":
            kill_at(f"evaluating {step}")
        return super().evaluate(state, step)


class KilledLogger:
    """Dies when the other loggers have all that they are asked to make durable."""

    after = ("jsonl", "csv", "tensorboard", "wandb")

    @fg.hookimpl
    def flush_logger(self, step: int) -> Future[None]:
        time.sleep(0.5)  # the other loggers write on threads
        kill_at(f"logged {step}")
        position: Future[None] = Future()
        position.set_result(None)
        return position


class WaitForEvaluations:
    """Holds training up until the checkpoints are evaluated, of which none is to be skipped."""

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        after_saves = fg.At(*[step + 1 for step in SAVES])
        return [fg.ScheduledAction("wait", after_saves, self.wait)]

    def wait(self, run: fg.Run) -> None:
        deadline = time.monotonic() + 300
        while not any(record.step == run.step - 1 for record in read_results(run.run_dir)):
            assert time.monotonic() < deadline, "the evaluation did not come"
            time.sleep(0.05)


def kill_at(place: str) -> None:
    if os.environ.get(KILL) == place:
        os.kill(os.getpid(), signal.SIGKILL)


def experiment(run_dir: str | None = None) -> Experiment:
    """Trains for 40 steps."""
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    every, last = EveryCheckpoint(poll=0.05), LastCheckpoint(poll=0.05)
    data = fg.ArrayData({"x": x[:20]}, batch_size=10)
    kill = [KilledLogger()] if os.environ.get(KILL) else []
    plugins = [
        JSONLLogger(),
        CSVLogger(),
        TensorBoardLogger(),
        WandbLogger("tests", mode="offline"),
        KilledEvaluator("slow", data, every=every, group="side"),
        Evaluator("last", data, every=last, group="side"),
        Checkpointer(every=10),
        WaitForEvaluations(),
        *kill,
    ]
    engine = fg.Engine(steps=40, run_dir=run_dir, log_every=5, plugins=plugins, autoload=False)
    return Experiment(engine, Line, fg.ArrayData({"x": x}, batch_size=10, shuffle=True))


if __name__ == "__main__":
    fulgurite_cli.run(experiment)
