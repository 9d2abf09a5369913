"""Parameters and updates of different dtypes, against a loop that uses optax."""

from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_optimizers import (
    BackboneFinetuning,
    GradientAccumulation,
    GradientClip,
    MultiOptimizer,
    Phase,
    ReduceOnPlateau,
    UnitNorm,
    WeightClip,
)

X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
Y = X @ np.array([1, -2, 3], np.float32)
STEPS = 5


class Line(fg.Module):
    weight: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(compute_loss(self.weight, *batch))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return make_optimizer()


def compute_loss(weight: Any, x: Any, y: Any) -> Any:
    return jnp.mean((x @ weight.astype(jnp.float32) - y) ** 2)


def make_optimizer() -> optax.GradientTransformation:
    """Return an optimizer whose moments, and so its updates, are float32."""
    return optax.adamw(0.1, mu_dtype=jnp.float32)


def train_by_hand(dtype: Any, every: int) -> Any:
    """One update by the mean gradient of each `every` batches, and of those that are left."""
    optimizer = make_optimizer()
    weight: Any = jnp.ones(3, dtype)
    state = optimizer.init(weight)
    for start in range(0, STEPS, every):
        steps = range(start, min(start + every, STEPS))
        batches = [slice(8 * step, 8 * step + 8) for step in steps]
        grads = [jax.grad(compute_loss)(weight, X[rows], Y[rows]) for rows in batches]
        updates: Any
        updates, state = optimizer.update(sum(grads) / len(grads), state, weight)
        assert updates.dtype == jnp.float32
        weight = optax.apply_updates(weight, updates)
    return weight


@pytest.mark.variants("full")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("plugins", "every"),
    [
        ([], 1),
        ([GradientAccumulation(1)], 1),
        ([GradientAccumulation(2, "steps")], 2),
        ([MultiOptimizer(loss=Phase(make_optimizer()))], 1),
        ([MultiOptimizer(loss=Phase(make_optimizer()), order="simultaneous")], 1),
    ],
    ids=["default", "microbatches", "steps with a remainder", "alternating", "simultaneous"],
)
def test_float32_updates_are_cast_to_the_dtype_of_their_parameters(
    plugins: Any, every: int, dtype: Any
) -> None:
    """To two units in the last place, because XLA may round gradients of half precision later."""
    engine = fg.Engine(steps=STEPS, plugins=plugins)
    module = engine.fit(Line(jnp.ones(3, dtype)), fg.ArrayData((X, Y), 8)).module
    assert module.weight.dtype == dtype
    precision = float(jnp.finfo(dtype).eps)
    expected = np.float32(train_by_hand(dtype, every))
    np.testing.assert_allclose(np.float32(module.weight), expected, rtol=2 * precision)


@pytest.mark.parametrize(
    ("dtype", "grads", "max_norm"),
    [
        (jnp.float16, [np.full(1000, 20.0), np.full(10, 300.0)], 1.0),  # squares above 65504
        (jnp.float16, [np.full(10, 1e-4)], 1e-4),  # squares below the smallest number
        (jnp.bfloat16, [np.ones(10)] * 1000, 1.0),  # a sum of 8 bits stops growing
    ],
)
def test_gradients_of_half_precision_are_clipped_by_their_norm(
    dtype: Any, grads: list[Any], max_norm: float
) -> None:
    clip = GradientClip(max_norm=max_norm).gradient_transform("default")
    assert clip is not None
    half: Any = [jnp.asarray(grad, dtype) for grad in grads]
    clipped: Any
    clipped, _ = clip.update(half, clip.init(half))
    assert {leaf.dtype for leaf in clipped} == {jnp.dtype(dtype)}
    norm = np.linalg.norm(np.concatenate([np.float64(leaf) for leaf in clipped]))
    assert norm == pytest.approx(max_norm, rel=float(jnp.finfo(dtype).eps))


def test_floats_of_numpy_are_numbers() -> None:
    half: Any = np.float32(0.5)
    assert GradientClip(max_norm=half).max_norm == 0.5
    assert WeightClip("weight", half).max_value == 0.5
    assert WeightClip("weight", half)(jnp.ones(2, jnp.float16)).dtype == jnp.float16
    clip: Any = GradientClip(max_value=half).gradient_transform("default")
    clipped, _ = clip.update(jnp.ones(2, jnp.bfloat16), clip.init(jnp.ones(2)))
    assert clipped.dtype == jnp.bfloat16
    assert ReduceOnPlateau("test/loss", 1, factor=half, min_scale=half).factor == 0.5
    assert BackboneFinetuning("weight", 1, rate=half).rate == 0.5
    with pytest.raises(ConfigurationError, match="rate is '0.5'"):
        BackboneFinetuning("weight", 1, rate="0.5")  # pyright: ignore[reportArgumentType]


def test_vectors_of_half_precision_have_length_one() -> None:
    rows = jnp.array([[1e-4, 1e-4], [300.0, 300.0], [0.0, 0.0]], jnp.float16)
    unit = UnitNorm("weight")(rows)
    assert unit.dtype == jnp.float16
    np.testing.assert_allclose(unit, [[0.5**0.5] * 2, [0.5**0.5] * 2, [0, 0]], rtol=1e-3)
