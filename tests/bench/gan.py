"""What several optimizers cost, against the alternating loop that one would write by hand.

All arms train the same GAN by the same losses with two Adams, on the same arrays, shuffled and
gathered by NumPy in the timed region, and are compiled before it. None of them reads from the
device before the end, except the engine at its log steps. The noise of a step is the same for both
phases, as in PyTorch's DCGAN tutorial. In one program XLA makes the images from it once; two calls
make them twice.

    b          two jit calls a step, one for the discriminator and one for the generator, over the
               partitioned Equinox trees, donated
    fit        `engine.fit` with MultiOptimizer and the noise: everything checked to be finite,
               losses and gradient norms in the metric window, logged every 50 steps
    fused      the same with steps_per_execution=8

The ratios are `fit` and `fused` over b. Without --model there are two models: `mlp`, perceptrons on
images of 8 × 8, and `conv`, that of examples/gan.py without its penalty.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_optimizers import MultiOptimizer, Phase
from harness import Spread, arguments, interleaved, ratio, show, write

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
gan: Any = import_module("gan")

BATCH, IN_FLIGHT = 64, 4
OPTIMIZER = optax.adam(1e-4)
STEPS = {"mlp": 600, "conv": 60}


class Perceptrons(eqx.Module):
    """A GAN of perceptrons."""

    generator: eqx.nn.MLP
    discriminator: eqx.nn.MLP

    def __init__(self, *, key: Any) -> None:
        first, second = jax.random.split(key)
        self.generator = eqx.nn.MLP(gan.LATENT, 64, 64, 2, key=first)
        self.discriminator = eqx.nn.MLP(64, "scalar", 64, 2, key=second)


class Trained(fg.Module):
    """A GAN with the training contract."""

    generator: Any
    discriminator: Any

    def losses(self, batch: Any, ctx: fg.Context) -> dict[str, Callable[[], Any]]:
        images, z = batch
        return {
            "discriminator": lambda: bce_loss(self.discriminator, self.generator, images, z),
            "generator": lambda: fooled(self.discriminator, self.generator, z),
        }


class Noise:
    """A plugin: puts noise into the batch, once for all phases."""

    @fg.hookimpl
    def transform_batch(self, batch: Any, ctx: fg.Context) -> Any:
        return batch, jax.random.normal(ctx.key(), (len(batch), gan.LATENT))


def bce_loss(discriminator: Any, generator: Any, batch: Any, z: Any) -> jax.Array:
    """The discriminator's loss."""
    judge = jax.vmap(discriminator)
    return (
        jax.nn.softplus(-judge(batch)).mean()
        + jax.nn.softplus(judge(jax.vmap(generator)(z))).mean()
    )


def fooled(discriminator: Any, generator: Any, z: Any) -> jax.Array:
    """The generator's loss."""
    return jax.nn.softplus(-jax.vmap(discriminator)(jax.vmap(generator)(z))).mean()


def models() -> dict[str, tuple[Any, np.ndarray]]:
    """Each model with its images."""
    images = gan.load_images()[0]
    return {
        "mlp": (Perceptrons(key=jax.random.key(0)), images.reshape(-1, 64)),
        "conv": (gan.GAN(16, 0.0, key=jax.random.key(0)), images),
    }


