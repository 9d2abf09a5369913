"""Annotations of a model's fields are checked at the start (K23)."""

from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ModelError
from jaxtyping import Array, Float, Int

BATCH = np.ones((2, 3), np.float32)


class Layer(eqx.Module):
    weight: Float[Array, "inputs outputs"]
    bias: Float[Array, " outputs"] | None
    offsets: Int[Array, " outputs"] | None = None
    scale: Any = None


class Net(fg.Module):
    layers: list[Layer]

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        weights = jax.tree.leaves(eqx.filter(self.layers, eqx.is_inexact_array))
        return fg.Output(jnp.sum(jnp.stack([jnp.sum(weight**2) for weight in weights])))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def start(*layers: Layer) -> None:
    fg.Engine(steps=1, plugins=[], autoload=False).init_state(Net(list(layers)), [BATCH])


def test_fields_that_fit_K23() -> None:
    start(
        Layer(jnp.ones((3, 2)), jnp.ones(2), jnp.zeros(2, int), scale=jnp.ones(7)),
        Layer(jnp.ones((5, 4)), None),
    )


def test_stacked_modules_have_further_axes_K23() -> None:
    layer = Layer(jnp.ones((3, 2)), jnp.ones(2))
    start(jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), layer))


class Stack(eqx.Module):
    """Any number of matrices."""

    matrices: Float[Array, "*stack inputs outputs"]


def test_arrays_without_elements_fit_K23() -> None:
    start(Layer(jnp.ones((3, 2)), None, scale=Stack(jnp.zeros((0, 3)))))
    none_stacked = Layer(jnp.zeros((0, 3, 2)), jnp.zeros((0, 2)))
    start(Layer(jnp.ones((3, 2)), None, scale=none_stacked))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            Layer(jnp.ones((3, 2)), jnp.ones(3)),
            r'layers\[1\]\.bias is float32\[3\]; Layer declares Float\[Array, "outputs"\]',
        ),
        (
            Layer(jnp.zeros((0, 3, 2)), jnp.zeros((0, 3))),
            r"layers\[1\]\.weight is float32\[0,3,2\]",
        ),
        (Layer(jnp.ones(3), jnp.ones(3)), r"layers\[1\]\.weight is float32\[3\]"),
        (Layer(jnp.ones((3, 2), int), None), r"layers\[1\]\.weight is int32\[3,2\].*Float"),
        (
            Layer(jnp.ones((3, 2)), None, jnp.ones(2)),
            r"layers\[1\]\.offsets is float32\[2\]; Layer declares Int",
        ),
    ],
)
def test_a_field_of_another_shape_or_dtype_is_an_error_at_the_start_K23(
    layer: Layer, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        start(Layer(jnp.ones((3, 2)), None), layer)
