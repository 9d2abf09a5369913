"""Models that the tests of populations train."""

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_population import Population

sgd = optax.inject_hyperparams(optax.sgd)
NUMBERS = [{"x": np.ones((2, 1), np.float32)}] * 3


class Point(fg.Module):
    """A number p with the loss p²/2."""

    p: jax.Array

    def __init__(self, *, key):
        self.p = jnp.ones(())

    def training_step(self, batch, ctx):
        return fg.Output(self.p**2 / 2 * batch["x"].mean())

    def configure_optimizers(self):
        return sgd(0.1)


class Fragile(Point):
    """A number whose loss is NaN while a number in the batch is that of its member."""

    member: jax.Array

    def __init__(self, *, key):
        self.p = jnp.ones(())
        self.member = jnp.zeros((), jnp.int32)

    def training_step(self, batch, ctx):
        loss = self.p**2 / 2 * jnp.where(batch["bad"][0] == self.member, jnp.nan, 1.0)
        return fg.Output(loss)


def make_bad_batches(members):
    """Return batches in which the loss of one member is NaN; -1 for none."""
    return [{"bad": np.full(2, member, np.int32)} for member in members]


class Net(fg.Module):
    """A small network with dropout."""

    net: eqx.nn.MLP
    scale: jax.Array

    def __init__(self, *, key):
        self.net = eqx.nn.MLP(4, 2, 8, 1, key=key)
        self.scale = jnp.ones((), jnp.int32)

    def training_step(self, batch, ctx):
        keep = jax.random.bernoulli(ctx.key(), 0.8, batch["x"].shape)
        preds = jax.vmap(self.net)(batch["x"] * keep * self.scale)
        accuracy = fg.metrics.Mean.from_values(preds.argmax(-1) == batch["y"].argmax(-1))
        return fg.Output(jnp.mean((preds - batch["y"]) ** 2), metrics={"accuracy": accuracy})

    def configure_optimizers(self):
        return optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)


def make_batches(count=10):
    random = np.random.default_rng(0)
    return [
        {
            "x": random.normal(size=(8, 4)).astype(np.float32),
            "y": random.normal(size=(8, 2)).astype(np.float32),
        }
        for _ in range(count)
    ]


def fit(model, data, steps, *plugins, **options):
    population = next(plugin for plugin in plugins if isinstance(plugin, Population))
    engine = fg.Engine(steps=steps, plugins=list(plugins), autoload=False, **options)
    return engine.fit(population.stack(model), data)


def list_leaves(tree):
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


def assert_same_bits(tree, other):
    leaves = zip(list_leaves(tree), list_leaves(other), strict=True)
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in leaves)
