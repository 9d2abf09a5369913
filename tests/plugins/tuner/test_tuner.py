"""Learning rates and batch sizes are found, and nothing else changes."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, DataError
from fulgurite_averaging import EMA, Average, Lookahead
from fulgurite_evaluators import Evaluator
from fulgurite_optimizers import (
    BackboneFinetuning,
    Freeze,
    GradientAccumulation,
    GradientClip,
    MultiOptimizer,
    Phase,
    WeightClip,
    optimize_only,
)
from fulgurite_stopping import EarlyStopping
from fulgurite_testing import TinyModel, assert_same_bits, tiny_data, tiny_engine
from fulgurite_tuner import find_batch_size, find_learning_rate
from fulgurite_tuner.batch_size import find_largest
from fulgurite_tuner.command import main
from fulgurite_tuner.learning_rate import (
    LearningRates,
    has_diverged,
    list_rates,
    smooth,
    suggest_rate,
)


def test_rates_and_smoothing() -> None:
    np.testing.assert_allclose(list_rates(1e-4, 1.0, 5), [1e-4, 1e-3, 1e-2, 1e-1, 1])
    np.testing.assert_allclose(smooth([1.0] * 5, 0.98), [1.0] * 5)
    rates = list_rates(1e-6, 1.0, 61)
    losses = [1 / (1 + math.exp(4 * (math.log10(rate) + 3))) for rate in rates]
    assert suggest_rate(rates, losses) == pytest.approx(1e-3)


def test_suggestions_and_divergence() -> None:
    assert suggest_rate([1e-3, 1e-2, 1e-1, 1], [10, 9, 8, 1]) is not None
    assert suggest_rate([1e-3, 1e-2], [1, math.nan]) is None
    assert suggest_rate([1e-3, 1e-2], [1, 2]) is None
    assert has_diverged([1, 0.5, 2.1], 4) and not has_diverged([1, 0.5, 1.9], 4)
    assert has_diverged([1, math.inf], 4)
    picture = LearningRates([1e-3, 1e-2, 1e-1], [3, 2, 3], [3, 2, 3]).to_svg()
    assert picture.startswith("<svg") and "1.00e-03" in picture


@pytest.mark.parametrize(
    ("smoothed", "expected"),
    [
        ([-1.0, -5.0, 9.9], False),  # -5 + 3 * 5 = 10
        ([-1.0, -5.0, 10.1], True),
        ([-5.0, -5.0, -4.0], False),
        ([1.0, 0.5, -0.01, 0.05], False),  # its size is 1, not .01
        ([1.0, 0.5, -0.01, 3.1], True),
        ([0.0, 0.0, 1e-9], False),
        ([0.0], False),
        ([-2.0, -math.inf], True),
        ([-2.0, math.nan], True),
    ],
)
def test_losses_of_either_sign_diverge(smoothed: list[float], expected: bool) -> None:
    assert has_diverged(smoothed, 4) == expected


class Rising(TinyModel):
    """Its loss is 1, and is not finite from the eighth step on."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        output = super().training_step(batch, ctx)
        assert output.loss is not None
        loss = 1 + 0 * output.loss
        return fg.Output(jax.numpy.where(ctx.step >= 7, jax.numpy.inf, loss))


@pytest.mark.full
def test_the_search_ends_where_the_loss_diverges_and_changes_nothing(tmp_path: Path) -> None:
    # Plugins that only watch stay away, with the evaluator that one of them would need.
    plugins = [GradientClip(max_norm=1.0), EarlyStopping("train/loss", patience=9)]
    engine = tiny_engine(*plugins, run_dir=tmp_path / "run")
    data = tiny_data()
    make: Any = Rising
    model = make(key=jax.random.key(0))
    before = jax.tree.map(np.asarray, model.linear)
    rates = find_learning_rate(engine, model, data, optax.adam, low=1e-4, high=1.0, steps=20)
    assert rates.losses == [1.0] * 7
    np.testing.assert_allclose(rates.smoothed, [1.0] * 7)
    assert rates.rates == list_rates(1e-4, 1.0, 20)[:7]
    assert rates.suggestion is None
    assert_same_bits(jax.tree.map(np.asarray, model.linear), before)
    assert not (tmp_path / "run").exists()
    # A fit after it is the fit without it.
    result = tiny_engine().fit(TinyModel, data)
    assert_same_bits(result.module.linear, tiny_engine().fit(TinyModel, tiny_data()).module.linear)


