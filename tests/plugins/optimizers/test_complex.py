"""Complex parameters under each plugin, against a loop over their real and imaginary parts."""

from collections.abc import Callable
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_optimizers import (
    Freeze,
    GradientAccumulation,
    GradientClip,
    MultiOptimizer,
    NonNegative,
    Phase,
    UnitNorm,
    WeightClip,
)

RATE = 0.02
STEPS = 4
NO_CHANGE = optax.identity()
RNG = np.random.default_rng(0)
X = (RNG.normal(size=(32, 3)) + 1j * RNG.normal(size=(32, 3))).astype(np.complex64)
Y = (X @ np.array([1 - 2j, 0.5j, -1])).astype(np.complex64)
Parts = dict[str, jax.Array]


class Model(fg.Module):
    a: jax.Array
    b: jax.Array
    games: bool = False

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        x, y = batch
        loss = jnp.mean(jnp.abs(x @ self.a * self.b - y) ** 2)
        if not self.games:
            return fg.Output(loss)
        return fg.Output(losses={"a": loss, "b": 2 * loss + jnp.abs(self.b - 1j) ** 2})

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(RATE)


def start() -> dict[str, Any]:
    return {"a": np.array([1, 1j, -1 + 1j], np.complex64), "b": np.complex64(1 - 0.5j)}


def fit(*plugins: Any, games: bool = False) -> fg.FitResult:
    model = Model(**jax.tree.map(jnp.asarray, start()), games=games)
    engine = fg.Engine(steps=STEPS, log_every=1, plugins=plugins)
    return engine.fit(model, fg.ArrayData((X, Y), 8))


def split(number: Any) -> jax.Array:
    return jnp.stack([number.real, number.imag], axis=-1)


def join(parts: Any) -> Any:
    return jax.lax.complex(parts[..., 0], parts[..., 1])


def compute_loss(parts: Parts, step: int, name: str = "a") -> jax.Array:
    x, y = X[8 * step : 8 * step + 8], Y[8 * step : 8 * step + 8]
    loss = jnp.mean(jnp.abs(x @ join(parts["a"]) * join(parts["b"]) - y) ** 2)
    return loss if name == "a" else 2 * loss + jnp.sum((parts["b"] - jnp.array([0.0, 1.0])) ** 2)


def move(parts: Parts, grads: Parts, names: str = "ab", optimizer: Any = NO_CHANGE) -> Parts:
    updates, _ = optimizer.update(grads, optimizer.init(parts))
    return {
        name: value - RATE * updates[name] if name in names else value
        for name, value in parts.items()
    }


def by_gradient(transform: Any = NO_CHANGE, names: str = "ab") -> Callable[[Parts, int], Parts]:
    return lambda parts, step: move(parts, jax.grad(compute_loss)(parts, step), names, transform)


def every_second(parts: Parts, step: int) -> Parts:
    if step % 2 == 0:
        return parts
    grads = [jax.grad(compute_loss)(parts, number) for number in (step - 1, step)]
    return move(parts, jax.tree.map(lambda first, second: (first + second) / 2, *grads))


def one_after_the_other(parts: Parts, step: int) -> Parts:
    for name in "ab":
        parts = move(parts, jax.grad(compute_loss)(parts, step, name), name)
    return parts


def at_once(parts: Parts, step: int) -> Parts:
    moved = {name: move(parts, jax.grad(compute_loss)(parts, step, name)) for name in "ab"}
    return {name: moved[name][name] for name in "ab"}


def on_the_sphere(parts: Parts, step: int) -> Parts:
    parts = by_gradient()(parts, step)
    return {**parts, "a": parts["a"] / jnp.linalg.norm(parts["a"])}


PHASES: dict[str, Any] = {"a": Phase(optax.sgd(RATE), "a"), "b": Phase(optax.sgd(RATE), "b")}


@pytest.mark.variants("full")
@pytest.mark.parametrize(
    ("plugin", "update"),
    [
        (GradientAccumulation(4), by_gradient()),
        (GradientAccumulation(2, "steps"), every_second),
        (GradientClip(max_norm=0.1), by_gradient(optax.clip_by_global_norm(0.1))),
        (Freeze("b"), by_gradient(names="a")),
        (MultiOptimizer(**PHASES), one_after_the_other),
        (MultiOptimizer(**PHASES, order="simultaneous"), at_once),
        (UnitNorm("a", axis=0), on_the_sphere),
    ],
    ids=["microbatches", "steps", "clipped", "frozen", "alternating", "simultaneous", "sphere"],
)
def test_complex_parameters_train_as_their_real_and_imaginary_parts(
    plugin: Any, update: Callable[[Parts, int], Parts]
) -> None:
    result = fit(plugin, games=isinstance(plugin, MultiOptimizer))
    before = parts = jax.tree.map(split, start())
    for step in range(STEPS):
        before = parts
        parts = update(parts, step)
    np.testing.assert_allclose(result.module.a, join(parts["a"]), rtol=2e-5)
    np.testing.assert_allclose(result.module.b, join(parts["b"]), rtol=2e-5)
    norm = result.metrics["train"].get("default/gradient_norm")
    if norm is not None:
        grads = jax.grad(compute_loss)(before, STEPS - 1)
        np.testing.assert_allclose(norm, optax.tree.norm(grads), rtol=1e-4)


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (GradientClip(max_value=0.1), "GradientClip: the gradient of a is complex64.*max_norm"),
        (NonNegative("a"), r"NonNegative: an array \[3\] is complex64.*select other"),
        (WeightClip("b", 0.1), r"WeightClip: an array \[\] is complex64.*select other"),
    ],
)
def test_what_needs_an_order_is_an_error_for_complex_parameters(plugin: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(plugin)
