"""Where arrays lie, by rules for parameters, optimizers, plugin states and outputs."""

from dataclasses import dataclass
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eight_devices import Wide, engine, placed, regression
from fulgurite.errors import ConfigurationError, PathError
from fulgurite_averaging import EMA, Average, Lookahead
from fulgurite_logging.media import Histogram
from fulgurite_sharding import (
    FSDP,
    DataParallel,
    ShardBySize,
    Sharding,
    TensorParallel,
    bytes_per_device,
)
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P


def test_the_optimizer_may_be_divided_further() -> None:
    state = placed(Sharding(optimizer=ShardBySize("data", 1)))
    assert state.module.matrix.sharding.spec == P()
    assert state.opt_state[1][1].trace.matrix.sharding.spec == P(None, "data")
    state = placed(
        Sharding(optimizer=[("**.trace.matrix", P("data"))], parameters=ShardBySize("data", 1))
    )
    assert state.module.matrix.sharding.spec == P(None, "data")
    assert state.opt_state[1][1].trace.matrix.sharding.spec == P("data")
    assert state.opt_state[1][1].trace.vector.sharding.spec == P("data")


def test_optimizer_state_of_another_shape_goes_by_size() -> None:
    factored = placed(Sharding(rules=[("matrix", P("data"))])).opt_state[1][0]
    assert factored.v_row.matrix.shape == (16,) and factored.v_row.matrix.sharding.spec == P()
    assert placed(FSDP(min_size=16)).opt_state[1][0].v_row.matrix.sharding.spec == P("data")


def test_a_rule_without_axes_keeps_an_array_whole() -> None:
    state = placed(FSDP(min_size=1, rules=[("matrix", P())]))
    assert (state.module.matrix.sharding.spec, state.module.vector.sharding.spec) == (
        P(),
        P("data"),
    )


def test_slices_follow_parameters_or_their_own_rule() -> None:
    @dataclass(frozen=True, eq=False)
    class Average:
        @fg.hookimpl
        def init_plugin_state(self, module: Any) -> Any:
            return module

    @dataclass(frozen=True, eq=False)
    class Own(Average):
        @fg.hookimpl
        def plugin_state_sharding(self, plugin_state: Any, mesh: Mesh) -> Any:
            return jax.tree.map(lambda _: NamedSharding(mesh, P()), plugin_state)

    slices = placed(Sharding(rules=[("matrix", P("data"))]), Average(), Own()).plugin_states
    assert slices["average"].matrix.sharding.spec == P("data")
    assert slices["own"].matrix.sharding.spec == P()


def test_an_average_lies_as_its_parameters() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AxisType.Auto,))
    state = placed(FSDP(mesh=mesh, min_size=8), Average(EMA(0.5)), Lookahead())
    average = state.plugin_states["average:averaged"].module
    for module in (average, state.plugin_states["lookahead"].slow):
        assert module.matrix.sharding == state.module.matrix.sharding
    assert 4 * bytes_per_device(average.matrix) == average.matrix.nbytes


def test_engines_of_one_process_may_order_the_same_devices_differently() -> None:
    devices = np.array(jax.devices()[:2])
    weights = []
    for order in (devices, devices[::-1]):
        mesh = Mesh(order, ("data",), axis_types=(AxisType.Auto,))
        trained = engine(FSDP(mesh=mesh, min_size=8)).fit(Wide, regression())
        assert trained.module.matrix.sharding.mesh == mesh
        weights.append(np.asarray(trained.module.matrix))
    np.testing.assert_array_equal(*weights)


def test_outputs_lie_as_the_rules_say() -> None:
    observed = {}

    @dataclass(frozen=True, eq=False)
    class Look:
        @fg.hookimpl
        def loss_terms(self, output: fg.Output) -> Any:
            preds = output.preds["hidden"]
            jax.debug.inspect_array_sharding(
                preds,
                callback=lambda sharding: observed.update(part=sharding.shard_shape(preds.shape)),
            )
            return {}

    sharding = Sharding({"data": 4, "model": 2}, outputs=[("preds.hidden", P("data", "model"))])
    trained = engine(sharding, Look())
    trained.step(trained.init_state(Wide, regression()), next(iter(regression())))
    assert observed["part"] == (8, 12)


