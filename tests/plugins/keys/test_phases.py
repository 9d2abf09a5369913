"""Losses and metrics on inner layers with several optimizers, microbatches and BatchNorm."""

from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite_keys import L1, L2, KeyedTask, Losses, Metrics, keyed
from fulgurite_metrics import Norm
from fulgurite_optimizers import GradientAccumulation, MultiOptimizer, Phase


class Players(fg.Module):
    """Two small networks, each with a loss that the other's output is in."""

    generator: eqx.nn.MLP
    discriminator: eqx.nn.MLP
    by_hand: bool = eqx.field(static=True)

    def __init__(self, by_hand: bool, *, key: Any) -> None:
        first, second = jax.random.split(key)
        self.generator = eqx.nn.MLP(3, 3, 4, 1, key=first)
        self.discriminator = eqx.nn.MLP(3, "scalar", 4, 1, key=second)
        self.by_hand = by_hand

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        fake = jax.vmap(self.generator)(batch["x"])
        scores = jax.vmap(self.discriminator)(jnp.concatenate([fake, batch["x"]]))
        size = len(fake)
        generator_loss = jax.nn.softplus(-scores[:size]).mean()
        metrics = {}
        if self.by_hand:
            hidden = jax.vmap(self.generator.layers[0])(batch["x"])
            generator_loss += 0.1 * jnp.mean(jnp.abs(hidden))
            norms = jnp.linalg.norm(hidden, axis=-1)
            metrics["metrics/hidden"] = fg.metrics.Mean.from_values(norms)
        discriminator_loss = jax.nn.softplus(scores[:size]) + jax.nn.softplus(-scores[size:])
        losses = {"generator": generator_loss, "discriminator": discriminator_loss.mean()}
        return fg.Output(losses=losses, metrics=metrics)


def make_data() -> fg.ArrayData:
    inputs = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
    return fg.ArrayData({"x": inputs}, 8)


def check_equal(first: Any, second: Any) -> None:
    arrays = [jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (first, second)]
    for left, right in zip(*arrays, strict=True):
        assert np.allclose(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_a_game_of_two_with_a_loss_and_a_metric_on_a_layer() -> None:
    phases: Any = {name: Phase(optax.adam(1e-2), name) for name in ("discriminator", "generator")}
    sparse: Any = {"generator/sparse": L1("interms.generator.layers[0]", weight=0.1)}
    keys = [
        Losses(**sparse),
        Metrics(hidden=keyed(Norm.from_vectors, "interms.generator.layers[0]")),
    ]
    results = [
        fg.Engine(steps=6, plugins=[MultiOptimizer(order="simultaneous", **phases), *plugins]).fit(
            Players(by_hand, key=jax.random.key(0)), make_data()
        )
        for by_hand, plugins in ((True, []), (False, keys))
    ]
    first, second = results
    for name in ("generator", "discriminator"):
        check_equal(getattr(first.module, name), getattr(second.module, name))
    names = ("metrics/hidden", "generator/loss")
    assert [second.metrics["train"][name] for name in names] == pytest.approx(
        [first.metrics["train"][name] for name in names], rel=1e-5
    )


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, *, key: Any) -> None:
        self.linear = eqx.nn.Linear(3, 3, key=key)
        self.norm = eqx.nn.BatchNorm(3, "batch", mode="batch")

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> Any:
        return self.norm(self.linear(x), state)


def make_normed(*, key: Any) -> Any:
    model, state = eqx.nn.make_with_state(Normed)(key=key)
    return KeyedTask(model, {"x": "batch.x"}, optimizer=optax.sgd(0.1)), state


@pytest.mark.full
def test_batch_norm_and_microbatches_by_key() -> None:
    losses = Losses(
        fit=L2("preds", "batch.x"),
        small=L2("interms.model.linear", weight=0.01),
        normed=L1("interms.model.norm", weight=0.01),
    )
    metrics = Metrics(normed=keyed(Norm.from_vectors, "interms.model.norm"))
    result = fg.Engine(steps=4, plugins=[losses, metrics]).fit(make_normed, make_data())
    assert result.metrics["train"]["metrics/normed"] > 0
    assert {"fit", "small", "normed"} <= result.metrics["train"].keys()

    model = eqx.nn.MLP(3, 3, 4, 1, key=jax.random.key(0))
    losses = Losses(fit=L2("preds", "batch.x"), sparse=L1("interms.model.layers[0]", weight=0.1))
    task = KeyedTask(model, {"x": "batch.x"}, optimizer=optax.sgd(0.1))
    whole = fg.Engine(steps=4, plugins=[losses]).fit(task, make_data())
    parts = fg.Engine(steps=4, plugins=[losses, GradientAccumulation(2)])
    check_equal(whole.module, parts.fit(task, make_data()).module)
