"""Several optimizers with checkpoints and on several devices.

Run as a program it trains on eight simulated devices and prints what came of it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import optax
import pytest
from fulgurite_checkpoint import Checkpointer
from fulgurite_optimizers import (
    Freeze,
    GradientAccumulation,
    GradientClip,
    MultiOptimizer,
    Phase,
    ReduceOnPlateau,
)
from fulgurite_sharding import FSDP
from fulgurite_testing import assert_same_bits

pytestmark = pytest.mark.full


class Pair(fg.Module):
    """Generator and discriminator, perceptrons."""

    generator: eqx.nn.MLP
    discriminator: eqx.nn.MLP

    def __init__(self, *, key: Any) -> None:
        first, second = jax.random.split(key)
        self.generator = eqx.nn.MLP(8, 8, 16, 1, key=first)
        self.discriminator = eqx.nn.MLP(8, "scalar", 16, 1, key=second)

    def losses(self, batch: Any, ctx: fg.Context) -> dict[str, Any]:
        fake = jax.vmap(self.generator)(jax.random.normal(ctx.key(), batch.shape))
        judge = jax.vmap(self.discriminator)
        return {
            "discriminator": lambda: (
                jax.nn.softplus(-judge(batch)).mean() + jax.nn.softplus(judge(fake)).mean()
            ),
            "generator": lambda: jax.nn.softplus(-judge(fake)).mean(),
        }

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(metrics={"score": jax.vmap(self.discriminator)(batch).mean()})


class Test:
    """An evaluation at every second step."""

    @fg.hookimpl
    def register_evaluations(self) -> list[fg.Evaluation]:
        return [fg.Evaluation("test", points())]

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("evaluate", 2, self.evaluate, "evaluate")]

    def evaluate(self, run: fg.Run) -> None:
        run.evaluate("test")


class Crash:
    """Ends a run with an exception at step 8."""

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("crash", fg.At(8), self.crash)]

    def crash(self, run: fg.Run) -> None:
        raise KeyboardInterrupt


def points() -> fg.ArrayData:
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    return fg.ArrayData(x, 16, shuffle=True)


def plugins() -> list[Any]:
    """At 7, where it is saved, two of three gradients are held, and the generator's first layer is
    frozen or not."""
    adam = optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 1e-3, 10))
    return [
        MultiOptimizer(
            discriminator=Phase(adam, "discriminator", accumulate=GradientAccumulation(3, "steps")),
            generator=Phase(optax.adam(1e-2), "generator", every=2),
        ),
        GradientClip(max_norm=1.0),
        Test(),
        ReduceOnPlateau("test/score", 2, mode="min", factor=0.5, patience=1),
    ]


@pytest.mark.parametrize(
    ("steps_per_execution", "until"),
    [
        (4, 8),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(1, 5), (1, 8), (1, 10), (4, 5), (4, 10)]
        ),
    ],
)
def test_run_resumes_in_the_middle_of_phases_and_accumulation(
    tmp_path: Path, until: int, steps_per_execution: int
) -> None:
    def engine(name: str, *more: Any) -> fg.Engine:
        freeze = Freeze("generator.layers[0]", until=until)
        parts = [*plugins(), freeze, Checkpointer(every=7, on_exception=False), *more]
        return fg.Engine(
            steps=11,
            seed=3,
            log_every=2,
            steps_per_execution=steps_per_execution,
            plugins=parts,
            run_dir=tmp_path / name,
            autoload=False,
        )

    whole = engine("whole").fit(Pair, points())
    with pytest.raises(KeyboardInterrupt):
        engine("cut", Crash()).fit(Pair, points())
    result = engine("cut").fit(Pair, points(), resume="auto")
    assert int(result.state.step) == 11
    assert_same_bits(result.state.module, whole.state.module)
    assert_same_bits(result.state.opt_state, whole.state.opt_state)
    assert result.history["reduce_on_plateau/scale"][-1] < 1


def report() -> dict[str, Any]:
    """What 6 steps on one device and on all of them make of the weights, whole and by
    microbatches."""

    def train(*more: Any, how: Any) -> Any:
        phases = MultiOptimizer(
            discriminator=Phase(optax.adam(1e-2), "discriminator", accumulate=how),
            generator=Phase(optax.adam(1e-2), "generator", every=2),
        )
        result = fg.Engine(steps=6, plugins=[phases, *more], autoload=False).fit(Pair, points())
        moments = result.state.opt_state["discriminator"]
        large = [leaf for leaf in jax.tree.leaves(moments) if leaf.shape == (16, 8)]
        weights = jax.tree.leaves(eqx.filter(result.module, eqx.is_array))
        return {
            "weights": np.concatenate([np.ravel(leaf) for leaf in weights]).tolist(),
            "parts": [list(leaf.addressable_shards[0].data.shape) for leaf in large],
        }

    hows = {
        "whole": None,
        "microbatch": GradientAccumulation(2),
        "steps": GradientAccumulation(2, "steps"),
    }
    return {
        name: {"one": train(how=how), "eight": train(FSDP(min_size=1), how=how)}
        for name, how in hows.items()
    }


@pytest.mark.slow
def test_several_devices_compute_what_one_does() -> None:
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
    run = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    for name, losses in json.loads(run.stdout.splitlines()[-1]).items():
        single, eight = losses["one"], losses["eight"]
        np.testing.assert_allclose(
            eight["weights"], single["weights"], rtol=2e-4, atol=2e-5, err_msg=name
        )
        assert single["parts"] and all(part == [16, 8] for part in single["parts"])
        assert all(part != [16, 8] for part in eight["parts"]), name


if __name__ == "__main__":
    print(json.dumps(report()))
