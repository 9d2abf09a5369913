"""The bits of a run do not depend on how many steps go into a dispatch, nor on where one is split:
`engine.step` in a loop, `fit` as it chooses, single steps, and odd splits."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite_optimizers import GradientAccumulation, MultiOptimizer, Phase

pytestmark = pytest.mark.full

STEPS = 24


class Perceptron(fg.Module):
    """Softmax regression through two hidden layers, with dropout."""

    mlp: eqx.nn.MLP

    def __init__(self, *, key: Any) -> None:
        self.mlp = eqx.nn.MLP(8, 3, 32, 2, key=key)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        mask = jax.random.bernoulli(ctx.key(), 0.9, batch["x"].shape)
        logits = jax.vmap(self.mlp)(batch["x"] * mask)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        accuracy = fg.metrics.Accuracy.from_logits(logits, batch["label"])
        return fg.Output(losses.mean(), metrics={"accuracy": accuracy})

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


class Transformer(fg.Module):
    """One block of attention over eight positions."""

    embed: eqx.nn.Linear
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    leave: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Linear(1, 16, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(2, 16, key=keys[1])
        self.norm = eqx.nn.LayerNorm(16)
        self.leave = eqx.nn.Linear(16, 3, key=keys[2])

    def __call__(self, x: Any) -> Any:
        hidden = jax.vmap(self.embed)(x[:, None])
        normed = jax.vmap(self.norm)(hidden)
        hidden = hidden + self.attention(normed, normed, normed)
        return self.leave(jax.nn.gelu(hidden).mean(0))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        logits = jax.vmap(self)(batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return fg.Output(losses.mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


class Adversaries(fg.Module):
    """Generator and discriminator, each with an optimizer of its own."""

    generator: eqx.nn.MLP
    discriminator: eqx.nn.MLP

    def __init__(self, *, key: Any) -> None:
        first, second = jax.random.split(key)
        self.generator = eqx.nn.MLP(4, 8, 16, 2, key=first)
        self.discriminator = eqx.nn.MLP(8, "scalar", 16, 2, key=second)

    def losses(self, batch: Any, ctx: fg.Context) -> dict[str, Any]:
        noise = jax.random.normal(ctx.key(), (len(batch["x"]), 4))

        def judge(images: Any) -> Any:
            return jax.vmap(self.discriminator)(images)

        def discriminator() -> Any:
            fake = jax.vmap(self.generator)(noise)
            return jnp.mean(jax.nn.softplus(-judge(batch["x"])) + jax.nn.softplus(judge(fake)))

        def generator() -> Any:
            return jnp.mean(jax.nn.softplus(-judge(jax.vmap(self.generator)(noise))))

        return {"discriminator": discriminator, "generator": generator}


def make_phases() -> MultiOptimizer:
    return MultiOptimizer(
        discriminator=Phase(optax.adam(1e-3), "discriminator", repeat=2),
        generator=Phase(optax.adam(1e-3), "generator"),
    )


KINDS: dict[str, tuple[Callable[..., fg.Module], Callable[[], list[Any]]]] = {
    "perceptron": (Perceptron, list),
    "accumulation": (Perceptron, lambda: [GradientAccumulation(4)]),
    "accumulation over steps": (Perceptron, lambda: [GradientAccumulation(3, "steps")]),
    "transformer": (Transformer, list),
    "gan": (Adversaries, lambda: [make_phases()]),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("gan", marks=pytest.mark.slow),
        "perceptron",
        pytest.param("accumulation", marks=pytest.mark.slow),
        pytest.param("accumulation over steps", marks=pytest.mark.slow),
        pytest.param("transformer", marks=pytest.mark.slow),
    ],
)
def test_bits_do_not_depend_on_dispatches(kind: str) -> None:
    model, make_plugins = KINDS[kind]
    data = make_data()

    def fit(**settings: Any) -> tuple[fg.TrainState, str]:
        engine = make_engine(make_plugins(), **settings)
        return engine.fit(model, data).state, engine.explain()

    chosen, explanation = fit()
    assert explanation.startswith("steps_per_execution: 16")
    others = {
        "single steps": fit(steps_per_execution=1)[0],
        "five": fit(steps_per_execution=5)[0],
        "split at the window": fit(log_every=7)[0],
        "step": run_steps(make_engine(make_plugins()), model, data),
    }
    expected = get_bits(chosen)
    assert {name: get_bits(state) == expected for name, state in others.items()} == dict.fromkeys(
        others, True
    )


def make_engine(plugins: list[Any], **settings: Any) -> fg.Engine:
    return fg.Engine(**{"steps": STEPS, "autoload": False, "plugins": plugins} | settings)


def run_steps(engine: fg.Engine, model: Any, data: Any) -> fg.TrainState:
    """Return the state after a loop of `engine.step`."""
    state = engine.init_state(model, data)
    for batch in engine.iter_batches(data):
        state, _ = engine.step(state, batch)
    return state


def make_data() -> fg.ArrayData:
    generator = np.random.default_rng(0)
    arrays = {
        "x": generator.normal(size=(200, 8)).astype(np.float32),
        "label": generator.integers(0, 3, 200).astype(np.int32),
    }
    return fg.ArrayData(arrays, 8, shuffle=True)


def get_bits(state: fg.TrainState) -> list[bytes]:
    """Return the bytes of everything that is trained."""
    trained = (state.module, state.opt_state, state.plugin_states)
    return [
        np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(eqx.filter(trained, eqx.is_array))
    ]
