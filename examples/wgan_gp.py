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
#     "numpy",
#     "optax",
# ]
#
# [tool.uv.sources]
# fulgurite = { path = "../core", editable = true }
# fulgurite-cli = { path = "../plugins/cli", editable = true }
# fulgurite-optimizers = { path = "../plugins/optimizers", editable = true }
# fulgurite-rng = { path = "../plugins/rng", editable = true }
# ///
"""A Wasserstein GAN with gradient penalty on a ring of eight Gaussians: five updates of the critic
to one.

uv run examples/wgan_gp.py              # installs what it needs; about a minute on two cores
python examples/wgan_gp.py critic=1     # what happens with equally many updates of both

The method is that of Gulrajani et al. (2017). At the end it counts how many of the eight modes the
samples are near, and how many samples are near any mode.
"""

from dataclasses import dataclass
from functools import partial

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_cli import Experiment, run
from jaxtyping import Array, Float, Key

try:
    from fulgurite_optimizers import MultiOptimizer, Phase
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{error.name} is not installed. Start this example with `uv run examples/wgan_gp.py`, "
        "which installs what is listed at its top."
    ) from None

Points = Float[Array, "n 2"]
LATENT = 8
SPREAD = 0.05
CENTRES = np.stack([np.cos(np.arange(8) * np.pi / 4), np.sin(np.arange(8) * np.pi / 4)], axis=1)


class WassersteinGAN(fg.Module):
    """Generator and critic, perceptrons, with the losses of a Wasserstein GAN."""

    generator: eqx.nn.MLP
    critic: eqx.nn.MLP
    penalty: float = eqx.field(static=True)

    def __init__(self, width: int, penalty: float, *, key: Key[Array, ""]) -> None:
        first, second = jax.random.split(key)
        self.generator = eqx.nn.MLP(LATENT, 2, width, 3, key=first)
        self.critic = eqx.nn.MLP(2, "scalar", width, 3, key=second)
        self.penalty = penalty

    def losses(self, batch: Points, ctx: fg.Context) -> dict:
        latent_key, eps_key = jax.random.split(ctx.key())
        fake = self.generate(jax.random.normal(latent_key, (len(batch), LATENT)))

        def critic() -> fg.Output:
            wasserstein = jax.vmap(self.critic)(batch).mean() - jax.vmap(self.critic)(fake).mean()
            eps = jax.random.uniform(eps_key, (len(batch), 1))
            grads = jax.vmap(jax.grad(self.critic))(eps * batch + (1 - eps) * fake)
            grad_norm = jnp.sqrt((grads**2).sum(axis=1) + 1e-12)
            loss = self.penalty * ((grad_norm - 1) ** 2).mean() - wasserstein
            return fg.Output(loss, metrics={"distance": wasserstein})

        return {"critic": critic, "generator": lambda: -jax.vmap(self.critic)(fake).mean()}

    def generate(self, z: Float[Array, "n latent"]) -> Points:
        """Return a point for each latent vector."""
        return jax.vmap(self.generator)(z)


@dataclass(frozen=True)
class Report:
    """A plugin that prints a line at every log step, and how good the samples are in the end."""

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind == "scalars" and record.stream == "exact":
            print(
                f"step {record.step:5}  distance {record.values['critic/distance']:.3f}", flush=True
            )

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run, result: fg.FitResult) -> None:
        print(count_modes(result.module))


def count_modes(gan: WassersteinGAN, samples: int = 2_000) -> dict[str, float]:
    """Return `modes`: how many of the eight have at least 3 % of the samples within four standard
    deviations; `high_quality`: the fraction of the samples within that distance of any."""
    points = np.asarray(
        eqx.filter_jit(gan.generate)(jax.random.normal(jax.random.key(1), (samples, LATENT)))
    )
    is_near = np.linalg.norm(points[:, None] - CENTRES, axis=2) < 4 * SPREAD
    return {
        "modes": int((is_near.mean(axis=0) > 0.03).sum()),
        "high_quality": float(is_near.any(axis=1).mean()),
    }


def sample_ring(examples: int = 8_000) -> Float[np.ndarray, "n 2"]:
    """Return points, float32, around eight centres on the unit circle."""
    rng = np.random.default_rng(0)
    return (CENTRES[rng.integers(0, 8, examples)] + SPREAD * rng.normal(size=(examples, 2))).astype(
        np.float32
    )


def experiment(
    width: int = 64,
    lr: float = 1e-3,
    penalty: float = 1.0,
    critic: int = 5,
    steps: int = 4_000,
    seed: int = 0,
) -> Experiment:
    """Train a Wasserstein GAN; each step has `critic` updates of the critic, each with a batch of
    its own."""
    repeat = {"repeat": critic, "split": True} if critic > 1 else {}
    phases = MultiOptimizer(
        critic=Phase(optax.adam(lr, b1=0.5, b2=0.9), "critic", **repeat),
        generator=Phase(optax.adam(lr, b1=0.5, b2=0.9), "generator"),
    )
    return Experiment(
        engine=fg.Engine(steps=steps, seed=seed, log_every=500, plugins=["rng", phases, Report()]),
        model=partial(WassersteinGAN, width, penalty),
        data=fg.ArrayData(sample_ring(), batch_size=64 * critic, shuffle=True, remainder="drop"),
    )


if __name__ == "__main__":
    run(experiment)
