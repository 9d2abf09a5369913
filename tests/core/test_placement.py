"""On which device a step computes, and what `explain_sharding` says of it, on two simulated devices.

The number of devices is fixed when jax begins, so this file is also a program: it trains there and
prints what it saw.
"""

import json
import os
import subprocess
import sys
from functools import partial
from itertools import cycle, product
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytestmark = pytest.mark.full

WEIGHTS = {"made here": None, "put on cpu:0": 0, "put on cpu:1": 1}
BATCHES = {"NumPy": None, "put on cpu:0": 0, "put on cpu:1": 1}
ENGINES = {"of JAX": None, "cpu:1": "cpu:1"}


class Line(fg.Module):
    weight: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean((batch["x"] @ self.weight - 1) ** 2))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


class Places:
    """Notes on which devices the programs of an engine compute."""

    def __init__(self) -> None:
        self.devices: set[str] = set()

    @fg.hookimpl
    def on_compile(self, compiled: jax.stages.Compiled) -> None:
        for sharding in jax.tree.leaves(compiled.input_shardings):
            self.devices |= set(map(str, sharding.device_set))


def put(array: Any, device: int | None) -> Any:
    return array if device is None else jax.device_put(array, jax.devices()[device])


def report() -> list[dict[str, Any]]:
    """Train and evaluate for each kind of weights, batches and engine.

    Every second one takes both steps in one dispatch, as often with each engine.
    """
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    rows = []
    cases = product(WEIGHTS, BATCHES, ENGINES)
    for (weights, batches, engine_device), steps_per_execution in zip(cases, cycle([1, 2, 2, 1])):
        batch = {"x": put(x, BATCHES[batches])}
        weight = put(jnp.ones(3), WEIGHTS[weights])
        places = Places()
        make_engine = partial(
            fg.Engine,
            steps=2,
            steps_per_execution=steps_per_execution,
            device=ENGINES[engine_device],
            plugins=[places],
            autoload=False,
        )
        make_engine().evaluate(Line(weight), [batch])
        engine = make_engine()
        result = engine.fit(Line(weight), [batch, batch])
        engine.evaluate(result, [batch])
        rows.append(
            {
                "case": [weights, batches, engine_device],
                "explained": engine.explain_sharding(batch),
                "computed on": sorted(places.devices),
                "ended on": sorted(map(str, result.module.weight.devices())),
                "weight": np.asarray(result.module.weight).tolist(),
            }
        )
    return rows


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "2"}
    run = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_step_computes_on_the_device_of_its_state_wherever_batches_are(rows: Any) -> None:
    for row in rows:
        weights, _, engine_device = row["case"]
        default = "cpu:1" if engine_device == "cpu:1" else "cpu:0"
        device = weights.removeprefix("put on ") if weights.startswith("put on") else default
        assert (row["computed on"], row["ended on"]) == ([device], [device]), row["case"]


def test_explanation_says_where_the_step_computes(rows: Any) -> None:
    for row in rows:
        default = "cpu:1" if row["case"][2] == "cpu:1" else "cpu:0"
        assert row["explained"] == (
            "x float32[4, 3]: whole on the device of the train state, which is "
            f"{default} unless the module was put on another"
        ), row["case"]


def test_numbers_do_not_depend_on_devices(rows: Any) -> None:
    assert len({tuple(row["weight"]) for row in rows}) == 1


if __name__ == "__main__":
    print(json.dumps(report()))
