"""Products of linear layers in float8 (L7)."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_precision import Precision
from fulgurite_precision.casting import cast_module
from fulgurite_precision.float8 import Float8Linear, cast_products, check_device, multiply
from fulgurite_testing import TinyModel, tiny_data, tiny_engine

RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(size=(16, 32)).astype(np.float32)
INPUTS = (RNG.normal(size=(8, 32)) * 10.0 ** RNG.integers(-6, 6, (8, 1))).astype(np.float32)
GRADIENT = RNG.normal(size=(8, 16)).astype(np.float32)


@jax.jit
def apply(weight: Any, inputs: Any) -> Any:
    return jax.vmap(lambda x: multiply(weight, x))(inputs)


def test_products_are_those_of_rounded_numbers_and_gradients_of_exact_ones() -> None:
    value, pull = jax.vjp(apply, jnp.asarray(WEIGHT), jnp.asarray(INPUTS))
    weight, inputs = WEIGHT.astype(np.float64), INPUTS.astype(np.float64)
    # Rounding to four significant bits changes a number by a 16th at most; one below the normal
    # range, by less than a 1e-5th of the largest of its row.
    sizes = (abs(inputs) + 1e-4 * abs(inputs).max(1, keepdims=True)) @ (
        abs(weight) + 1e-4 * abs(weight).max(1, keepdims=True)
    ).T
    error = abs(np.asarray(value, np.float64) - inputs @ weight.T)
    assert (error <= ((1 + 1 / 16) ** 2 - 1) * sizes).all()
    assert (error.max(1) > 1e-3 * abs(value).max(1)).all()
    weight_gradient, input_gradient = pull(jnp.asarray(GRADIENT))
    np.testing.assert_allclose(weight_gradient, GRADIENT.T @ INPUTS, rtol=1e-3, atol=1)
    np.testing.assert_allclose(input_gradient, GRADIENT @ WEIGHT, rtol=1e-4, atol=1e-5)
    # No example changes the result of another.
    np.testing.assert_array_equal(apply(jnp.asarray(WEIGHT), jnp.asarray(INPUTS[:2])), value[:2])
    np.testing.assert_array_equal(multiply(jnp.asarray(WEIGHT), jnp.zeros(32)), np.zeros(16))


def test_a_batch_is_multiplied_at_once_in_float8() -> None:
    def compute_loss(weight: Any, inputs: Any) -> Any:
        return jnp.sum(jnp.sin(jax.vmap(jax.checkpoint(partial(multiply, weight)))(inputs)))

    text = jax.jit(apply).lower(WEIGHT, INPUTS).as_text()
    (product,) = [line for line in text.splitlines() if "dot_general" in line]
    assert product.count("f8E4M3FN") == 2
    assert "batching_dims" not in product
    text = jax.jit(jax.grad(compute_loss, (0, 1))).lower(WEIGHT, INPUTS).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert not [line for line in products if "batching_dims" in line]


@pytest.mark.full
def test_only_linear_layers_that_fit_and_are_not_excluded_multiply_so() -> None:
    key = jax.random.key(0)
    module = eqx.nn.MLP(16, 3, 32, 2, key=key)
    cast: Any = cast_products(module, fg.select("layers[1]"))
    kinds = [type(layer) for layer in cast.layers]
    assert kinds == [Float8Linear, eqx.nn.Linear, eqx.nn.Linear]
    half: Any = cast_module(cast, "bfloat16", None)
    assert isinstance(half.layers[0], Float8Linear)
    assert jax.eval_shape(half, jnp.ones(16, "bfloat16")).dtype == jnp.bfloat16
    x = jax.random.normal(key, (5, 16))
    expected, value = jax.vmap(module)(x), jax.vmap(cast)(x)
    assert 0 < float(abs(value - expected).max()) < 0.1 * float(abs(expected).max())


def test_a_device_without_float8_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="has no products in float8.* use Precision"):
        tiny_engine(Precision("fp8")).init_state(TinyModel, tiny_data())
    for capability in ("8.0", "7.5"):
        device = SimpleNamespace(platform="gpu", device_kind="GPU", compute_capability=capability)
        with pytest.raises(ConfigurationError, match=f"capability {capability} has no products"):
            check_device(device)
    for capability in ("8.9", "9.0", "10.0"):
        check_device(
            SimpleNamespace(platform="gpu", device_kind="GPU", compute_capability=capability)
        )
