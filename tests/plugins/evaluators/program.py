"""A program that tests run: it counts updates, saves, and has standalone evaluators."""

from pathlib import Path
from typing import Any

import fulgurite as fg
import fulgurite_cli
import jax
from evaluated import Counting, Disk, Witness, gate, note, numbers
from fulgurite_cli import Experiment
from fulgurite_evaluators import Evaluator, EveryCheckpoint, LastCheckpoint


class Gated(Evaluator):
    """Waits at a gate before it evaluates."""

    def evaluate(self, state: fg.TrainState, step: int) -> dict[str, Any]:
        gate(RUN, f"{self.name}-{step}")
        note(RUN, f"evaluates {self.name} {step}")
        return super().evaluate(state, step)


class Drawing(Counting):
    """Draws its first weight, and has a size that is an argument of the program."""

    size: int = 1

    def __init__(self, size: int, *, key: Any) -> None:
        self.size, self.weight = size, jax.random.normal(key, (size,)).sum()


RUN = Path()


def broken(state: fg.TrainState, step: int) -> dict[str, Any]:
    if step > 10:
        raise ValueError("this evaluator is broken")
    return {"step": step}


def experiment(
    run: str, steps: int = 40, size: int = 1, scales: tuple[float, ...] = (1.0,)
) -> Experiment:
    """Counts."""
    global RUN
    RUN = Path(run)

    class Gates:
        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("gate", 5, lambda run: gate(RUN, f"train-{run.step}"))]

    def train() -> Any:
        note(RUN, "reads the training data")
        return numbers([0])

    every, last = EveryCheckpoint(poll=0.05), LastCheckpoint(poll=0.05)
    scale = {"scale": lambda preds, batch: preds + scales[0]}
    evaluators = [
        Gated("slow", numbers([0], [0, 0]), every, group="slow", metrics=scale),
        Gated("last", numbers([0]), last, group="slow"),
        Evaluator("broken", every=every, group="mixed", fn=broken),
        Evaluator("sound", numbers([0]), every, group="mixed"),
        Evaluator("along", numbers([0]), 20),
    ]
    engine = fg.Engine(
        steps=steps,
        log_every=10,
        plugins=[Disk(10), Witness(), Gates(), *evaluators],
        autoload=False,
    )
    return Experiment(engine, lambda key: Drawing(size, key=key), train)


if __name__ == "__main__":
    fulgurite_cli.run(experiment)
