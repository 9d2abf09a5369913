"""Trains three models with a loss and a metric on inner layers, and writes what they became. Started
by `test_keyed_programs.py`.

    python keyed_programs.py by-keys DIRECTORY [KILL_AT_STEP]
    python keyed_programs.py by-hand DIRECTORY

The models are a game of two networks, attention blocks under scan sharded over eight devices, and
one with BatchNorm. Those by hand know nothing of fulgurite. With KILL_AT_STEP the run of the blocks is
killed when it comes to that step for the first time.
"""

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_checkpoint import Checkpointer
from fulgurite_keys import L1, L2, KeyedTask, Losses, Metrics, keyed
from fulgurite_logging import JSONLLogger
from fulgurite_metrics import Norm
from fulgurite_optimizers import MultiOptimizer, Phase
from fulgurite_sharding import FSDP

STEPS = 12
BATCH_SIZE = 8
WIDTH = 8
OPTIMIZER = optax.adam(3e-3)


def make_inputs() -> np.ndarray:
    """Return four batches of sequences, `(32, 4, 8)` float32."""
    return np.random.default_rng(0).normal(size=(32, 4, WIDTH)).astype(np.float32)


class Players(eqx.Module):
    """A game of two small networks."""

    generator: eqx.nn.MLP
    discriminator: eqx.nn.MLP

    def __init__(self, *, key: Any) -> None:
        first, second = jax.random.split(key)
        self.generator = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 1, key=first)
        self.discriminator = eqx.nn.MLP(WIDTH, "scalar", WIDTH, 1, key=second)

    def compute_losses(self, x: jax.Array) -> dict[str, jax.Array]:
        """Return the losses of a batch `(batch, positions, width)`, by player."""
        examples = x[:, 0]
        fake = jax.vmap(self.discriminator)(jax.vmap(self.generator)(examples))
        real = jax.vmap(self.discriminator)(examples)
        return {
            "discriminator": jax.nn.softplus(fake).mean() + jax.nn.softplus(-real).mean(),
            "generator": jax.nn.softplus(-fake).mean(),
        }


class Game(fg.Module):
    players: Players

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(losses=self.players.compute_losses(batch["x"]))


class Block(eqx.Module):
    """Attention and a layer, each added to its input."""

    attention: eqx.nn.MultiheadAttention
    linear: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        first, second = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=first)
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=second)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the outputs of the block and of its layer, `(positions, width)` each."""
        x = x + self.attention(x, x, x)
        linear = jax.vmap(self.linear)(x)
        return x + jax.nn.relu(linear), linear


class Transformer(eqx.Module):
    """Three blocks whose parameters are stacked, under scan and remat."""

    blocks: Block
    head: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        first, second = jax.random.split(key)
        self.blocks = eqx.filter_vmap(lambda key: Block(key=key))(jax.random.split(first, 3))
        self.head = eqx.nn.Linear(WIDTH, WIDTH, key=second)

    def apply(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the outputs `(positions, width)`, and those of each block's layer `(3, positions,
        width)`."""
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def apply_block(carry: jax.Array, arrays: Any) -> Any:
            return eqx.combine(arrays, static)(carry)

        outputs, linear = jax.lax.scan(apply_block, x, arrays)
        return jax.vmap(self.head)(outputs), linear

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.apply(x)[0]


class Normed(eqx.Module):
    """A layer and its normalization."""

    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, *, key: Any) -> None:
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.norm = eqx.nn.BatchNorm(WIDTH, "batch", mode="batch")

    def apply(self, x: jax.Array, state: eqx.nn.State) -> Any:
        """Return the output, that of the layer, and the new state."""
        linear = self.linear(x[0])
        output, state = self.norm(linear, state)
        return output, linear, state

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> Any:
        output, _, state = self.apply(x, state)
        return output, state


def make_game_by_keys() -> tuple[Any, list[Any]]:
    phases: Any = {
        name: Phase(OPTIMIZER, f"players.{name}") for name in ("discriminator", "generator")
    }
    layer = "interms.players.generator.layers[0]"
    sparse: Any = {"generator/sparse": L1(layer, weight=0.1)}
    metrics = Metrics(hidden=keyed(Norm.from_vectors, layer))
    return Game(Players(key=jax.random.key(0))), [
        MultiOptimizer(**phases),
        Losses(**sparse),
        metrics,
    ]


def make_transformer_by_keys() -> tuple[Any, list[Any]]:
    task = KeyedTask(Transformer(key=jax.random.key(0)), {"x": "batch.x"}, optimizer=OPTIMIZER)
    layer = "interms.model.blocks.linear[1]"
    losses = Losses(fit=L2("preds", "batch.x"), sparse=L1(layer, weight=0.1))
    return task, [losses, Metrics(hidden=keyed(Norm.from_vectors, layer)), FSDP(min_size=1)]


def make_normed_by_keys() -> tuple[Any, list[Any]]:
    model, model_state = eqx.nn.make_with_state(Normed)(key=jax.random.key(0))
    task = KeyedTask(model, {"x": "batch.x"}, optimizer=OPTIMIZER)
    layer = "interms.model.linear"
    losses = Losses(fit=L2("preds", "batch.x[:,1]"), sparse=L1(layer, weight=0.1))
    return (task, model_state), [losses, Metrics(hidden=keyed(Norm.from_vectors, layer))]