@pytest.mark.slow
def test_a_rate_is_suggested_for_a_model_that_learns() -> None:
    rates = find_learning_rate(
        tiny_engine(), TinyModel, tiny_data(), optax.sgd, low=1e-3, high=100.0, steps=100
    )
    assert rates.suggestion is not None and 5e-3 < rates.suggestion < 20


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"search": "power", "start": 2}, 64),
        ({"search": "power", "start": 500}, 62),
        ({"search": "power", "start": 3}, 96),
        ({"search": "bisect", "start": 2}, 100),
        ({"search": "bisect", "start": 2, "margin": 0.05}, 95),
        ({"search": "power", "start": 2, "max_size": 64}, 64),
        ({"search": "bisect", "start": 2, "max_size": 70}, 70),
    ],
)
def test_sizes_that_are_tried(options: dict[str, Any], size: int) -> None:
    assert find_largest(lambda size: size <= 100, **options) == size
    assert find_largest(lambda size: False, search="power", start=8) == 0
    assert find_largest(lambda size: True, search="power", start=8, max_size=0) == 0


@pytest.mark.full
def test_the_size_follows_from_memory_and_fits() -> None:
    engine = tiny_engine(GradientClip(max_norm=1.0))
    data = tiny_data()
    options: dict[str, Any] = {"fraction": 1.0, "start": 16, "search": "bisect"}
    with pytest.raises(ConfigurationError, match="not even one example fits into 10 bytes"):
        find_batch_size(engine, TinyModel, data, limit=10, **options)
    sizes = find_batch_size(engine, TinyModel, data, limit=40_000, **options)
    assert sizes.num_bytes[sizes.suggestion] <= 40_000
    assert sizes.suggestion > 64
    assert sizes.num_bytes[32] > sizes.num_bytes[16]
    # A fit after both is the fit without them.
    result = tiny_engine().fit(TinyModel, data)
    assert_same_bits(result.module, tiny_engine().fit(TinyModel, tiny_data()).module)


