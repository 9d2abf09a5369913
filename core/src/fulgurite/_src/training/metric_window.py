"""The open metric window: what the steps since the last log trigger have merged, on the device."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from fulgurite._src.metrics.accumulator import MetricAccumulator
from fulgurite._src.metrics.base import AccumulatedMetric, Metric, Value
from fulgurite._src.metrics.basic import ExponentialMovingAverage, LastValue
from fulgurite._src.metrics.conversion import (
    GetWeight,
    as_loss_metric,
    as_mean,
    as_metrics,
    sum_values,
    to_number,
)
from fulgurite._src.model.output import Output
from fulgurite._src.tree.specs import put_constant
from fulgurite.errors import ModelError


class MetricWindow(eqx.Module):
    """Metrics over the steps between two log triggers.

    Only a log trigger closes a window: the values stay until the next step begins a new one, so
    that they can be read while that step runs, and so that a window that straddles a checkpoint or
    a kill is logged once with the same bits.

    Attributes:
        count: int32, the steps merged.
        closed: bool, whether the next step begins a new window.
        has_steps: bool, whether any step has been taken yet.
        values: the metrics merged over the window, and those carried across windows.
        optional_steps: int32 each, in how many steps of the window those metrics were measured
            that batches of some structures do not have, by name.
    """

    count: Int[Array, ""]
    closed: Bool[Array, ""]
    has_steps: Bool[Array, ""]
    values: MetricAccumulator
    optional_steps: dict[str, Int[Array, ""]]

    @staticmethod
    def zeros(spec: MetricAccumulator, optional: Iterable[str] = ()) -> "MetricWindow":
        """Return a window without steps, as a place for metrics of this structure.

        Args:
            spec: the metrics of a step, or their specs.
            optional: the names of those that not every step has.
        """
        zeros = MetricAccumulator.zeros(spec)
        steps = {name: put_constant(np.int32(0)) for name in optional}
        return MetricWindow(
            count=put_constant(np.int32(0)),
            closed=put_constant(np.bool_(False)),
            has_steps=put_constant(np.bool_(False)),
            values=zeros,
            optional_steps=steps,
        )

    def add(self, step: MetricAccumulator) -> "MetricWindow":
        """Return the window with one more step, or a new one with this step if it was closed.

        Args:
            step: the metrics of the step.
        """
        restart = self.closed | (self.count == 0)
        step_metrics = step.by_name
        optional_steps = {}
        for name, count in self.optional_steps.items():
            is_measured = name in step_metrics
            optional_steps[name] = jnp.where(restart, 0, count) + jnp.int32(is_measured)
        return MetricWindow(
            count=jnp.where(restart, 1, self.count + 1),
            closed=jnp.bool_(False),
            has_steps=jnp.bool_(True),
            values=self.values.update(step, restart, restart_running=~self.has_steps),
            optional_steps=optional_steps,
        )

    def close(self) -> "MetricWindow":
        """Return the same window; the next step begins a new one."""
        return replace(self, closed=jnp.bool_(True))

    def compute(self) -> dict[str, Value]:
        """Return the values by name; on the host."""
        return self.values.compute()

    def read_metrics(self) -> dict[str, AccumulatedMetric]:
        """Return the metrics of the open window themselves, by name, on the host: they can be
        merged with those of other windows. Waits for the device.

        Those that no batch of the window had are left out, and all are where no step was taken
        since it was closed.
        """
        window: MetricWindow = jax.device_get(self)
        if not window.count or window.closed:
            return {}
        unmeasured = {name for name, count in window.optional_steps.items() if not count}
        return {
            name: metric for name, metric in window.values.by_name.items() if name not in unmeasured
        }

    def read(self) -> dict[str, Any]:
        """Return the values of `read_metrics` as Python numbers, by name, as `fit` logs them;
        running ones, such as moving averages, as they are now."""
        accumulator = MetricAccumulator.from_metrics(self.read_metrics())
        # A mean over examples that are all masked is 0 / 0.
        with np.errstate(all="ignore"):
            values = accumulator.compute()
        return {name: to_number(value) for name, value in values.items()}


def collect_step_metrics(
    output: Output, extra: dict[str, Any], get_weight: GetWeight
) -> MetricAccumulator:
    """Return the metrics of a step: its own, those of plugins, every loss term, the batch loss and
    its moving average.

    Args:
        output: what the step returned.
        extra: the metrics of plugins.
        get_weight: returns what a bare number is a mean over.
    """
    get_weight = cache(get_weight)
    values = collect_losses(output, get_weight) | output.metrics
    if output.loss is not None:
        weight = sum_values([*output.loss_weights.values()] or [1])
        average = ExponentialMovingAverage.from_values(output.loss, weight=weight)
        values = {
            "batch_loss": LastValue.from_values(output.loss),
            "loss_average": average,
            **values,
        }
    duplicates = sorted(values.keys() & extra.keys())
    if duplicates:
        raise ModelError(
            f"the step and a plugin both give the metric {duplicates[0]!r}; rename that of the step"
        )
    return MetricAccumulator.from_metrics(as_metrics({**values, **extra}, get_weight))


def collect_losses(output: Output, get_weight: GetWeight) -> dict[str, Metric]:
    """Return the metrics of the loss and of its terms by name.

    Args:
        output: of a forward pass, or of a `train_step` of one's own, which may lack the weights.
        get_weight: returns what a term of unknown weight is a mean over.
    """
    terms = dict(output.losses)
    if output.loss is not None and not terms:
        terms = {"loss": output.loss}
    weights = {
        name: output.loss_weights[name] if name in output.loss_weights else get_weight()
        for name in terms
    }
    metrics: dict[str, Metric] = {
        name: as_mean(name, term, partial(weights.__getitem__, name))
        for name, term in terms.items()
        if name != "loss"
    }
    if output.loss is not None:
        metrics["loss"] = as_loss_metric(output.loss, terms, weights)
    return metrics


def check_unique_names(terms: Iterable[str], metrics: Iterable[str]) -> None:
    """Raise a `ModelError` if a metric has the name of a term of the loss. It may replace the loss.

    Args:
        terms: the names of the terms.
        metrics: the names of what else the step measured.
    """
    duplicates = sorted({*terms} & {*metrics} - {"loss"})
    if duplicates:
        raise ModelError(
            f"{duplicates[0]!r} is both a term of the loss, which is recorded too, and a metric; "
            "rename one"
        )
