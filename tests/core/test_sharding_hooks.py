"""The hooks `sharding_strategy` and `plugin_state_sharding`, on four simulated devices.

The number of devices is fixed when jax begins, so this file is also a program: it trains there and
prints what it saw.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, cast

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import DataError
from fulgurite_sharding import MeshStrategy
from jax.sharding import NamedSharding, PartitionSpec as P

pytestmark = pytest.mark.full

DEVICES = 4
STEPS = 10


class Net(fg.Module):
    """Two layers: (8, 4) and (8,), with a scalar."""

    first: jax.Array
    second: jax.Array
    scale: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.first = jax.random.normal(key, (8, 4))
        self.second = jnp.ones(8) / 8
        self.scale = jnp.ones(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        preds = self.scale * (jnp.tanh(batch["x"] @ self.first.T) @ self.second)
        return fg.Output(jnp.mean((preds - batch["y"]) ** 2), preds=preds)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


@dataclass(frozen=True, eq=False)
class Average:
    """A slice of the shape of the first layer."""

    @fg.hookimpl
    def init_plugin_state(self, module: Net) -> Any:
        return module.first

    @fg.hookimpl
    def after_update(self, module: Net, plugin_state: Any) -> Any:
        return module, 0.9 * plugin_state + 0.1 * module.first


@dataclass(frozen=True, eq=False)
class Columns(Average):
    """The same, divided by columns, whatever shards the rest of the state."""

    @fg.hookimpl
    def plugin_state_sharding(self, plugin_state: Any, mesh: jax.sharding.Mesh) -> Any:
        assert plugin_state.shape == (8, 4)
        return NamedSharding(mesh, P(None, "data"))


class FirstAxis(MeshStrategy):
    """Shards whatever divides by the devices on its first axis, and batches on theirs; notes what
    it was asked with."""

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        super().__init__(mesh)
        self.calls: dict[str, Any] = {}

    def get_state_shardings(self, state: fg.TrainState) -> Any:
        self.calls["abstract"] = all(
            isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)
        )
        return jax.tree.map(
            lambda leaf: NamedSharding(self.mesh, P("data") if divisible(leaf) else P()), state
        )

    def get_batch_shardings(self, batch: Any) -> Any:
        self.calls["batch"] = {name: [str(leaf.dtype), *leaf.shape] for name, leaf in batch.items()}
        return jax.tree.map(lambda leaf: NamedSharding(self.mesh, P("data")), batch)

    def get_param_shardings(self, module: Net) -> Any:
        return jax.tree.map(lambda _: self.replicated, module)

    def get_output_shardings(self, output: fg.Output) -> Any:
        return jax.tree.map(lambda _: None, output).replace(preds=self.replicated)


@dataclass(frozen=True, eq=False)
class Sharding:
    """Gives a strategy."""

    strategy: MeshStrategy

    @fg.hookimpl
    def sharding_strategy(self) -> fg.ShardingStrategy:
        return self.strategy


def divisible(leaf: Any) -> bool:
    return bool(leaf.shape) and leaf.shape[0] % DEVICES == 0


@dataclass(frozen=True, eq=False)
class Looking:
    """Notes how states and batches are placed, and what a checkpointer is asked for."""

    observed: dict[str, Any] = field(default_factory=dict)

    @fg.hookimpl
    def transform_batch(self, batch: Any) -> Any:
        def look(sharding: Any) -> None:
            self.observed["batch part"] = list(sharding.shard_shape(batch["x"].shape))

        jax.debug.inspect_array_sharding(batch["x"], callback=look)
        return batch

    @fg.hookimpl
    def loss_terms(self, module: Net, output: fg.Output) -> Any:
        def look_at_module(sharding: Any) -> None:
            self.observed["module part"] = list(sharding.shard_shape(module.first.shape))

        jax.debug.inspect_array_sharding(module.first, callback=look_at_module)

        def look(sharding: Any) -> None:
            self.observed["preds part"] = list(sharding.shard_shape(output.preds.shape))

        jax.debug.inspect_array_sharding(output.preds, callback=look)
        return {}

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        def look(run: fg.Run) -> None:
            self.observed[f"state at {run.step}"] = parts(run.state)

        return [fg.ScheduledAction("look", fg.AtStart() | fg.At(3), look)]

    @fg.hookimpl
    def restore_checkpoint(self, template: fg.TrainState) -> None:
        self.observed["state to restore"] = parts(template)


def parts(state: Any) -> dict[str, list[int] | None]:
    """The shape of each device's part of each array that divides by the devices; None without a
    sharding."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path): leaf.sharding and list(leaf.sharding.shard_shape(leaf.shape))
        for path, leaf in leaves
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and divisible(leaf)
    }


