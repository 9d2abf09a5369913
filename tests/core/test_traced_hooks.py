"""Hooks that are traced into a step: the batch, the forward pass, the loss and the update."""

from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite.errors import ModelError, PluginError
from hook_plugins import Averaging, Blurred, Noise, engine, plugin
from models import (
    Act,
    Counting,
    Linear,
    assert_close,
    assert_same_bits,
    numbers,
    regression,
    trained,
)


class Seeing(Counting):
    """Logs the batch that the step gets."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return (
            super()
            .training_step(batch, ctx)
            .replace(metrics={"seen": jnp.mean(batch)}, preds=batch)
        )


@pytest.mark.hook("transform_batch")
def test_transform_batch_is_folded_in_training_alone() -> None:
    double = plugin("double", transform_batch=lambda self, batch: 2 * batch)
    increment = plugin("increment", transform_batch=lambda self, batch: batch + 1)
    data = numbers([1, 3], [5, 7])
    both = engine(double, increment, steps=2, log_every=1)
    result = both.fit(Seeing, data)
    assert result.history["train/seen"].tolist() == [5, 13]
    assert both.predict(result, data).tolist() == [1, 3, 5, 7]


def test_transform_batch_that_forgets_to_return_is_an_error() -> None:
    with pytest.raises(
        PluginError, match="plugin 'careless', hook transform_batch: return the batch, not None"
    ):
        engine(plugin("careless", transform_batch=lambda self, batch: None), steps=1).fit(
            Counting(), numbers([0])
        )


def test_around_forward_that_forgets_to_return_is_an_error_of_the_plugin() -> None:
    def forget(self: Any, call: Any, module: Any, batch: Any) -> None:
        call(module, batch)

    silent = plugin("careless", around_forward=lambda self, call, module, batch: None)
    for careless in (plugin("careless", around_forward=forget), silent):
        with pytest.raises(PluginError, match="around_forward returned None") as caught:
            engine(careless, steps=1).fit(Counting(), numbers([0]))
        assert any(note.startswith("plugin 'careless'") for note in caught.value.__notes__)


def test_a_step_that_forgets_to_return_is_an_error_of_the_module() -> None:
    class Forgetful(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> Any:
            return None

    careful = plugin(
        "careful", around_forward=lambda self, call, module, batch: call(module, batch)
    )
    with pytest.raises(ModelError, match="training_step returned NoneType"):
        engine(careful, steps=1).fit(Forgetful, numbers([0]))


class Echo(Counting):
    """Measures and predicts its batch."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight * 1.0, metrics={"batch": jnp.mean(batch)})

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(metrics={"batch": jnp.mean(batch)})

    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        return batch


@pytest.mark.hook("around_forward")
def test_around_forward_is_nested_wherever_the_module_runs() -> None:
    """The first plugin is outermost, so the step gets (3 + 1) * 2."""
    keys: list[Any] = []

    def add(self: Any, call: Any, module: Any, batch: Any, ctx: fg.Context) -> Any:
        keys.append(ctx.rng_path[-1][0])
        return call(module, batch + 1)

    def double(self: Any, call: Any, module: Any, batch: Any) -> Any:
        return call(module, 2 * batch)

    run = engine(
        plugin("add", around_forward=add), plugin("double", around_forward=double), steps=1
    )
    data = numbers([3])
    result = run.fit(Echo, data)
    assert result.metrics["train"]["batch"] == 8
    assert run.evaluate(result, data)["batch"] == 8
    assert run.predict(result, data).tolist() == [8]
    assert set(keys) == {"plugin:add"}


