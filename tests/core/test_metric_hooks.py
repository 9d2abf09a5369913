"""Metrics of plugins: of steps and of evaluations."""

from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ModelError
from hook_plugins import engine, plugin
from models import Counting, numbers


@pytest.mark.hook("step_metrics")
def test_step_metrics_are_prefixed_with_the_name_of_the_plugin() -> None:
    """The gradient is 1 before the plugins, 3 as the optimizer gets it, and the learning rate 1."""
    scale = plugin("scale", gradient_transform=lambda self: optax.scale(3.0))

    def step_metrics(
        self: Any, output: fg.Output, grads: Any, updates: Any, ctx: fg.Context
    ) -> dict[str, Any]:
        return {
            "gradient": grads.weight,
            "update": fg.metrics.Min.from_values(updates.weight),
            "step": fg.metrics.LastValue.from_values(ctx.step),
            "loss": fg.metrics.Sum.from_values(jnp.asarray(output.loss)),
        }

    result = engine(scale, plugin("norms", step_metrics=step_metrics), steps=4, log_every=2).fit(
        Counting(), numbers([0])
    )
    assert result.history["train/norms/gradient"].tolist() == [3, 3]
    assert result.history["train/norms/update"].tolist() == [-3, -3]
    assert result.history["train/norms/step"].tolist() == [1, 3]
    assert result.history["train/norms/loss"].tolist() == [0 - 3, -6 - 9]


def test_step_metrics_see_the_batch_of_the_step() -> None:
    double = plugin("double", transform_batch=lambda self, batch: 2 * batch)
    mean = plugin("mean", step_metrics=lambda self, batch: {"batch": jnp.mean(batch)})
    result = engine(double, mean, steps=2, log_every=1).fit(Counting(), numbers([3], [4]))
    assert result.history["train/mean/batch"].tolist() == [6, 8]


class Share(fg.metrics.Metric):
    """With a number of Python's among its fields, as whoever counts examples writes it."""

    hits: jax.Array
    count: Any

    def merge(self, other: Any) -> Any:
        return type(self)(self.hits + other.hits, self.count + other.count)

    def compute(self) -> Any:
        return self.hits / self.count


class Lost(Share):
    def merge(self, other: Any) -> Any:
        return self.hits + other.hits


class Worded(Share):
    def compute(self) -> Any:
        return "many"


@pytest.mark.full
def test_metric_may_hold_python_numbers_and_a_broken_one_is_an_error() -> None:
    def fit(metric: Any) -> fg.FitResult:
        shares = plugin("shares", step_metrics=lambda self: {"hits": metric})
        return fg.Engine(plugins=[shares], steps=3, log_every=3, autoload=False).fit(
            Counting(), numbers([0])
        )

    assert fit(Share(jnp.float32(1), 4)).metrics["train"]["shares/hits"] == 0.25
    with pytest.raises(
        ModelError, match="metric 'shares/hits' became .* when merged: it must stay Lost as it was"
    ):
        fit(Lost(jnp.float32(1), 4))
    with pytest.raises(
        ModelError, match="metric 'shares/hits' computed 'many': compute gives a number"
    ):
        fit(Worded(jnp.float32(1), 4))
    with pytest.raises(
        ModelError, match="metric 'shares/hits' holds 'four': the fields of a metric are arrays"
    ):
        fit(Share(jnp.float32(1), "four"))


@pytest.mark.hook("evaluation_metrics")
def test_plugins_measure_evaluations() -> None:
    """The mean over the examples of both batches, (1 + 2 + 6) / 3."""

    def evaluation_metrics(self: Any, batch: Any, ctx: fg.Context) -> dict[str, Any]:
        return {"mean": fg.metrics.Mean.from_values(batch, ctx.mask)}

    run = engine(plugin("batches", evaluation_metrics=evaluation_metrics), steps=1)
    data = [np.array([1.0, 2.0], np.float32), np.array([6.0], np.float32)]
    assert run.evaluate(Counting(), data) == {"updates": 0, "batches/mean": 3}