class Square(fg.Module):
    """Weights with the loss `mean(w²) / 2` times the mean of the batch, which is 1."""

    weight: jax.Array

    def __init__(self, *, key: Any = None, size: int = 1) -> None:
        self.weight = jax.numpy.ones(size)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output((self.weight**2).mean() / 2 * batch["x"].mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


ONES = [{"x": np.ones((2, 1), np.float32)}] * 4


def test_what_acts_after_an_update_is_a_part_of_the_search() -> None:
    """Weights that go back every second update, and such as are clipped; the oracle is NumPy."""

    def search(*plugins: Any) -> list[float]:
        # It runs with the evaluation of a plugin that stays away.
        best = EarlyStopping("test/loss", restore_best=True)
        engine = fg.Engine(
            steps=1, plugins=[*plugins, Evaluator("test", ONES, every=1), best], autoload=False
        )
        return find_learning_rate(
            engine, Square, ONES, optax.sgd, low=0.1, high=0.8, steps=4, smoothing=0
        ).losses

    def simulate(move: Callable[[int, float, float], tuple[float, float]]) -> list[float]:
        weight, slow, losses = 1.0, 1.0, []
        for step, rate in enumerate(np.geomspace(0.1, 0.8, 4), 1):
            losses.append(weight**2 / 2)
            weight, slow = move(step, weight - rate * weight, slow)
        return losses

    def look_ahead(step: int, weight: float, slow: float) -> tuple[float, float]:
        middle = (weight + slow) / 2
        return (middle, middle) if step % 2 == 0 else (weight, slow)

    def clip(step: int, weight: float, slow: float) -> tuple[float, float]:
        return min(weight, 0.75), slow

    assert search() == pytest.approx(simulate(lambda step, weight, slow: (weight, slow)))
    assert search(Lookahead(2, 0.5)) == pytest.approx(simulate(look_ahead))
    assert search(WeightClip("weight", max_value=0.75)) == pytest.approx(simulate(clip))


class Straight(fg.Module):
    """Two weights, whose gradients are 1; that of `first` is NaN in some steps."""

    first: jax.Array
    second: jax.Array
    bad_steps: tuple[int, ...] = eqx.field(static=True, default=())
    optimizer: Any = eqx.field(static=True, default=None)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        def add_root(weight: Any) -> Any:
            return jnp.sqrt(0 * weight)

        is_bad = jnp.isin(ctx.step, jnp.array((-1, *self.bad_steps)))
        zero = jax.lax.cond(is_bad, add_root, lambda weight: 0 * weight, self.first)
        return fg.Output((self.first + self.second) * batch["x"].mean() + zero)

    def configure_optimizers(self) -> Any:
        return self.optimizer or optax.sgd(0.1)


def search_straight(*plugins: Any, **fields: Any) -> LearningRates:
    model = Straight(jnp.ones(()), jnp.ones(()), **fields)
    engine = fg.Engine(epochs=9, plugins=plugins, autoload=False, on_nonfinite="skip")
    return find_learning_rate(engine, model, ONES, optax.sgd, low=0.01, high=0.08, steps=4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("plugins", "fields", "num_trained"),
    [
        ((GradientAccumulation(3, "steps"),), {}, 2),
        ((), {"bad_steps": (1, 2, 4)}, 2),
        ((), {"optimizer": optimize_only(optax.adam(1.0), "first")}, 1),
        ((MultiOptimizer(),), {"optimizer": {"loss": Phase(optax.adam(1.0), "first")}}, 1),
        ((Freeze("first", until=fg.EveryEpoch()),), {}, 1),
        ((BackboneFinetuning("first", until=fg.EveryEpoch(3)),), {}, 1),
    ],
    ids=["accumulated", "skipped", "one part", "one phase", "frozen", "backbone"],
)
def test_each_rate_is_that_of_an_update(plugins: Any, fields: Any, num_trained: int) -> None:
    """Each lowers the loss by the rate for each weight that is trained, however many steps wait."""
    rates = np.geomspace(0.01, 0.08, 4)
    search = search_straight(*plugins, **fields)
    np.testing.assert_allclose(search.rates, rates)
    expected = 2 - num_trained * np.cumsum([0, *rates[:-1]])
    np.testing.assert_allclose(search.losses, expected, rtol=1e-6)


def test_a_search_that_is_not_defined_is_refused() -> None:
    phases: dict[str, Any] = {name: Phase(optax.sgd(0.1), name) for name in ("first", "second")}
    with pytest.raises(ConfigurationError, match=r"several optimizers \(first, second\)"):
        search_straight(MultiOptimizer(**phases))
    model = Straight(jnp.ones(()), jnp.ones(()))
    optimizer: Any = optimize_only
    with pytest.raises(ConfigurationError, match=r"optimizer\(schedule\) returned {'default'"):
        find_learning_rate(
            fg.Engine(steps=1), model, ONES, lambda rate: optimizer(optax.sgd(rate), "first")
        )


@pytest.mark.full
def test_a_search_ends_where_no_step_is_finite() -> None:
    search = search_straight(bad_steps=(*range(2, 200),))
    np.testing.assert_allclose(search.losses, [2, 1.98])


@pytest.mark.full
def test_a_model_without_an_optimizer_is_searched() -> None:
    task = fg.Task(eqx.nn.Linear(1, 1, key=jax.random.key(0)), lambda preds, batch: preds.mean())
    data = [(np.ones((2, 1), np.float32),)]
    search = find_learning_rate(
        fg.Engine(steps=1, autoload=False), task, data, optax.sgd, low=0.01, high=0.08, steps=2
    )
    # Weight and bias fall by the rate each.
    assert search.losses[0] - search.losses[1] == pytest.approx(0.02, rel=1e-5)


class Weighed(fg.Module):
    """Takes the mask of its batch, and a single number."""

    weight: jax.Array
    other: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.ones((64, 64))
        self.other = jnp.ones((64, 64))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        assert ctx.mask is not None
        hidden = jnp.tanh(batch["x"][:, :1] * jnp.ones(64) @ self.weight) @ self.other
        losses = jnp.mean(hidden**2, axis=1) * batch["temperature"]
        return fg.Output(jnp.sum(losses * ctx.mask) / jnp.sum(ctx.mask))

    def configure_optimizers(self) -> Any:
        return optax.adam(0.1)


@pytest.mark.full
def test_the_batch_of_a_size_is_like_those_that_are_trained_on() -> None:
    """It has a mask where they do, and single numbers stay so. What is trained only later takes
    memory too."""
    data = [
        fg.Batch(
            {"x": np.ones((4, 3), np.float32), "temperature": np.float32(1)},
            np.array([True, True, True, False]),
        )
    ]

    def measure(*plugins: Any) -> int:
        engine = fg.Engine(steps=9, plugins=plugins, autoload=False)
        sizes = find_batch_size(engine, Weighed, data, limit=2**30, start=2, max_size=4)
        assert sizes.suggestion == 4
        return sizes.num_bytes[4]

    whole = measure()
    for until in (5, fg.EveryEpoch(3), fg.AtEnd()):
        assert measure(Freeze("weight", until=until)) == pytest.approx(whole, rel=1e-3)
    assert measure(Freeze("weight")) < 0.9 * whole


def test_a_batch_of_several_lengths_has_no_size() -> None:
    data = [{"x": np.ones(4, np.float32), "unlabeled": np.ones(12, np.float32)}]
    with pytest.raises(DataError, match="begin with one length .there is 4, 12."):
        find_batch_size(fg.Engine(steps=1), Square, data, limit=2**30)


@pytest.mark.full
def test_what_plugins_keep_in_the_state_counts_as_memory() -> None:
    size = 2**14
    make: Any = partial(Square, size=size)

    def measure(*plugins: Any) -> int:
        engine = fg.Engine(steps=1, plugins=plugins, autoload=False)
        options: dict[str, Any] = {"limit": 2**30, "start": 2, "max_size": 4}
        return find_batch_size(engine, make, ONES, **options).num_bytes[4]

    copies = {
        2: [Average(EMA(0.9)), Average(EMA(0.99), name="slower")],
        1: [Evaluator("test", ONES, every=1), EarlyStopping("test/loss", restore_best=True)],
    }
    without = measure()
    for number, plugins in copies.items():
        assert (measure(*plugins) - without) / (4 * size) == pytest.approx(number, abs=0.01)


class Smaller(fg.ProcessSync):
    """Speaks for a second process, whose device has 12,000 bytes, and whose steps take 1000
    more."""

    def all_gather(self, name: str, value: Any) -> list[Any]:
        return [value, {"batch limit": 12_000, "batch bytes": value + 1000}[name]]


class TwoProcesses:
    @fg.hookimpl
    def sharding_strategy(self) -> fg.ShardingStrategy:
        return fg.SingleDevice(Smaller())


@pytest.mark.full
def test_processes_agree_on_what_fits_everywhere() -> None:
    sizes = find_batch_size(
        tiny_engine(TwoProcesses()), TinyModel, tiny_data(), limit=40_000, fraction=1.0
    )
    assert sizes.limit == 12_000
    assert sizes.num_bytes[sizes.suggestion] <= 12_000
    smallest = find_batch_size(
        tiny_engine(), TinyModel, tiny_data(), limit=40_000, fraction=1.0, max_size=8
    )
    assert sizes.num_bytes[8] == smallest.num_bytes[8] + 1000


@pytest.mark.slow
def test_two_processes_find_the_same() -> None:
    program = Path(__file__).with_name("tuned.py")
    command = "from fulgurite_cli.command import main; raise SystemExit(main())"
    run = subprocess.run(
        [sys.executable, "-c", command, "launch", "--processes", "2", program],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "2"},
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    lines = [line for line in run.stdout.splitlines() if "{" in line]
    first, second = (json.loads(line[line.index("{") :]) for line in lines)
    assert first == second
    assert first["bytes"] <= first["limit"] == 20_000
    # Of the two devices of a process, each has as many examples: powers begin with 8, not 7.
    assert first["size"].bit_count() == 1
    assert len(first["losses"]) == 3


class FourDevices:
    """Says that a batch is divided among four devices."""

    @fg.hookimpl
    def sharding_strategy(self) -> fg.ShardingStrategy:
        strategy = fg.SingleDevice()
        strategy.mesh = SimpleNamespace(local_devices=[None] * 4)  # pyright: ignore
        return strategy


def measure_batch(plugin: Any = None, **options: Any) -> Any:
    plugins = [] if plugin is None else [plugin]
    engine = fg.Engine(steps=1, plugins=plugins, autoload=False)
    return find_batch_size(engine, Square, ONES, **{"limit": 1000, **options})


def search_rate(**options: Any) -> Any:
    return find_learning_rate(tiny_engine(), TinyModel, tiny_data(), optax.sgd, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: list_rates(1.0, 0.1, 5), "low is 1.0"),
        (lambda: list_rates(0.1, 1.0, 0), "steps"),
        (lambda: find_batch_size(tiny_engine(), TinyModel, tiny_data()), "give limit="),
        (
            lambda: find_batch_size(tiny_engine(), TinyModel, tiny_data(), limit=9, fraction=0),
            "fraction is 0",
        ),
        (lambda: measure_batch(limit=0), "limit is 0"),
        (lambda: measure_batch(max_size=0), "max_size is 0"),
        (lambda: measure_batch(max_size=1.5), "max_size is 1.5"),
        (
            lambda: measure_batch(max_size=3, plugin=FourDevices()),
            "max_size is 3, and a batch is divided among 4 devices",
        ),
        (lambda: measure_batch(fraction="all"), "fraction is 'all'"),
        (lambda: search_rate(smoothing=1.0), "smoothing is 1.0"),
        (lambda: search_rate(smoothing=-0.5), "smoothing is -0.5"),
        (lambda: search_rate(divergence=0.5), "divergence is 0.5"),
        (lambda: search_rate(divergence=math.nan), "divergence is nan"),
        (lambda: search_rate(low="1e-3"), "low is '1e-3'"),
    ],
)
def test_what_makes_no_sense_is_an_error(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


PROGRAM = """
import fulgurite as fg
from fulgurite_cli import Experiment
from fulgurite_testing import TinyModel, tiny_data


def experiment(steps: int = 8) -> Experiment:
    return Experiment(fg.Engine(steps=steps, autoload=False), TinyModel, tiny_data)
"""


@pytest.mark.full
def test_the_command_prints_what_it_suggests(tmp_path: Path, capsys: Any) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    drawing = tmp_path / "rates.svg"
    options = ["--low", "1e-3", "--high", "100", "--optimizer", "sgd", "--svg", str(drawing)]
    assert main(["lr", str(program), "steps=4", *options]) == 0
    assert 1e-3 < float(capsys.readouterr().out) < 100
    assert drawing.read_text().startswith("<svg")
    assert main(["batch", str(program), "--limit", "40000"]) == 0
    assert int(capsys.readouterr().out) >= 64


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: Any) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert main(["lr", str(program), "--optimizer", "chain"]) == 2
    assert "'chain', which is not an optimizer of optax" in capsys.readouterr().err
    assert main(["lr", str(program), "width=3"]) == 2
    assert main(["batch", str(program)]) == 2
    assert "give limit=" in capsys.readouterr().err
