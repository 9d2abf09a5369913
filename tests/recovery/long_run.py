"""A long run whose clock runs fast, with an eye on what it holds.

python long_run.py RUN_DIR STEPS EVALUATORS

Each step logs ten records, every 50th is saved, and each evaluator runs ten times; other actions run
by the clock, which shows 24 hours in all. Prints a line of JSON for each tenth.
"""

# These measure their own timeouts, by the clock that they find when they are imported.
import asyncio  # noqa: F401
import concurrent.futures.thread  # noqa: F401
import json
import os
import queue  # noqa: F401
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HOURS = 24
RECORDS_A_STEP = 10
SAVE_EVERY = 50
NUM_EVALUATIONS = 10
NUM_SAMPLES = 10


class FastClock:
    """A clock that jumps ahead with each step of a run, so that all of it takes `HOURS`."""

    def __init__(self) -> None:
        self._read = time.monotonic
        self.offset = 0.0

    def __call__(self) -> float:
        return self._read() + self.offset


CLOCK = FastClock()
# Before fulgurite is imported, whose modules take the function by its name.
time.monotonic = CLOCK

import fulgurite as fg  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from fulgurite_averaging import EMA, Average  # noqa: E402
from fulgurite_checkpoint import Checkpointer  # noqa: E402
from fulgurite_evaluators import Evaluator  # noqa: E402
from fulgurite_logging import CSVLogger, JSONLLogger  # noqa: E402
from fulgurite_progress import ProgressBar  # noqa: E402
from fulgurite_stopping import TimeLimit  # noqa: E402
from fulgurite_tensorboard import TensorBoardLogger  # noqa: E402


@dataclass(frozen=True)
class Sample:
    """What the process holds at a step.

    Attributes:
        step: the step.
        memory: resident, in MiB.
        descriptors: open files and the like.
        threads: of Python.
        step_cost: processor time of a step since the sample before, all threads, in microseconds.
        wall_cost: the same in time that has passed.
        hours: what the clock shows, since the beginning.
        ticks: how often the action by the clock has run.
    """

    step: int
    memory: float
    descriptors: int
    threads: int
    step_cost: float
    wall_cost: float
    hours: float
    ticks: int


class Line(fg.Module):
    """Least squares."""

    weight: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.weight = jax.random.normal(key, (4,))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(((batch @ self.weight - 1) ** 2).mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


class Watch:
    """Moves the clock, logs, and looks at the process."""

    plugin_name = "watch"

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.ticks = 0
        self.started = CLOCK()
        self.last_look = (0, time.process_time(), time.perf_counter())

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [
            fg.ScheduledAction("move", 1, self.move_clock),
            fg.ScheduledAction("log", 1, self.log),
            fg.ScheduledAction("tick", fg.EverySeconds(600), self.tick),
            fg.ScheduledAction("look", self.steps // NUM_SAMPLES, self.look),
        ]

    def move_clock(self, run: fg.Run) -> None:
        CLOCK.offset += HOURS * 3600 / self.steps

    def log(self, run: fg.Run) -> None:
        for number in range(RECORDS_A_STEP - 1):
            run.log_scalars(f"source{number}", {"value": run.step * number})

    def tick(self, run: fg.Run) -> None:
        self.ticks += 1

    def look(self, run: fg.Run) -> None:
        step, process_time, passed = self.last_look
        self.last_look = (run.step, time.process_time(), time.perf_counter())
        num_steps = run.step - step
        sample = Sample(
            step=run.step,
            memory=read_memory(),
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=threading.active_count(),
            step_cost=(self.last_look[1] - process_time) / num_steps * 1e6,
            wall_cost=(self.last_look[2] - passed) / num_steps * 1e6,
            hours=(CLOCK() - self.started) / 3600,
            ticks=self.ticks,
        )
        print(json.dumps(asdict(sample)), flush=True)


def read_memory() -> float:
    """Return the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(run_dir: str, steps: int, num_evaluators: int) -> None:
    """Train, and print samples.

    Args:
        run_dir: the run directory, which is not there yet.
        steps: how many.
        num_evaluators: how many evaluators.
    """
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    evaluators = [
        Evaluator(f"set{number}", [x[number % 8 :: 8]], every=fg.EvenlySpaced(NUM_EVALUATIONS))
        for number in range(num_evaluators)
    ]
    plugins = [
        Watch(steps),
        Average(EMA(0.99)),
        JSONLLogger(),
        CSVLogger(),
        TensorBoardLogger(),
        ProgressBar(),
        TimeLimit(f"{HOURS + 1}h"),
        Checkpointer(fg.Every(SAVE_EVERY), max_to_keep=3, monitor="train/loss"),
        *evaluators,
    ]
    engine = fg.Engine(steps=steps, run_dir=run_dir, log_every=1, plugins=plugins, autoload=False)
    result = engine.fit(Line, fg.ArrayData(x, 8, shuffle=True), resume="never")
    assert result.stop_reason is None, result.stop_reason


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
