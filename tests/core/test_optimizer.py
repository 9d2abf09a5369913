"""What `configure_optimizers` sees of the module, and what an optimizer is told besides the
gradients."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from models import Linear

X = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
BATCH: dict[str, Any] = {"x": X, "y": X @ np.asarray([1, -2, 3], np.float32)}


class Net(fg.Module):
    """A matrix and a bias that nothing but weight decay changes."""

    weight: jax.Array
    bias: jax.Array
    activation: Callable[..., Any]

    def __init__(self, *, key: Any) -> None:
        self.weight, self.bias, self.activation = jnp.ones((2, 3)), jnp.ones(2), jax.nn.relu

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(0.0 * (self.weight.sum() + self.bias.sum()))

    def configure_optimizers(self) -> optax.GradientTransformation:
        matrices = jax.tree.map(lambda leaf: eqx.is_array(leaf) and leaf.ndim > 1, self)
        scale = jnp.float32(0.5) * len(jax.tree.leaves(eqx.filter(self, eqx.is_inexact_array)))
        return optax.chain(optax.add_decayed_weights(scale, mask=matrices), optax.sgd(0.25))


@pytest.mark.parametrize("model", [Net, Net(key=None)], ids=["class", "module"])
def test_a_mask_of_weight_decay_by_what_is_an_array(model: Any) -> None:
    """One step takes 0.25 · 0.5 · 2 of a matrix, and nothing of a bias."""
    module = fg.Engine(steps=1).fit(model, [BATCH]).module
    np.testing.assert_allclose(module.weight, 0.75)
    np.testing.assert_allclose(module.bias, 1.0)


def by(optimizer: optax.GradientTransformation) -> type[Linear]:
    class Model(Linear):
        def configure_optimizers(self) -> optax.GradientTransformation:
            return optimizer

    return Model


@pytest.mark.parametrize(
    "optimizer",
    [optax.polyak_sgd(), pytest.param(optax.lbfgs(), marks=pytest.mark.full)],
    ids=["polyak", "lbfgs"],
)
def test_optimizer_receives_the_loss(optimizer: Any) -> None:
    def loss(weight: jax.Array) -> jax.Array:
        return ((X @ weight - BATCH["y"]) ** 2).mean()

    weight = jnp.zeros(3)
    state = optimizer.init(weight)
    for _ in range(4):
        value, grad = jax.value_and_grad(loss)(weight)
        updates, state = optimizer.update(
            grad, state, weight, value=value, grad=grad, value_fn=loss
        )
        weight = weight + updates
    fitted = fg.Engine(steps=4, steps_per_execution=4).fit(by(optimizer), [BATCH])
    np.testing.assert_allclose(fitted.module.weight, weight, rtol=1e-4)


def test_disabled_jit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        jax.disable_jit(),
        pytest.raises(ConfigurationError, match="training is one compiled program: unset it"),
    ):
        fg.Engine(steps=1).fit(Net, [BATCH])
    monkeypatch.setattr(
        jax, "jit", lambda function, **_: function
    )  # as Equinox does it under EQX_ON_ERROR=breakpoint
    with pytest.raises(ConfigurationError, match="training is one compiled program: unset it"):
        fg.Engine(steps=1).fit(Net, [BATCH])