def by_hand(model: Any, images: np.ndarray, steps: int) -> Callable[[], float]:
    """Seconds a step of the loop with two calls."""
    (d, d_static), (g, g_static) = (
        eqx.partition(network, eqx.is_array) for network in (model.discriminator, model.generator)
    )

    @partial(jax.jit, donate_argnums=(0, 1))
    def discriminate(d: Any, state: Any, g: Any, batch: Any, key: Any) -> Any:
        def loss(d: Any) -> jax.Array:
            z = jax.random.normal(key, (len(batch), gan.LATENT))
            return bce_loss(eqx.combine(d, d_static), eqx.combine(g, g_static), batch, z)

        value, grads = jax.value_and_grad(loss)(d)
        updates, state = OPTIMIZER.update(grads, state, d)
        return optax.apply_updates(d, updates), state, value

    @partial(jax.jit, donate_argnums=(0, 1))
    def generate(g: Any, state: Any, d: Any, key: Any) -> Any:
        def loss(g: Any) -> jax.Array:
            z = jax.random.normal(key, (BATCH, gan.LATENT))
            return fooled(eqx.combine(d, d_static), eqx.combine(g, g_static), z)

        value, grads = jax.value_and_grad(loss)(g)
        updates, state = OPTIMIZER.update(grads, state, g)
        return optax.apply_updates(g, updates), state, value

    def train(steps: int) -> float:
        now, then, key = copied(d), copied(g), jax.random.key(0)
        states = OPTIMIZER.init(now), OPTIMIZER.init(then)
        jax.block_until_ready(states)
        in_flight: deque[Any] = deque()
        start = perf_counter()
        for batch in batches(images, steps):
            key, subkey = jax.random.split(key)
            now, disc_state, _ = discriminate(now, states[0], then, batch, subkey)
            then, other, loss = generate(then, states[1], now, subkey)
            states = disc_state, other
            in_flight.append(loss)
            if len(in_flight) == IN_FLIGHT:
                in_flight.popleft().block_until_ready()
        jax.block_until_ready((now, then))
        return (perf_counter() - start) / steps

    train(2)
    return lambda: train(steps)


def by_engine(model: Any, images: np.ndarray, steps: int, fuse: int) -> Callable[[], float]:
    """Seconds a step of `Engine.fit`, with all that it does."""
    phases = MultiOptimizer(
        discriminator=Phase(OPTIMIZER, "discriminator"), generator=Phase(OPTIMIZER, "generator")
    )
    engine = fg.Engine(steps=1, steps_per_execution=fuse, plugins=[phases, Noise()], autoload=False)
    data = fg.ArrayData(images, BATCH, shuffle=True, remainder="drop")
    start = engine.init_state(Trained(model.generator, model.discriminator), data)

    def train(steps: int) -> float:
        state = copied(start)
        before = perf_counter()
        result = engine.fit(data=data, state=state, steps=steps)
        jax.block_until_ready(eqx.filter(result.module, eqx.is_array))
        return (perf_counter() - before) / steps

    train(2 * fuse)
    return lambda: train(steps)


def batches(images: np.ndarray, steps: int) -> Iterator[np.ndarray]:
    """Permuted and gathered as `fg.ArrayData` does it."""
    left = steps
    for epoch in range(10**9):
        order = np.random.Generator(
            np.random.Philox(np.random.SeedSequence([0, epoch]))
        ).permutation(len(images))
        for low in range(0, len(images) - BATCH + 1, BATCH):
            if left == 0:
                return
            left -= 1
            yield images.take(order[low : low + BATCH], 0)


def copied(tree: Any) -> Any:
    """A copy of every array, ready to be donated."""
    return jax.block_until_ready(
        jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, tree)
    )


def main() -> None:
    parser = arguments(__doc__, repeats=21)
    parser.add_argument("--model", choices=STEPS, help="only this one")
    options = parser.parse_args()
    ratios: dict[str, Spread] = {}
    milliseconds: dict[str, Spread] = {}
    for name, (model, images) in models().items():
        if options.model not in (None, name):
            continue
        arms = {"b": by_hand(model, images, STEPS[name])}
        arms |= {
            arm: by_engine(model, images, STEPS[name], fuse)
            for arm, fuse in (("fit", 1), ("fused", 8))
        }
        seconds = interleaved(arms, options.repeats)
        milliseconds |= {
            f"{name}.{arm}": Spread.of([1e3 * value for value in values])
            for arm, values in seconds.items()
        }
        ratios |= {f"{name}.{arm}": ratio(seconds, arm, "b") for arm in ("fit", "fused")}
    show("milliseconds a step", milliseconds)
    show("over the loop by hand", ratios)
    if options.json:
        write(options.json, ratios, milliseconds=milliseconds)


if __name__ == "__main__":
    main()
