"""Several optimizers in one step, bit for bit against one function written by hand."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite._src.rng import fold_name
from fulgurite_optimizers import MultiOptimizer, Phase
from fulgurite_testing import assert_same_bits
from games import Pair, bce_loss, engine, fooled, points

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
gan: Any = import_module("gan")

Optimizers = dict[str, tuple[optax.GradientTransformation, int]]


def by_hand(
    loss: Callable[[str, Any, Any, Any], Any],
    optimizers: Optimizers,
    *,
    simultaneous: bool,
) -> Callable[..., Any]:
    """One step of phases on a dict of parameters, as one would write it."""

    def step(
        params: dict[str, Any], states: dict[str, Any], number: Any, batch: Any, keys: Any
    ) -> Any:
        old = params
        for name, (optimizer, every) in optimizers.items():

            def update(
                params: Any, state: Any, name: str = name, optimizer: Any = optimizer
            ) -> Any:
                at = old if simultaneous else params
                grads = jax.grad(
                    lambda player_params: loss(name, {**at, name: player_params}, batch, keys[name])
                )(at[name])
                updates, state = optimizer.update(grads, state, at[name])
                return {**params, name: eqx.apply_updates(params[name], updates)}, state

            if every == 1:
                params, state = update(params, states[name])
            else:
                operands = params, states[name]
                params, state = jax.lax.cond(
                    (number + 1) % every == 0, update, lambda *operands: operands, *operands
                )
            states = {**states, name: state}
        return params, states

    # As the engine compiles a step with a small state; the default schedule rounds some last bits
    # otherwise.
    return jax.jit(
        step, compiler_options={"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    )


def by_two_calls(
    loss: Callable[[str, Any, Any, Any], Any], optimizers: Optimizers
) -> Callable[..., Any]:
    """The same alternating step as people write it: a jitted call for each phase."""

    def update(name: str) -> Callable[..., Any]:
        def update_player(params: Any, state: Any, batch: Any, key: Any) -> Any:
            grads = jax.grad(
                lambda player_params: loss(name, {**params, name: player_params}, batch, key)
            )(params[name])
            updates, state = optimizers[name][0].update(grads, state, params[name])
            return {**params, name: eqx.apply_updates(params[name], updates)}, state

        return jax.jit(update_player)

    calls = {name: update(name) for name in optimizers}

    def step(params: Any, states: Any, number: int, batch: Any, keys: Any) -> Any:
        for name, (_, every) in optimizers.items():
            if (number + 1) % every == 0:
                params, states[name] = calls[name](params, states[name], batch, keys[name])
        return params, states

    return step


@pytest.mark.parametrize("order", ["alternating", "simultaneous"])
@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(8, marks=pytest.mark.full)])
def test_quadratic_games_equal_a_handwritten_step(order: Any, steps_per_execution: int) -> None:
    """100 steps in float64, bit for bit, with Adam and momentum; `max` with every third update."""

    class Quadratic(fg.Module):
        x: jax.Array
        y: jax.Array

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            params = {"min": self.x, "max": self.y}
            return fg.Output(losses={name: loss(name, params, batch, None) for name in params})

    def loss(name: str, params: Any, batch: Any, key: Any) -> Any:
        x, y = params["min"], params["max"]
        value = (
            jnp.sum((x - batch) ** 2) / 2 + x @ y if name == "min" else jnp.sum(y**2) / 2 - x @ y
        )
        return value

    with jax.enable_x64(True):
        optimizers: Optimizers = {
            "min": (optax.adam(0.05), 1),
            "max": (optax.sgd(0.02, momentum=0.9), 3),
        }
        rng = np.random.default_rng(3)
        batches = [rng.normal(size=5) for _ in range(7)]
        params = {"min": jnp.asarray(rng.normal(size=5)), "max": jnp.asarray(rng.normal(size=5))}
        phases: dict[str, Any] = {
            name: Phase(optimizer, {"min": "x", "max": "y"}[name], every=every)
            for name, (optimizer, every) in optimizers.items()
        }
        start = Quadratic(params["min"], params["max"])
        result = engine(
            MultiOptimizer(order=order, **phases),
            steps=100,
            steps_per_execution=steps_per_execution,
        ).fit(start, batches * 15)
        steps = [by_hand(loss, optimizers, simultaneous=order == "simultaneous")]
        steps += [by_two_calls(loss, optimizers)] if order == "alternating" else []
        for step in steps:
            now = params
            states = {
                name: optimizer.init(params[name]) for name, (optimizer, _) in optimizers.items()
            }
            for number in range(100):
                now, states = step(now, states, number, batches[number % 7], dict.fromkeys(params))
            assert result.module.x.dtype == jnp.float64
            assert_same_bits((result.module.x, result.module.y), (now["min"], now["max"]))
            for name, state in states.items():
                opt_state = result.state.opt_state[name].optimizer
                assert_same_bits(jax.tree.leaves(opt_state), jax.tree.leaves(state))


@pytest.mark.parametrize(
    "order",
    [
        pytest.param("alternating", marks=pytest.mark.slow),
        pytest.param("simultaneous", marks=pytest.mark.full),
    ],
)
def test_small_gan_equals_a_handwritten_step(order: Any) -> None:
    """100 steps; losses from one forward pass share its key where they are simultaneous."""
    model = Pair(key=jax.random.key(1))

    def loss(name: str, params: Any, batch: Any, key: Any) -> Any:
        fake = jax.vmap(eqx.combine(params["generator"], model.generator))(
            jax.random.normal(key, (len(batch), 4))
        )
        judge = jax.vmap(eqx.combine(params["discriminator"], model.discriminator))
        return fooled(judge(fake)) if name == "generator" else bce_loss(judge(batch), judge(fake))

    optimizers: Optimizers = {
        "discriminator": (optax.adam(1e-3), 1),
        "generator": (optax.adam(1e-3), 2),
    }
    check_gan(model, points(), loss, optimizers, order, one_key=order == "simultaneous")


@pytest.mark.full
@pytest.mark.parametrize(
    "order",
    [
        "alternating",
        *(
            pytest.param(
                order, marks=[pytest.mark.optimized, pytest.mark.slow], id=f"{order}-optimized"
            )
            for order in ("alternating", "simultaneous")
        ),
    ],
)
def test_gan_of_digits_equals_a_handwritten_step(order: Any) -> None:
    """100 steps of the convolutional GAN of examples/gan.py on the real digits, with its penalty
    and its optimizer."""
    model = gan.GAN(4, 1.0, key=jax.random.key(1))

    def loss(name: str, params: Any, batch: Any, key: Any) -> Any:
        generator = eqx.combine(params["generator"], model.generator)
        judge = eqx.combine(params["discriminator"], model.discriminator)
        fake = jax.vmap(generator)(jax.random.normal(key, (len(batch), gan.LATENT)))
        if name == "generator":
            return jax.nn.softplus(-jax.vmap(judge)(fake)).mean()
        on_real, slopes = jax.vmap(jax.value_and_grad(judge))(batch)
        bce = jax.nn.softplus(-on_real).mean() + jax.nn.softplus(jax.vmap(judge)(fake)).mean()
        return bce + 1.0 / 2 * (slopes**2).sum(axis=(1, 2, 3)).mean()

    adam = optax.adam(1e-3, b1=0.0, b2=0.99)
    data = fg.ArrayData(gan.load_images()[0], 8, shuffle=True, remainder="drop")
    check_gan(
        model,
        data,
        loss,
        {"discriminator": (adam, 1), "generator": (adam, 1)},
        order,
        one_key=False,
    )


def check_gan(
    model: Any, data: Any, loss: Any, optimizers: Optimizers, order: Any, *, one_key: bool
) -> None:
    """Trains for 100 steps and compares bit for bit with one function, and for 5 steps with two
    calls to 1e-5; with the keys that each phase has for itself, unless they share `one_key`.

    Without health: what it adds to a program makes XLA steps_per_execution the rest otherwise, which rounds the
        last bit otherwise.
    """
    phases: dict[str, Any] = {
        name: Phase(optimizer, name, every=every) for name, (optimizer, every) in optimizers.items()
    }
    trainer, streams = (
        engine(MultiOptimizer(order=order, **phases), seed=4, on_nonfinite="ignore"),
        fg.RngStreams(jax.random.key(4)),
    )

    def trained(steps: int) -> dict[str, Any]:
        module = trainer.fit(model, data, steps=steps).module
        return {name: eqx.filter(getattr(module, name), eqx.is_array) for name in phases}

    def after(step: Callable[..., Any], steps: int) -> Any:
        params = {name: eqx.filter(getattr(model, name), eqx.is_array) for name in phases}
        states = {name: optimizer.init(params[name]) for name, (optimizer, _) in optimizers.items()}
        for number, batch in enumerate(trainer.iter_batches(data, steps=steps)):
            key = streams.key("default", "train", number)
            keys = {name: key if one_key else fold_name(key, name) for name in phases}
            params, states = step(params, states, number, batch, keys)
        return params

    assert_same_bits(
        trained(100), after(by_hand(loss, optimizers, simultaneous=order == "simultaneous"), 100)
    )
    if order == "alternating":
        pairs = zip(
            *map(jax.tree.leaves, (trained(5), after(by_two_calls(loss, optimizers), 5))),
            strict=True,
        )
        for ours, theirs in pairs:
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
