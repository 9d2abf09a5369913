"""Runs that are made longer or shorter than they were planned: what the new end makes due at the
checkpoint runs there, once."""

from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite_checkpoint import Checkpointer
from fulgurite_evaluators import Evaluator
from fulgurite_population import Evolution, Population
from fulgurite_runs import RunDirectory
from fulgurite_testing import TinyModel, assert_same_bits, tiny_data

BATCHES = [np.ones((2, 1), np.float32)] * 15


@pytest.mark.full
@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        pytest.param([9, (4, 4), 4], ["end 9", "end 4"], id="shorter"),
        pytest.param([6, 10, 10], ["end 6", "end 10"], id="longer", marks=pytest.mark.slow),
    ],
)
def test_what_is_due_at_the_end_runs_once_at_the_end_a_run_has_now(
    lengths: list[Any], expected: list[str], tmp_path: Path
) -> None:
    fired: list[str] = []
    note = fg.LambdaPlugin(every={fg.AtEnd(): lambda run: fired.append(f"end {run.step}")})
    for length in lengths:
        steps, resume = length if isinstance(length, tuple) else (length, "auto")
        checkpointer = Checkpointer(every=2, keep_period=2)
        engine = fg.Engine(
            steps=steps, run_dir=tmp_path / "run", plugins=[note, checkpointer], autoload=False
        )
        result = engine.fit(TinyModel, tiny_data(), resume=resume)
        assert int(result.state.step) == steps
        assert RunDirectory(tmp_path / "run").is_complete
    assert fired == expected


class Point(fg.Module):
    """A number p with the loss p²/2."""

    p: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.p = jnp.ones(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.p**2 / 2 * batch.mean())

    def configure_optimizers(self) -> Any:
        return optax.inject_hyperparams(optax.sgd)(0.1)


def evolve(run: Path, *lengths: int) -> fg.FitResult:
    """Train four members, replace two of them every third step, and return the last result."""
    result = None
    for length in lengths:
        evolution = Evolution(every=3, monitor="test/loss", share=0.5, factors=(0.5,))
        rates = [0.1, 0.2, 0.3, 0.4]
        population = Population(seeds=range(4), vary={"learning_rate": rates}, evolution=evolution)
        test = Evaluator("test", BATCHES[:1], every=3)
        plugins = [population, test, Checkpointer(every=100)]
        engine = fg.Engine(steps=length, run_dir=run, plugins=plugins, autoload=False)
        result = engine.fit(population.stack(Point), BATCHES, resume="auto")
    assert result is not None
    return result


@pytest.mark.full
def test_a_population_made_longer_evolves_where_it_had_ended(tmp_path: Path) -> None:
    """It had ended at a step of evolution. The oracle is plain NumPy."""
    whole = evolve(tmp_path / "whole", 9)
    first = evolve(tmp_path / "run", 6)
    # At the end of a run nobody would train the copies.
    assert first.history["population/parent[0]"].tolist() == [3]
    longer = evolve(tmp_path / "run", 6, 9)
    assert longer.history.steps("population/parent[0]").tolist() == [3, 6]
    assert_same_bits(longer.module, whole.module)
    assert_same_bits(longer.state.opt_state, whole.state.opt_state)

    numbers, rates = np.ones(4), np.array([0.1, 0.2, 0.3, 0.4])
    for step in range(1, 10):
        numbers = numbers * (1 - rates)
        if step in (3, 6):
            best, second, third, worst = np.argsort(numbers)
            numbers[[worst, third]] = numbers[[best, second]]
            rates[[worst, third]] = rates[[best, second]] * 0.5
    np.testing.assert_allclose(longer.module.members.p, numbers, rtol=1e-5)
