"""What is wrong with a mesh or a rule is found when it is written down, and one device needs no
other program."""

from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, PathError, PluginError
from fulgurite_checkpoint import Checkpointer
from fulgurite_sharding import (
    FSDP,
    DataParallel,
    ShardBySize,
    Sharding,
    TensorParallel,
    bytes_per_device,
    visualize_sharding,
)
from jax.sharding import PartitionSpec as P


class Line(fg.Module):
    weight: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.weight = jax.random.normal(key, (4,))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(((batch["x"] @ self.weight - batch["y"]) ** 2).mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(0.1)


def data() -> fg.ArrayData:
    x = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    return fg.ArrayData({"x": x, "y": x.sum(1)}, 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mesh": {}}, ["mesh is {}", "'data': -1"]),
        ({"mesh": {"data": 0}}, ["{'data': 0}"]),
        ({"mesh": {"data": -1, "model": -1}}, ["at most one -1"]),
        ({"mesh": ["data"]}, ["['data']"]),
        ({"batch": "data"}, ["batch is 'data'", "('data',)"]),
        ({"batch": ("dat",)}, ["batch", "'dat'", "Did you mean 'data'?"]),
        ({"rules": [("**", P("model"))]}, ["rules", "'model'", "There are: data."]),
        (
            {"outputs": [("preds", P("modl"))], "mesh": {"data": -1, "model": 1}},
            ["outputs", "Did you mean 'model'?"],
        ),
        ({"optimizer": [("**", P("x"))]}, ["optimizer", "'x'"]),
        ({"parameters": ShardBySize("x")}, ["parameters", "'x'"]),
        ({"parameters": [("**", P())]}, ["parameters is", "ShardBySize"]),
        ({"optimizer": "data"}, ["optimizer is 'data'"]),
        ({"batch": None}, ["batch is None", "('data',)"]),
        ({"rules": None}, ["rules is None", "such as"]),
        ({"outputs": "preds"}, ["outputs is 'preds'", "such as"]),
        ({"rules": [("**", "data")]}, ["a rule is a pair"]),
        ({"rules": ["**"]}, ["a rule is a pair"]),
        ({"rules": [("**", P(3))]}, ["3", "not the name of an axis"]),
        ({"rules": [("**", P("data", "data"))]}, ["names an axis twice"]),
        ({"rules": [("layers[-1].weight", P())]}, ["counts from the end"]),
    ],
)
def test_wrong_arguments_are_errors_at_once(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Sharding(**arguments)
    assert all(word in str(raised.value) for word in ["Sharding", *words]), raised.value


def test_fsdp_takes_no_empty_mesh_for_the_default() -> None:
    with pytest.raises(ConfigurationError, match="mesh is {}"):
        FSDP(mesh={})


def test_sizes_are_an_axis_and_a_number() -> None:
    wrong: list[dict[str, Any]] = [{"min_size": "2**14"}, {"min_size": None}, {"axis": 0}]
    for value in wrong:
        with pytest.raises(ConfigurationError, match="ShardBySize"):
            ShardBySize(**value)


@pytest.mark.full
def test_rules_and_axes_may_come_from_an_iterator() -> None:
    """Which gives them once: they would be checked and then be gone."""
    once: Any = zip(["weight"], [P("model")], strict=True)
    axes: Any = (axis for axis in ["data"])
    plugin = Sharding({"data": 1, "model": 1}, axes, rules=once)
    result = fg.Engine(steps=1, plugins=[plugin], autoload=False).fit(Line, data())
    assert result.module.weight.sharding.spec == P("model")
    assert plugin.sharding_strategy().get_batch_shardings(np.zeros((4, 2))).spec == P("data")


def test_invalid_pattern_is_an_error_at_construction() -> None:
    with pytest.raises(PathError, match="cannot read"):
        TensorParallel([("weight[", P("model"))])


def test_mesh_unlike_the_devices_is_an_error_of_the_engine() -> None:
    with pytest.raises(ConfigurationError, match=r"'data': 7.*does not take all 1 devices"):
        fg.Engine(steps=1, plugins=[Sharding({"data": 7})], autoload=False)


def test_two_shardings_are_an_error() -> None:
    with pytest.raises(PluginError, match="hook sharding_strategy takes one answer"):
        fg.Engine(steps=1, plugins=[DataParallel(), FSDP()], autoload=False)


@pytest.mark.variants("full")
@pytest.mark.parametrize(
    "plugin",
    [
        DataParallel(),
        pytest.param(FSDP(min_size=1), marks=pytest.mark.full),
        pytest.param(
            TensorParallel([("weight", ["model"])]), marks=pytest.mark.full
        ),  # as plain data
        pytest.param("data_parallel", marks=pytest.mark.full),
        {"fsdp": {"min_size": 1}},
        {"sharding": {"mesh": {"a": 1, "b": -1}, "batch": ["a"], "rules": [["*", [["a", "b"]]]]}},
    ],
    ids=str,
)
def test_every_layout_trains_alike_on_one_device(plugin: Any) -> None:
    plain, laid_out = (
        fg.Engine(steps=9, log_every=3, plugins=plugins, autoload=False).fit(Line, data())
        for plugins in ((), (plugin,))
    )
    np.testing.assert_allclose(
        laid_out.history["train/loss"], plain.history["train/loss"], rtol=1e-6
    )
    np.testing.assert_allclose(laid_out.module.weight, plain.module.weight, rtol=1e-6)


@pytest.mark.full
def test_run_resumes_with_and_without_sharding(tmp_path: Path) -> None:
    """Where arrays lie decides no number, so that a checkpoint asks for no plugin that says it."""

    def trained(steps: int, *plugins: Any) -> fg.FitResult:
        plugins = (*plugins, Checkpointer(every=3))
        engine = fg.Engine(
            steps=steps, log_every=3, plugins=plugins, autoload=False, run_dir=tmp_path / "run"
        )
        return engine.fit(Line, data(), resume="auto")

    trained(3)
    with pytest.warns(UserWarning, match="may not be exact: mesh was None and is"):
        trained(6, FSDP(min_size=1))
    with pytest.warns(UserWarning, match="mesh was .* and is None"):
        result = trained(9)
    alone = fg.Engine(steps=9, log_every=3, autoload=False).fit(Line, data())
    np.testing.assert_allclose(result.module.weight, alone.module.weight, rtol=1e-6)


def test_bytes_and_table_of_arrays_on_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    tree = {"a": jax.numpy.zeros((3, 5)), "b": [jax.numpy.zeros(7, "int8")], "c": None, "d": "text"}
    assert bytes_per_device(tree) == 3 * 5 * 4 + 7
    visualize_sharding(tree)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        ["a", "[3,", "5]", "SingleDeviceSharding", "60"],
        ["b[0]", "[7]", "SingleDeviceSharding", "7"],
        ["total", "67"],
    ]
    with pytest.raises(ConfigurationError, match="one or two dimensions"):
        visualize_sharding({"a": jax.numpy.zeros((2, 2, 2))}, visualize="a")