BY_KEYS = {
    "game": make_game_by_keys,
    "transformer": make_transformer_by_keys,
    "normed": make_normed_by_keys,
}


@dataclass(frozen=True)
class Killer:
    """Kills its own process at a step, once.

    Attributes:
        step: at which.
        marker: a file that says that it has.
    """

    step: int
    marker: Path

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("kill", fg.At(self.step), self.kill)]

    def kill(self, run: fg.Run) -> None:
        if not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train_by_keys(name: str, directory: Path, kill_at_step: int | None) -> tuple[Any, float]:
    """Return the model that was trained and the metric of its layer in the last step."""
    model, plugins = BY_KEYS[name]()
    plugins += [Checkpointer(4), JSONLLogger()]
    if kill_at_step is not None and name == "transformer":
        plugins.append(Killer(kill_at_step, directory / f"{name}.killed"))
    engine = fg.Engine(
        steps=STEPS, log_every=1, run_dir=directory / name, plugins=plugins, autoload=False
    )
    result = engine.fit(model, fg.ArrayData({"x": make_inputs()}, BATCH_SIZE), resume="auto")
    module: Any = result.module
    trained = module.players if name == "game" else module.model
    return trained, float(result.metrics["train"]["metrics/hidden"])


def compute_norm(hidden: jax.Array) -> jax.Array:
    return jnp.linalg.norm(hidden, axis=-1).mean()


def update(model: Any, grads: Any, opt_state: Any) -> tuple[Any, Any]:
    """Return a model and the state of its optimizer after a step."""
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state


def step_game(players: Players, carry: Any, x: jax.Array) -> Any:
    hidden = jax.vmap(players.generator.layers[0])(x[:, 0])

    def compute_discriminator_loss(discriminator: Any) -> jax.Array:
        both = eqx.tree_at(lambda players: players.discriminator, players, discriminator)
        return both.compute_losses(x)["discriminator"]

    grads = eqx.filter_grad(compute_discriminator_loss)(players.discriminator)
    discriminator, first = update(players.discriminator, grads, carry[0])
    players = eqx.tree_at(lambda players: players.discriminator, players, discriminator)

    def compute_generator_loss(generator: Any) -> jax.Array:
        both = eqx.tree_at(lambda players: players.generator, players, generator)
        sparse = jnp.abs(jax.vmap(generator.layers[0])(x[:, 0])).mean()
        return both.compute_losses(x)["generator"] + 0.1 * sparse

    grads = eqx.filter_grad(compute_generator_loss)(players.generator)
    generator, second = update(players.generator, grads, carry[1])
    players = eqx.tree_at(lambda players: players.generator, players, generator)
    return players, (first, second), compute_norm(hidden)


def step_transformer(model: Transformer, opt_state: Any, x: jax.Array) -> Any:
    def compute_loss(model: Transformer) -> Any:
        preds, linear = jax.vmap(model.apply)(x)
        hidden = linear[:, 1]
        return jnp.mean((preds - x) ** 2) + 0.1 * jnp.abs(hidden).mean(), hidden

    grads, hidden = eqx.filter_grad(compute_loss, has_aux=True)(model)
    return *update(model, grads, opt_state), compute_norm(hidden)


def step_normed(model: Normed, carry: Any, x: jax.Array) -> Any:
    opt_state, model_state = carry

    def compute_loss(model: Normed) -> Any:
        preds, hidden, new_state = jax.vmap(
            model.apply, axis_name="batch", in_axes=(0, None), out_axes=(0, 0, None)
        )(x, model_state)
        loss = jnp.mean((preds - x[:, 1]) ** 2) + 0.1 * jnp.abs(hidden).mean()
        return loss, (hidden, new_state)

    grads, (hidden, new_state) = eqx.filter_grad(compute_loss, has_aux=True)(model)
    model, opt_state = update(model, grads, opt_state)
    return model, (opt_state, new_state), compute_norm(hidden)


def init_optimizer(model: Any) -> Any:
    return OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))


def train_by_hand(name: str) -> tuple[Any, float]:
    """Return the model that was trained and the norm of its layer in the last step."""
    if name == "game":
        model: Any = Players(key=jax.random.key(0))
        carry: Any = (init_optimizer(model.discriminator), init_optimizer(model.generator))
        step: Any = step_game
    elif name == "transformer":
        model = Transformer(key=jax.random.key(0))
        carry = init_optimizer(model)
        step = step_transformer
    else:
        model, model_state = eqx.nn.make_with_state(Normed)(key=jax.random.key(0))
        carry = (init_optimizer(model), model_state)
        step = step_normed
    batches = np.split(make_inputs(), 4)
    norm = 0.0
    for index in range(STEPS):
        model, carry, norm = eqx.filter_jit(step)(model, carry, batches[index % 4])
    return model, float(norm)


def main(how: str, directory: Path, kill_at_step: int | None = None) -> None:
    for name in BY_KEYS:
        if how == "by-keys":
            model, norm = train_by_keys(name, directory, kill_at_step)
        else:
            model, norm = train_by_hand(name)
        arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))
        np.savez(directory / f"{name}.npz", norm, *arrays)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
