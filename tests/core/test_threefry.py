"""Keys made and folded on the host, against `jax.random`."""

import logging

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite._src import threefry
from fulgurite._src.rng import fold_name, make_root_key
from jaxtyping import Array, Float, Key, UInt32
from numpy.testing import assert_array_equal

SEEDS = [0, 1, 2**31, 2**32 - 1, *map(int, np.random.default_rng(0).integers(0, 2**32, 50))]
WIDE_SEEDS = [2**32, 2**32 + 5, 2**63 - 1]


def get_bits(key: Key[Array, ""]) -> UInt32[np.ndarray, " words"]:
    return np.asarray(jax.random.key_data(key))


def test_keys_of_all_seeds_are_those_of_jax() -> None:
    for seed in SEEDS:
        assert_array_equal(get_bits(make_root_key(seed)), get_bits(jax.random.key(seed)))
    with jax.enable_x64(True):
        expected = [get_bits(jax.random.key(seed)) for seed in WIDE_SEEDS]
    assert_array_equal([get_bits(make_root_key(seed)) for seed in WIDE_SEEDS], expected)


def test_folded_keys_are_those_of_jax() -> None:
    for seed in SEEDS:
        key = jax.random.key(seed)
        data = SEEDS[seed % len(SEEDS)]
        words = threefry.read_words(key)
        assert words is not None
        folded = threefry.fold_in(words, data)
        assert_array_equal(get_bits(folded), get_bits(jax.random.fold_in(key, data)))
        assert folded.dtype == key.dtype
        assert not folded.committed


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4), (70_001,)])
def test_split_keys_and_random_bits_are_those_of_jax(shape: tuple[int, ...]) -> None:
    keys = jax.random.split(jax.random.key(5), (2, 3))
    words = get_bits(keys)

    split = jax.vmap(jax.vmap(lambda key: jax.random.split(key, shape)))(keys)
    assert_array_equal(threefry.split(words, shape), get_bits(split))
    assert_array_equal(threefry.split(words[1, 2], shape), get_bits(split)[1, 2])
    bits = jax.vmap(jax.vmap(lambda key: jax.random.bits(key, shape)))(keys)
    assert_array_equal(threefry.draw_bits(words, shape), bits)
    assert_array_equal(threefry.draw_bits(words[0, 1], shape), bits[0, 1])
    folded = jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, 2**32 - 2)))(keys)
    assert_array_equal(threefry.fold_in_words(words, 2**32 - 2), get_bits(folded))


def test_key_that_is_bound_to_a_device_stays_there() -> None:
    key = jax.device_put(jax.random.key(0), jax.devices()[0])

    folded = fold_name(key, "dropout", 3)

    assert folded.committed
    assert_array_equal(get_bits(folded), get_bits(fold_name(jax.random.key(0), "dropout", 3)))


def test_traced_keys_and_keys_of_another_kind_are_folded_by_jax() -> None:
    key = jax.random.key(7)
    expected = get_bits(fold_name(key, "dropout", 3))
    traced = jax.jit(lambda key, index: fold_name(key, "dropout", index))
    constant = jax.jit(lambda: fold_name(key, "dropout", 3))

    assert_array_equal(get_bits(traced(key, 3)), expected)
    assert_array_equal(get_bits(constant()), expected)

    other = fold_name(jax.random.key(7, impl="rbg"), "dropout", 3)
    assert jax.random.key_impl(other) == "rbg"


def test_root_keys_are_of_the_kind_that_jax_is_set_to() -> None:
    with jax.default_prng_impl("rbg"):
        key = make_root_key(3)
        expected = jax.random.key(3)

    assert jax.random.key_impl(key) == "rbg"
    assert_array_equal(get_bits(key), get_bits(expected))


def test_number_that_no_key_can_be_folded_with_is_an_error_of_jax() -> None:
    with pytest.raises(OverflowError):
        fold_name(jax.random.key(0), "dropout", 2**32)


class Scale(fg.Module):
    weight: Float[Array, ""]

    def training_step(self, batch: Float[Array, " batch"], ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean((self.weight * batch - 1) ** 2))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


@pytest.mark.full
def test_start_of_a_fit_compiles_its_step_and_nothing_for_keys_and_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Scale(jnp.asarray(np.float32(2)))
    engine = fg.Engine(steps=2, autoload=False)
    jax.clear_caches()

    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        engine.fit(model, [np.ones(4, np.float32)] * 2)

    started = [
        record.args[0]
        for record in caplog.records
        if record.msg.startswith("Compiling") and isinstance(record.args, tuple)
    ]
    assert set(started) == {"jit(_run)", "jit(_mark_as_closed)"}