def test_rules_for_outputs_leave_alone_what_does_not_divide_in_an_evaluation() -> None:
    class Showing(Wide):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            preds = batch["x"] @ self.matrix + self.vector
            metrics = {"constant": 2.0, "rows": jnp.float32(len(preds))}
            media = {"preds": lambda: Histogram.from_values(preds)}
            return fg.Output(preds.mean(), preds={"hidden": preds}, metrics=metrics, media=media)

    rules = Sharding(outputs=[("preds.hidden", P("data")), ("**", P())])
    trained = engine(rules, steps=1).fit(Showing, regression())
    arrays = regression().arrays
    ten = fg.ArrayData(jax.tree.map(lambda array: array[:10], arrays), 8)
    with pytest.warns(UserWarning, match="the metric 'rows' of 2 examples is 2"):
        evaluated = engine(rules).evaluate(trained, ten)
    assert evaluated["rows"] == np.float32((8 * 8 + 2 * 2) / 10)


class Odd(fg.Module):
    odd: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.odd.sum())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


@pytest.mark.parametrize(
    ("sharding", "error", "words"),
    [
        (
            Sharding(rules=[("matrx", P("data"))]),
            PathError,
            ["matrx", "matches no array", "'matrix'"],
        ),
        (
            Sharding(rules=[("**", P(None, "data"))]),
            ConfigurationError,
            ["vector [24]", "1 dimensions"],
        ),
        (
            Sharding(
                {"data": 1, "model": 8},
                rules=[("matrix", P(None, ("data", "model")))],
                optimizer=[("x", P())],
            ),
            PathError,
            ["optimizer", "'x'"],
        ),
        (
            Sharding(outputs=[("preds.*", P(None, None, "data"))]),
            ConfigurationError,
            ["preds.hidden", "2 dimensions"],
        ),
    ],
)
def test_a_rule_that_does_not_fit_is_an_error(
    sharding: Sharding, error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        engine(sharding).init_state(Wide, regression())
    assert all(word in str(caught.value) for word in words)


def test_a_dimension_is_divided_only_by_an_axis_that_divides_it() -> None:
    sharding = Sharding({"data": 1, "model": 8}, rules=[("odd", P("model"))])
    with pytest.raises(ConfigurationError) as caught:
        engine(sharding).init_state(lambda key: Odd(jnp.zeros((3, 5))), regression())
    words = ["odd [3, 5]", "dimension 0 of 3", "'model'", "8"]
    assert all(word in str(caught.value) for word in words)
    # 16 and 24 divide by 8.
    engine(TensorParallel([("matrix", P("model"))], size=8)).init_state(Wide, regression())
    other_axes = Sharding({"data": 1, "a": 8}, batch=(), rules=[("vector", P("a"))])
    engine(other_axes).init_state(Wide, regression())


@pytest.mark.parametrize("mesh", [{"data": 3}, {"data": 16}, {"data": 3, "model": -1}], ids=str)
def test_a_mesh_that_does_not_take_all_devices_is_an_error(mesh: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="does not take all 8 devices"):
        engine(Sharding(mesh))


def test_a_mesh_with_explicit_axes_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="Auto"):
        engine(Sharding(jax.make_mesh((8,), ("data",))))


def test_parameters_that_fsdp_leaves_whole_are_told() -> None:
    class Wide(fg.Module):
        wide: jax.Array
        even: jax.Array
        bias: jax.Array

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            preds = batch @ self.wide + self.even.sum() + self.bias
            return fg.Output(jnp.mean(preds**2))

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(0.0)

    def fit(*plugins: Any) -> list[str]:
        module = Wide(jnp.ones((101, 3)), jnp.ones((16, 3)), jnp.ones(3))
        data = [np.ones((8, 101), np.float32)]
        return fg.Engine(steps=1, plugins=plugins).fit(module, data).messages

    (message,) = fit(FSDP(min_size=10))
    assert "8 parts of the axis 'data': wide (101, 3). Pad" in message
    (message,) = fit(FSDP())
    assert "no parameter is divided over the axis 'data'" in message
    assert fit(FSDP(min_size=304)) == [message.replace("16384", "304")]
    assert fit(DataParallel()) == []
    assert fit(Sharding(parameters=ShardBySize("data", 10), rules=[("wide", P())])) == []
