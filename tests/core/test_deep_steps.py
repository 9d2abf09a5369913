"""What the engine adds to the program of a step with hundreds of arrays."""

import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array, Float, Key

OPTIMIZER = optax.adam(1e-3)
Vector = Float[Array, " width"]

# They name or carry what another instruction computes.
PLUMBING = {"parameter", "get-tuple-element", "tuple"}


class Deep(fg.Module):
    """Small layers with residual connections."""

    layers: list[eqx.nn.Linear]

    def __init__(self, num_layers: int, *, key: Key[Array, ""]) -> None:
        self.layers = [eqx.nn.Linear(32, 32, key=key) for key in jax.random.split(key, num_layers)]

    def __call__(self, x: Vector) -> Vector:
        for layer in self.layers:
            x = x + jnp.tanh(layer(x)) / 8
        return x

    def training_step(self, batch: Float[Array, "batch width"], ctx: fg.Context) -> fg.Output:
        return fg.Output(compute_loss(self, batch))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return OPTIMIZER


def compute_loss(model: Callable[[Vector], Vector], batch: Float[Array, "batch width"]) -> Any:
    return (jax.vmap(model)(batch) ** 2).mean()


class Texts:
    """Keeps the program of each executable as it was traced, and as it was optimized."""

    def __init__(self) -> None:
        self.traced: list[str] = []
        self.texts: list[str] = []

    @fg.hookimpl
    def on_compile(self, compiled: jax.stages.Compiled, jaxpr: ClosedJaxpr) -> None:
        self.traced.append(str(jaxpr))
        text = compiled.as_text()
        assert text is not None
        self.texts.append(text)


def compile_by_hand(model: Deep, batch: Float[np.ndarray, "batch width"]) -> str:
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def step(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return compute_loss(eqx.combine(params, static), batch)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    jitted = jax.jit(step, donate_argnums=(0, 1))
    text = jitted.lower(params, OPTIMIZER.init(params), batch).compile().as_text()
    assert text is not None
    return text


def count_instructions(program: str) -> int:
    """Return how many instructions of an optimized program compute something."""
    # `%name = f32[32]{0} add(%a, %b)`, where the type may be a tuple.
    names = re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = .*?\s([a-z][\w-]*)\(", program, re.MULTILINE)
    return sum(name not in PLUMBING for name in names)


@pytest.mark.optimized
@pytest.mark.parametrize(
    "num_layers",
    [
        pytest.param(100, marks=pytest.mark.slow, id="600 arrays"),
        pytest.param(833, marks=pytest.mark.slow, id="5,000 arrays"),
    ],
)
def test_checks_metrics_and_packing_add_a_tenth_of_the_instructions_at_most(
    num_layers: int,
) -> None:
    model = Deep(num_layers, key=jax.random.key(0))
    batch = np.ones((8, 32), np.float32)
    texts = Texts()

    fg.Engine(steps=1, autoload=False, plugins=[texts]).fit(model, [batch])

    (program,) = texts.texts
    assert count_instructions(program) <= 1.1 * count_instructions(compile_by_hand(model, batch))


def test_no_gradient_of_a_mean_over_all_examples_is_asked_whether_there_are_any() -> None:
    batch = np.ones((8, 32), np.float32)

    def count_selections(num_layers: int) -> int:
        texts = Texts()
        model = Deep(num_layers, key=jax.random.key(0))
        fg.Engine(steps=1, autoload=False, plugins=[texts]).fit(model, [batch])
        (program,) = texts.traced
        # `jnp.where` is a program of its own, which is printed once.
        return len(re.findall("select_n|name=_where", program))

    assert count_selections(2) == count_selections(4)