def report() -> dict[str, Any]:
    """Trains with and without shardings, and fused."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(48, 4)).astype(np.float32)
    data = fg.ArrayData({"x": x, "y": np.sin(x.sum(1))}, 16, shuffle=True)

    def train(*plugins: Any, **settings: Any) -> fg.FitResult:
        engine = fg.Engine(
            steps=STEPS, log_every=2, plugins=[*plugins, Average()], autoload=False, **settings
        )
        return engine.fit(
            Net, data, resume=fg.CheckpointRef("none", optional=True) if plugins else None
        )

    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding, looking = Sharding(FirstAxis(mesh)), Looking()
    results = {
        "plain": train(),
        "sharded": train(sharding, looking),
        "fused": train(Sharding(FirstAxis(mesh)), Looking(), steps_per_execution=3),
    }
    engine = fg.Engine(steps=STEPS, plugins=[Sharding(FirstAxis(mesh)), Columns()], autoload=False)
    columns = engine.fit(Net, data)
    # From where it was made by an engine without a mesh, the state goes to where this one has it.
    plain = fg.Engine(steps=STEPS, plugins=[Average()], autoload=False)
    moved, moving = (
        plain.init_state(Net, data),
        fg.Engine(steps=STEPS, plugins=[Sharding(FirstAxis(mesh)), Average()], autoload=False),
    )
    for batch in moving.iter_batches(data):
        moved, _ = moving.step(moved, batch)
    ragged = fg.ArrayData({"x": x[:42], "y": np.sin(x[:42].sum(1))}, 16)
    try:
        indivisible = str(engine.fit(Net, fg.ArrayData(ragged.arrays, 14)))
    except DataError as error:
        indivisible = str(error)
    return {
        "columns": parts(columns.state)[".plugin_states['columns']"],
        "moved": [parts(moved), np.asarray(moved.module.first).tolist()],
        "indivisible": indivisible,
        "evaluated": [
            engine.evaluate(columns.module, ragged)["loss"]
            for engine in (engine, fg.Engine(steps=1))
        ],
        "predicted": [
            np.asarray(engine.predict(columns.module, ragged)).tolist()
            for engine in (engine, fg.Engine(steps=1))
        ],
        "described": engine.explain_sharding(next(iter(data))),
        "devices": len(jax.devices()),
        "calls": cast(Any, sharding.strategy).calls,
        "seen": looking.observed,
        "state at the end": {name: parts(result.state) for name, result in results.items()},
        "losses": {name: result.history["train/loss"].tolist() for name, result in results.items()},
        "weights": {
            name: np.asarray(result.module.first).tolist() for name, result in results.items()
        },
        "averages": {
            name: np.asarray(result.state.plugin_states["average"]).tolist()
            for name, result in results.items()
        },
    }


@pytest.fixture(scope="module")
def reported() -> dict[str, Any]:
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": f"{DEVICES}"}
    run = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    answers = json.loads(run.stdout.splitlines()[-1])
    assert answers["devices"] == DEVICES
    return answers


SHARDED = {
    ".module.first": [2, 4],
    ".module.second": [2],
    ".opt_state[1][0].mu.first": [2, 4],
    ".opt_state[1][0].mu.second": [2],
    ".opt_state[1][0].nu.first": [2, 4],
    ".opt_state[1][0].nu.second": [2],
    ".plugin_states['average']": [2, 4],
}


def test_strategy_is_asked_with_shapes(reported: dict[str, Any]) -> None:
    assert reported["calls"] == {
        "abstract": True,
        "batch": {"x": ["float32", 16, 4], "y": ["float32", 16]},
    }


@pytest.mark.hook("sharding_strategy")
@pytest.mark.parametrize("when", ["state at 0", "state at 3", "state to restore"])
def test_state_is_sharded_as_the_strategy_says(reported: dict[str, Any], when: str) -> None:
    """Module, optimizer and slices: from the beginning, after steps, and for whoever restores
    it."""
    assert reported["seen"][when] == SHARDED


def test_state_stays_sharded_to_the_end(reported: dict[str, Any]) -> None:
    assert reported["state at the end"]["sharded"] == SHARDED
    assert reported["state at the end"]["fused"] == SHARDED
    assert reported["state at the end"]["plain"][".module.first"] == [8, 4]


def test_batches_are_sharded_as_the_strategy_says(reported: dict[str, Any]) -> None:
    assert reported["seen"]["batch part"] == [4, 4]


@pytest.mark.parametrize("name", ["sharded", "fused"])
@pytest.mark.parametrize("what", ["losses", "weights", "averages"])
def test_numbers_equal_those_of_one_device(reported: dict[str, Any], what: str, name: str) -> None:
    np.testing.assert_allclose(reported[what][name], reported[what]["plain"], rtol=1e-5, atol=1e-6)


@pytest.mark.hook("plugin_state_sharding")
def test_plugin_shards_its_own_state(reported: dict[str, Any]) -> None:
    assert reported["columns"] == [8, 1]


def test_module_is_constrained_for_the_forward_pass(reported: dict[str, Any]) -> None:
    assert reported["seen"]["module part"] == [8, 4]


def test_outputs_are_constrained_as_the_strategy_says(reported: dict[str, Any]) -> None:
    assert reported["seen"]["preds part"] == [16]


def test_state_of_another_engine_is_sharded_by_the_first_step(reported: dict[str, Any]) -> None:
    placed, weights = reported["moved"]
    assert placed == SHARDED
    np.testing.assert_allclose(weights, reported["weights"]["plain"], rtol=1e-5, atol=1e-6)


def test_explanation_names_axes_and_devices(reported: dict[str, Any]) -> None:
    lines = reported["described"].splitlines()
    devices = ", ".join(f"cpu:{number}" for number in range(DEVICES))
    assert lines == [
        f"x float32[16, 4]: [4, 4] on each of {devices} (axis 0 in 4 parts over 'data')",
        f"y float32[16]: [4] on each of {devices} (axis 0 in 4 parts over 'data')",
    ]


def test_indivisible_batch_is_an_error(reported: dict[str, Any]) -> None:
    assert reported["indivisible"].startswith(
        "the batch for step 1: axis 0 of x [14, 4] does not divide into 4 parts along the mesh's "
        "'data'"
    )


@pytest.mark.parametrize("what", ["evaluated", "predicted"])
def test_evaluation_equals_that_of_one_device(reported: dict[str, Any], what: str) -> None:
    """With a last batch that does not divide."""
    np.testing.assert_allclose(*reported[what], rtol=1e-6, atol=1e-6)


if __name__ == "__main__":
    print(json.dumps(report()))
