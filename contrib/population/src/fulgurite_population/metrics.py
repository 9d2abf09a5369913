"""What a population logs: each member's metrics, and their mean and deviation."""

from typing import Any, Self

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool


class AcrossMembers(fg.metrics.Metric):
    """A metric of every member, merged member by member.

    Attributes:
        stacked: the metric, every array with a leading axis of members.
        is_alive: bool `(members,)`, which members count.
    """

    stacked: Any
    is_alive: Bool[Array, " members"]

    def merge(self, other: Any) -> Self:
        merged = jax.vmap(lambda mine, its: mine.merge(its))(self.stacked, other.stacked)
        return type(self)(merged, self.is_alive & other.is_alive)

    def empty(self) -> Self:
        empty = jax.vmap(lambda metric: metric.empty())(self.stacked)
        return type(self)(empty, jnp.ones_like(self.is_alive))

    def compute(self) -> Any:
        size = len(self.is_alive)
        results = [take_metric(self.stacked, index).compute() for index in range(size)]
        return jax.tree.map(lambda *values: self.summarize(jnp.stack(values)), *results)

    def summarize(self, values: Array) -> Array:
        """Return one number, or array, for the values of all members.

        Args:
            values: `(members, ...)`.
        """
        raise NotImplementedError

    def _average(self, values: Array) -> Array:
        is_alive = jnp.asarray(self.is_alive).reshape(-1, *(1,) * (values.ndim - 1))
        total = jnp.sum(jnp.where(is_alive, values, 0), axis=0)
        return total / jnp.sum(jnp.asarray(self.is_alive))


class MeanOfMembers(AcrossMembers):
    """The mean of a metric over the members that are alive; NaN without any."""

    def summarize(self, values: Array) -> Array:
        return self._average(values)


class StdOfMembers(AcrossMembers):
    """The population standard deviation of a metric over the members that are alive; NaN without
    any."""

    def summarize(self, values: Array) -> Array:
        mean = self._average(values)
        return jnp.sqrt(self._average(jnp.square(values - mean)))


def describe_members(
    outputs: fg.Output, is_alive: Bool[Array, " members"], num_examples: Array
) -> dict[str, Any]:
    """Return the metrics to log: `NAME[2]` of each member, `NAME` and `NAME/std` over the members
    that are alive. `loss` itself is left to the engine, which has it as the step's loss.

    Args:
        outputs: what the steps of the members returned, stacked.
        is_alive: which members count in mean and deviation.
        num_examples: of the batch, over which a bare scalar is a mean.
    """
    entries = {}
    values = dict(outputs.metrics)
    if outputs.loss is not None:
        values.setdefault("loss", outputs.loss)
    for name, value in values.items():
        entries |= {f"{name}[{index}]": take_metric(value, index) for index in range(len(is_alive))}
        if isinstance(value, fg.metrics.RunningMetric | fg.metrics.CollectingMetric):
            continue
        metric = value if isinstance(value, fg.metrics.Metric) else _as_means(value, num_examples)
        if name != "loss":
            entries[name] = MeanOfMembers(metric, is_alive)
        entries[f"{name}/std"] = StdOfMembers(metric, is_alive)
    return entries


def take_metric(metric: Any, index: int) -> Any:
    """Return one member's metric.

    Args:
        metric: every array has a leading axis of members.
        index: of the member.
    """
    return jax.tree.map(
        lambda leaf: leaf[index] if eqx.is_array_like(leaf) and jnp.ndim(leaf) else leaf, metric
    )


def _as_means(values: Array, num_examples: Array) -> Any:
    return jax.vmap(lambda value: fg.metrics.Mean.from_values(value, weight=num_examples))(values)
