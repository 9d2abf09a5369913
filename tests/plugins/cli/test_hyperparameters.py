"""A learning rate of the command line that a run in progress has in its optimizer's state."""

import json
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite_checkpoint import Checkpointer
from fulgurite_cli import Experiment, run


class Falling(fg.Module):
    """Each update takes the learning rate off a weight that begins at 0."""

    weight: jax.Array
    lr: float

    def __init__(self, lr: float, *, key: Any) -> None:
        self.weight = jnp.zeros(())
        self.lr = lr

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.inject_hyperparams(optax.sgd)(learning_rate=self.lr)


def experiment(lr: float = 0.5, steps: int = 2) -> Experiment:
    engine = fg.Engine(steps=steps, plugins=[Checkpointer(100)], autoload=False)
    return Experiment(engine, lambda key: Falling(lr, key=key), [np.zeros(1, np.float32)])


def train(run_dir: Path, *arguments: str) -> float:
    result = run(experiment, [*arguments, "--run", str(run_dir)])
    return float(result.module.weight)


@pytest.mark.full
def test_what_is_said_and_written_of_a_changed_rate_is_what_runs(tmp_path: Path) -> None:
    assert train(tmp_path, "lr=0.5") == -1.0
    with pytest.warns(UserWarning, match=r"the argument lr was 0\.5 and is 0\.25.*rate stays 0\.5"):
        assert train(tmp_path, "lr=0.25", "steps=4") == -2.0
    with pytest.warns(UserWarning, match=r"the argument lr was 0\.25 and is 0\.125.*was 0\.25 and"):
        taken = train(tmp_path, "lr=0.125", "steps=6", "--hyperparameters", "program")
    assert taken == -2.25
    rates = []
    for attempt in sorted((tmp_path / "attempts").iterdir()):
        state = json.loads(attempt.read_text())["hyperparameters"]["state"]
        rates += [entry["value"] for entry in state.values()]
    assert rates == [0.5, 0.5, 0.125]


def test_a_new_run_takes_the_program_either_way(tmp_path: Path) -> None:
    assert train(tmp_path, "lr=0.25", "--hyperparameters", "program") == -0.5
