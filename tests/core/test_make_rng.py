"""Random keys without plumbing (K29), and modes of functions that are not ours (K31)."""

import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite._src.rng import fold_name
from fulgurite.errors import ModelError

BATCH = np.arange(12, dtype=np.float32).reshape(4, 3)


class Drawing(fg.Module):
    """Returns what its function draws."""

    weight: jax.Array
    draw: Callable[[Any], Any] = eqx.field(static=True)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        drawn = self.draw(batch)
        return fg.Output(jnp.sum(self.weight**2), aux=drawn)

    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        return jnp.broadcast_to(self.draw(batch), (len(batch),))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def draw_in_step(draw: Callable[[Any], Any], step: int = 0, **settings: Any) -> Any:
    """What a function draws in the given step of a training."""
    engine = fg.Engine(seed=5, plugins=[], autoload=False, **settings)
    state = engine.init_state(Drawing(jnp.ones(2), draw), [BATCH])
    out = None
    for _ in range(step + 1):
        state, out = engine.step(state, BATCH, returns=("aux",))
    assert out is not None
    return jax.device_get(out.aux)


def key_by_hand(step: int, index: int) -> Any:
    """Root, stream, step and phase, then the number of the call."""
    key = jax.random.fold_in(fold_name(jax.random.key(5), "default"), step)
    return fold_name(fold_name(key, "train"), "make_rng", index)


def normal(key: Any) -> Any:
    return jax.random.normal(key)


@pytest.mark.full
def test_each_call_draws_another_key_by_name_and_order_K29() -> None:
    def draw_twice(batch: Any) -> Any:
        return normal(fg.make_rng()), normal(fg.make_rng("default"))

    for step in (0, 2):
        drawn = draw_in_step(draw_twice, step)
        assert drawn == tuple(normal(key_by_hand(step, index)) for index in (0, 1))


@pytest.mark.full
def test_examples_under_vmap_share_a_key_unless_the_axis_has_a_name_K29() -> None:
    def draw_under_vmap(batch: Any) -> Any:
        shared = jax.vmap(lambda example: normal(fg.make_rng()) + 0 * example[0])(batch)
        by_example = jax.vmap(
            lambda example: normal(fg.make_rng(axis_name="batch")) + 0 * example[0],
            axis_name="batch",
        )(batch)
        return shared, by_example

    shared, by_example = draw_in_step(draw_under_vmap)
    assert shared.tolist() == [normal(key_by_hand(0, 0))] * 4
    folded = [normal(jax.random.fold_in(key_by_hand(0, 1), index)) for index in range(4)]
    assert by_example.tolist() == folded


def test_keys_are_the_same_in_gradients_of_ones_own_K29() -> None:
    def draw_in_gradient(batch: Any) -> Any:
        return jax.grad(lambda x: x * normal(fg.make_rng()))(1.0)

    assert draw_in_step(draw_in_gradient) == normal(key_by_hand(0, 0))


@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: lambda x: jax.lax.scan(lambda carry, y: (carry, f(y)), 0.0, x)[1],
        lambda f: lambda x: jax.lax.cond(x[0, 0] > 0, f, f, x),
        lambda f: jax.vmap(jax.jit(f)),
    ],
    ids=["jit", "checkpoint", "scan", "cond", "jit-in-vmap"],
)
def test_a_key_within_what_jax_traces_once_is_refused_K29(wrap: Any) -> None:
    def layer(x: Any) -> Any:
        return x + normal(fg.make_rng())

    with pytest.raises(ModelError, match="Draw the key outside and pass it in"):
        draw_in_step(lambda batch: wrap(layer)(batch))


def test_a_key_outside_of_a_step_is_refused_K29() -> None:
    with pytest.raises(ModelError, match="outside of a step"):
        fg.make_rng()


def test_predictions_have_keys_of_their_own_which_repeat_K29() -> None:
    module = Drawing(jnp.ones(2), lambda batch: normal(fg.make_rng()))
    engine = fg.Engine(seed=5, plugins=[], autoload=False)
    first, second = (engine.predict(module, [BATCH, BATCH]) for _ in range(2))
    assert np.array_equal(first, second)
    assert first[0] == first[3] != first[4]  # a batch has four examples
    assert first[0] != normal(key_by_hand(0, 0))


class Logging(Drawing):
    """Logs what it draws, as a running value."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.sum(self.weight**2), metrics={"drawn": self.draw(batch)})


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_each_step_of_a_dispatch_draws_its_own_K29(steps_per_execution: int) -> None:
    engine = fg.Engine(
        steps=4,
        seed=5,
        log_every=1,
        steps_per_execution=steps_per_execution,
        plugins=[],
        autoload=False,
    )
    module = Logging(jnp.ones(2), lambda batch: normal(fg.make_rng()))
    drawn = engine.fit(module, [BATCH] * 4).history["train/drawn"]
    assert drawn == pytest.approx(
        [float(normal(key_by_hand(step, 0))) for step in range(4)], rel=1e-6
    )


def test_keys_for_another_library_by_name_B25() -> None:
    class Named(Drawing):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            keys = ctx.keys_for(("default",))
            assert set(keys) == {"default"}
            same = jnp.array_equal(
                jax.random.key_data(keys["default"]),
                jax.random.key_data(ctx.for_forward().key()),  # which counts from its begin
            )
            return fg.Output(jnp.sum(self.weight**2), metrics={"same": same.astype(float)})

    engine = fg.Engine(steps=1, plugins=[], autoload=False)
    result = engine.fit(Named(jnp.ones(2), normal), [BATCH])
    assert result.metrics["train"]["same"] == 1


def test_mode_of_a_foreign_function_that_has_its_own_jit_K31() -> None:
    dropout = eqx.nn.Dropout(0.5)

    @jax.jit
    def foreign(x: Any) -> Any:
        return x * 2 if fg.is_training() else x * 3

    assert foreign(1.0) == 2
    with fg.training_mode(False, dropout) as evaluated:
        assert foreign(1.0) == 3
        assert jnp.array_equal(evaluated(jnp.asarray(BATCH)), BATCH)  # asks for no key
    assert foreign(1.0) == 2
    with fg.training_mode(False, foreign) as function:  # any callable; it is passed on
        assert function(1.0) == 3


def test_streams_are_for_training_unless_told_otherwise_K29() -> None:
    streams = fg.RngStreams(
        jax.random.key(0), [fg.RngStream("noise"), fg.RngStream("x", train=False)]
    )
    assert re.findall(r"\w+", " ".join(streams.train_keys(0))) == ["noise"]
