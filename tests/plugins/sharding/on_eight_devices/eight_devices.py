"""Models, data and engines of the tests on eight devices."""

from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_sharding import (
    Sharding,
)
from jax.sharding import AxisType, Mesh, PartitionSpec as P


@dataclass(frozen=True, eq=False)
class Compilations:
    """Keeps what was compiled."""

    compilations: list[Any] = field(default_factory=list)

    @fg.hookimpl
    def on_compile(self, compiled: Any) -> None:
        self.compilations.append(compiled)


class Net(fg.Module):
    """Two layers with dropout, and the batch norm between them; regression on `x` (batch, 16)."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    second: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        keys = jax.random.split(key)
        self.first, self.second = (
            eqx.nn.Linear(16, 64, key=keys[0]),
            eqx.nn.Linear(64, 8, key=keys[1]),
        )
        self.norm = eqx.nn.BatchNorm(64, axis_name="batch", mode="batch")
        self.drop = eqx.nn.Dropout(0.5)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        def apply(x: Any, key: Any, state: Any) -> Any:
            hidden, state = self.norm(self.first(x), state)
            return self.second(self.drop(jax.nn.relu(hidden), key=key)), state

        keys = ctx.keys("default", len(batch["x"]))
        axes = {"in_axes": (0, 0, None), "out_axes": (0, None), "axis_name": "batch"}
        preds, state = jax.vmap(apply, **axes)(batch["x"], keys, ctx.model_state)
        drawn = jax.vmap(lambda key: jax.random.bits(key, (64,)))(keys)
        # Sums modulo 2^32 that tell every example's place: the same bits only for the same draws in
        # the same order.
        places = jnp.arange(1, drawn.size + 1, dtype=jnp.uint32).reshape(drawn.shape)
        metrics = {
            "draws": fg.metrics.LastValue.from_values(jnp.sum(drawn * places) % 65521),
            "order": fg.metrics.LastValue.from_values(
                jnp.sum(batch["index"].astype(jnp.uint32) * places[:, 0]) % 65521
            ),
        }
        loss = jnp.mean((preds.sum(1) - batch["y"]) ** 2, where=ctx.mask)
        return fg.Output(loss, metrics=metrics, preds=preds, model_state=state)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


def regression(examples: int = 96, batch_size: int = 32, **options: Any) -> fg.ArrayData:
    x = np.random.default_rng(0).normal(size=(examples, 16)).astype(np.float32)
    y = np.tanh(x).sum(1).astype(np.float32)
    arrays = {"x": x, "y": y, "index": np.arange(examples, dtype=np.int32)}
    return fg.ArrayData(arrays, batch_size, **options)


def engine(*plugins: Any, **settings: Any) -> fg.Engine:
    return fg.Engine(plugins=plugins, autoload=False, **{"steps": 1, **settings})


def some(count: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:count]), ("data",), axis_types=(AxisType.Auto,))


def whole() -> Sharding:
    return Sharding(batch=())


class Line(fg.Module):
    weight: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.weight = jax.random.normal(key, (16,))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean((batch["x"] @ self.weight - batch["y"]) ** 2))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e-2, momentum=0.9)


class Wide(fg.Module):
    """A matrix (16, 24), a vector (24,), and a step that constrains what it computes by the axes'
    names."""

    matrix: jax.Array
    vector: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.matrix, self.vector = jax.random.normal(key, (16, 24)), jnp.zeros(24)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        hidden = jax.lax.with_sharding_constraint(batch["x"] @ self.matrix, P("data", None))
        preds = hidden + self.vector
        return fg.Output(jnp.mean((preds.sum(1) - batch["y"]) ** 2), preds={"hidden": preds})

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.scale_by_factored_rms(min_dim_size_to_factor=8),
            optax.trace(0.9),
            optax.scale(-1e-3),
        )


def placed(sharding: Sharding, *plugins: Any) -> fg.TrainState:
    return engine(sharding, *plugins).init_state(Wide, regression())


class Noisy(fg.Module):
    weight: jax.Array

    def __init__(self) -> None:
        self.weight = jnp.ones(3)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        inputs = batch["x"]
        if "key" in batch:
            inputs = inputs + jax.vmap(lambda key: jax.random.normal(key, (3,)))(batch["key"])
        return fg.Output(jnp.mean((inputs @ self.weight - 1) ** 2))

    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        return jax.vmap(lambda key: jax.random.normal(key, (3,)))(batch["key"])

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)
