"""Populations with evaluations and checkpoints."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_checkpoint import Checkpointer
from fulgurite_evaluators import Evaluator
from fulgurite_population import Evolution, Population
from populations import NUMBERS, Point, assert_same_bits, fit, list_leaves, make_batches
from sklearn.datasets import load_digits


@pytest.mark.full
def test_evaluations_report_each_member():
    population = Population(seeds=range(2), vary={"learning_rate": [0.1, 0.2]})
    result = fit(Point, NUMBERS, 3, population, Evaluator("test", NUMBERS[:1], every=3))
    losses = np.array([0.729, 0.512]) ** 2 / 2
    metrics = result.metrics["test"]
    np.testing.assert_allclose([metrics["loss[0]"], metrics["loss[1]"]], losses, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss/std"], losses.std(), rtol=1e-5)
    best = population.best(result, "test/loss")
    assert best.index == 1
    np.testing.assert_allclose(best.module.p, 0.512, rtol=1e-6)
    with pytest.raises(ConfigurationError, match="no member has a metric 'test/f1'"):
        population.best(result, "test/f1")


@pytest.mark.full
def test_evolution_multiplies_what_varies_alone():
    """A decay of Adam above 1 would end its member."""

    class Adam(Point):
        def configure_optimizers(self):
            return optax.inject_hyperparams(optax.adam)(learning_rate=0.1)

    evolution = Evolution(every=3, monitor="train/loss", factors=(1.25,))
    population = Population(seeds=(0, 1), vary={"learning_rate": [0.1, 0.2]}, evolution=evolution)
    result = fit(Adam, NUMBERS * 2, 4, population, log_every=1)
    rates = optax.tree.get(result.state.opt_state, "learning_rate")
    np.testing.assert_allclose(rates, [0.25, 0.2], rtol=1e-6)
    np.testing.assert_allclose(optax.tree.get(result.state.opt_state, "b1"), [0.9, 0.9], rtol=1e-6)


class Normalized(fg.Module):
    """A layer of batch normalization."""

    norm: eqx.nn.BatchNorm
    net: eqx.nn.Linear

    def __init__(self, *, key):
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
        self.net = eqx.nn.Linear(4, 2, key=key)

    def training_step(self, batch, ctx):
        def apply(x, state):
            hidden, state = self.norm(x, state)
            return self.net(hidden), state

        mapped = jax.vmap(apply, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        preds, state = mapped(batch["x"], ctx.model_state)
        return fg.Output(jnp.mean((preds - batch["y"]) ** 2), model_state=state)

    def configure_optimizers(self):
        return optax.sgd(0.1)


@pytest.mark.full
def test_members_have_their_own_model_state():
    population = Population(seeds=(0, 1))
    batches = make_batches(3)
    model = eqx.nn.make_with_state(Normalized)
    result = fit(model, batches, 3, population, Evaluator("test", batches[:1], every=3))
    alone = fg.Engine(steps=3, seed=1, plugins=[Evaluator("test", batches[:1], every=3)]).fit(
        model, batches
    )
    for leaf, expected in zip(
        list_leaves((result.module.take(1), jax.tree.map(lambda x: x[1], result.model_state))),
        list_leaves((alone.module, alone.model_state)),
        strict=True,
    ):
        np.testing.assert_allclose(leaf, expected, atol=1e-5)
    np.testing.assert_allclose(
        result.metrics["test"]["loss[1]"], alone.metrics["test"]["loss"], rtol=1e-5
    )


@pytest.mark.full
def test_evolution_replaces_the_worst_by_the_best():
    evolution = Evolution(every=2, monitor="test/loss", factors=(0.5,))
    rates = {"learning_rate": [0.1, 0.2, 0.3, 0.4]}
    population = Population(seeds=range(4), vary=rates, evolution=evolution)
    result = fit(Point, NUMBERS, 3, population, Evaluator("test", NUMBERS[:1], every=2))
    # After two steps the first, at 0.81, becomes the fourth, at 0.36, with half its rate.
    expected = [0.36 * 0.8, 0.8**3, 0.7**3, 0.6**3]
    np.testing.assert_allclose(result.module.members.p, expected, rtol=1e-6)
    assert result.history["population/parent[0]"].tolist() == [3]


class Digits(fg.Module):
    """A small classifier of digits."""

    net: eqx.nn.MLP

    def __init__(self, *, key):
        self.net = eqx.nn.MLP(64, 10, 16, 1, key=key)

    def training_step(self, batch, ctx):
        logits = jax.vmap(self.net)(batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        accuracy = fg.metrics.Accuracy.from_logits(logits, batch["label"], ctx.mask)
        loss = fg.metrics.Mean.from_values(losses, ctx.mask).compute()
        return fg.Output(loss, metrics={"accuracy": accuracy})

    def configure_optimizers(self):
        return optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)


def fit_digits(run_dir, kill_at=None):
    """Train eight classifiers that evolve; the process is killed at a step."""
    pixels, labels = load_digits(return_X_y=True)
    arrays = {"image": (pixels / 16).astype(np.float32), "label": labels.astype(np.int32)}
    train = fg.ArrayData({name: array[400:] for name, array in arrays.items()}, 64, shuffle=True)
    test = fg.ArrayData({name: array[:400] for name, array in arrays.items()}, 200)
    population = Population(
        seeds=range(8),
        vary={"learning_rate": [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 1e30]},
        evolution=Evolution(every=20, monitor="test/loss"),
    )

    def kill(run):
        if run.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    plugins = [
        population,
        "jsonl",
        Evaluator("test", test, every=20),
        Checkpointer(every=20),
        fg.LambdaPlugin(every={10: kill}),
    ]
    engine = fg.Engine(steps=60, run_dir=run_dir, plugins=plugins, log_every=10)
    return population, engine.fit(population.stack(Digits), train, resume="auto")


@pytest.mark.full
def test_eight_classifiers_are_killed_and_resumed_with_the_same_bits(tmp_path):
    population, whole = fit_digits(tmp_path / "whole")
    command = [sys.executable, __file__, tmp_path / "killed", "50"]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert (tmp_path / "killed" / "checkpoints").is_dir()
    _, resumed = fit_digits(tmp_path / "killed")
    for name in ("module", "opt_state"):
        assert_same_bits(getattr(resumed.state, name), getattr(whole.state, name))
    records = [(tmp_path / name / "records.jsonl").read_bytes() for name in ("whole", "killed")]
    assert records[0] == records[1]
    assert whole.history["population/parent[7]"].size
    best = population.best(whole, "test/accuracy", "max")
    assert best.value > 0.9


@pytest.mark.slow
def test_members_are_divided_among_devices():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    program = Path(__file__).with_name("on_four.py")
    subprocess.run([sys.executable, program], env={**os.environ, "XLA_FLAGS": flags}, check=True)


if __name__ == "__main__":
    fit_digits(Path(sys.argv[1]), int(sys.argv[2]))
