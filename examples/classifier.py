# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "equinox",
#     "fulgurite",
#     "fulgurite-averaging",
#     "fulgurite-checkpoint",
#     "fulgurite-cli",
#     "fulgurite-config",
#     "fulgurite-evaluators",
#     "fulgurite-logging",
#     "fulgurite-optimizers",
#     "fulgurite-precision",
#     "fulgurite-rng",
#     "fulgurite-stopping",
#     "jax",
#     "optax",
#     "scikit-learn",
# ]
#
# [tool.uv.sources]
# fulgurite = { path = "../core", editable = true }
# fulgurite-averaging = { path = "../plugins/averaging", editable = true }
# fulgurite-checkpoint = { path = "../plugins/checkpoint", editable = true }
# fulgurite-cli = { path = "../plugins/cli", editable = true }
# fulgurite-config = { path = "../plugins/config", editable = true }
# fulgurite-evaluators = { path = "../plugins/evaluators", editable = true }
# fulgurite-logging = { path = "../plugins/logging", editable = true }
# fulgurite-optimizers = { path = "../plugins/optimizers", editable = true }
# fulgurite-precision = { path = "../plugins/precision", editable = true }
# fulgurite-rng = { path = "../plugins/rng", editable = true }
# fulgurite-stopping = { path = "../plugins/stopping", editable = true }
# ///
"""The everyday kit as a configuration: BatchNorm, dropout, bfloat16, early stopping, an average.

uv run examples/classifier.py --run runs/a       # installs what it needs; resumes if run again
python examples/classifier.py '**.half_life=50' --print     # each value and where it comes from
cd examples; fulgurite evaluate --run ../runs/a --step best
"""

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import optax
from fulgurite_averaging import EMA, Average
from fulgurite_checkpoint import Checkpointer
from fulgurite_cli import run
from fulgurite_config import L
from fulgurite_evaluators import Evaluator
from fulgurite_logging import JSONLLogger, LearningRateMonitor
from fulgurite_optimizers import GradientClip
from fulgurite_precision import Precision
from fulgurite_stopping import EarlyStopping
from sklearn.datasets import load_digits


class Classifier(fg.Module):
    first: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    second: eqx.nn.Conv2d
    drop: eqx.nn.Dropout
    last: eqx.nn.Linear
    optimizer: optax.GradientTransformation

    def __init__(self, optimizer: optax.GradientTransformation, *, key):
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.Conv2d(1, 16, 3, padding=1, key=keys[0])
        self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="ema")
        self.second = eqx.nn.Conv2d(16, 16, 3, stride=2, padding=1, key=keys[1])
        self.drop = eqx.nn.Dropout(0.2)
        self.last = eqx.nn.Linear(16 * 4 * 4, 10, key=keys[2])
        self.optimizer = optimizer

    def __call__(self, image, key, state):
        hidden, state = self.norm(self.first(image), state)
        hidden = jax.nn.relu(self.second(jax.nn.relu(hidden)))
        return self.last(self.drop(hidden.reshape(-1), key=key)), state

    def training_step(self, batch, ctx):
        apply = jax.vmap(self, axis_name="batch", in_axes=(0, 0, None), out_axes=(0, None))
        keys = ctx.keys("dropout", len(batch["label"]))
        logits, state = apply(batch["image"], keys, ctx.model_state)
        logits = logits.astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        accuracy = fg.metrics.Accuracy.from_logits(logits, batch["label"])
        return fg.Output(losses.mean(), metrics={"accuracy": accuracy}, model_state=state)

    def configure_optimizers(self):
        return self.optimizer


def make_images(first: int, last: int) -> dict:
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype("float32").reshape(-1, 1, 8, 8)
    return {"image": images[first:last], "label": labels[first:last].astype("int32")}


def make_model(optimizer: optax.GradientTransformation, *, key):
    return eqx.nn.make_with_state(Classifier)(optimizer, key=key)


def experiment():
    cfg = L(steps=1000, every=50, rate=3e-3)
    steps, every = cfg.ref.steps, cfg.ref.every
    cfg.schedule = L(optax.warmup_cosine_decay_schedule, 0.0, cfg.ref.rate, steps // 10, steps)
    cfg.optimizer = L(optax.adamw, cfg.ref.schedule)
    test = L(fg.ArrayData, L(make_images, 1400, 1700), 100)
    plugins = [
        L(Precision, "bf16"), L(GradientClip, max_norm=1.0),
        L(Average, L(EMA, half_life=20, warmup=True)), "rng",
        L(Evaluator, "test", test, every=every, module_view="averaged"),
        L(EarlyStopping, "test/loss", patience=5, min_delta=1e-3),
        L(Checkpointer, every=every, monitor="test/loss"), L(JSONLLogger), L(LearningRateMonitor),
    ]  # fmt: skip
    cfg.engine = L(fg.Engine, steps=steps, log_every=every, plugins=plugins)
    cfg.model = L.partial(make_model, cfg.ref.optimizer)
    cfg.data = L(fg.ArrayData, L(make_images, 0, 1400), 50, shuffle=True)
    return cfg


if __name__ == "__main__":
    run(experiment)
