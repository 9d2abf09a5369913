"""What JAX, Equinox and optax used to answer with errors of their own: it works, or one sentence says
what is wrong."""

from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, DataError, ModelError

KEY = jax.random.key(0)
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
BATCH = {"x": X}


class Line(fg.Module):
    weight: jax.Array
    optimizer: Any = eqx.field(static=True)

    def __init__(self, optimizer: Any = None) -> None:
        self.weight = jnp.ones(3)
        self.optimizer = optimizer or optax.sgd(0.1)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean((batch["x"] @ self.weight - 1) ** 2))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return self.optimizer


class Quantized(Line):
    """A matrix of less than a byte for each number, scaled by a trained vector."""

    codes: jax.Array
    code: jax.Array

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.codes = jnp.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
        self.code = jnp.ones((), dtype)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        matrix = jax.lax.stop_gradient(self.codes.astype(jnp.float32)) * self.weight
        outputs = batch["x"] @ matrix.T
        return fg.Output(jnp.mean((outputs - self.code.astype(jnp.float32)) ** 2))


def descend_by_hand(codes: np.ndarray, steps: int) -> np.ndarray:
    weight = np.ones(3)
    for _ in range(steps):
        residual = X @ (codes * weight).T - 1
        weight = weight - 0.1 * 2 * ((residual.T @ X) * codes).sum(0) / residual.size
    return weight


@pytest.mark.variants("full")
@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4, jnp.int2])
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_numbers_of_less_than_a_byte_stay_beside_trained_ones(
    dtype: Any, steps_per_execution: int
) -> None:
    engine = fg.Engine(steps=3, steps_per_execution=steps_per_execution, autoload=False)
    result = engine.fit(Quantized(dtype), [BATCH] * 3)
    codes = np.array([[0, 1, 1], [1, 0, 1]])
    np.testing.assert_allclose(result.module.weight, descend_by_hand(codes, 3), rtol=1e-5)
    assert result.module.codes.dtype == result.module.code.dtype == dtype
    np.testing.assert_array_equal(result.module.codes.astype(int), codes)
    state = engine.init_state(Quantized(dtype), [BATCH])
    state, _ = engine.step(state, BATCH)
    np.testing.assert_allclose(state.module.weight, descend_by_hand(codes, 1), rtol=1e-5)
    assert state.module.codes.dtype == dtype
    assert engine.evaluate(state, [BATCH])["loss"] > 0


@pytest.mark.full
def test_extreme_numbers_of_four_bits_survive_a_fit() -> None:
    class Extreme(Line):
        signed: jax.Array
        unsigned: jax.Array

        def __init__(self) -> None:
            super().__init__()
            self.signed = jnp.array([-8, 7, -1]).astype(jnp.int4)
            self.unsigned = jnp.array([0, 15, 8]).astype(jnp.uint4)

    module = fg.Engine(steps=2, autoload=False).fit(Extreme(), [BATCH] * 2).module
    assert module.signed.astype(int).tolist() == [-8, 7, -1]
    assert module.unsigned.astype(int).tolist() == [0, 15, 8]


class Static(Line):
    table: Any = eqx.field(static=True)

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table


class Outer(Line):
    inner: list[Static]

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.inner = [Static(table)]


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize("table", [np.ones(2), {"a": (np.zeros(()),)}, jnp.ones(2)])
def test_array_in_a_static_field_is_an_error_that_names_the_field(table: Any) -> None:
    engine = fg.Engine(steps=1, autoload=False)
    with pytest.raises(
        ModelError, match=r"^inner\[0\].table is a static field of Static and holds"
    ):
        engine.fit(Outer(table), [BATCH])
    with pytest.raises(ModelError, match=r"^table is a static field of Static and holds an array"):
        engine.init_state(lambda key: Static(table), [BATCH])
    assert engine.fit(Outer((1.0, 2.0)), [BATCH]).state.step == 1


def test_disabled_jit_is_an_error_of_a_step_too() -> None:
    engine = fg.Engine(steps=1, autoload=False)
    state = engine.init_state(Line(), [BATCH])
    state, _ = engine.step(state, BATCH)
    with jax.disable_jit():
        with pytest.raises(ConfigurationError, match="jax_disable_jit is set, but training"):
            engine.step(state, BATCH)
    assert engine.step(state, BATCH)[0].step == 2  # nothing was consumed


class Counter(eqx.Module):
    count: eqx.nn.StateIndex

    def __init__(self) -> None:
        self.count = eqx.nn.StateIndex(jnp.zeros(()))

    def __call__(self, state: eqx.nn.State) -> eqx.nn.State:
        return state.set(self.count, state.get(self.count) + 1)


class Counting(Line):
    counters: list[Counter]

    def __init__(self) -> None:
        super().__init__()
        self.counters = [Counter(), Counter()]

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        assert ctx.model_state is not None
        self.counters[0](ctx.model_state)
        state = self.counters[1](ctx.model_state)
        return super().training_step(batch, ctx).replace(model_state=state)

    validation_step = training_step


@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_state_that_was_used_up_is_an_error_that_names_the_layer(call: str) -> None:
    model = eqx.nn.make_with_state(Counting)()
    with pytest.raises(ModelError, match=r"^counters\[1\] \(Counter\) was called with a state"):
        getattr(fg.Engine(steps=1, autoload=False), call)(model, [BATCH])


@pytest.mark.variants("full")
@pytest.mark.parametrize("make", [optax.lbfgs, lambda: optax.contrib.sophia(0.1), optax.polyak_sgd])
def test_optimizer_that_computes_the_loss_again_trains_as_by_hand(make: Any) -> None:
    def compute_loss(weight: jax.Array) -> jax.Array:
        return jnp.mean((X @ weight - 1) ** 2)

    optimizer = make()
    weight = jnp.ones(3)
    state = optimizer.init(weight)
    for _ in range(3):
        value, grads = jax.value_and_grad(compute_loss)(weight)
        extra = {"obj_fn": compute_loss} if make not in (optax.lbfgs, optax.polyak_sgd) else {}
        updates, state = optimizer.update(
            grads, state, weight, value=value, grad=grads, value_fn=compute_loss, **extra
        )
        weight = weight + updates
    result = fg.Engine(steps=3, autoload=False).fit(Line(make()), [BATCH] * 3)
    np.testing.assert_allclose(result.module.weight, weight, rtol=1e-4)


def test_typed_keys_in_stored_arrays_are_an_error_that_says_what_to_store() -> None:
    keys = jax.random.split(KEY, 4)
    with pytest.raises(DataError, match=r"^data\['keys'\] holds typed random keys.*key_data"):
        fg.ArrayData({"x": X, "keys": keys}, batch_size=2)


@pytest.mark.full
def test_evaluation_of_batches_with_typed_keys_tries_its_loss_without_a_warning() -> None:
    class Noisy(Line):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(batch["keys"])
            return fg.Output(jnp.mean(((batch["x"] + noise) @ self.weight - 1) ** 2))

    make: Any = Noisy
    keys = jax.random.split(KEY, 8)
    batches = [{"x": X, "keys": keys[:4]}, {"x": X, "keys": keys[4:]}]
    noise = np.stack([jax.random.normal(key, (3,)) for key in keys])
    expected = np.mean(((np.concatenate([X, X]) + noise).sum(1) - 1) ** 2)
    loss = fg.Engine(steps=1, autoload=False).evaluate(make(), batches)["loss"]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
