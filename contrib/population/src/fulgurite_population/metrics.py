"""What a population logs: each member's metrics, and their mean and deviation."""

from typing import Any, Self

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool


class AcrossMembers(fg.metrics.Metric):
    """A metric of every member, merged member by member: the values of each, and their mean and
    standard deviation over the members that are alive.

    One metric for all, because a metric for each member doubled the time of a step of four.

    Attributes:
        stacked: the metric, every array with a leading axis of members.
        is_alive: bool `(members,)`, which members count in mean and deviation.
    """

    stacked: Any
    is_alive: Bool[Array, " members"]

    def merge(self, other: Any) -> Self:
        merged = jax.vmap(lambda mine, its: mine.merge(its))(self.stacked, other.stacked)
        return type(self)(merged, self.is_alive & other.is_alive)

    def empty(self) -> Self:
        empty = jax.vmap(lambda metric: metric.empty())(self.stacked)
        return type(self)(empty, jnp.ones_like(self.is_alive))

    def compute(self) -> dict[str, Any]:
        size = len(self.is_alive)
        results = [take_metric(self.stacked, index).compute() for index in range(size)]
        if isinstance(results[0], dict):
            return {
                name: self._summarize([result[name] for result in results]) for name in results[0]
            }
        return self._summarize(results)

    def _summarize(self, results: list[Any]) -> dict[str, Any]:
        """Return the value of each member, the mean and the deviation, by what follows the name."""
        values = jnp.stack(list(map(jnp.asarray, results)))
        mean = self._average(values)
        deviation = jnp.sqrt(self._average(jnp.square(values - mean)))
        by_index = {f"[{index}]": value for index, value in enumerate(results)}
        return {"": mean, **by_index, "std": deviation}

    def _average(self, values: Array) -> Array:
        is_alive = jnp.asarray(self.is_alive).reshape(-1, *(1,) * (values.ndim - 1))
        total = jnp.sum(jnp.where(is_alive, values, 0), axis=0)
        return total / jnp.sum(jnp.asarray(self.is_alive))


def describe_members(
    outputs: fg.Output, is_alive: Bool[Array, " members"], num_examples: Array
) -> dict[str, Any]:
    """Return the metrics to log: `NAME[2]` of each member, `NAME` and `NAME/std` over the members
    that are alive.

    Args:
        outputs: what the steps of the members returned, stacked.
        is_alive: which members count in mean and deviation.
        num_examples: of the batch, over which a bare scalar is a mean.
    """
    values = dict(outputs.metrics)
    if outputs.loss is not None:
        values.setdefault("loss", outputs.loss)
    entries: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, fg.metrics.RunningMetric | fg.metrics.CollectingMetric):
            parts = [take_metric(value, index) for index in range(len(is_alive))]
            entries |= {f"{name}[{index}]": part for index, part in enumerate(parts)}
        elif isinstance(value, fg.metrics.Metric):
            entries[name] = AcrossMembers(value, is_alive)
        else:
            entries[name] = AcrossMembers(_as_means(value, num_examples), is_alive)
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
