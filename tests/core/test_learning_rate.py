"""A learning rate that something outside of the optimizer changes (H6)."""

from typing import Any

import fulgurite as fg
import numpy as np
import optax
import pytest
from fulgurite_testing.memory import InMemoryCheckpointer
from models import Counting


class Adjustable(Counting):
    """Its weight falls by the learning rate at each update."""

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)


def set_rate(run: fg.Run) -> fg.ReplaceState:
    opt_state = optax.tree.set(run.state.opt_state, learning_rate=0.25)
    return fg.ReplaceState(run.state.replace(opt_state=opt_state))


class Adjust:
    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("adjust", fg.At(2), set_rate, stage="decide")]


class SaveAt3:
    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("save", fg.At(3), fg.Run.save, stage="save")]


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_a_rate_changed_by_an_action_holds_from_the_next_step_and_after_a_resume_H6(
    steps_per_execution: int,
) -> None:
    """Two updates by 1, then by 0.25."""
    memory = InMemoryCheckpointer()

    def fit(steps: int, resume: Any) -> float:
        engine = fg.Engine(
            steps=steps,
            steps_per_execution=steps_per_execution,
            plugins=[Adjust(), SaveAt3(), memory],
            autoload=False,
        )
        result = engine.fit(Adjustable, [np.zeros(1, np.float32)], resume=resume)
        return float(result.module.weight)

    assert fit(3, None) == -2.25
    assert fit(6, "latest") == -3.0


def test_a_resumed_run_takes_the_rate_of_the_program_where_resume_says_so() -> None:
    """By 1 and 1, then by 0.25 until step 3; the program begins with 1 again."""
    memory = InMemoryCheckpointer()

    def fit(steps: int, resume: Any) -> float:
        engine = fg.Engine(steps=steps, plugins=[Adjust(), SaveAt3(), memory], autoload=False)
        result = engine.fit(Adjustable, [np.zeros(1, np.float32)], resume=resume)
        return float(result.module.weight)

    assert fit(3, None) == -2.25
    assert fit(5, fg.CheckpointRef("memory", hyperparameters="program")) == -4.25
    assert fit(6, fg.CheckpointRef("memory", step=3)) == -3.0