@pytest.mark.hook("loss_terms")
def test_loss_terms_are_part_of_the_loss() -> None:
    decay = plugin("decay", loss_terms=lambda self, module: {"l2": 0.5 * jnp.sum(module.weight**2)})
    pull = plugin(
        "pull", loss_terms=lambda self, module, output: {"pull": module.weight[0] + 0 * output.loss}
    )
    settings = engine(decay, pull, steps=6, log_every=1)
    result = settings.fit(Linear(), regression(24, 8))
    weight, losses, terms = np.zeros(3), [], []
    for batch in [*regression(24, 8)] * 2:
        x, y = batch["x"].astype(np.float64), batch["y"].astype(np.float64)
        terms.append(0.5 * weight @ weight)
        losses.append(np.mean((x @ weight - y) ** 2) + terms[-1] + weight[0])
        weight = weight - 0.1 * (2 * x.T @ (x @ weight - y) / len(y) + weight + [1, 0, 0])
    np.testing.assert_allclose(result.module.weight, weight, rtol=1e-5)
    np.testing.assert_allclose(result.history["train/loss"], losses, rtol=1e-5)
    np.testing.assert_allclose(result.history["train/l2"], terms, rtol=1e-5)
    evaluated = settings.evaluate(result, regression(24, 8))
    assert evaluated["l2"] == pytest.approx(0.5 * weight @ weight, rel=1e-5)
    assert evaluated["loss"] == pytest.approx(
        evaluated["error"] + evaluated["l2"] + evaluated["pull"], rel=1e-5
    )


def test_a_loss_term_may_be_a_python_number() -> None:
    constant = plugin("constant", loss_terms=lambda self: {"constant": 2.0})
    result = engine(constant, steps=1).fit(Counting(), numbers([0]))
    assert (result.metrics["train"]["loss"], result.metrics["train"]["constant"]) == (2, 2)
    assert float(result.module.weight) == -1


@pytest.mark.hook("after_update")
def test_after_update_is_folded_over_the_module() -> None:
    """Each step: minus 1, plus 0.5, times 2."""
    shift = plugin(
        "shift",
        after_update=lambda self, module, plugin_state: (
            jax.tree.map(lambda x: x + 0.5, module),
            plugin_state,
        ),
    )
    double = plugin(
        "double",
        after_update=lambda self, module, plugin_state: (
            jax.tree.map(lambda x: x * 2, module),
            plugin_state,
        ),
    )
    assert float(engine(shift, double, steps=3).fit(Counting(), numbers([0])).module.weight) == -7
    assert (
        float(engine(double, shift, steps=3).fit(Counting(), numbers([0])).module.weight) == -10.5
    )


def test_after_update_returns_a_pair() -> None:
    with pytest.raises(
        PluginError,
        match=r"hook after_update returns a tuple or None, not Counting",
    ):
        engine(plugin("single", after_update=lambda self, module: module), steps=1).fit(
            Counting(), numbers([0])
        )


def test_module_keeps_its_shapes() -> None:
    changing = plugin(
        "changing",
        after_update=lambda self, module, plugin_state: (
            jax.tree.map(lambda x: x[None], module),
            plugin_state,
        ),
    )
    with pytest.raises(
        ModelError,
        match=r"plugin 'changing'.*after_update.*weight from float32\[\] to float32\[1\]",
    ):
        engine(changing, steps=1).fit(Counting(), numbers([0]))


@pytest.mark.full
def test_traced_hooks_behave_the_same_in_fused_steps() -> None:
    plugins = [
        Noise("a"),
        Averaging(),
        plugin("l2", loss_terms=lambda self, module: {"l2": jnp.sum(module.weight**2)}),
    ]
    single, fused, split = (
        engine(
            *plugins, *others, steps=19, steps_per_execution=steps_per_execution, log_every=6
        ).fit(Blurred, regression(80, 4))
        for steps_per_execution, others in (
            (1, []),
            (8, []),
            (8, [Act(fg.Every(5), lambda run: None)]),
        )
    )
    assert_same_bits(fused.state, split.state)
    assert_close(
        (trained(single.state), single.state.plugin_states),
        (trained(fused.state), fused.state.plugin_states),
    )
    for name in single.history:
        np.testing.assert_allclose(single.history[name], fused.history[name], rtol=1e-5)
