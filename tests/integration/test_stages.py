"""Stages of a run, each with its own data and optimizer: one directory, one resume, one table."""

from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite_checkpoint import Checkpointer
from fulgurite_data import Stages
from fulgurite_logging import iter_records
from fulgurite_optimizers import switch_optimizers

FIRST_STEPS, SECOND_STEPS = 5, 6
STEPS = FIRST_STEPS + SECOND_STEPS


class Killed(Exception):
    """Ends a run."""


class Kill:
    def __init__(self, step: int) -> None:
        self.step = step

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("kill", fg.At(self.step), self.kill)]

    def kill(self, run: fg.Run) -> None:
        raise Killed


class Line(fg.Module):
    weight: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.weight = jnp.ones(3)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        x, y = batch
        return fg.Output(jnp.mean((x @ self.weight - y) ** 2))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return switch_optimizers({0: optax.adam(0.1), FIRST_STEPS: optax.sgd(0.05, momentum=0.9)})


def make_data(seed: int, size: int, **options: Any) -> fg.ArrayData:
    x = np.random.default_rng(seed).normal(size=(size, 3)).astype(np.float32)
    y = np.float32(x @ [1.0, -2.0, seed])
    return fg.ArrayData((x, y), 8, remainder="drop", **options)


def train(run: Path, *plugins: Any, shuffle: bool = True, **options: Any) -> fg.FitResult:
    data = Stages(
        (make_data(1, 24, shuffle=shuffle), FIRST_STEPS),
        (make_data(2, 32, shuffle=shuffle), SECOND_STEPS),
    )
    saving = Checkpointer(every=1, on_exception=False)
    engine = fg.Engine(
        steps=len(data),
        log_every=1,
        run_dir=run,
        plugins=[saving, "jsonl", *plugins],
        autoload=False,
    )
    return engine.fit(Line, data, **options)


def train_by_hand() -> tuple[Any, list[float]]:
    """Two plain loops of optax, the second with the weights of the first."""
    weight = jnp.ones(3)
    losses = []
    stages = [
        (make_data(1, 24), FIRST_STEPS, optax.adam(0.1)),
        (make_data(2, 32), SECOND_STEPS, optax.sgd(0.05, momentum=0.9)),
    ]
    for data, steps, optimizer in stages:
        x, y = data.arrays
        state = optimizer.init(weight)
        for step in range(steps):
            start = step * 8 % len(x)
            part = slice(start, start + 8)

            def compute_loss(weight: Any, x: Any = x[part], y: Any = y[part]) -> jax.Array:
                return jnp.mean((x @ weight - y) ** 2)

            loss, grads = jax.value_and_grad(compute_loss)(weight)
            updates, state = optimizer.update(grads, state, weight)
            weight = optax.apply_updates(weight, updates)
            losses.append(float(loss))
    return weight, losses


def test_stages_with_other_data_and_optimizers_are_two_plain_loops_in_one_table(
    tmp_path: Path,
) -> None:
    result = train(tmp_path, shuffle=False)
    weight, losses = train_by_hand()
    np.testing.assert_allclose(result.module.weight, weight, rtol=1e-5)
    np.testing.assert_allclose(result.history["train/loss"], losses, rtol=1e-5)


@pytest.mark.full
def test_a_run_that_is_killed_in_each_stage_resumes_with_the_same_bits(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    for step in (2, FIRST_STEPS, FIRST_STEPS + 1, STEPS - 1):
        with pytest.raises(Killed):
            train(tmp_path / "killed", Kill(step), resume="auto")
    resumed = train(tmp_path / "killed", resume="auto")
    jax.tree.map(np.testing.assert_array_equal, resumed.state.opt_state, whole.state.opt_state)
    np.testing.assert_array_equal(resumed.module.weight, whole.module.weight)
    tables = [
        [(record.step, record.values["loss"]) for record in iter_records(tmp_path / name)]
        for name in ("whole", "killed")
    ]
    assert tables[0] == tables[1]
    assert [step for step, _ in tables[0]] == list(range(1, STEPS + 1))
