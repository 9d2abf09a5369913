# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "equinox",
#     "fulgurite",
#     "fulgurite-cli",
#     "fulgurite-optimizers",
#     "fulgurite-rng",
#     "jax",
#     "jaxtyping",
#     "matplotlib",
#     "numpy",
#     "optax",
#     "scikit-learn",
# ]
#
# [tool.uv.sources]
# fulgurite = { path = "../core", editable = true }
# fulgurite-cli = { path = "../plugins/cli", editable = true }
# fulgurite-optimizers = { path = "../plugins/optimizers", editable = true }
# fulgurite-rng = { path = "../plugins/rng", editable = true }
# ///
"""A convolutional GAN that draws handwritten digits, with two optimizers in one step.

uv run examples/gan.py                 # installs what it needs; pictures go to `samples`
python examples/gan.py steps=500       # a first impression; the whole takes a minute on two cores

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
from jaxtyping import Array, Float, Int, Key

try:
    from fulgurite_optimizers import MultiOptimizer, Phase
    from matplotlib.image import imsave
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{error.name} is not installed. Start this example with `uv run examples/gan.py`, "
        "which installs what is listed at its top."
    ) from None

Images = Float[Array, "n 1 8 8"]
LATENT = 32


class Generator(eqx.Module):
    """From a latent vector to an image of 8 × 8 pixels, black at -1 and white at 1."""

    fc: eqx.nn.Linear
    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    conv_out: eqx.nn.Conv2d

    def __init__(self, width: int, *, key: Key[Array, ""]) -> None:
        keys = jax.random.split(key, 4)
        self.fc = eqx.nn.Linear(LATENT, 2 * width * 4, key=keys[0])
        self.conv1 = eqx.nn.Conv2d(2 * width, 2 * width, 3, padding=1, key=keys[1])
        self.conv2 = eqx.nn.Conv2d(2 * width, width, 3, padding=1, key=keys[2])
        self.conv_out = eqx.nn.Conv2d(width, 1, 3, padding=1, key=keys[3])

    def __call__(self, z: Float[Array, "latent"]) -> Float[Array, "1 8 8"]:
        x = jax.nn.leaky_relu(self.fc(z), 0.2).reshape(-1, 2, 2)
        x = jax.nn.leaky_relu(self.conv1(upsample2x(x)), 0.2)
        x = jax.nn.leaky_relu(self.conv2(upsample2x(x)), 0.2)
        return self.conv_out(x)


class Discriminator(eqx.Module):
    """From an image to a number, positive for real ones."""

    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    fc: eqx.nn.Linear

    def __init__(self, width: int, *, key: Key[Array, ""]) -> None:
        keys = jax.random.split(key, 3)
        self.conv1 = eqx.nn.Conv2d(1, width, 4, stride=2, padding=1, key=keys[0])
        self.conv2 = eqx.nn.Conv2d(width, 2 * width, 4, stride=2, padding=1, key=keys[1])
        self.fc = eqx.nn.Linear(2 * width * 4, "scalar", key=keys[2])

    def __call__(self, image: Float[Array, "1 8 8"]) -> Float[Array, ""]:
        x = jax.nn.leaky_relu(self.conv1(image), 0.2)
        x = jax.nn.leaky_relu(self.conv2(x), 0.2)
        return self.fc(x.reshape(-1))


class GAN(fg.Module):
    """Generator and discriminator with the non-saturating losses of Goodfellow et al. (2014).

    The losses are functions, so that each phase computes only its own, with random keys of its own.
    """

    generator: Generator
    discriminator: Discriminator
    penalty: float = eqx.field(static=True)

    def __init__(self, width: int, penalty: float, *, key: Key[Array, ""]) -> None:
        key1, key2 = jax.random.split(key)
        self.generator = Generator(width, key=key1)
        self.discriminator = Discriminator(width, key=key2)
        self.penalty = penalty

    def losses(self, batch: Images, ctx: fg.Context) -> dict:
        fake = self.generate(jax.random.normal(ctx.key(), (len(batch), LATENT)))

        def discriminator() -> Float[Array, ""]:
            real_logits, grad_real = jax.vmap(jax.value_and_grad(self.discriminator))(batch)
            bce_loss = (
                jax.nn.softplus(-real_logits).mean()
                + jax.nn.softplus(jax.vmap(self.discriminator)(fake)).mean()
            )
            # The gradient penalty at real images keeps the game from going round in circles
            # (Mescheder et al., 2018).
            return bce_loss + self.penalty / 2 * (grad_real**2).sum(axis=(1, 2, 3)).mean()

        def generator() -> Float[Array, ""]:
            return jax.nn.softplus(-jax.vmap(self.discriminator)(fake)).mean()

        return {"discriminator": discriminator, "generator": generator}

    def generate(self, z: Float[Array, "n latent"]) -> Images:
        """Return an image for each latent vector."""
        return jax.vmap(self.generator)(z)


@dataclass(frozen=True)
class TextSamples:
    """A plugin that writes a picture of the same samples at regular intervals."""

    folder: Path
    every: int

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("draw", fg.Every(self.every) | fg.AtEnd(), self.draw)]

    def draw(self, run: fg.Run) -> None:
        images = np.pad(
            draw_samples(run.state.module, 80, seed=0)[:, 0],
            ((0, 0), (1, 1), (1, 1)),
            constant_values=-1,
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
    """A plugin that prints a line at every log step, and how good the samples are in the end."""

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind == "scalars" and record.stream == "exact":
            losses = {
                name: f"{record.values[f'{name}/loss']:.3f}"
                for name in ("discriminator", "generator")
            }
            print(f"step {record.step:5}  {losses}", flush=True)

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run, result: fg.FitResult) -> None:
        print({name: round(value, 4) for name, value in evaluate_samples(result.module).items()})


class FeatureExtractor(fg.Module):
    """A classifier of digits; `features` are the inputs of its last layer."""

    hidden: eqx.nn.MLP
    fc: eqx.nn.Linear

    def __init__(self, *, key: Key[Array, ""]) -> None:
        key1, key2 = jax.random.split(key)
        self.hidden = eqx.nn.MLP(64, 32, 128, 1, final_activation=jax.nn.relu, key=key1)
        self.fc = eqx.nn.Linear(32, 10, key=key2)

    def features(self, images: Images) -> Float[Array, "n 32"]:
        return jax.vmap(self.hidden)(images.reshape(len(images), 64))

    def training_step(self, batch: dict[str, Array], ctx: fg.Context) -> fg.Output:
        logits = jax.vmap(self.fc)(self.features(batch["image"]))
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return fg.Output(
            loss.mean(),
            metrics={"accuracy": fg.metrics.Accuracy.from_logits(logits, batch["label"])},
        )

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-3)


def evaluate_samples(gan: GAN, samples: int = 2_000) -> dict[str, float]:
    """Return how a classifier of the real digits rates samples.

    `classes`: how many classes it finds in more than a hundredth of them; `confidence`: the mean
    probability of the class that it chooses; `distance`: the Fréchet distance of its features
    (Heusel et al., 2017) between samples and real digits; `relative`: that distance divided by that
    of an untrained generator.
    """
    images, labels = load_images()
    data = fg.ArrayData(
        {"image": images, "label": labels}, batch_size=64, shuffle=True, remainder="drop"
    )
    extractor = (
        fg.Engine(steps=1_500, autoload=False, log_every=None).fit(FeatureExtractor, data).module
    )
    fake = draw_samples(gan, samples, seed=1)
    probabilities = jax.nn.softmax(jax.vmap(extractor.fc)(extractor.features(fake)))
    untrained = draw_samples(
        GAN(gan.discriminator.conv1.out_channels, 0, key=jax.random.key(1)), samples, seed=1
    )
    real = extractor.features(jnp.asarray(images))
    distance = compute_frechet_distance(extractor.features(fake), real)
    untrained_distance = compute_frechet_distance(extractor.features(untrained), real)
    return {
        "classes": int((np.bincount(np.argmax(probabilities, axis=1)) > samples / 100).sum()),
        "confidence": float(jnp.max(probabilities, axis=1).mean()),
        "distance": distance,
        "relative": distance / untrained_distance,
    }


def compute_frechet_distance(a: Float[Array, "n d"], b: Float[Array, "m d"]) -> float:
    """Return |μa - μb|² + tr(Σa + Σb - 2 (Σa Σb)^½)."""
    features = [np.asarray(samples, np.float64) for samples in (a, b)]
    covs = [np.cov(samples, rowvar=False) for samples in features]
    means = [samples.mean(axis=0) for samples in features]
    # The trace of the root, by eigenvalues: features that never fire make the matrices singular.
    root = np.sqrt(np.maximum(np.linalg.eigvals(covs[0] @ covs[1]).real, 0)).sum()
    mean_distance = ((means[0] - means[1]) ** 2).sum()
    return float(mean_distance + np.trace(covs[0] + covs[1]) - 2 * root)


def draw_samples(gan: GAN, samples: int, seed: int) -> Images:
    """Return `samples` images, black at -1 and white at 1."""
    z = jax.random.normal(jax.random.key(seed), (samples, LATENT))
    return eqx.filter_jit(GAN.generate)(gan, z)


def upsample2x(x: Float[Array, "c h w"]) -> Float[Array, "c 2*h 2*w"]:
    """Return an image of twice the height and width, every pixel four times."""
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


def load_images() -> tuple[Float[np.ndarray, "n 1 8 8"], Int[np.ndarray, " n"]]:
    """Return 1,797 images, float32 (n, 1, 8, 8) from -1 to 1, and their labels, int32 (n,)."""
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
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
    """Train a GAN on scikit-learn's handwritten digits."""
    phases = MultiOptimizer(
        discriminator=Phase(optax.adam(lr, b1=0.0, b2=0.99), "discriminator"),
        generator=Phase(optax.adam(lr, b1=0.0, b2=0.99), "generator"),
    )
    plugins = ["rng", phases, TextSamples(Path(folder), every), Report()]
    return Experiment(
        engine=fg.Engine(steps=steps, seed=seed, log_every=200, plugins=plugins),
        model=partial(GAN, width, penalty),
        data=fg.ArrayData(load_images()[0], batch_size=64, shuffle=True, remainder="drop"),
    )


if __name__ == "__main__":
    run(experiment)
