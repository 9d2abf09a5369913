"""A convolutional GAN that draws handwritten digits, with two optimizers in one step.

python examples/gan.py                 # about a minute on two cores; pictures of samples go to the
folder `samples` python examples/gan.py steps=500       # a first impression

A classifier trained on the real digits judges the samples: how sure it is of its answers, how many
of the ten classes it finds, and how far the samples are from the real digits, by the Fréchet
distance of its features.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_cli import Experiment, run
from fulgurite_optimizers import MultiOptimizer, Phase
from jaxtyping import Array, Float, Int, Key
from sklearn.datasets import load_digits

Images = Float[Array, "n 1 8 8"]
LATENT = 32


class Generator(eqx.Module):
    """From a latent vector to an image of 8 × 8 pixels, black at -1 and white at 1."""

    enter: eqx.nn.Linear
    first: eqx.nn.Conv2d
    second: eqx.nn.Conv2d
    leave: eqx.nn.Conv2d

    def __init__(self, width: int, *, key: Key[Array, ""]) -> None:
        keys = jax.random.split(key, 4)
        self.enter = eqx.nn.Linear(LATENT, 2 * width * 4, key=keys[0])
        self.first = eqx.nn.Conv2d(2 * width, 2 * width, 3, padding=1, key=keys[1])
        self.second = eqx.nn.Conv2d(2 * width, width, 3, padding=1, key=keys[2])
        self.leave = eqx.nn.Conv2d(width, 1, 3, padding=1, key=keys[3])

    def __call__(self, z: Float[Array, "latent"]) -> Float[Array, "1 8 8"]:
        x = jax.nn.leaky_relu(self.enter(z), 0.2).reshape(-1, 2, 2)
        x = jax.nn.leaky_relu(self.first(doubled(x)), 0.2)
        x = jax.nn.leaky_relu(self.second(doubled(x)), 0.2)
        return self.leave(x)


class Discriminator(eqx.Module):
    """From an image to a number, positive for real ones."""

    first: eqx.nn.Conv2d
    second: eqx.nn.Conv2d
    leave: eqx.nn.Linear

    def __init__(self, width: int, *, key: Key[Array, ""]) -> None:
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.Conv2d(1, width, 4, stride=2, padding=1, key=keys[0])
        self.second = eqx.nn.Conv2d(width, 2 * width, 4, stride=2, padding=1, key=keys[1])
        self.leave = eqx.nn.Linear(2 * width * 4, "scalar", key=keys[2])

    def __call__(self, image: Float[Array, "1 8 8"]) -> Float[Array, ""]:
        x = jax.nn.leaky_relu(self.first(image), 0.2)
        x = jax.nn.leaky_relu(self.second(x), 0.2)
        return self.leave(x.reshape(-1))


class GAN(fg.Module):
    """Generator and discriminator with the non-saturating losses of Goodfellow et al. (2014).

    The losses are functions, so that each phase computes only its own, with random keys of its own.
    """

    generator: Generator
    discriminator: Discriminator
    penalty: float = eqx.field(static=True)

    def __init__(self, width: int, penalty: float, *, key: Key[Array, ""]) -> None:
        first, second = jax.random.split(key)
        self.generator = Generator(width, key=first)
        self.discriminator = Discriminator(width, key=second)
        self.penalty = penalty

    def losses(self, batch: Images, ctx: fg.Context) -> dict:
        fake = self.drawn(jax.random.normal(ctx.key(), (len(batch), LATENT)))

        def discriminator() -> Float[Array, ""]:
            on_real, slopes = jax.vmap(jax.value_and_grad(self.discriminator))(batch)
            told_apart = (
                jax.nn.softplus(-on_real).mean()
                + jax.nn.softplus(jax.vmap(self.discriminator)(fake)).mean()
            )
            # Slopes at real images keep the game from going round in circles (Mescheder et al.,
            # 2018).
            return told_apart + self.penalty / 2 * (slopes**2).sum(axis=(1, 2, 3)).mean()

        def generator() -> Float[Array, ""]:
            return jax.nn.softplus(-jax.vmap(self.discriminator)(fake)).mean()

        return {"discriminator": discriminator, "generator": generator}

    def drawn(self, z: Float[Array, "n latent"]) -> Images:
        """An image for each latent vector."""
        return jax.vmap(self.generator)(z)


@dataclass(frozen=True)
class Samples:
    """A plugin: writes a picture of the same samples at regular intervals."""

    folder: Path
    every: int

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("draw", fg.Every(self.every) | fg.AtEnd(), self.draw)]

    def draw(self, run: fg.Run) -> None:
        from matplotlib.image import imsave

        images = np.pad(
            drawn(run.state.module, 80, seed=0)[:, 0], ((0, 0), (1, 1), (1, 1)), constant_values=-1
        )
        rows = images.reshape(8, 10, 10, 10).transpose(0, 2, 1, 3).reshape(80, 100)
        self.folder.mkdir(parents=True, exist_ok=True)
        imsave(
            self.folder / f"step-{run.step}.png",
            np.kron(rows, np.ones((6, 6))),
            cmap="gray",
            vmin=-1,
            vmax=1,
        )


@dataclass(frozen=True)
class Report:
    """A plugin: prints a line at every log step, and how good the samples are in the end."""

    @fg.hookimpl
    def log_scalars(self, record: fg.Record) -> None:
        if record.stream == "exact":
            losses = {
                name: f"{record.values[f'{name}/loss']:.3f}"
                for name in ("discriminator", "generator")
            }
            print(f"step {record.step:5}  {losses}", flush=True)

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run, result: fg.FitResult) -> None:
        print({name: round(value, 4) for name, value in judged(result.module).items()})


class Judge(fg.Module):
    """A classifier of digits; `features` are what its last layer sees."""

    hidden: eqx.nn.MLP
    leave: eqx.nn.Linear

    def __init__(self, *, key: Key[Array, ""]) -> None:
        first, second = jax.random.split(key)
        self.hidden = eqx.nn.MLP(64, 32, 128, 1, final_activation=jax.nn.relu, key=first)
        self.leave = eqx.nn.Linear(32, 10, key=second)

    def features(self, images: Images) -> Float[Array, "n 32"]:
        return jax.vmap(self.hidden)(images.reshape(len(images), 64))

    def training_step(self, batch: dict[str, Array], ctx: fg.Context) -> fg.Output:
        logits = jax.vmap(self.leave)(self.features(batch["image"]))
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return fg.Output(
            loss.mean(),
            metrics={"accuracy": fg.metrics.Accuracy.from_logits(logits, batch["label"])},
        )

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-3)


def judged(gan: GAN, samples: int = 2_000) -> dict[str, float]:
    """How a classifier of the real digits judges samples.

    `classes`: how many classes it finds in more than a hundredth of them; `confidence`: the mean
    probability of the class that it chooses; `distance`: the Fréchet distance of its features
    (Heusel et al., 2017) between samples and real digits; `relative`: that distance divided by that
    of an untrained generator.
    """
    images, labels = digits()
    data = fg.ArrayData(
        {"image": images, "label": labels}, batch_size=64, shuffle=True, remainder="drop"
    )
    judge = fg.Engine(steps=1_500, autoload=False, log_every=None).fit(Judge, data).module
    fake = drawn(gan, samples, seed=1)
    probabilities = jax.nn.softmax(jax.vmap(judge.leave)(judge.features(fake)))
    untrained = drawn(
        GAN(gan.discriminator.first.out_channels, 0, key=jax.random.key(1)), samples, seed=1
    )
    real = judge.features(jnp.asarray(images))
    distance, before = (frechet(judge.features(one), real) for one in (fake, untrained))
    return {
        "classes": int((np.bincount(np.argmax(probabilities, axis=1)) > samples / 100).sum()),
        "confidence": float(jnp.max(probabilities, axis=1).mean()),
        "distance": distance,
        "relative": distance / before,
    }


def frechet(a: Float[Array, "n d"], b: Float[Array, "m d"]) -> float:
    """|μa - μb|² + tr(Σa + Σb - 2 (Σa Σb)^½)."""
    features = [np.asarray(one, np.float64) for one in (a, b)]
    both = [np.cov(one, rowvar=False) for one in features]
    means = [one.mean(axis=0) for one in features]
    # The trace of the root, by eigenvalues: features that never fire make the matrices singular.
    root = np.sqrt(np.maximum(np.linalg.eigvals(both[0] @ both[1]).real, 0)).sum()
    apart = ((means[0] - means[1]) ** 2).sum()
    return float(apart + np.trace(both[0] + both[1]) - 2 * root)


def drawn(gan: GAN, samples: int, seed: int) -> Images:
    """`samples` images, black at -1 and white at 1."""
    z = jax.random.normal(jax.random.key(seed), (samples, LATENT))
    return eqx.filter_jit(GAN.drawn)(gan, z)


def doubled(x: Float[Array, "c h w"]) -> Float[Array, "c 2*h 2*w"]:
    """Every pixel four times."""
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


def digits() -> tuple[Float[np.ndarray, "n 1 8 8"], Int[np.ndarray, " n"]]:
    """1,797 images, float32 (n, 1, 8, 8) from -1 to 1, and their labels, int32 (n,)."""
    pixels, labels = load_digits(return_X_y=True)
    return (pixels / 8 - 1).astype(np.float32).reshape(-1, 1, 8, 8), labels.astype(np.int32)


def experiment(
    width: int = 16,
    lr: float = 1e-3,
    penalty: float = 1.0,
    steps: int = 3_000,
    seed: int = 0,
    folder: str = "samples",
    every: int = 1_000,
) -> Experiment:
    """Trains a GAN on scikit-learn's handwritten digits."""
    phases = MultiOptimizer(
        discriminator=Phase(optax.adam(lr, b1=0.0, b2=0.99), "discriminator"),
        generator=Phase(optax.adam(lr, b1=0.0, b2=0.99), "generator"),
    )
    plugins = ["rng", phases, Samples(Path(folder), every), Report()]
    return Experiment(
        engine=fg.Engine(steps=steps, seed=seed, log_every=200, plugins=plugins),
        model=partial(GAN, width, penalty),
        data=fg.ArrayData(digits()[0], batch_size=64, shuffle=True, remainder="drop"),
    )


if __name__ == "__main__":
    run(experiment)
