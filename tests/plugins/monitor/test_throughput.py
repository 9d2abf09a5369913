"""Rates, and the model FLOPs utilization, against counts by hand."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, StateError
from fulgurite_monitor import PEAKS, RateWindow, Throughput, count_flops, count_model_flops
from fulgurite_optimizers import Freeze, GradientAccumulation
from monitored import LINE_FLOPS, Line, Records, fit, make_rows


class Digits(fg.Module):
    """A perceptron 784-256-256-10, as large as for pictures of digits."""

    net: eqx.nn.MLP

    def __init__(self, *, key: Any) -> None:
        self.net = eqx.nn.MLP(784, 10, 256, 2, key=key)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(
            jax.vmap(self.net)(batch["x"]), batch["label"]
        )
        return fg.Output(fg.metrics.Mean.from_values(losses, ctx.mask).compute())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


# --- FLOPs ----------------------------------------------------------------------------------------


def count_step(model: Any, data: Any, *plugins: Any, **settings: Any) -> float:
    """Return the model FLOPs of the training step that a fit compiles."""
    counts: list[float] = []

    class Counter:
        @fg.hookimpl
        def on_compile(self, jaxpr: Any) -> None:
            counts.append(count_model_flops(jaxpr))

    engine = fg.Engine(steps=1, plugins=[Counter(), *plugins], autoload=False, **settings)
    engine.fit(model, data)
    (flops,) = counts
    return flops


@pytest.mark.full
def test_model_flops_of_a_training_step_are_its_products_alone() -> None:
    batch = {"x": np.zeros((128, 784), np.float32), "label": np.zeros(128, np.int32)}
    layers = [784 * 256, 256 * 256, 256 * 10]
    # Forward, by the weights, and by the inputs of all layers but the first.
    by_hand = 2 * 128 * (2 * sum(layers) + sum(layers[1:]))
    assert by_hand == 155_058_176
    assert count_step(Digits, [batch]) == by_hand


def test_model_flops_of_a_convolution() -> None:
    convolution = eqx.nn.Conv2d(3, 16, 3, padding=1, key=jax.random.key(0))
    program = jax.make_jaxpr(jax.vmap(convolution))(jnp.zeros((8, 3, 32, 32)))
    assert count_model_flops(program) == 7_077_888  # 2 x 27 products for 8 x 16 x 32 x 32 outputs
    assert count_flops(program) == 7_077_888 + 8 * 16 * 32 * 32  # and the bias


def test_loops_count_as_often_as_they_run() -> None:
    square = jnp.ones((64, 64))

    def in_scan(matrix: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (carry @ matrix, None), matrix, length=10)[0]

    def unrolled(matrix: Any) -> Any:
        product = matrix
        for _ in range(10):
            product = product @ matrix
        return product

    for function in (in_scan, unrolled):
        assert count_model_flops(jax.make_jaxpr(function)(square)) == 10 * 2 * 64**3


def test_what_is_computed_again_for_the_backward_pass_is_hardware_flops_and_not_the_models() -> (
    None
):
    def block(carry: Any, weight: Any) -> Any:
        return jnp.tanh(carry @ weight), None

    def run(weights: Any, x: Any, is_checkpointed: bool) -> Any:
        body = jax.checkpoint(block) if is_checkpointed else block
        return jax.lax.scan(body, x, weights)[0].sum()

    weights, x = jnp.ones((10, 8, 8)), jnp.ones((4, 8))
    one_pass = 10 * 2 * 4 * 8 * 8
    program = jax.make_jaxpr(jax.grad(run), static_argnums=2)(weights, x, True)
    assert count_model_flops(program) == 3 * one_pass
    assert count_flops(program) > 4 * one_pass
    plain = jax.make_jaxpr(jax.grad(run), static_argnums=2)(weights, x, False)
    assert count_model_flops(plain) == 3 * one_pass


@pytest.mark.parametrize("steps_per_execution", [1, 8])
def test_model_flops_do_not_depend_on_how_steps_are_dispatched(steps_per_execution: int) -> None:
    data = make_rows(64)
    count = count_step(Line, data, steps_per_execution=steps_per_execution)
    assert count == LINE_FLOPS


@pytest.mark.full
def test_microbatches_of_a_step_all_count() -> None:
    four_of_eight_examples = count_step(Line, make_rows(64, 32), GradientAccumulation(4))
    assert four_of_eight_examples == 4 * LINE_FLOPS


# --- rates ----------------------------------------------------------------------------------------


def test_rates_are_over_the_newest_readings() -> None:
    window = RateWindow(2)
    assert window.update(2.0, {"batches": 1, "examples": 2, "items": 4}) is None
    rates = window.update(2.5, {"batches": 2, "examples": 4, "items": 8})
    assert rates == {"batches": 2.0, "examples": 4.0, "items": 8.0}
    rates = window.update(4.5, {"batches": 8, "examples": 4, "items": 10})
    assert rates == {"batches": 3.0, "examples": 0.0, "items": 1.0}


def test_time_that_does_not_increase_is_an_error() -> None:
    window = RateWindow(3)
    window.update(2.0, {})
    with pytest.raises(StateError, match="time must increase"):
        window.update(2.0, {})
    with pytest.raises(ConfigurationError, match="give 2 or more"):
        RateWindow(1)


def test_padding_is_not_counted_and_items_are_what_the_function_says() -> None:
    throughput = Throughput(items={"numbers": lambda batch: 10 * batch.value["x"].size})
    data = make_rows(11, remainder="pad")  # 8 real examples, then 3 of 8
    records, result = fit(throughput, data)
    assert len(records.values) == 2  # none for the first log step
    for values in records.values:
        batches = values["batches_per_second"]
        # Two batches of an epoch are in each window.
        assert values["examples_per_second"] == pytest.approx(batches * 11 / 2)
        assert values["numbers_per_second"] == pytest.approx(batches * 10 * 8 * 256)
        assert values["flops_per_second"] == pytest.approx(batches * LINE_FLOPS)
    assert {record.stream for record in records.records} == {"telemetry"}
    assert {name.partition("/")[0] for name in result.history} == {"train"}


def test_error_in_a_count_names_what_was_counted() -> None:
    throughput = Throughput(items={"tokens": lambda batch: batch["tokens"].size})
    with pytest.raises(KeyError) as caught:
        fit(throughput, make_rows(16))
    assert "while Throughput counted the tokens of a batch" in caught.value.__notes__


@pytest.mark.full
def test_padding_of_data_on_the_device_is_not_counted() -> None:
    records, _ = fit(Throughput(), make_rows(11, remainder="pad", on_device=True))
    for values in records.values:
        assert values["examples_per_second"] == pytest.approx(values["batches_per_second"] * 11 / 2)
    with pytest.raises(ConfigurationError, match="leave out items, or on_device"):
        fit(Throughput(items={"rows": len}), make_rows(11, on_device=True))


@pytest.mark.full
def test_batches_of_two_shapes_count_each_with_its_own_flops() -> None:
    records, _ = fit(Throughput(), make_rows(12))  # batches of 8 and of 4
    for values in records.values:
        expected = values["batches_per_second"] * LINE_FLOPS * (1 + 0.5) / 2
        assert values["flops_per_second"] == pytest.approx(expected)


def test_a_program_that_changes_counts_from_then_on_alone() -> None:
    """A frozen layer has no gradients: 2 of its 3 products of 2·8·64·64 FLOPs are not computed."""
    batches = [np.ones((8, 64), np.float32)] * 20

    class Two(fg.Module):
        first: jax.Array
        second: jax.Array

        def __init__(self, *, key: Any) -> None:
            self.first = jnp.ones((64, 64)) / 64
            self.second = jnp.ones((64, 64)) / 64

        def training_step(self, batch: jax.Array, ctx: Any) -> fg.Output:
            return fg.Output(jnp.mean(jnp.tanh(batch @ self.first) @ self.second))

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(0.1)

    throughput = Throughput(interval=0, peak_flops=1e12)
    flops: list[tuple[int, float]] = []

    class Read(fg.Plugin):
        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("read", fg.Every(5), self.read, stage="act")]

        def read(self, run: fg.Run) -> None:
            assert throughput._meter is not None
            flops.append((run.step, throughput._meter.counts["flops"]))

    plugins = [Freeze("first", until=10), throughput, Read()]
    fg.Engine(steps=20, log_every=5, plugins=plugins, autoload=False).fit(Two, batches)
    product = 2 * 8 * 64 * 64
    # Frozen: two products forward, one for the gradient of `second`. Then five without that of
    # the batch.
    assert flops == [
        (5, 5 * 3 * product),
        (10, 10 * 3 * product),
        (15, (10 * 3 + 5 * 5) * product),
        (20, (10 * 3 + 10 * 5) * product),
    ]


def test_another_fit_of_the_same_engine_knows_the_flops() -> None:
    records = Records("throughput")
    engine = fg.Engine(
        steps=6, log_every=2, autoload=False, plugins=[Throughput(interval=0), records]
    )
    for _ in range(2):
        engine.fit(Line, make_rows(64))
    assert len(records.values) == 4
    for values in records.values:
        assert values["flops_per_second"] == pytest.approx(
            values["batches_per_second"] * LINE_FLOPS
        )


def test_log_steps_that_come_fast_have_few_records() -> None:
    records = Records("throughput")
    plugins = [Throughput(interval=3600), records]
    engine = fg.Engine(steps=12, log_every=2, autoload=False, plugins=plugins)
    engine.fit(Line, make_rows(64))
    assert [record.step for record in records.records if record.kind == "scalars"] == [4]


# --- utilization ----------------------------------------------------------------------------------


def test_utilization_is_flops_over_the_peak_and_says_both() -> None:
    records, result = fit(Throughput(peak_flops=1e14, flops_per_step=1e12), make_rows(64))
    for values in records.values:
        assert values["peak_flops_per_second"] == 1e14
        assert values["mfu"] == pytest.approx(values["batches_per_second"] * 1e12 / 1e14)
    (message,) = [message for message in result.messages if "MFU" in message]
    assert "1e+12 FLOP a step (Throughput(flops_per_step=...))" in message
    assert "1 cpu x 1e+14 FLOP/s, Throughput(peak_flops=...)" in message


@pytest.mark.full
def test_two_devices_have_twice_the_peak() -> None:
    program = Path(__file__).with_name("on_two_devices.py")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    subprocess.run([sys.executable, program], env=os.environ | {"XLA_FLAGS": flags}, check=True)


def test_device_of_unknown_peak_has_no_utilization_and_one_message() -> None:
    records, result = fit(Throughput(), make_rows(64))
    assert all("mfu" not in values and "flops_per_second" in values for values in records.values)
    (message,) = [message for message in result.messages if "MFU" in message]
    assert "the peak of 'cpu' is not known" in message


def test_program_that_was_compiled_before_has_no_flops_and_one_message() -> None:
    records = Records("throughput")
    throughput = Throughput(peak_flops=1e12, interval=0)
    engine = fg.Engine(
        steps=6, log_every=2, autoload=False, plugins=[throughput, records], steps_per_execution=1
    )
    data = make_rows(64)
    engine.step(engine.init_state(Line, data), next(iter(engine.iter_batches(data))))
    result = engine.fit(Line, data)
    assert not any("flops_per_second" in values for values in records.values)
    (message,) = [message for message in result.messages if "MFU" in message]
    assert "compiled before this fit" in message


def test_every_peak_has_a_source_and_is_of_dense_products() -> None:
    for kind, peak in PEAKS.items():
        assert 1e13 < peak.flops < 3e15, kind
        assert "NVIDIA" in peak.source or peak.source.startswith("https://"), kind
    assert PEAKS["NVIDIA H100 80GB HBM3"].flops == pytest.approx(1979e12 / 2)  # 1979 is sparse
    assert PEAKS["TPU v4"].flops == 275e12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"items": {"tokens": 3}}, "give a function of the batch"),
        ({"items": len}, "give functions of the batch by name"),
        ({"interval": -1}, "give seconds, or 0"),
        ({"interval": "1"}, "give seconds, or 0"),
        ({"window": 1}, "2 log steps or more"),
        ({"peak_flops": 0}, "peak_flops is 0"),
        ({"peak_flops": "1e15"}, "peak_flops is '1e15'"),
        ({"flops_per_step": -1.0}, "flops_per_step is -1.0"),
    ],
)
def test_invalid_argument_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Throughput(**options)


def test_engine_without_log_steps_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="give log_every="):
        fg.Engine(steps=1, log_every=None, plugins=[Throughput()], autoload=False)
