"""Small models with several losses, and what compares their results."""

from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_logging import media

ONE = [np.zeros(1, np.float32)]


class Game(fg.Module):
    """Two numbers: `x` is to make x²/2 + xy small, `y` y²/2 - xy. Their gradients are x + y and y -
    x."""

    x: jax.Array
    y: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        x, y = self.x, self.y
        losses = {"min": x * x / 2 + x * y, "max": y * y / 2 - x * y}
        return fg.Output(
            losses=losses, metrics={"product": fg.metrics.LastValue.from_values(x * y)}, preds=x
        )


class Apart(fg.Module):
    """The same game with its losses as functions."""

    x: jax.Array
    y: jax.Array

    def losses(self, batch: Any, ctx: fg.Context) -> dict[str, Any]:
        x, y = self.x, self.y
        return {
            "min": lambda: x * x / 2 + x * y,
            "max": lambda: fg.Output(y * y / 2 - x * y, metrics={"product": x * y}),
        }


class Pair(fg.Module):
    """Generator and discriminator, perceptrons that share the data's space; `form` is how they give
    their losses."""

    generator: eqx.nn.MLP
    discriminator: eqx.nn.MLP

    def __init__(self, width: int = 16, *, key: Any) -> None:
        first, second = jax.random.split(key)
        self.generator = eqx.nn.MLP(4, 8, width, 2, key=first)
        self.discriminator = eqx.nn.MLP(8, "scalar", width, 2, key=second)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        fake = jax.vmap(self.generator)(jax.random.normal(ctx.key(), (len(batch), 4)))
        on_fake, on_real = jax.vmap(self.discriminator)(fake), jax.vmap(self.discriminator)(batch)
        return fg.Output(
            losses={"generator": fooled(on_fake), "discriminator": bce_loss(on_real, on_fake)}
        )


class PairApart(Pair):
    """The same with functions."""

    def losses(self, batch: Any, ctx: fg.Context) -> dict[str, Any]:
        output = self.training_step(batch, ctx)
        return {name: lambda loss=loss: loss for name, loss in output.losses.items()}


class Heads(fg.Module):
    """A trunk with two heads, each with a loss of its own."""

    trunk: eqx.nn.MLP
    a: eqx.nn.Linear
    b: eqx.nn.Linear

    def __init__(self, width: int = 16, *, key: Any) -> None:
        keys = jax.random.split(key, 3)
        self.trunk = eqx.nn.MLP(8, width, width, 3, key=keys[0])
        self.a, self.b = (eqx.nn.Linear(width, 1, key=key) for key in keys[1:])

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        x = jax.vmap(self.trunk)(batch + 0.1 * jax.random.normal(ctx.key(), batch.shape))
        return fg.Output(
            losses={
                "a": (jax.vmap(self.a)(x) ** 2).mean(),
                "b": (jax.vmap(self.b)(x) - 1).mean() ** 2,
            }
        )


class HeadsApart(Heads):
    """The same with functions."""

    def losses(self, batch: Any, ctx: fg.Context) -> dict[str, Any]:
        output = self.training_step(batch, ctx)
        return {name: lambda loss=loss: loss for name, loss in output.losses.items()}


def fooled(on_fake: jax.Array) -> jax.Array:
    """The non-saturating loss of a generator."""
    return jax.nn.softplus(-on_fake).mean()


def bce_loss(on_real: jax.Array, on_fake: jax.Array) -> jax.Array:
    """The loss of a discriminator."""
    return jax.nn.softplus(-on_real).mean() + jax.nn.softplus(on_fake).mean()


def points(examples: int = 64, batch_size: int = 16) -> fg.ArrayData:
    """Batches (batch_size, 8) float32."""
    x = np.random.default_rng(0).normal(size=(examples, 8)).astype(np.float32)
    return fg.ArrayData(x, batch_size, shuffle=True)


@dataclass(frozen=True, eq=False)
class Compiled:
    """Keeps what was compiled."""

    executables: list[Any] = field(default_factory=list)

    @fg.hookimpl
    def on_compile(self, name: str, compiled: Any) -> None:
        self.executables.append(compiled)

    @property
    def flops(self) -> float:
        return self.executables[-1].cost_analysis()["flops"]


@dataclass(frozen=True, eq=False)
class Show:
    """Shows media at every step and keeps them; called `media`."""

    shown: list[dict[str, Any]] = field(default_factory=list)
    plugin_name = "media"

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("show", 1, fg.Run.emit_media)]

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind != "media":
            return
        self.shown.append(record.values)

    def numbers(self, name: str) -> list[float]:
        """What the figure `name` was given at each step."""
        assert all(list(values) == [name] for values in self.shown)
        return [float(values[name].draw(values[name].values)) for values in self.shown]


def picture(value: Any) -> Any:
    """A figure that is made where it is shown, `draw` and all."""

    def make() -> media.Figure:
        def draw(values: Any) -> Any:
            return values

        return media.Figure(draw, value)

    return make


def engine(*plugins: Any, **settings: Any) -> fg.Engine:
    return fg.Engine(plugins=plugins, autoload=False, **settings)


def game(x: float = 1.0, y: float = 2.0, kind: Any = Game) -> Any:
    return kind(jnp.float32(x), jnp.float32(y))


def played(result: fg.FitResult) -> tuple[float, float]:
    return float(result.module.x), float(result.module.y)


def sgd(x: float, y: float, **more: Any) -> dict[str, Any]:
    """Phases for the game, by plain gradient descent."""
    from fulgurite_optimizers import Phase

    return {"min": Phase(optax.sgd(x), "x"), "max": Phase(optax.sgd(y), "y", **more)}
