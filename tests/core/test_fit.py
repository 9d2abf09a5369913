"""Training: the numbers against loops written by hand, how long it lasts, what comes back, and how
it is stopped."""

import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, DataError, ModelError, PluginError
from models import (
    Act,
    Classifier,
    Counting,
    Epochs,
    Evaluating,
    Events,
    Linear,
    assert_close,
    assert_same_bits,
    classes,
    numbers,
    regression,
    trained,
)

# --- the same numbers as loops written by hand ----------------------------------------------------


def test_gradient_descent_by_hand_in_numpy() -> None:
    data, weight = regression(24, 8), np.zeros(3)
    for batch in [*data, *data]:
        x, y = batch["x"].astype(np.float64), batch["y"].astype(np.float64)
        weight -= 0.1 * 2 * x.T @ (x @ weight - y) / len(y)
    result = fg.Engine(steps=6).fit(Linear(), data)
    np.testing.assert_allclose(result.module.weight, weight, rtol=1e-5)


def test_fit_is_a_flat_jit_loop_written_by_hand() -> None:
    model, data = Classifier(key=jax.random.key(3)), classes()
    optimizer = optax.adam(1e-2)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    leaves, treedef = jax.tree.flatten(params)
    opt_state: Any = optimizer.init(leaves)

    @jax.jit
    def update(leaves: Any, opt_state: Any, batch: Any) -> Any:
        def loss(leaves: Any) -> Any:
            net = eqx.combine(jax.tree.unflatten(treedef, leaves), static)
            logits = jax.vmap(net.mlp)(batch["x"])
            return (
                optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(),
                logits,
            )

        (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(leaves)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(leaves, updates), opt_state, value, logits

    losses, right, num_examples = [], 0, 0
    for _ in range(8):
        for batch in data:
            if len(losses) < 30:
                leaves, opt_state, value, logits = update(leaves, opt_state, batch)
                losses.append(float(value))
                right += (
                    int(np.sum(np.argmax(logits, -1) == batch["label"])) if len(losses) > 20 else 0
                )
                num_examples += len(batch["label"]) if len(losses) > 20 else 0
    result = fg.Engine(steps=30, log_every=10).fit(model, data)
    assert_close(eqx.filter(result.module, eqx.is_array), jax.tree.unflatten(treedef, leaves))
    assert_close(result.state.opt_state[1][0].mu, jax.tree.unflatten(treedef, opt_state[0].mu))
    assert result.metrics["train"]["batch_loss"] == pytest.approx(losses[-1], abs=1e-6)
    assert result.metrics["train"]["accuracy"] == pytest.approx(right / num_examples, abs=1e-6)


@pytest.mark.full
def test_fit_is_init_batches_and_step_bit_for_bit() -> None:
    data = classes(shuffle=True)
    whole = fg.Engine(steps=11, seed=5).fit(Classifier, data)
    engine = fg.Engine(steps=11, seed=5)
    state, outputs = engine.init_state(Classifier, data), []
    for batch in engine.iter_batches(data):
        state, output = engine.step(state, batch)
        outputs.append(output)
    assert len(outputs) == int(state.step) == 11
    assert_same_bits(trained(whole.state), trained(state))
    assert whole.metrics["train"]["batch_loss"] == outputs[-1].loss.item()
    correct = sum(float(output.metrics["accuracy"].mean.total.compute()) for output in outputs)
    assert whole.metrics["train"]["accuracy"] == pytest.approx(correct / (2 * 50 + 3 * 16))
    later = fg.Engine(steps=6, seed=5).fit(data=data, state=whole.state)
    for batch in engine.iter_batches(data, steps=6, start_step=11):
        state, _ = engine.step(state, batch)
    assert_same_bits(trained(later.state), trained(state))


class Explaining(Linear):
    """Returns its errors as further arrays."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        output = super().training_step(batch, ctx)
        return output.replace(aux={"error": output.preds - batch["y"]})


@pytest.mark.full
def test_step_returns_further_fields_of_the_output_where_asked_B17_K30() -> None:
    """At weights of zero the prediction is 0, the error -y, and the gradient -2 mean(y x)."""
    data = regression(8, 8)
    batch = next(iter(fg.Engine().iter_batches(data)))
    engine = fg.Engine(steps=1, autoload=False)
    plain, output = engine.step(engine.init_state(Explaining, data), batch)
    assert (output.preds, output.aux, output.grads) == (None, None, None)
    state, output = engine.step(
        engine.init_state(Explaining, data), batch, returns=("preds", "aux", "grads")
    )
    assert_same_bits(state, plain)
    assert output.preds.tolist() == [0] * 8
    assert_close(output.aux["error"], -batch["y"])
    assert_close(output.grads.weight, -2 * np.mean(batch["y"][:, None] * batch["x"], axis=0))
    assert output.updates is None
    with pytest.raises(ConfigurationError, match="returns"):
        engine.step(state, batch, returns=("media",))


@pytest.mark.full
def test_fused_steps_are_the_same_wherever_a_dispatch_is_split() -> None:
    data = classes(48, shuffle=True)
    plain = fg.Engine(steps=30, log_every=None).fit(Classifier, data)
    results = [
        fg.Engine(
            steps=30, steps_per_execution=8, log_every=log, plugins=[Act(every, lambda run: None)]
        ).fit(Classifier, data)
        for log, every in ((3, fg.Every(7)), (30, fg.At(1, 2, 29)), (7, fg.Every(1)))
    ]
    for result in results:
        assert_same_bits(trained(result.state), trained(plain.state))


@pytest.mark.full
def test_logging_interval_does_not_change_the_state() -> None:
    states = [
        fg.Engine(steps=12, log_every=log).fit(Classifier, classes()).state for log in (1, 5, None)
    ]
    assert_same_bits(trained(states[0]), trained(states[1]))
    assert_same_bits(trained(states[0]), trained(states[2]))


class Convolution(fg.Module):
    conv: eqx.nn.Conv2d
    head: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        first, second = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(1, 4, 3, key=first)
        self.head = eqx.nn.Linear(4, 3, key=second)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        images = batch["x"].reshape(-1, 1, 4, 4)
        logits = jax.vmap(lambda image: self.head(jax.nn.relu(self.conv(image)).mean((1, 2))))(
            images
        )
        return fg.Output(
            optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        )

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


@pytest.mark.full
def test_fused_convolutions_agree_to_rounding_and_do_not_depend_on_the_split() -> None:
    generator = np.random.default_rng(0)
    arrays = {
        "x": generator.normal(size=(32, 16)).astype(np.float32),
        "label": np.arange(32, dtype=np.int32) % 3,
    }
    data = fg.ArrayData(arrays, 8, shuffle=True)
    plain = fg.Engine(steps=20).fit(Convolution, data)
    fused, split = (
        fg.Engine(steps=20, steps_per_execution=8, log_every=log).fit(Convolution, data)
        for log in (20, 3)
    )
    assert_same_bits(trained(fused.state), trained(split.state))
    assert_close(trained(plain.state), trained(fused.state), 1e-5)


@pytest.mark.full
def test_batches_gathered_on_the_device_give_the_same_bits() -> None:
    host, device = (
        fg.Engine(steps=9).fit(Classifier, classes(shuffle=True, on_device=on))
        for on in (False, True)
    )
    assert_same_bits(trained(host.state), trained(device.state))
    engine, data = fg.Engine(steps=9), classes(shuffle=True, on_device=True)
    state = engine.init_state(Classifier, data)
    for batch in engine.iter_batches(data):
        state, _ = engine.step(state, batch)
    assert_same_bits(trained(host.state), trained(state))


def test_the_seed_decides_parameters_and_order() -> None:
    data = classes(shuffle=True)
    first, again, other = (
        fg.Engine(steps=3, seed=seed).fit(Classifier, data) for seed in (1, 1, 2)
    )
    assert_same_bits(trained(first.state), trained(again.state))
    assert not np.array_equal(first.module.mlp.layers[0].weight, other.module.mlp.layers[0].weight)


# --- how long it lasts ----------------------------------------------------------------------------


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_n_steps_are_exactly_n_updates(steps_per_execution: int) -> None:
    evaluating = Evaluating(fg.Evaluation("test", numbers([0, 0])), trigger=3)
    result = fg.Engine(steps=11, steps_per_execution=steps_per_execution, plugins=[evaluating]).fit(
        Counting, numbers([0], [0])
    )
    assert float(result.module.weight) == -11 and int(result.state.step) == 11
    assert [(step, metrics["updates"]) for step, _, metrics in evaluating.results] == [
        (3, 3),
        (6, 6),
        (9, 9),
    ]
    assert (
        result.history["test/updates"].tolist()
        == result.history.steps("test/updates").tolist()
        == [3, 6, 9]
    )


def test_the_end_of_an_epoch_run_is_extrapolated() -> None:
    events = Events()
    result = fg.Engine(epochs=3, plugins=[events]).fit(Counting, Epochs((10, 12, 8)))
    assert [(epoch, step, step_range.stop) for epoch, step, step_range in events.epochs] == [
        (0, 10, 30),
        (1, 22, 34),
        (2, 30, 30),
    ]
    assert events.epochs[-1][2].epoch_ends == (10, 22, 30)
    assert int(result.state.step) == -float(result.module.weight) == 30


def test_the_end_of_an_epoch_run_is_known_with_fused_steps_and_triggers() -> None:
    events, ends = Events(), []
    actions = [
        Act(fg.EveryEpoch(2), lambda run: ends.append(run.step)),
        Act(fg.AtEnd(), lambda run: ends.append(-run.step)),
    ]
    fg.Engine(epochs=3, steps_per_execution=8, plugins=[events, *actions]).fit(
        Counting, Epochs((10, 12, 8))
    )
    assert [(step, step_range.stop) for _, step, step_range in events.epochs] == [
        (10, 30),
        (22, 34),
        (30, 30),
    ]
    assert ends == [22, -30]


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_an_epoch_that_is_longer_than_expected_is_finished(steps_per_execution: int) -> None:
    events, ends = Events(), []
    plugins = [events, Act(fg.AtEnd(), lambda run: ends.append(run.step))]
    result = fg.Engine(epochs=2, steps_per_execution=steps_per_execution, plugins=plugins).fit(
        Counting, Epochs((2, 5))
    )
    assert [(epoch, step) for epoch, step, _ in events.epochs] == [(0, 2), (1, 7)]
    assert ends == [7] and float(result.module.weight) == -7


def test_a_second_fit_of_epochs_counts_its_own() -> None:
    events, engine = Events(), fg.Engine(epochs=1)
    first = engine.fit(Counting, Epochs((4,)))
    second = fg.Engine(steps=99, plugins=[events]).fit(
        data=Epochs((3, 5)), state=first.state, epochs=2
    )
    assert [
        (epoch, step, step_range.start, step_range.stop)
        for epoch, step, step_range in events.epochs
    ] == [
        (0, 7, 4, 10),
        (1, 12, 4, 12),
    ]
    assert int(second.state.step) == 12 and events.epochs[-1][2].epoch_ends == (7, 12)


def test_epochs_of_data_with_a_length_end_as_planned() -> None:
    step_ranges = []
    plugin = Act(fg.AtStart(), lambda run: step_ranges.append(run.step_range))
    result = fg.Engine(epochs=2, limit_train_batches=3, plugins=[plugin]).fit(Counting, classes(64))
    assert step_ranges == [fg.StepRange(0, 6)] and int(result.state.step) == 6


def test_data_that_ends_early_is_reported() -> None:
    with pytest.raises(DataError, match="data ended after 7 steps of 10"):
        fg.Engine(steps=10).fit(Counting, iter(numbers(*[[0]] * 7)))


def test_an_iterator_that_is_long_enough_is_enough() -> None:
    result = fg.Engine(steps=7).fit(Counting, iter(numbers(*[[0]] * 7)))
    assert float(result.module.weight) == -7


def test_second_fit_continues_the_first() -> None:
    step_ranges = []
    plugin = Act(
        fg.AtStart() | fg.AtEnd(),
        lambda run: step_ranges.append((run.step, run.step_range.start, run.step_range.stop)),
    )
    engine, data = fg.Engine(steps=6, log_every=4, plugins=[plugin]), classes(48)
    first = engine.fit(Classifier, data)
    second = engine.fit(data=data, state=first.state, steps=9)
    assert step_ranges == [(0, 0, 6), (6, 0, 6), (6, 6, 15), (15, 6, 15)]
    assert first.history.steps("train/loss").tolist() == [4, 6]
    assert second.history.steps("train/loss").tolist() == [8, 12, 15]
    whole = fg.Engine(steps=15, log_every=4).fit(Classifier, data)
    assert_same_bits(trained(second.state), trained(whole.state))


def test_a_second_fit_has_other_orders_of_the_data() -> None:
    class Seeing(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return (
                super()
                .training_step(batch, ctx)
                .replace(metrics={"seen": fg.metrics.LastValue.from_values(batch)})
            )

    data, state = fg.ArrayData(np.arange(8, dtype=np.float32), 4, shuffle=True), None
    engine, orders = fg.Engine(steps=2, log_every=1), []
    for _ in range(2):
        result = engine.fit(None if state else Seeing, data, state=state)
        orders.append(result.history["train/seen"].ravel().tolist())
        state = result.state
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(8)) and orders[0] != orders[1]


def test_invalid_lengths_of_a_fit_are_errors() -> None:
    data = numbers([0])
    with pytest.raises(ConfigurationError, match="how long to train"):
        fg.Engine().fit(Counting, data)
    with pytest.raises(ConfigurationError, match="how long to train"):
        fg.Engine(steps=1, epochs=1).fit(Counting, data)
    with pytest.raises(ConfigurationError, match="how long to train"):
        fg.Engine().fit(Counting, data, steps=1, epochs=1)
    for bad in (0, -1, True):
        with pytest.raises(ConfigurationError, match=r"steps is .*positive integer"):
            fg.Engine().fit(Counting, data, steps=bad)
    with pytest.raises(ConfigurationError, match=r"steps is 2147483648.*positive integer below"):
        fg.Engine(steps=2**31)
    for seed in (1.5, -1, None, True, 2**63):
        with pytest.raises(ConfigurationError, match=r"seed is .*not negative"):
            fg.Engine(steps=1, seed=seed)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="num_batches is 2.5"):
        fg.Engine().evaluate(Counting(), numbers([0]), num_batches=2.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="data must be an iterable of batches, not None"):
        fg.Engine(steps=1).fit(Counting)


def test_fast_dev_run_trains_and_evaluates_a_few_batches_and_writes_nothing(tmp_path: Path) -> None:
    observed: list[Any] = []

    class Logger:
        @fg.hookimpl
        def log_record(self, record: fg.Record) -> None:
            if record.kind != "scalars":
                return
            observed.append(record)

    largest = {"largest": lambda preds, batch: fg.metrics.Max.from_values(batch)}
    spec = fg.Evaluation("test", numbers([1], [2], [6]), metrics=largest)
    evaluating = Evaluating(spec, trigger=fg.AtEnd())
    engine = fg.Engine(
        steps=1000, fast_dev_run=2, run_dir=str(tmp_path / "run"), plugins=[Logger(), evaluating]
    )
    result = engine.fit(Counting, numbers([0], [0]))
    assert int(result.state.step) == 2 and not observed and not list(tmp_path.iterdir())
    assert [(step, metrics["largest"]) for step, _, metrics in evaluating.results] == [(2, 2)]


def test_an_action_stops_training_as_if_that_were_the_planned_end() -> None:
    ends = []
    plugins = [
        Act(fg.At(5), lambda run: fg.StopTraining("enough"), stage="decide"),
        Act(fg.AtEnd(), lambda run: ends.append(run.step), instance="end"),
    ]
    result = fg.Engine(steps=100, steps_per_execution=8, plugins=plugins).fit(
        Counting, numbers([0])
    )
    assert result.stop_reason == "enough" and ends == [5] and float(result.module.weight) == -5


def test_an_action_stops_training_before_its_first_step() -> None:
    plugin = Act(fg.AtStart(), lambda run: fg.StopTraining("nothing to do"), stage="decide")
    result = fg.Engine(steps=3, plugins=[plugin]).fit(Counting, numbers([0]))
    assert (result.stop_reason, int(result.state.step), float(result.module.weight)) == (
        "nothing to do",
        0,
        0,
    )


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_an_action_replaces_the_state(steps_per_execution: int) -> None:
    def reset(run: fg.Run) -> fg.ReplaceState:
        weight = jnp.full((), 100.0)
        return fg.ReplaceState(
            run.state.replace(
                module=eqx.tree_at(lambda module: module.weight, run.state.module, weight)
            )
        )

    result = fg.Engine(
        steps=5, steps_per_execution=steps_per_execution, plugins=[Act(fg.At(3), reset)]
    ).fit(Counting, numbers([0]))
    assert float(result.module.weight) == 98 and int(result.state.step) == 5


# --- metrics over windows -------------------------------------------------------------------------


class Measured(Counting):
    """A `Counting` with metrics of its batches, which are rows of numbers, and of whether these are
    positive."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        logits = jnp.stack([jnp.zeros(len(batch)), batch], axis=-1)
        metrics = {
            "average": fg.metrics.ExponentialMovingAverage.from_values(
                jnp.mean(batch, where=ctx.mask), decay=0.75
            ),
            "positive": fg.metrics.Accuracy.from_logits(
                logits, jnp.ones(len(batch), int), ctx.mask
            ),
            "mean": jnp.mean(batch, where=ctx.mask),
            "largest": fg.metrics.Max.from_values(batch, ctx.mask),
        }
        return super().training_step(batch, ctx).replace(metrics=metrics)


@pytest.mark.parametrize("log", [1, 2])
def test_a_moving_average_is_carried_across_windows(log: int) -> None:
    result = fg.Engine(steps=6, log_every=log).fit(Measured, numbers([4], [0], [0], [0], [0], [0]))
    expected = np.asarray([4, 2, 4 / 3, 1, 0.75, 0.5625])[log - 1 :: log]
    np.testing.assert_allclose(result.history["train/average"], expected, rtol=1e-6)


@pytest.mark.variants("full")
@pytest.mark.parametrize("steps_per_execution", [1, 4])
@pytest.mark.parametrize("remainder", ["keep", "pad"])
def test_a_window_is_exact_over_uneven_batches(remainder: Any, steps_per_execution: int) -> None:
    data = fg.ArrayData(np.asarray([1, 2, 3, 4, 5, -7], np.float32), 4, remainder=remainder)
    result = fg.Engine(steps=2, steps_per_execution=steps_per_execution).fit(Measured, data)
    assert result.metrics["train"]["positive"] == pytest.approx(5 / 6)
    assert result.metrics["train"]["mean"] == pytest.approx(8 / 6)
    assert result.metrics["train"]["largest"] == 5


def test_only_log_triggers_close_a_window() -> None:
    quiet = fg.Engine(steps=6, log_every=3).fit(Measured, numbers([1], [2], [3], [4], [5], [6]))

    def look(run: fg.Run) -> None:
        assert int(run.state.step) == run.step

    noisy = [
        Act(fg.Every(1), look, stage=phase, instance=phase) for phase in ("act", "save", "decide")
    ]
    busy = fg.Engine(steps=6, log_every=3, plugins=noisy).fit(
        Measured, numbers([1], [2], [3], [4], [5], [6])
    )
    for result in (quiet, busy):
        assert result.history["train/mean"].tolist() == [2, 5]
        assert result.history["train/largest"].tolist() == [3, 6]
        assert result.history.steps("train/mean").tolist() == [3, 6]


def test_plugin_closes_the_window_by_an_action_of_stage_log() -> None:
    plugin = Act(fg.Every(2), None, stage="log")
    result = fg.Engine(steps=6, log_every=None, plugins=[plugin]).fit(
        Measured, numbers([1], [2], [3], [4], [5], [6])
    )
    assert result.history["train/mean"].tolist() == [1.5, 3.5, 5.5]


def test_without_a_log_trigger_nothing_is_logged() -> None:
    result = fg.Engine(steps=3, log_every=None).fit(Measured, numbers([1]))
    assert result.history.names() == [] and result.metrics == {}


def test_batch_loss_and_its_moving_average_are_always_there() -> None:
    class Losing(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(self.weight * 0 + batch.mean())

    result = fg.Engine(steps=4, log_every=2).fit(Losing, numbers([4], [0], [2], [6]))
    assert result.history["train/loss"].tolist() == [2, 4]
    assert result.stop_reason is None
    assert result.history["train/batch_loss"].tolist() == [0, 6]
    np.testing.assert_allclose(
        result.history["train/loss_average"], [2, 3], rtol=1e-6
    )  # weights 1, 1/2, 1/3, 1/4


def test_module_metric_replaces_the_engine_metric_of_the_same_name() -> None:
    class Named(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            metrics = {
                name: jnp.float32(value)
                for value, name in enumerate(("loss", "batch_loss", "loss_average"), 7)
            }
            return fg.Output(self.weight, metrics=metrics)

    result = fg.Engine(steps=1).fit(Named, numbers([0]))
    assert result.metrics["train"] == {"loss": 7, "batch_loss": 8, "loss_average": 9}


# --- fg.Task --------------------------------------------------------------------------------------


class Scale(eqx.Module):
    factor: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.factor * x


def task(**options: Any) -> fg.Task:
    """Ten times the input as the loss of an example, averaged over its elements."""
    return fg.Task(
        Scale(jnp.full((), 10.0)), lambda preds, batch: preds.mean(-1), optax.sgd(0.0), **options
    )


@pytest.mark.parametrize(
    ("weight", "expected"), [(1.0, 10.0), (2.5, 25.0), (lambda step: step / 20, 50.0)]
)
def test_terms_have_weights_and_schedules(weight: Any, expected: float) -> None:
    data = [(np.ones((2, 3), np.float32),)]
    engine = fg.Engine(steps=1)
    state = engine.init_state(task(weight=weight), data)
    _, output = engine.step(state.replace(step=jnp.int32(100)), data[0])
    assert output.loss == pytest.approx(expected)


@pytest.mark.full
@pytest.mark.parametrize(("weight", "expected"), [(1.0, (15.0, 10.0)), (3.0, (45.0, 30.0))])
def test_masked_examples_count_nothing(weight: float, expected: tuple[float, float]) -> None:
    rows = np.asarray([[1, 1], [2, 2]], np.float32)
    everyone = fg.Engine(steps=1).fit(task(weight=weight), [(rows,)])
    masked = fg.Engine(steps=1).fit(
        task(weight=weight), [fg.Batch((rows,), np.asarray([True, False]))]
    )
    losses = everyone.metrics["train"]["loss"], masked.metrics["train"]["loss"]
    assert losses == pytest.approx(expected)


def test_a_task_trains_a_plain_model_with_metrics() -> None:
    x = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
    model = eqx.nn.Linear(2, "scalar", key=jax.random.key(0))
    task = fg.Task(
        model,
        loss=lambda preds, batch: (preds - batch[1]) ** 2,
        optimizer=optax.sgd(0.3),
        metrics={"off": lambda preds, batch: jnp.abs(preds - batch[1])},
    )
    data = fg.ArrayData((x, x @ np.asarray([2.0, -1.0], np.float32) + 1), 8)
    result = fg.Engine(steps=200).fit(task, data)
    np.testing.assert_allclose(result.module.model.weight, [[2.0, -1.0]], atol=1e-3)
    assert fg.Engine(steps=1).evaluate(result, data)["off"] < 1e-3


@pytest.mark.full
def test_a_task_without_a_loss_trains_by_the_losses_of_plugins_and_of_the_context() -> None:
    """With the factor 10 and inputs 1 and 3 the added loss is 20, and 5 times the factor is 50."""

    class FactorLoss:
        @fg.hookimpl
        def loss_terms(self, module: Any) -> dict[str, Any]:
            return {"factor": 5 * module.model.factor}

    def forward(model: Any, batch: Any, ctx: fg.Context) -> Any:
        preds = jax.vmap(model)(batch[0])
        ctx.add_loss("added", preds.mean())
        return preds

    def make_task(**options: Any) -> fg.Task:
        return fg.Task(Scale(jnp.full((), 10.0)), optimizer=optax.sgd(0.1), **options)

    data = [(np.asarray([1, 3], np.float32),)]
    metrics = {"largest": lambda preds, batch: preds.max()}
    both = make_task(forward=forward, metrics=metrics)
    result = fg.Engine(steps=1, plugins=[FactorLoss()]).fit(both, data)
    trained = result.metrics["train"]
    assert [trained[name] for name in ("loss", "added", "factor", "largest")] == [70, 20, 50, 30]
    assert result.module.model.factor == pytest.approx(10 - 0.1 * (2 + 5))
    evaluated = fg.Engine().evaluate(make_task(metrics=metrics), data)
    assert evaluated == {"largest": 30}
    assert fg.Engine().predict(make_task(), data).tolist() == [10, 30]
    with pytest.raises(ModelError, match="returned no loss"):
        fg.Engine(steps=1).fit(make_task(), data)
    for weight in (2.0, lambda step: step):
        with pytest.raises(ConfigurationError, match="there is no loss that it is a factor of"):
            make_task(weight=weight)


@pytest.mark.full
def test_a_task_gives_each_example_a_key_where_the_model_takes_one() -> None:
    model = eqx.nn.Sequential([eqx.nn.Identity(), eqx.nn.Dropout(0.5)])
    task = fg.Task(
        model,
        lambda preds, batch: preds,
        optax.sgd(0.0),
        {"all": lambda preds, batch: (preds != 0) * 1.0},
    )
    data = [(np.ones(64, np.float32),)]
    dropped = fg.Engine(steps=1).fit(task, data).metrics["train"]["all"]
    assert 0.2 < dropped < 0.8 and fg.Engine().evaluate(task, data)["all"] == 1


def test_task_with_unknown_inputs_is_an_error_saying_what_to_pass() -> None:
    with pytest.raises(ModelError, match="forward=lambda"):
        fg.Engine(steps=1).fit(task(), [{"x": np.ones((2, 3), np.float32)}])
    with pytest.raises(ConfigurationError, match=r"pass optimizer="):
        fg.Engine(steps=1).fit(
            fg.Task(Scale(jnp.ones(())), lambda preds, batch: preds), [(np.ones(2, np.float32),)]
        )


# --- what is not a model --------------------------------------------------------------------------


def test_model_without_a_step_is_an_error_naming_what_is_missing() -> None:
    class Stepless(fg.Module):
        def configure_optimizers(self) -> Any:
            return optax.sgd(1.0)

    class Unoptimized(Counting):
        def configure_optimizers(self) -> Any:
            return 0.1

    class Several(Counting):
        def configure_optimizers(self) -> Any:
            return {"a": fg.OptimizerSpec(optax.sgd(1.0)), "b": fg.OptimizerSpec(optax.sgd(1.0))}

    cases: list[tuple[Any, type[Exception], str]] = [
        (Stepless(), ModelError, "Stepless has no training_step"),
        (
            eqx.nn.Linear(2, 2, key=jax.random.key(0)),
            ModelError,
            "subclass fg.Module, or give fg.Task",
        ),
        (Unoptimized, ConfigurationError, "Unoptimized.configure_optimizers returned float"),
        (Several, PluginError, "the optimizers a, b need"),
        (3, ModelError, "int is not one of these"),
    ]
    for model, kind, message in cases:
        with pytest.raises(kind, match=message):
            fg.Engine(steps=1).fit(model, numbers([0]))


def test_fit_takes_a_model_or_a_state() -> None:
    engine, data = fg.Engine(steps=1), numbers([0])
    state = engine.init_state(Counting, data)
    with pytest.raises(ConfigurationError, match="not both"):
        engine.fit(Counting, data, state=state)
    with pytest.raises(ModelError, match="NoneType"):
        engine.fit(data=data)


def test_the_repr_of_a_result_shows_no_arrays() -> None:
    result = fg.Engine(steps=2, log_every=2).fit(Counting, numbers([1.0, 2.0]))
    shown = (
        f"FitResult(history=History({', '.join(result.history)}), metrics={result.metrics}, "
        "stop_reason=None, failures="
    )
    assert repr(result).startswith(shown)


def test_fit_in_another_thread() -> None:
    results: list[fg.FitResult] = []
    data, model = numbers([0]), Counting()
    thread = threading.Thread(target=lambda: results.append(fg.Engine(steps=3).fit(model, data)))
    thread.start()
    thread.join()
    assert float(results[0].module.weight) == -3


@pytest.mark.full
def test_an_action_may_evaluate_predict_and_train_with_other_engines() -> None:
    observed: list[Any] = []

    def act(run: fg.Run) -> None:
        observed.append(run.engine.evaluate(run.state, numbers([0])))
        observed.append(run.engine.predict(run.state.module, numbers([5])).tolist())
        observed.append(float(fg.Engine(steps=1).fit(run.state.module, numbers([0])).module.weight))

    result = fg.Engine(steps=3, plugins=[Act(fg.At(2), act)]).fit(Counting, numbers([0]))
    assert observed == [{"updates": 2}, [5], -3] and float(result.module.weight) == -3


# --- stopped from outside -------------------------------------------------------------------------

STOPPED = """
import os, signal, sys, time
import fulgurite as fg, numpy as np
sys.path.insert(0, sys.argv[1])
from models import Act, Counting, Events

def slow():
    while True:
        time.sleep(0.01)
        yield np.zeros(1, np.float32)

def train(action):
    ends, events = [], Events()
    plugins = [Act(fg.At(7), action), Act(fg.AtEnd(), lambda run: ends.append(run.step), instance="end"), events]
    try:
        result = fg.Engine(steps=2_000, plugins=plugins).fit(Counting, fg.DataSource(slow(), prefetch=0))
        print(result.stop_reason, int(result.state.step), float(result.module.weight), len(ends), len(events.results))
    except KeyboardInterrupt:
        print("at once", len(events.exceptions), len(events.results))
    fg.forget_stop_request()

train(lambda run: print("training", flush=True))
train(lambda run: os.kill(os.getpid(), signal.SIGTERM))
train(lambda run: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)] and None)
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""


@pytest.mark.full
def test_signals_end_training_between_steps_and_a_second_one_at_once() -> None:
    arguments = [sys.executable, "-c", STOPPED, str(Path(__file__).parent)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "training\n"
            process.send_signal(signal.SIGINT)
            lines = process.communicate(timeout=120)[0].splitlines()
        finally:
            process.kill()
    for line, expected in zip(lines, ("SIGINT", "SIGTERM"), strict=False):
        reason, step, weight, planned_ends, message_count = line.split()
        assert (reason, planned_ends, message_count) == (expected, "0", "1")
        assert int(step) == -float(weight) and 7 <= int(step) < 2000
    assert int(lines[1].split()[1]) in (
        7,
        8,
    )  # seen after the step that may have been begun already
    assert lines[2:] == ["at once 1 0", "True True"]


# --- nothing is waited for ------------------------------------------------------------------------


@pytest.mark.full
def test_no_host_hook_waits_for_the_device() -> None:
    """Every step takes long: had anything waited for the newest one, all arrays would be computed
    by then."""
    x = np.random.default_rng(0).normal(size=(600, 600)).astype(np.float32)
    ready: list[tuple[str, int, bool]] = []

    class Slow(fg.Module):
        weight: jax.Array

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            product = jax.lax.fori_loop(
                0, 30, lambda _, x: jnp.tanh(x @ batch), batch * self.weight
            )
            return fg.Output(self.weight + jax.lax.stop_gradient(product.mean()))

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(0.1)

    class Watching:
        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [
                fg.ScheduledAction("watch", fg.Every(1), lambda run: self.note("action", run.step))
            ]

        @fg.hookimpl
        def log_record(self, record: fg.Record) -> None:
            if record.kind != "scalars":
                return
            self.note("logger", record.step)

        @fg.hookimpl
        def on_epoch_end(self, run: fg.Run) -> None:
            self.note("epoch", run.step)

        def note(self, what: str, step: int) -> None:
            ready.append((what, step, all(array.is_ready() for array in jax.live_arrays())))

    steps = 7
    fg.Engine(steps=steps, log_every=2, plugins=[Watching()]).fit(Slow(jnp.ones(())), [x, x, x])
    running = [(what, step) for what, step, done in ready if not done]
    # The records of the last two windows are only there when everything is.
    expected = [("action", step) for step in range(1, steps + 1)] + [
        ("epoch", 3),
        ("epoch", 6),
        ("logger", 2),
        ("logger", 4),
    ]
    assert set(expected) <= set(running)


@pytest.mark.full
def test_the_steps_in_flight_are_bounded() -> None:
    """A step that is not yet computed keeps its batch alive, which is used in place if it is
    aligned."""
    batches: list[weakref.ref[np.ndarray]] = []
    alive: list[int] = []

    class Slow(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            product = jax.lax.fori_loop(0, 20, lambda _, x: jnp.tanh(x @ batch), batch)
            return fg.Output(self.weight + 0 * product.mean())

    class Aligned:
        def __iter__(self) -> Any:
            for _ in range(15):
                alive.append(sum(batch() is not None for batch in batches))
                room = np.zeros(400 * 400 * 4 + 64, np.uint8)
                batch = (
                    room[-room.ctypes.data % 64 :][: 400 * 400 * 4]
                    .view(np.float32)
                    .reshape(400, 400)
                )
                batches.append(weakref.ref(batch))
                yield batch
                del room, batch

    fg.Engine(steps=15, log_every=None).fit(Slow, fg.DataSource(Aligned(), prefetch=0))
    assert (
        len(alive) == 15 and max(alive) <= 4 + 2
    )  # one is about to be taken, one is looked ahead at
