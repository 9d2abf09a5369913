"""A program whose runs are exported, for tests of the command."""

from typing import Any

import fulgurite as fg
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_averaging import EMA, Average
from fulgurite_checkpoint import Checkpointer
from fulgurite_cli import Experiment

TOKENS = np.arange(40, dtype=np.int32).reshape(8, 5)


class Shift(fg.Module):
    """Adds its weight, which grows by 1 with each update."""

    weight: Any

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(-self.weight)

    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        return batch["tokens"] + self.weight

    def double(self, batch: Any) -> Any:
        return 2 * self.predict_step(batch, None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


def experiment(steps: int = 4) -> Experiment:
    engine = fg.Engine(
        steps=steps,
        plugins=[Checkpointer(every=2, max_to_keep=None), Average(EMA(0.5))],
        autoload=False,
    )
    data = fg.ArrayData({"tokens": TOKENS, "label": TOKENS[:, 0]}, 4)
    return Experiment(engine, Shift, data)
