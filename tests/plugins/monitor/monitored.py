"""A small model, and what keeps the records of a monitor."""

from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_monitor import Throughput


class Line(fg.Module):
    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.ones((256, 64))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        losses = jnp.mean((batch["x"] @ self.weight) ** 2, axis=1)
        return fg.Output(fg.metrics.Mean.from_values(losses, ctx.mask).compute())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.0)


LINE_FLOPS = 2 * (2 * 8 * 256 * 64)
"""Of a step of `Line` on 8 examples: forward and by the weights."""


class Records:
    """Keep the records of one source."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.records: list[fg.Record] = []

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.source == self.source:
            self.records.append(record)

    @property
    def values(self) -> list[dict[str, Any]]:
        return [record.values for record in self.records if record.kind == "scalars"]


def make_rows(num_examples: int, batch_size: int = 8, **options: Any) -> fg.ArrayData:
    return fg.ArrayData({"x": np.ones((num_examples, 256), np.float32)}, batch_size, **options)


def fit(
    throughput: Throughput, data: Any, steps: int = 6, **settings: Any
) -> tuple[Records, fg.FitResult]:
    throughput.interval = 0
    records = Records("throughput")
    plugins = [throughput, records, *settings.pop("plugins", [])]
    engine = fg.Engine(steps=steps, log_every=2, autoload=False, plugins=plugins, **settings)
    return records, engine.fit(Line, data)
