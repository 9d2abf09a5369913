"""What the plugin promises as a plugin, and its updates against loops written by hand."""

from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, ModelError
from fulgurite_optimizers import (
    Freeze,
    GradientAccumulation,
    GradientClip,
    MultiOptimizer,
    Phase,
)
from fulgurite_precision import Precision
from fulgurite_sam import Sam
from fulgurite_sam.rule import Ascent
from fulgurite_testing import check_plugin

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = np.sin(X).sum(1)


class Regression(fg.Module):
    """A small perceptron with BatchNorm and noise; `frozen` is for `Freeze`."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        first, last = jax.random.split(key)
        self.first = eqx.nn.Linear(3, 4, key=first)
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
        self.last = eqx.nn.Linear(4, "scalar", key=last)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        noise = 0.1 * jax.random.normal(ctx.key(), batch[0].shape)
        preds, state = self.predict(batch[0] + noise, ctx.model_state)
        return fg.Output(jnp.mean((preds - batch[1]) ** 2), preds=preds, model_state=state)

    def predict(self, x: Any, state: Any) -> Any:
        hidden = jax.vmap(self.first)(x)
        hidden, state = jax.vmap(
            self.norm, in_axes=(0, None), out_axes=(0, None), axis_name="batch"
        )(hidden, state)
        return jax.vmap(self.last)(jnp.tanh(hidden)), state

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1, momentum=0.9)


class Game(fg.Module):
    """Two numbers with a loss each; the loss of each depends on the other."""

    x: jax.Array
    y: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(losses=compute_game(self.x, self.y))


class GameOfFunctions(Game):
    """The same with its losses as functions."""

    def losses(self, batch: Any, ctx: fg.Context) -> Any:
        return {
            name: lambda name=name: compute_game(self.x, self.y)[name] for name in ("min", "max")
        }


def compute_game(x: Any, y: Any) -> dict[str, Any]:
    return {"min": x**4 / 4 + x * y, "max": y**4 / 4 - x * y}


def make_engine(*plugins: Any, **settings: Any) -> fg.Engine:
    return fg.Engine(**{"steps": 3, "log_every": 1, "plugins": plugins, **settings})


def make_data(batch_size: int = 8) -> fg.ArrayData:
    return fg.ArrayData((X, Y), batch_size)


def list_arrays(tree: Any) -> list[Any]:
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


def find_worst(params: Any, grads: Any, radius: float, offset: float | None = None) -> Any:
    """The formulas of the two papers, as they stand there."""
    sizes = jax.tree.map(lambda p: 1 if offset is None else jnp.abs(p) + offset, params)
    norm = optax.tree.norm(jax.tree.map(lambda s, g: s * g, sizes, grads))
    return jax.tree.map(lambda p, s, g: p + radius * s**2 * g / norm, params, sizes, grads), norm


def train_by_hand(engine: fg.Engine, offset: float | None = None, clip: float | None = None) -> Any:
    """Three steps of the regression, from the state that the engine begins with."""
    state = engine.init_state(eqx.nn.make_with_state(Regression), make_data())
    params, static = eqx.partition(state.module, eqx.is_inexact_array)
    optimizer = optax.sgd(0.1, momentum=0.9)
    if clip is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(clip), optimizer)

    @eqx.filter_jit
    def step_by_hand(params: Any, opt_state: Any, model_state: Any, noise: Any) -> Any:
        def compute_loss(params: Any) -> Any:
            copy = jax.tree.map(lambda leaf: leaf, model_state)
            preds, new = eqx.combine(params, static).predict(X + noise, copy)
            return jnp.mean((preds - Y) ** 2), new

        (loss, new_state), grads = jax.value_and_grad(compute_loss, has_aux=True)(params)
        worst, norm = find_worst(params, grads, 0.2, offset)
        grads, _ = jax.grad(compute_loss, has_aux=True)(worst)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, new_state, loss, norm

    opt_state = optimizer.init(params)
    model_state = state.model_state
    rngs = fg.RngStreams(state.key)
    losses = []
    norms = []
    for step in range(3):
        noise = 0.1 * jax.random.normal(rngs.key("default", "train", jnp.int32(step)), X.shape)

        params, opt_state, model_state, loss, norm = step_by_hand(
            params, opt_state, model_state, noise
        )
        losses.append(loss)
        norms.append(norm)
    return params, model_state, losses, norms


@pytest.mark.full
def test_plugin_passes_the_conformance_check():
    check_plugin(Sam, bad_arguments=[{"radius": -1.0}, {"offset": float("nan")}])


@pytest.mark.parametrize(
    "arguments", [{"radius": "x"}, {"radius": True}, {"offset": None}, {"adaptive": "yes"}]
)
def test_arguments_of_another_type_are_errors(arguments: Any):
    with pytest.raises(ConfigurationError, match=f"Sam: {next(iter(arguments))} is "):
        Sam(**arguments)


def test_two_of_them_are_an_error():
    engine = make_engine(Sam(), Freeze("fixed"), Sam())
    with pytest.raises(ConfigurationError, match="listed twice.*leave one of them out"):
        engine.fit(Quartic(jnp.float32(0), jnp.float32(0)), fg.ArrayData(np.zeros(2), 2))


@pytest.mark.parametrize(
    ("offset", "clip"),
    [(None, None), pytest.param(0.01, 0.5, marks=pytest.mark.full)],
    ids=["plain", "adaptive, clipped"],
)
def test_updates_are_those_of_a_loop_by_hand(offset: float | None, clip: float | None):
    """With BatchNorm, whose statistics are those at the weights, and with noise, which is the same
    at both points."""
    sam = Sam(0.2) if offset is None else Sam(0.2, adaptive=True, offset=offset)
    engine = make_engine(sam, *([] if clip is None else [GradientClip(clip)]))
    params, model_state, losses, norms = train_by_hand(engine, offset, clip)
    result = engine.fit(eqx.nn.make_with_state(Regression), make_data())
    for array, by_hand in zip(
        list_arrays((eqx.filter(result.module, eqx.is_inexact_array), result.model_state)),
        list_arrays((params, model_state)),
        strict=True,
    ):
        np.testing.assert_allclose(array, by_hand, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(result.history["train/loss"], losses, rtol=1e-5)
    np.testing.assert_allclose(result.history["train/sam/ascent_norm"], norms, rtol=1e-5)


@pytest.mark.full
def test_radius_of_zero_changes_nothing():
    """Random numbers and model state included."""
    model = eqx.nn.make_with_state(Regression)
    plain = make_engine().fit(model, make_data())
    same = make_engine(Sam(0.0)).fit(model, make_data())
    for left, right in zip(list_arrays(plain.module), list_arrays(same.module), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6)
    assert (plain.history["train/loss"] == same.history["train/loss"]).all()


def step_game_by_hand(x: float, y: float, simultaneous: bool) -> tuple[float, float, list[float]]:
    """One step of both numbers; the worst point of each loss differs in its own number alone."""
    sign_x = np.sign(x**3 + y)
    new_x = x - 0.1 * ((x + 0.2 * sign_x) ** 3 + y)
    other = x if simultaneous else new_x
    sign_y = np.sign(y**3 - other)
    new_y = y - 0.1 * ((y + 0.2 * sign_y) ** 3 - other)
    return new_x, new_y, [abs(x**3 + y), abs(y**3 - other)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "order"),
    [
        (Game, "alternating"),
        pytest.param(Game, "simultaneous", marks=pytest.mark.full),
        pytest.param(GameOfFunctions, "alternating", marks=pytest.mark.full),
    ],
)
def test_each_of_several_optimizers_has_its_own_worst_point(model: Any, order: Any):
    phases = MultiOptimizer(
        order=order, min=Phase(optax.sgd(0.1), "x"), max=Phase(optax.sgd(0.1), "y")
    )
    x, y = 1.0, 0.5
    result = make_engine(phases, Sam(0.2), steps=2).fit(
        model(jnp.float32(x), jnp.float32(y)), make_data()
    )
    norms = []
    for _ in range(2):
        x, y, step_norms = step_game_by_hand(x, y, order == "simultaneous")
        norms.append(step_norms)
    np.testing.assert_allclose([result.module.x, result.module.y], [x, y], rtol=1e-5)
    names = ["min", "max"]
    if (model, order) == (Game, "alternating"):
        # Of the further passes of one training_step, only the first gives metrics.
        names = ["min"]
    for index, name in enumerate(names):
        logged = result.history[f"train/sam/{name}/ascent_norm"]
        np.testing.assert_allclose(logged, [norm[index] for norm in norms], rtol=1e-5)


class Quartic(fg.Module):
    """The mean of (w - x)^4 / 4 over a batch of numbers."""

    w: jax.Array
    fixed: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean((self.w - batch) ** 4) / 4 + self.fixed * self.w)

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


def differentiate_quartic(w: float, x: Any) -> float:
    """The gradient at the worst point for a batch."""
    ascent = np.sign(np.mean((w - x) ** 3) + 1)
    return float(np.mean((w + 0.2 * ascent - x) ** 3) + 1)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["microbatch", pytest.param("steps", marks=pytest.mark.full)])
def test_each_microbatch_has_its_own_worst_point(mode: Any):
    """Foret et al. call it m-sharpness. The two ways to accumulate agree."""
    numbers = np.asarray([-2.0, 1.5, 0.2, 2.5], np.float32)
    parts = [numbers[0::2], numbers[1::2]]
    batches = numbers
    if mode == "steps":
        batches = np.concatenate(parts)
    source = fg.ArrayData(batches, 4 if mode == "microbatch" else 2)
    plugins = [GradientAccumulation(2, mode=mode), Sam(0.2), Freeze("fixed")]
    engine = make_engine(*plugins, steps=1 if mode == "microbatch" else 2)
    result = engine.fit(Quartic(jnp.float32(0.3), jnp.float32(1)), source)
    by_hand = 0.3 - 0.1 * np.mean([differentiate_quartic(0.3, part) for part in parts])
    np.testing.assert_allclose(result.module.w, by_hand, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("is_first", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_frozen_part_takes_no_part_in_the_ascent(is_first: bool):
    plugins = [Freeze("fixed"), Sam(0.2)] if is_first else [Sam(0.2), Freeze("fixed")]
    numbers = np.asarray([-2.0, 1.5], np.float32)
    result = make_engine(*plugins, steps=1).fit(
        Quartic(jnp.float32(0.3), jnp.float32(1)), fg.ArrayData(numbers, 2)
    )
    by_hand = 0.3 - 0.1 * differentiate_quartic(0.3, numbers)
    np.testing.assert_allclose(result.module.w, by_hand, rtol=1e-5)
    assert float(result.module.fixed) == 1


def test_gradients_from_elsewhere_are_an_error():
    class OwnStep(fg.Engine):
        def train_step(self, state: Any, batch: Any, ctx: Any, update_rule: Any) -> Any:
            grads, output = fg.compute_gradients(self.forward, state.module, batch, ctx)
            return update_rule.apply_gradients(state, grads, output)

    engine = OwnStep(steps=1, plugins=[Sam()])
    with pytest.raises(ModelError, match=r"call update_rule\(self.forward, state, batch, ctx\)"):
        engine.fit(Quartic(jnp.float32(0), jnp.float32(0)), fg.ArrayData(np.zeros(2), 2))


def test_half_precision_has_no_infinite_norm():
    ascent = Ascent(radius=0.5, offset=None)
    worst, norm = ascent.find_worst([jnp.float16(1)], [jnp.float16(3e4)])
    assert norm == pytest.approx(3e4, rel=1e-3)
    assert worst[0].dtype == jnp.float16
    assert worst[0] == 1.5
    at_rest, norm = ascent.find_worst([jnp.float32(1)], [jnp.float32(0)])
    assert (at_rest[0], norm) == (1, 0)


class Small(fg.Module):
    """A loss whose gradient by what float16 holds is zero, but for a scale."""

    w: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(1e-9 * jnp.mean((batch * self.w).astype(jnp.float32) ** 2))

    def configure_optimizers(self) -> Any:
        return optax.sgd(1e8)


def test_a_scaled_loss_is_scaled_in_the_ascent_too():
    """Whichever plugin is listed first. The gradient is 1e-9 * w, so that the worst point is w and
    half of its direction."""
    start = np.array([1, 2], np.float32)
    expected = -0.1 * (start + 0.5 * start / np.sqrt(5))
    plugins: list[Any] = [Precision("fp16"), Sam(0.5)]
    engine = fg.Engine(steps=1, on_nonfinite="skip", plugins=plugins, autoload=False)
    result = engine.fit(Small(jnp.asarray(start)), [np.ones((2, 2), np.float32)])
    np.testing.assert_allclose(result.module.w - start, expected, rtol=5e-3)
    assert result.metrics["train"]["sam/ascent_norm"] == pytest.approx(1e-9 * 5**0.5, rel=5e-3)


def test_a_weight_that_is_infinite_stays_where_it_is():
    """Such as a mask; the other one is moved by 1 + 0.01 in the direction of the ascent."""
    ascent = Ascent(radius=0.5, offset=0.01)
    params = [jnp.array([0.0, -jnp.inf]), jnp.float32(1)]
    worst, norm = ascent.find_worst(params, [jnp.zeros(2), jnp.float32(2)])
    np.testing.assert_array_equal(worst[0], params[0])
    assert worst[1] == pytest.approx(1 + 0.5 * 1.01)
    assert norm == pytest.approx(2 * 1.01)


class Complex(fg.Module):
    w: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        loss = jnp.real(self.w[0] * batch[0]) ** 2 + jnp.abs(self.w[1] - batch[1]) ** 4
        return fg.Output(loss / 4)

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


@pytest.mark.full
@pytest.mark.parametrize(
    "offset", [None, pytest.param(0.01, marks=pytest.mark.full)], ids=["plain", "adaptive"]
)
def test_complex_weights_ascend_as_their_real_and_imaginary_parts(offset: float | None):
    """With numbers in pairs, and the size of a weight that of the pair."""
    batch = np.array([1 - 2j, 1j], np.complex64)
    sam = Sam(0.2) if offset is None else Sam(0.2, adaptive=True, offset=offset)
    start = np.array([1 + 1j, -1 + 0.5j], np.complex64)
    result = make_engine(sam).fit(Complex(jnp.asarray(start)), [batch])

    def compute_loss(pairs: Any) -> Any:
        first = batch[0].real * pairs[0, 0] - batch[0].imag * pairs[0, 1]
        distance = pairs[1] - jnp.array([batch[1].real, batch[1].imag])
        return (first**2 + jnp.sum(distance**2) ** 2) / 4

    pairs = jnp.stack([start.real, start.imag], axis=1)
    norm = jnp.zeros(())
    for _ in range(3):
        grads = jax.grad(compute_loss)(pairs)
        sizes = 1 if offset is None else jnp.linalg.norm(pairs, axis=1, keepdims=True) + offset
        norm = jnp.sqrt(jnp.sum((sizes * grads) ** 2))
        pairs = pairs - 0.1 * jax.grad(compute_loss)(pairs + 0.2 * sizes**2 * grads / norm)
    np.testing.assert_allclose(result.module.w, pairs[:, 0] + 1j * pairs[:, 1], rtol=1e-5)
    assert result.metrics["train"]["sam/ascent_norm"] == pytest.approx(float(norm), rel=1e-5)
