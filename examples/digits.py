# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "equinox",
#     "fulgurite",
#     "fulgurite-checkpoint",
#     "fulgurite-cli",
#     "fulgurite-logging",
#     "fulgurite-progress",
#     "fulgurite-rng",
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
# fulgurite-logging = { path = "../plugins/logging", editable = true }
# fulgurite-progress = { path = "../plugins/progress", editable = true }
# fulgurite-rng = { path = "../plugins/rng", editable = true }
# ///
"""Handwritten digits: a complete program that trains on real data.

uv run examples/digits.py                      # installs what it needs; a few seconds on two cores
python examples/digits.py width=256 lr=3e-4    # the arguments of `experiment`, by name
python examples/digits.py --run runs/a         # saves and logs to runs/a; resumes if run again
"""

from dataclasses import dataclass
from functools import partial

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import optax
from fulgurite_cli import Experiment, run
from jaxtyping import Array, Float, Int, Key

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{error.name} is not installed. Start this example with `uv run examples/digits.py`, "
        "which installs what is listed at its top."
    ) from None

Batch = dict[str, Array]


class Classifier(fg.Module):
    """A perceptron with dropout that defines its own training."""

    net: eqx.nn.MLP
    drop: eqx.nn.Dropout
    lr: float = eqx.field(static=True)

    def __init__(self, width: int, lr: float, *, key: Key[Array, ""]) -> None:
        self.net = eqx.nn.MLP(in_size=64, out_size=10, width_size=width, depth=2, key=key)
        self.drop = eqx.nn.Dropout(0.1)
        self.lr = lr

    def __call__(self, image: Float[Array, "64"], key: Key[Array, ""]) -> Float[Array, "10"]:
        return self.net(self.drop(image, key=key))

    def training_step(self, batch: Batch, ctx: fg.Context) -> fg.Output:
        images, labels = batch["image"], batch["label"]
        logits = jax.vmap(self)(images, ctx.keys("dropout", len(images)))
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return fg.Output(
            loss, metrics={"accuracy": fg.metrics.Accuracy.from_logits(logits, labels)}
        )

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(self.lr)


@dataclass(frozen=True)
class Report:
    """A plugin that prints a line at every log step, and the accuracy on `test` at the end."""

    test: fg.ArrayData

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        # Telemetry is the rest, such as steps per second.
        if record.kind == "scalars" and record.stream == "exact":
            loss, accuracy = record.values["loss"], record.values["accuracy"]
            print(f"step {record.step:5}  loss {loss:.4f}  accuracy {accuracy:.3f}", flush=True)

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run, result: fg.FitResult) -> None:
        print(f"test accuracy {run.engine.evaluate(result, self.test)['accuracy']:.4f}")


def load_arrays() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return 1,437 images to train on and 360 to test.

    `image` is float32 (n, 64) from 0 to 1, `label` is int32 (n,).
    """
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(labels))
    arrays: dict[str, Float[np.ndarray, "n 64"] | Int[np.ndarray, " n"]] = {
        "image": (pixels[order] / 16).astype(np.float32),
        "label": labels[order].astype(np.int32),
    }
    train = {name: array[:-360] for name, array in arrays.items()}
    test = {name: array[-360:] for name, array in arrays.items()}
    return train, test


def experiment(
    width: int = 128,
    lr: float = 1e-3,
    steps: int = 2_000,
    seed: int = 0,
    run_dir: str | None = None,
) -> Experiment:
    """Train a perceptron on scikit-learn's handwritten digits. With a run directory it saves and
    logs there."""
    train, test = load_arrays()
    report = Report(fg.ArrayData(test, batch_size=120))
    plugins = ["rng", report]
    if run_dir is not None:
        plugins += [{"checkpoints": {"every": 200}}, "jsonl", "csv", "environment"]
    engine = fg.Engine(steps=steps, seed=seed, log_every=200, run_dir=run_dir, plugins=plugins)
    return Experiment(
        engine=engine,
        model=partial(Classifier, width, lr),
        data=fg.ArrayData(train, batch_size=64, shuffle=True, remainder="drop"),
    )


if __name__ == "__main__":
    run(experiment)
