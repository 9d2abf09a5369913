"""States of plugins in the train state: each has its own, which keeps its structure."""

from dataclasses import dataclass
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite.errors import ModelError, PluginError
from hook_plugins import Averaging, averaged_by_hand, engine, plugin
from models import Counting, Linear, assert_same_bits, numbers, regression, trained


@pytest.mark.hook("init_plugin_state")
@pytest.mark.parametrize("steps_per_execution", [1, 8])
def test_weight_averages_equal_numpy(steps_per_execution: int) -> None:
    result = engine(
        Averaging(), steps=11, steps_per_execution=steps_per_execution, log_every=5
    ).fit(Linear(), regression(24, 8))
    weight, average = averaged_by_hand(11)
    np.testing.assert_allclose(result.module.weight, weight, rtol=1e-5)
    np.testing.assert_allclose(
        result.state.plugin_states["averaging"]["average"].weight, average, rtol=1e-5
    )


def test_averaging_does_not_change_training() -> None:
    with_, without = (
        engine(*plugins, steps=11).fit(Linear(), regression(24, 8))
        for plugins in ([Averaging()], [])
    )
    assert_same_bits(trained(with_.state), trained(without.state))


@dataclass(frozen=True)
class Tally:
    """Adds the batch's number to its own slice."""

    factor: float
    instance: str

    @fg.hookimpl
    def init_plugin_state(self) -> Any:
        return {"total": jnp.zeros(())}

    @fg.hookimpl
    def after_update(self, module: Any, plugin_state: Any, output: fg.Output) -> Any:
        return module, {"total": plugin_state["total"] + self.factor * output.preds.sum()}


def test_each_plugin_has_its_own_state() -> None:
    result = engine(Tally(1.0, "one"), Tally(10.0, "ten"), steps=3).fit(
        Counting(), numbers([1], [2], [3])
    )
    assert jax.tree.map(float, result.state.plugin_states) == {
        "tally:one": {"total": 6.0},
        "tally:ten": {"total": 60.0},
    }


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_traced_hooks_see_their_own_state_before_the_step(steps_per_execution: int) -> None:
    def terms(self: Any, ctx: fg.Context) -> Any:
        assert ctx.training == (ctx.plugin_state is not None)
        return {self.plugin_name: 1.0 * ctx.plugin_state} if ctx.training else {}

    def batch(self: Any, batch: Any, ctx: fg.Context) -> Any:
        return batch + ctx.plugin_state

    def counting(name: str, start: int) -> Any:
        hooks = {
            "loss_terms": terms,
            "transform_batch": batch,
            "step_metrics": lambda self, ctx: {"own": 1.0 * ctx.plugin_state},
        }
        count = {
            "init_plugin_state": lambda self: jnp.int32(start),
            "after_update": lambda self, module, plugin_state: (module, plugin_state + 1),
        }
        return plugin(name, **hooks, **count)

    class Fed(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(self.weight * 1.0, metrics={"batch": batch.mean()})

    plugins = [
        counting("low", 0),
        counting("high", 10),
        plugin("none", loss_terms=lambda self, ctx: {"no": float(ctx.plugin_state is None)}),
    ]
    engine = fg.Engine(
        plugins=plugins,
        steps=3,
        log_every=1,
        steps_per_execution=steps_per_execution,
        autoload=False,
    )
    result = engine.fit(Fed, numbers([0.0]))
    assert (
        result.history["train/low"].tolist()
        == result.history["train/low/own"].tolist()
        == [0, 1, 2]
    )
    assert result.history["train/high"].tolist() == [10, 11, 12] and result.history[
        "train/no"
    ].tolist() == [1, 1, 1]
    assert result.history["train/batch"].tolist() == [10, 12, 14]
    assert engine.evaluate(result, numbers([0.0]))["no"] == 1


def test_step_metrics_do_not_see_the_state_of_another_plugin() -> None:
    observed: list[list[str]] = []
    looking = {
        "init_plugin_state": lambda self: jnp.zeros(1),
        "step_metrics": lambda self, state: observed.append(list(state.plugin_states)),
    }
    engine(plugin("a", **looking), plugin("b", **looking), steps=1).fit(Counting(), numbers([0]))
    assert observed[:2] == [["a"], ["b"]]


def test_stateless_plugin_gets_none_and_cannot_return_state() -> None:
    observed: list[Any] = []
    looks = plugin(
        "looks",
        after_update=lambda self, module, plugin_state: (
            observed.append(plugin_state),
            (module, plugin_state),
        )[1],
    )
    assert engine(looks, steps=1).fit(Counting(), numbers([0])).state.plugin_states == {}
    assert set(observed) == {None}
    makes = plugin("makes", after_update=lambda self, module: (module, jnp.zeros(())))
    with pytest.raises(ModelError, match=r"plugin 'makes'.*after_update.*structure"):
        engine(makes, steps=1).fit(Counting(), numbers([0]))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda total: total[:2], r"total.* from float32\[3\] to float32\[2\]"),
        (lambda total: total.astype(jnp.int32), r"total.* from float32\[3\] to int32\[3\]"),
        (lambda total: (total, total), r"structure.*total"),
    ],
)
def test_plugin_state_keeps_its_structure_shapes_and_dtypes(change: Any, expected: str) -> None:
    changing = plugin(
        "changing",
        init_plugin_state=lambda self: {"total": jnp.zeros(3)},
        after_update=lambda self, module, plugin_state: (
            module,
            {"total": change(plugin_state["total"])},
        ),
    )
    with pytest.raises(ModelError, match=f"plugin 'changing'.*after_update.*{expected}"):
        engine(changing, steps=1).fit(Counting(), numbers([0]))


@pytest.mark.parametrize("leaf", [1.0, "text", jnp.tanh])
def test_plugin_state_holds_only_arrays(leaf: Any) -> None:
    careless = plugin("careless", init_plugin_state=lambda self: {"average": leaf, "none": None})
    with pytest.raises(
        PluginError,
        match=(
            "plugin 'careless', hook init_plugin_state: average is .*; a plugin's state holds "
            "nothing but arrays"
        ),
    ):
        engine(careless, steps=1).fit(Counting(), numbers([0]))


def test_a_plugin_state_that_is_one_wrong_leaf_is_an_error() -> None:
    careless = plugin("careless", init_plugin_state=lambda self: "a")
    with pytest.raises(PluginError, match="hook init_plugin_state: it is 'a'"):
        engine(careless, steps=1).fit(Counting(), numbers([0]))


class Weighing(Counting):
    """Its loss is not finite where the batch is not."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight * jnp.mean(batch))


def test_a_plugin_state_that_is_kept_on_skip_sees_skipped_steps() -> None:
    counting = {
        "init_plugin_state": lambda self: jnp.zeros(()),
        "after_update": lambda self, module, plugin_state: (module, plugin_state + 1),
    }
    all_steps = plugin("all_steps", **counting)
    type(all_steps).kept_on_skip = True
    good_steps = plugin("good_steps", **counting)
    data = numbers([1], [float("nan")], [1])
    result = engine(all_steps, good_steps, steps=3, on_nonfinite="skip").fit(Weighing, data)
    states = {name: float(value) for name, value in result.state.plugin_states.items()}
    assert states == {"all_steps": 3, "good_steps": 2}
    assert float(result.module.weight) == -2
