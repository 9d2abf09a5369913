# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "equinox",
#     "fulgurite",
#     "fulgurite-checkpoint",
#     "fulgurite-cli",
#     "fulgurite-evaluators",
#     "fulgurite-keys",
#     "fulgurite-logging",
#     "fulgurite-losses",
#     "fulgurite-metrics",
#     "fulgurite-rng",
#     "fulgurite-runs",
#     "jax",
#     "jaxtyping",
#     "numpy",
#     "optax",
#     "scikit-learn",
# ]
#
# [tool.uv.sources]
# fulgurite = { path = "../core", editable = true }
# fulgurite-checkpoint = { path = "../plugins/checkpoint", editable = true }
# fulgurite-cli = { path = "../plugins/cli", editable = true }
# fulgurite-evaluators = { path = "../plugins/evaluators", editable = true }
# fulgurite-keys = { path = "../plugins/keys", editable = true }
# fulgurite-logging = { path = "../plugins/logging", editable = true }
# fulgurite-losses = { path = "../plugins/losses", editable = true }
# fulgurite-metrics = { path = "../plugins/metrics", editable = true }
# fulgurite-rng = { path = "../plugins/rng", editable = true }
# fulgurite-runs = { path = "../plugins/runs", editable = true }
# ///
"""Kauldron's first example on real digits: an autoencoder whose loss, metrics and pictures are
wired by keys. The model knows nothing of them, nor that the output of its encoder is looked at.

uv run examples/autoencoder.py                   # installs what it needs; half a minute
python examples/autoencoder.py --run runs/a      # resumes if run again
"""

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import optax
from fulgurite_checkpoint import Checkpointer
from fulgurite_cli import Experiment, run
from fulgurite_evaluators import Evaluator
from fulgurite_keys import L1, L2, Images, Key, KeyedTask, Losses, Metrics, Summaries, keyed
from fulgurite_logging import JSONLLogger
from fulgurite_metrics import Norm
from jaxtyping import Array, Float, Key as RandomKey
from sklearn.datasets import load_digits

PICTURE = (8, 8, 1)


class Autoencoder(eqx.Module):
    """From 64 pixels to a code, and back. `image` says where its input is."""

    encoder: eqx.nn.Linear
    decoder: eqx.nn.Linear
    image: Key = eqx.field(static=True, default="batch.image")

    def __call__(self, image: Float[Array, "64"]) -> dict[str, Array]:
        return {"image": self.decoder(jax.nn.relu(self.encoder(image)))}


def make_task(*, key: RandomKey[Array, ""]) -> KeyedTask:
    """Return the model with its optimizer."""
    encoder_key, decoder_key = jax.random.split(key)
    model = Autoencoder(
        eqx.nn.Linear(64, 32, key=encoder_key), eqx.nn.Linear(32, 64, key=decoder_key)
    )
    return KeyedTask(model, optimizer=optax.adam(3e-3))


def experiment(steps: int = 300, every: int = 100, seed: int = 42) -> Experiment:
    """Return the experiment.

    Args:
        steps: how many updates.
        every: how often is evaluated, shown and saved.
        seed: of weights and order.
    """
    pixels, _ = load_digits(return_X_y=True)
    images = pixels.astype(np.float32) / 16
    test = fg.ArrayData({"image": images[:360]}, 120)
    losses = Losses(recon=L2("preds.image", "batch.image"))
    plugins = [
        losses.for_evaluators(eval={"absolute": L1("preds.image", "batch.image")}),
        Metrics(
            latent_norm=keyed(Norm.from_vectors, "interms.model.encoder"),
            update_norm=keyed(Norm.from_tree, "updates"),
        ),
        Summaries(
            every=every,
            image=Images("batch.image[:5]", shape=PICTURE),
            recon=Images("preds.image[:5]", shape=PICTURE),
        ),
        Evaluator("eval", test, every=every),
        Checkpointer(every=every),
        JSONLLogger(),
    ]
    return Experiment(
        engine=fg.Engine(steps=steps, seed=seed, log_every=every, plugins=plugins),
        model=make_task,
        data=fg.ArrayData({"image": images[360:]}, 256, shuffle=True, remainder="drop"),
    )


if __name__ == "__main__":
    result = run(experiment)
    final = result.metrics["eval"]
    print(f"reconstruction {final['recon']:.4f}  absolute {final['absolute']:.4f}")
