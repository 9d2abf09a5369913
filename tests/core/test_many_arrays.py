"""States of many small arrays, of several dtypes."""

from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import StateError
from models import assert_close, assert_same_bits

pytestmark = pytest.mark.full

BATCH, STEPS = 16, 12


class Deep(fg.Module):
    """Twenty small layers, one of half precision, and an array that is not small."""

    layers: list[eqx.nn.Linear]
    half: jax.Array
    wide: eqx.nn.Linear
    counted: jax.Array

    def __init__(self, *, key: Any) -> None:
        first, *keys = jax.random.split(key, 21)
        self.layers = [eqx.nn.Linear(4, 4, key=key) for key in keys]
        self.half = jnp.ones(4, jnp.bfloat16)
        self.wide = eqx.nn.Linear(4, 2000, key=first)
        self.counted = jnp.arange(3)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(compute_loss(self, batch))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


def compute_loss(model: Deep, batch: Any) -> jax.Array:
    def example_loss(x: jax.Array) -> jax.Array:
        for layer in model.layers:
            x = x + jnp.tanh(layer(x)) / 8
        return model.wide(x * model.half).mean()

    return ((jax.vmap(example_loss)(batch["x"]) - batch["y"]) ** 2).mean()


def data() -> fg.ArrayData:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * 4, 4)).astype(np.float32)
    return fg.ArrayData({"x": x, "y": x.sum(1)}, BATCH, shuffle=False)


def by_hand(model: Deep) -> Deep:
    optimizer = optax.adam(1e-3)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda params: compute_loss(eqx.combine(params, static), batch))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for batch in [*data()] * (STEPS // 4):
        params, state = step(params, state, batch)
    return eqx.combine(params, static)


@pytest.fixture(scope="module")
def trained() -> fg.FitResult:
    return fg.Engine(steps=STEPS).fit(Deep(key=jax.random.key(0)), data())


@pytest.mark.full
def test_the_result_is_that_of_a_loop_by_hand(trained: fg.FitResult) -> None:
    assert_close(trained.module, by_hand(Deep(key=jax.random.key(0))), 1e-4)


def test_single_steps_give_the_same_bits(trained: fg.FitResult) -> None:
    engine = fg.Engine(steps=STEPS)
    state = engine.init_state(Deep(key=jax.random.key(0)), data())
    for batch in engine.iter_batches(data()):
        state, _ = engine.step(state, batch)
    assert_same_bits(state.module, trained.module)
    assert_same_bits(state.opt_state, trained.state.opt_state)


@pytest.mark.full
def test_steps_fused_into_one_dispatch_give_the_same_numbers(trained: fg.FitResult) -> None:
    fused = fg.Engine(steps=STEPS, steps_per_execution=4, log_every=3).fit(
        Deep(key=jax.random.key(0)), data()
    )
    assert_close(fused.module, trained.module, 1e-4)


def test_state_passed_to_fit_is_consumed() -> None:
    engine = fg.Engine(steps=2)
    state = engine.init_state(Deep(key=jax.random.key(0)), data())
    engine.fit(data=data(), state=state)
    assert all(layer.weight.is_deleted() for layer in state.module.layers)
    with pytest.raises(StateError, match="consumed"):
        engine.fit(data=data(), state=state)


def test_state_held_by_a_plugin_is_consumed_by_the_next_step() -> None:
    states: list[fg.TrainState] = []

    class Keeping:
        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("keep", fg.Every(1), lambda run: states.append(run.state))]

    engine = fg.Engine(steps=3, plugins=[Keeping()])
    engine.fit(Deep(key=jax.random.key(0)), data())
    assert all(layer.weight.is_deleted() for layer in states[0].module.layers)
    with pytest.raises(StateError, match="consumed"):
        engine.fit(data=data(), state=states[0])


def test_numbers_of_every_kind_keep_their_bits() -> None:
    numbers = [
        np.float32("nan"),
        np.float32(-0.0),
        np.float32(1e-40),
        np.float32("-inf"),
        jnp.bfloat16(3.14),
    ]
    numbers += [
        np.float16(0.1),
        np.complex64(1 - 2j),
        np.int32(-7),
        np.uint32(2**32 - 1),
        np.bool_(True),
    ]
    numbers += [np.int8(-3), np.uint8(200), np.int16(-300), np.uint16(60_000)]

    class Mixed(Deep):
        leaves: list[jax.Array]

        def __init__(self, *, key: Any) -> None:
            super().__init__(key=key)
            self.leaves = [jnp.asarray(number) for number in numbers]

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.masked(optax.sgd(0.1), jax.tree.map(lambda leaf: leaf.ndim > 0, self))

    leaves = (
        fg.Engine(steps=2, on_nonfinite="ignore")
        .fit(Mixed(key=jax.random.key(0)), data())
        .module.leaves
    )
    assert_same_bits(leaves, [jnp.asarray(number) for number in numbers])
