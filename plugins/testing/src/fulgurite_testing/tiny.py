"""A model, data and an engine that compile in a moment."""

from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_runs import RunPlugin

STEPS = 8


class TinyModel(fg.Module):
    """A linear classifier of four numbers into three classes, with noise on its inputs, a metric,
    and momentum.

    Example:
        from fulgurite_testing import TinyModel

        model = TinyModel(key=jax.random.key(0))
    """

    linear: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        self.linear = eqx.nn.Linear(4, 3, key=key)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        """Return the cross entropy."""
        noise = 0.1 * jax.random.normal(ctx.key(), batch["x"].shape)
        logits = jax.vmap(self.linear)(batch["x"] + noise)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        accuracy = fg.metrics.Accuracy.from_logits(logits, batch["label"], ctx.mask)
        return fg.Output(
            jnp.mean(losses, where=ctx.mask), metrics={"accuracy": accuracy}, preds=logits
        )

    def configure_optimizers(self) -> optax.GradientTransformation:
        """Return gradient descent whose learning rate can be read."""
        return optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)


def tiny_data() -> fg.ArrayData:
    """Return five batches of four examples an epoch, shuffled: `x` float32 (batch, 4) and `label`
    int32 (batch,)."""
    x = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    return fg.ArrayData(
        {"x": x, "label": (x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0)}, 4, shuffle=True
    )


def tiny_engine(*plugins: Any, **settings: Any) -> fg.Engine:
    """Return an engine for 8 single steps that logs every second one; nothing is autoloaded.

    Args:
        plugins: of the engine. With a `run_dir`, one that opens it is added.
        settings: of the engine, instead of its own.
    """
    if settings.get("run_dir") is not None:
        plugins = (*plugins, RunPlugin())
    defaults = {"steps": STEPS, "steps_per_execution": 1, "log_every": 2, "autoload": False}
    return fg.Engine(plugins=plugins, **{**defaults, **settings})
