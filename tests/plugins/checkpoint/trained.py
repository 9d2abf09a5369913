"""A model with everything that a checkpoint must keep, plugins around it, and what compares the
results."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_checkpoint import Checkpointer
from fulgurite_runs import RunDirectory


class Net(fg.Module):
    """A linear layer, BatchNorm and dropout, with Adam."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, *, key: Any, width: int = 4, rate: float = 0.5) -> None:
        self.first = eqx.nn.Linear(3, width, key=jax.random.fold_in(key, 1))
        self.norm = eqx.nn.BatchNorm(width, "batch", mode="ema")
        self.drop = eqx.nn.Dropout(rate)
        self.last = eqx.nn.Linear(width, 1, key=jax.random.fold_in(key, 2))

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        h, state = self.norm(self.first(x), state)
        return self.last(self.drop(h, key=key))[0], state

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        keys = ctx.keys("default", len(batch["y"]))
        preds, state = jax.vmap(self, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))(
            batch["x"], ctx.model_state, keys
        )
        error = (preds - batch["y"]) ** 2
        return fg.Output(error.mean(), metrics={"error": error.mean()}, model_state=state)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


NET = eqx.nn.make_with_state(Net)


class Counting(fg.Module):
    """One weight that every update makes smaller by exactly 1, whatever the batch."""

    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight * 1.0)

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(metrics={"score": fg.metrics.LastValue.from_values(batch[0])})

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


@dataclass(frozen=True)
class Average:
    """A slice of the state: an average of the weights of the first layer, with a number drawn at
    each step."""

    @fg.hookimpl
    def init_plugin_state(self, module: Net) -> Any:
        return {"average": module.first.weight, "drawn": jnp.zeros(())}

    @fg.hookimpl
    def after_update(self, module: Net, plugin_state: Any, ctx: fg.Context) -> Any:
        average = 0.9 * plugin_state["average"] + 0.1 * module.first.weight
        return module, {"average": average, "drawn": jax.random.uniform(ctx.key())}


@dataclass(frozen=True, eq=False)
class Act:
    """One scheduled action."""

    trigger: fg.Trigger | int
    action: Callable[[fg.Run], Any]
    phase: Any = "act"

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("act", self.trigger, self.action, self.phase)]


@dataclass(frozen=True, eq=False)
class Scores:
    """An evaluation whose metric `score` has the given values, one after the other."""

    scores: tuple[float, ...]
    trigger: fg.Trigger | int = 1
    name: str = "test"
    used_scores: list[float] = field(default_factory=list)

    def __iter__(self) -> Any:
        self.used_scores.append(self.scores[len(self.used_scores)])
        return iter([np.full(1, self.used_scores[-1], np.float32)])

    @fg.hookimpl
    def register_evaluations(self) -> list[fg.Evaluation]:
        # Each pass over it takes a score.
        data = fg.DataSource(self, prefetch=0)
        return [fg.Evaluation(self.name, data, check_at_start=False)]

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("evaluate", self.trigger, self.evaluate, "evaluate")]

    def evaluate(self, run: fg.Run) -> None:
        run.evaluate(self.name)


class Killed(Exception):
    """Ends a run."""


def kill(run: fg.Run) -> None:
    raise Killed


def engine(run: Path | None, *plugins: Any, **settings: Any) -> fg.Engine:
    return fg.Engine(run_dir=run, plugins=plugins, autoload=False, **settings)


def counting(
    run: Path | None, *plugins: Any, steps: int = 5, resume: Any = None, **options: Any
) -> fg.FitResult:
    """Trains `Counting` with a checkpoint at every step, unless `options` say otherwise."""
    checkpoints = Checkpointer(**{"every": 1, **options})
    return engine(run, checkpoints, *plugins, steps=steps, log_every=None).fit(
        Counting, ZEROS, resume=resume
    )


ZEROS = [np.zeros(1, np.float32)]


def regression(**options: Any) -> fg.ArrayData:
    """Inputs `x` (60, 3) and `y`, linear in them but for some noise, shuffled, in batches of 8."""
    generator = np.random.default_rng(1)
    x = generator.normal(size=(60, 3)).astype(np.float32)
    y = (x @ [1.0, -2.0, 0.5] + 0.1 * generator.normal(size=60)).astype(np.float32)
    return fg.ArrayData({"x": x, "y": y}, 8, **{"shuffle": True, **options})


def steps_in(run: Path) -> list[int]:
    """The steps of the complete checkpoints of a run."""
    return [step for step, _ in RunDirectory(run).list_checkpoints()]
