"""A callable that makes the model: Python runs it once, and the arrays are those it makes eagerly."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from models import assert_same_bits, regression

CONSTANT = np.linspace(-1, 1, 3, dtype=np.float32)
SHARED = jnp.arange(3.0)


class Layers(fg.Module):
    """Predicts a number from three; what its arrays are is what a test is about."""

    head: eqx.nn.Linear
    rest: Any

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        pred = jax.vmap(self.head)(batch["x"])
        total = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(eqx.filter(self.rest, eqx.is_array)))
        return fg.Output(loss=jnp.mean((pred - batch["y"]) ** 2) + 0 * jnp.float32(total))

    def configure_optimizers(self) -> fg.OptimizerSpec:
        return fg.OptimizerSpec(optax.sgd(0.1))


def make_head(key: Any) -> eqx.nn.Linear:
    return eqx.nn.Linear(3, "scalar", key=key)


def make_loop(key: Any) -> Layers:
    head_key, *keys = jr.split(key, 101)
    return Layers(make_head(head_key), [eqx.nn.Linear(2, 3, key=each) for each in keys])


def make_scanned(key: Any) -> Layers:
    head_key, layers_key = jr.split(key)
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 4, key=key))(jr.split(layers_key, 7))
    return Layers(make_head(head_key), layers)


def make_various(key: Any) -> Layers:
    """Initializers of several operations, constants, slices, and one array at two places of the
    program."""
    keys = jr.split(key, 6)
    normal = jr.normal(keys[0], (5, 4)) * 0.02 + 1.5
    orthogonal = jax.nn.initializers.orthogonal()(keys[1], (4, 4))
    truncated = jax.nn.initializers.lecun_normal()(keys[2], (4, 2))
    halves = normal[:2], normal[1:4:2], normal[::-1]
    weak = jnp.asarray(0.5) * 3
    numbers = jr.permutation(keys[3], 10), jr.bernoulli(keys[4], 0.3, (4,)), jnp.bfloat16(1) / 3
    copies = [jnp.asarray(CONSTANT), SHARED, normal.astype(jnp.bfloat16)]
    return Layers(make_head(keys[5]), [orthogonal, truncated, halves, weak, numbers, copies])


def make_computed(key: Any) -> Layers:
    """Products in sums and sums over rows, which XLA computes otherwise where it fuses them."""
    head_key, normal_key, uniform_key = jr.split(key, 3)
    normal = jr.normal(normal_key, (50, 40))
    uniform = jr.uniform(uniform_key, (33, 7))
    rest = [
        normal * 0.02 + 1.5,
        jnp.sum(uniform * uniform, axis=1) / 3.1 + uniform[:, 0] * 1.7,
        jnp.tanh(normal) * jnp.exp(normal) - normal @ normal.T[:, :40],
        normal / jnp.linalg.norm(normal, axis=0) * jnp.std(uniform),
    ]
    return Layers(make_head(head_key), rest)


@pytest.mark.full
@pytest.mark.parametrize("make", [make_loop, make_scanned, make_various, make_computed])
def test_a_state_has_the_arrays_of_the_function_called_by_hand(
    make: Callable[[Any], Layers],
) -> None:
    """Three dozen operations, so that the function is compiled in many programs by hand."""
    engine = fg.Engine(steps=1, autoload=False)
    state = engine.init_state(lambda key: make(key), regression())
    key = engine.make_rng_streams(state.key).key("params", "init")
    expected = make(key)
    assert_same_bits(state.module, expected)


def test_python_runs_the_function_once_for_each_fit() -> None:
    calls = []

    def make(key: Any, scale: float) -> Layers:
        calls.append(scale)
        return Layers(make_head(key), scale * jnp.ones(3))

    engine = fg.Engine(steps=1, autoload=False)
    data = regression()
    first = engine.fit(lambda key: make(key, 1.0), data)
    assert calls == [1.0]
    # Another function of the same shapes, by the program of the first one.
    second = engine.fit(lambda key: make(key, 2.0), data)
    assert calls == [1.0, 2.0]
    np.testing.assert_array_equal(first.module.rest, np.ones(3))
    np.testing.assert_array_equal(second.module.rest, 2 * np.ones(3))
    # The array that the function holds is still its own.
    engine.fit(lambda key: Layers(make_head(key), SHARED), data)
    np.testing.assert_array_equal(SHARED, [0, 1, 2])


def test_a_function_that_fails_says_so_and_may_be_called_again() -> None:
    failures = [ValueError("no width was given")]

    def make(key: Any) -> Layers:
        if failures:
            raise failures.pop()
        return Layers(make_head(key), None)

    engine = fg.Engine(steps=1, autoload=False)
    with pytest.raises(ValueError, match="no width was given") as info:
        engine.fit(make, regression())
    assert "while the model was made, as make(key=key)" in "".join(info.value.__notes__)
    engine.fit(make, regression())
