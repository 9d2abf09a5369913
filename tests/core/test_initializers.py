"""A callable that makes the model: Python runs it once, and the arrays are those it makes eagerly."""

import logging
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


def make_drawn(key: Any) -> Layers:
    """Every kind of random numbers, of shapes that are no multiple of anything."""
    head_key, key = jr.split(key)
    draw = [
        lambda key: jr.uniform(key, (7, 13), minval=-0.37, maxval=0.73),
        lambda key: jr.uniform(key, (1001,), minval=1e-3, maxval=17.3),
        lambda key: jr.normal(key, (5, 3, 11)),
        lambda key: jr.normal(key, (64,), dtype=jnp.bfloat16),
        lambda key: jr.truncated_normal(key, -2.0, 2.0, (19, 5)),
        lambda key: jr.bernoulli(key, 0.3, (41,)),
        lambda key: jr.randint(key, (29,), -3, 1000),
        lambda key: jr.bits(key, (9,), jnp.uint8),
        lambda key: jr.bits(key, (9, 2)),
        lambda key: jr.gumbel(key, (31,)),
        lambda key: jr.exponential(key, (31,)),
        lambda key: jr.laplace(key, (31,)),
        lambda key: jr.cauchy(key, (31,)),
        lambda key: jr.gamma(key, 1.7, (8,)),
        lambda key: jr.categorical(key, jnp.arange(6.0), shape=(23,)),
        lambda key: jr.permutation(key, 37),
        lambda key: jr.orthogonal(key, 5),
        lambda key: jr.uniform(jr.fold_in(key, 2**32 - 1), ()),
        lambda key: jr.normal(jr.split(key, (2, 3))[1, 2], (0, 4)),
        lambda key: jr.key_data(jr.split(key, 5)[::2]),
        jax.nn.initializers.glorot_uniform(),
        jax.nn.initializers.he_normal(),
        jax.nn.initializers.variance_scaling(0.3, "fan_avg", "truncated_normal"),
    ]
    keys = jr.split(key, len(draw))
    shape = (6, 7)
    drawn: list[Any] = [each(key) for each, key in zip(draw[:-3], keys[:-3], strict=True)]
    drawn += [each(key, shape) for each, key in zip(draw[-3:], keys[-3:], strict=True)]
    return Layers(make_head(head_key), drawn)


@eqx.filter_jit
def split_jitted(key: Any) -> tuple[Any, Any]:
    """Return a key and numbers of another one."""
    first, second = jr.split(key)
    return first, jr.uniform(second, (3,)) * 0.3 + 1.1


def make_nested(key: Any) -> Layers:
    """Functions of keys within others, in loops, with keys of other kinds, and of many numbers."""
    head_key, *keys = jr.split(key, 9)
    inner_key, jitted = split_jitted(keys[0])
    _, scanned = jax.lax.scan(
        lambda key, _: (jr.split(key)[0], jr.normal(key, (2,))), keys[1], length=3
    )
    branched = jax.lax.cond(jr.bernoulli(keys[2]), jr.normal, jr.uniform, keys[3])
    with jax.threefry_partitionable(False):
        original = jr.uniform(keys[4], (5,))
    other_kind = jr.normal(jr.key(3, impl="rbg"), (4,))
    data = jr.key_data(keys[5])
    large = jr.uniform(keys[6], (1025, 1024))
    several = jax.vmap(jax.vmap(lambda key: jr.normal(key, (2,))))(jr.split(keys[7], (3, 4)))
    rest = [jitted, jr.uniform(inner_key, (3,)), scanned, branched, original, other_kind, data]
    return Layers(make_head(head_key), [*rest, large, several])


@pytest.mark.full
@pytest.mark.parametrize(
    "make",
    [
        make_scanned,
        make_various,
        make_nested,
        pytest.param(make_loop, marks=pytest.mark.slow),
        pytest.param(make_computed, marks=pytest.mark.slow),
        pytest.param(make_drawn, marks=pytest.mark.slow),
    ],
)
def test_a_state_has_the_arrays_of_the_function_called_by_hand(
    make: Callable[[Any], Layers],
) -> None:
    """Three dozen operations, so that the function is compiled in many programs by hand."""
    engine = fg.Engine(steps=1, autoload=False)
    state = engine.init_state(lambda key: make(key), regression())
    key = engine.make_rng_streams(state.key).key("params", "init")
    expected = make(key)
    assert_same_bits(state.module, expected)


@pytest.mark.optimized
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make_nested, marks=pytest.mark.slow),
        pytest.param(make_computed, marks=pytest.mark.slow),
        pytest.param(make_drawn, marks=pytest.mark.slow),
    ],
)
def test_a_state_has_these_arrays_as_xla_optimizes_for_users(
    make: Callable[[Any], Layers],
) -> None:
    """XLA may contract a product and a sum, whether it or the host has made the random bits."""
    test_a_state_has_the_arrays_of_the_function_called_by_hand(make)


@pytest.mark.full
def test_a_state_is_made_without_the_programs_that_make_random_bits_and_zeros(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The moments of Adam have the shapes of the weights, and so has what is drawn."""
    engine = fg.Engine(steps=1, autoload=False)

    def make(key: Any) -> Layers:
        first, second, third = jr.split(key, 3)
        return Layers(make_head(first), [jr.uniform(second, (3,)), jr.uniform(third, (3,))])

    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        engine.init_state(make, regression())
    started = [
        record.args[0]
        for record in caplog.records
        if record.msg.startswith("Compiling") and isinstance(record.args, tuple)
    ]
    # For the weight, the bias and the others; the last two are of one kind.
    assert started == ["jit(_uniform)"] * 3


@pytest.mark.full
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
