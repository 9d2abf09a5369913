"""Complex parameters, against the same training of their real and imaginary parts."""

from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, NonFiniteError

LENGTH = 16


class Target(fg.Module):
    """Minimizes the squared distance of a complex number from those of the batch."""

    z: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean(jnp.abs(self.z - batch) ** 2))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


class FourierLayer(fg.Module):
    """Multiplies the spectrum of a signal, and scales it by a complex number."""

    spectrum: jax.Array
    scale: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        preds = jnp.fft.irfft(jnp.fft.rfft(batch["x"]) * self.spectrum * self.scale, LENGTH)
        return fg.Output(jnp.mean((preds - batch["y"]) ** 2))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.3, momentum=0.5)


class Halved(fg.Engine):
    """Halves gradients in a step of its own."""

    def train_step(self, state: Any, batch: Any, ctx: Any, update_rule: Any) -> Any:
        grads, output = fg.compute_gradients(self.forward, state.module, batch, ctx)
        return update_rule.apply_gradients(
            state, jax.tree.map(lambda grad: grad / 2, grads), output
        )


def make_signals() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, LENGTH)).astype(np.float32)
    spectrum = rng.normal(size=(LENGTH // 2 + 1, 2)) @ np.array([1, 1j])
    return x, np.fft.irfft(np.fft.rfft(x) * spectrum, LENGTH).astype(np.float32)


def train_parts_by_hand(steps: int, rate: float) -> tuple[jax.Array, jax.Array]:
    """The Fourier layer with real numbers alone: no gradient by a complex number anywhere."""
    x, y = make_signals()
    params = {
        "spectrum": jnp.zeros((LENGTH // 2 + 1, 2)).at[:, 0].set(1.0),
        "scale": jnp.array([1.0, -0.5]),
    }
    optimizer = optax.sgd(rate, momentum=0.5)

    def compute_loss(params: Any) -> jax.Array:
        spectrum = jax.lax.complex(params["spectrum"][:, 0], params["spectrum"][:, 1])
        scale = jax.lax.complex(params["scale"][0], params["scale"][1])
        preds = jnp.fft.irfft(jnp.fft.rfft(x) * spectrum * scale, LENGTH)
        return jnp.mean((preds - y) ** 2)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(jax.grad(compute_loss)(params), state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    spectrum, scale = params["spectrum"], params["scale"]
    return spectrum[:, 0] + 1j * spectrum[:, 1], scale[0] + 1j * scale[1]


def make_fourier_layer() -> FourierLayer:
    return FourierLayer(jnp.ones(LENGTH // 2 + 1, jnp.complex64), jnp.complex64(1 - 0.5j))


@pytest.mark.variants("slow")
@pytest.mark.parametrize("target", [3 + 4j, -3 - 4j, 5j, -2])
def test_gradient_descent_reaches_a_complex_number(target: complex) -> None:
    """Each of 20 steps leaves 0.8 of the distance."""
    data = [np.full(4, target, np.complex64)]
    module = fg.Engine(steps=20).fit(Target(jnp.zeros((), jnp.complex64)), data).module
    assert module.z.dtype == jnp.complex64
    np.testing.assert_allclose(module.z, target * (1 - 0.8**20), rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(("engine_class", "rate"), [(fg.Engine, 0.3), (Halved, 0.15)])
def test_fourier_layer_trains_as_its_real_and_imaginary_parts(
    engine_class: type[fg.Engine], rate: float
) -> None:
    x, y = make_signals()
    result = engine_class(steps=300).fit(make_fourier_layer(), [{"x": x, "y": y}])
    spectrum, scale = train_parts_by_hand(300, rate)
    np.testing.assert_allclose(result.module.spectrum, spectrum, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.module.scale, scale, rtol=1e-4, atol=1e-5)
    preds = np.fft.irfft(np.fft.rfft(x) * np.asarray(result.module.spectrum * result.module.scale))
    assert np.mean((preds - y) ** 2) < (1e-8 if rate == 0.3 else 1e-3)


@pytest.mark.variants("full")
@pytest.mark.parametrize("shape", [(), (40, 50)])
@pytest.mark.parametrize("value", [complex(np.inf, 0), complex(0, np.nan)])
def test_complex_parameter_that_is_not_finite_is_an_error(shape: Any, value: complex) -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        def break_last(update: Any) -> Any:
            return jnp.where(state == 1, update.at[(-1,) * update.ndim].set(value), update)

        return jax.tree.map(break_last, updates), state + 1

    class Broken(Target):
        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.GradientTransformation(lambda params: jnp.int32(0), update)

    with pytest.raises(NonFiniteError, match="step 2: the update of z"):
        fg.Engine(steps=3).fit(
            Broken(jnp.zeros(shape, jnp.complex64)), [jnp.array([1j], np.complex64)]
        )


def test_metric_of_complex_values_is_an_error_instead_of_their_real_part() -> None:
    values = jnp.array([1 + 2j, -3])
    for metric in (fg.metrics.Mean, fg.metrics.Sum, fg.metrics.Max, fg.metrics.LastValue):
        with pytest.raises(ConfigurationError, match=r"values of a metric are complex64.*jnp\.abs"):
            metric.from_values(values)
    np.testing.assert_allclose(
        fg.metrics.Mean.from_values(jnp.abs(values)).compute(), (5**0.5 + 3) / 2
    )
