"""A run of known durations that is killed now and then, for `test_goodput.py`.

python interrupted.py RUN_DIR KILL_AT STEP SAVE EVALUATION BATCH RESTORE NUM_STEPS

A step, a checkpoint every 10 steps, an evaluation every 20, each batch and a restore take at least
the seconds that the arguments say. KILL_AT is the step after which the process kills
itself. How long saves and restores took in all is written to RUN_DIR/measured.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_checkpoint import Checkpointer
from fulgurite_evaluators import Evaluator
from fulgurite_monitor import Goodput, read_goodput

RUN_DIR, KILL_AT = sys.argv[1], int(sys.argv[2])
STEP, SAVE, EVALUATION, BATCH, RESTORE = map(float, sys.argv[3:8])
NUM_STEPS = int(sys.argv[8])


class Paced(fg.Module):
    """Its step sleeps."""

    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        zero = jax.pure_callback(sleep_a_step, jax.ShapeDtypeStruct((), "float32"), ctx.step)
        return fg.Output(self.weight * 1.0 + zero + 0 * jnp.mean(batch["x"]))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


def sleep_a_step(step: Any) -> Any:
    time.sleep(STEP)
    return np.float32(0)


class Batches:
    """Its batches take a while."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(NUM_STEPS):
            time.sleep(BATCH)
            yield {"x": np.zeros(2, np.float32)}


@contextmanager
def measure(name: str) -> Iterator[None]:
    """Append how long the block takes to a file."""
    began = time.perf_counter()
    yield
    with open(Path(RUN_DIR) / "measured", "a") as file:
        file.write(f"{name} {time.perf_counter() - began}\n")


class SlowCheckpointer(Checkpointer):
    @fg.hookimpl
    def save_checkpoint(self, run: fg.Run) -> None:
        with measure("save"):
            super().save_checkpoint(run)
            time.sleep(SAVE)

    @fg.hookimpl
    def restore_checkpoint(
        self, resume: Any, template: Any, engine: Any, announce: Any
    ) -> fg.Snapshot | None:
        with measure("restore"):
            time.sleep(RESTORE if Path(RUN_DIR, "checkpoints").exists() else 0)
            return super().restore_checkpoint(resume, template, engine, announce)


class Killer:
    """Kills the process."""

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        if KILL_AT == 0:
            return []
        return [fg.ScheduledAction("kill", fg.At(KILL_AT), self.kill)]

    @staticmethod
    def kill(run: fg.Run) -> None:
        while read_goodput(RUN_DIR).attempts[-1].step < run.step:
            time.sleep(0.005)  # until the thread has noted this step
        os.kill(os.getpid(), signal.SIGKILL)


def evaluate(state: fg.TrainState, step: int) -> dict[str, float]:
    time.sleep(EVALUATION)
    return {"loss": 0.0}


if __name__ == "__main__":
    plugins = [Goodput(), Killer(), SlowCheckpointer(every=10)]
    if EVALUATION:
        plugins.append(Evaluator("test", every=20, fn=evaluate))
    engine = fg.Engine(
        steps=NUM_STEPS,
        log_every=1,
        run_dir=RUN_DIR,
        plugins=plugins,
        autoload=False,
        on_nonfinite="ignore",
        steps_per_execution=1,
    )
    engine.fit(Paced, fg.DataSource(Batches(), prefetch=0, resume="restart"), resume="auto")
