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
from fulgurite.errors import ConfigurationError, ModelError
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
    engine = fg.Engine(steps=1)
    for call in (engine.fit, engine.evaluate, engine.predict):
        with pytest.raises(ConfigurationError, match="EQX_ON_ERROR=breakpoint is set: Equinox"):
            call(Net(key=jax.random.key(0)), [BATCH])


class Configured(Linear):
    """Has a learning rate of any type, and an optimizer that is made of the module."""

    rate: Any
    make_optimizer: Callable[[Any], Any] = eqx.field(static=True)

    def __init__(self, rate: Any, make_optimizer: Callable[[Any], Any]) -> None:
        super().__init__()
        self.rate = rate
        self.make_optimizer = make_optimizer

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self)


def pull_to_start(model: Any) -> optax.GradientTransformation:
    """Pull weights to those that the module has, as L2-SP does (Li et al. 2018)."""
    return optax.stateless(lambda updates, params: eqx.apply_updates(updates, model))


def keep_start(model: Any) -> optax.GradientTransformation:
    return optax.GradientTransformation(
        lambda params: model.weight, lambda updates, state, params=None: (updates, state)
    )


@pytest.mark.parametrize(
    "rate", [jnp.float32(0.1), pytest.param(np.float32(0.1), marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("make_optimizer", "message"),
    [
        (lambda model: optax.adam(model.rate), r"gave an optimizer an array.*float32\[\]"),
        (lambda model: optax.sgd(-2 * model.rate), r"gave an optimizer an array.*float32\[\]"),
        (
            lambda model: optax.inject_hyperparams(optax.sgd)(learning_rate=model.rate),
            r"gave an optimizer an array.*float32\[\]",
        ),
        (pull_to_start, r"gave an optimizer an array.*float32\[3\]"),
        (keep_start, r"gave an optimizer an array.*float32\[3\]"),
        (lambda model: optax.sgd(float(model.rate)), "asked for the value of an array"),
        (lambda model: optax.sgd(np.asarray(model.rate).item()), "asked for the value of an array"),
        (lambda model: optax.sgd(0.1) if model.rate > 0 else None, "asked for the value"),
    ],
    ids=["adam", "computed", "injected", "weights", "state", "float", "numpy", "condition"],
)
def test_an_array_of_the_module_in_an_optimizer_is_an_error_with_its_source(
    rate: Any, make_optimizer: Any, message: str
) -> None:
    with pytest.raises(
        ModelError,
        match=rf"Configured\.configure_optimizers {message}.*static=True.*params of its init",
    ):
        fg.Engine(steps=1).fit(Configured(rate, make_optimizer), [BATCH])


def test_what_the_error_recommends_instead_of_an_array_works() -> None:
    """A Python number as the rate, and the initial weights in the state of an optimizer that pulls
    back to them."""

    def pull(updates: Any, start: Any, params: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda u, p, s: u + 0.5 * (p - s), updates, params, start), start

    def make_optimizer(model: Any) -> optax.GradientTransformation:
        start = optax.GradientTransformation(lambda params: params, pull)  # pyright: ignore[reportArgumentType]
        return optax.chain(start, optax.sgd(model.rate))

    module = fg.Engine(steps=4).fit(Configured(0.1, make_optimizer), [BATCH]).module
    start = weight = np.zeros(3)
    for _ in range(4):
        gradient = 2 * X.T @ (X @ weight - BATCH["y"]) / len(X)
        weight = weight - 0.1 * (gradient + 0.5 * (weight - start))
    np.testing.assert_allclose(module.weight, weight, rtol=1e-5)
