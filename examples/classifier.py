# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "equinox",
#     "fulgurite",
#     "fulgurite-averaging",
#     "fulgurite-checkpoint",
#     "fulgurite-cli",
#     "fulgurite-evaluators",
#     "fulgurite-logging",
#     "fulgurite-optimizers",
#     "fulgurite-precision",
#     "fulgurite-rng",
#     "fulgurite-stopping",
#     "jax",
#     "numpy",
#     "optax",
#     "scikit-learn",
# ]
#
# [tool.uv.sources]
# fulgurite = { path = "../core", editable = true }
# fulgurite-averaging = { path = "../plugins/averaging", editable = true }
# fulgurite-checkpoint = { path = "../plugins/checkpoint", editable = true }
# fulgurite-cli = { path = "../plugins/cli", editable = true }
# fulgurite-evaluators = { path = "../plugins/evaluators", editable = true }
# fulgurite-logging = { path = "../plugins/logging", editable = true }
# fulgurite-optimizers = { path = "../plugins/optimizers", editable = true }
# fulgurite-precision = { path = "../plugins/precision", editable = true }
# fulgurite-rng = { path = "../plugins/rng", editable = true }
# fulgurite-stopping = { path = "../plugins/stopping", editable = true }
# ///
"""The everyday kit: a convolutional network with BatchNorm and dropout, trained in bfloat16 with
early stopping, clipping, a cosine schedule with warm-up, and an average whose best is reloaded.

uv run examples/classifier.py                    # installs what it needs; half a minute
python examples/classifier.py --run runs/a       # resumes if run again
"""

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_averaging import EMA, Average
from fulgurite_checkpoint import Checkpointer
from fulgurite_cli import Experiment, run
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
    steps: int = eqx.field(static=True)

    def __init__(self, steps: int, *, key):
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.Conv2d(1, 16, 3, padding=1, key=keys[0])
        self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="ema")
        self.second = eqx.nn.Conv2d(16, 16, 3, stride=2, padding=1, key=keys[1])
        self.drop = eqx.nn.Dropout(0.2)
        self.last = eqx.nn.Linear(16 * 4 * 4, 10, key=keys[2])
        self.steps = steps

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
        warmup = self.steps // 10
        return optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup, self.steps))


def report(run):
    """Print the accuracy of the average at its best checkpoint."""
    path = run.run_dir.path
    state = run.engine.load_weights(run.state, fg.CheckpointRef(path, step="best"))
    best = run.engine.apply_module_view(state, "averaged")
    accuracy = run.engine.evaluate(best, run.engine.evaluators["test"].data)["accuracy"]
    print(f"stopped at step {run.step}, best at step {int(best.step)}: accuracy {accuracy:.4f}")


def experiment(steps: int = 1000, every: int = 50) -> Experiment:
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    arrays = {"image": images, "label": labels.astype(np.int32)}
    train = fg.ArrayData({k: v[:1400] for k, v in arrays.items()}, 50, shuffle=True)
    test = fg.ArrayData({k: v[1400:1700] for k, v in arrays.items()}, 100)
    plugins = [
        Precision("bf16"), GradientClip(max_norm=1.0), Average(EMA(half_life=20, warmup=True)),
        Evaluator("test", test, every=every, module_view="averaged"),
        EarlyStopping("test/loss", patience=5, min_delta=1e-3),
        Checkpointer(every=every, monitor="test/loss"), JSONLLogger(), LearningRateMonitor(), "rng",
        fg.LambdaPlugin(on_fit_end=report),
    ]  # fmt: skip
    engine = fg.Engine(steps=steps, log_every=every, run_dir="runs/classifier", plugins=plugins)
    model = eqx.nn.make_with_state(Classifier)
    return Experiment(engine, lambda key: model(steps, key=key), train)


if __name__ == "__main__":
    run(experiment)
