"""What a population logs: each member's metrics, and their mean and deviation."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped


@dataclass(frozen=True)
class _Structure:
    """How a metric is put together again.

    Attributes:
        treedef: of the metric.
        is_number: whether each of its leaves is one float32 number of each member.
    """

    treedef: Any
    is_number: tuple[bool, ...]


class AcrossMembers(fg.metrics.Metric):
    """A metric of every member, merged member by member: the values of each, and their mean and
    standard deviation over the members that are alive.

    One metric for all, because a metric for each member doubled the time of a step of four; and its
    numbers in one array, because XLA on CPU runs a kernel for each that goes into the metric
    window: a step of four small members takes 1.84 of the time of one, and 1.97 with one each.

    Attributes:
        numbers: `(numbers, members)`, those fields of the metric that are float32 numbers, and at
            last 1 for each member that counts in mean and deviation and 0 for the others.
        others: the other fields of the metric, with a leading axis of members.
        structure: of the metric.
    """

    numbers: Float[Array, "numbers members"]
    others: list[Shaped[Array, "members ..."]]
    structure: _Structure = eqx.field(static=True)

    @staticmethod
    def from_stacked(stacked: Any, is_alive: Bool[Array, " members"]) -> "AcrossMembers":
        """Return the metric of all members.

        Args:
            stacked: the metric, every array with a leading axis of members.
            is_alive: which members count in mean and deviation.
        """
        leaves, treedef = jax.tree.flatten(stacked)
        leaves = list(map(jnp.asarray, leaves))
        is_number = tuple(leaf.ndim == 1 and leaf.dtype == jnp.float32 for leaf in leaves)
        rows = [leaf for leaf, is_row in zip(leaves, is_number, strict=True) if is_row]
        others = [leaf for leaf, is_row in zip(leaves, is_number, strict=True) if not is_row]
        rows.append(is_alive.astype(jnp.float32))
        return AcrossMembers(stack_rows(rows), others, _Structure(treedef, is_number))

    def unstack(self) -> tuple[Any, Any]:
        """Return the metric, every array with a leading axis of members, and which members are
        alive."""
        rows = iter([self.numbers[index] for index in range(len(self.numbers))])
        others = iter(self.others)
        is_number = self.structure.is_number
        leaves = [next(rows) if is_row else next(others) for is_row in is_number]
        return self.structure.treedef.unflatten(leaves), next(rows) > 0

    def merge(self, other: Any) -> "AcrossMembers":
        mine, is_mine_alive = self.unstack()
        its, is_its_alive = other.unstack()
        merged = jax.vmap(lambda metric, other: metric.merge(other))(mine, its)
        return AcrossMembers.from_stacked(merged, is_mine_alive & is_its_alive)

    def empty(self) -> "AcrossMembers":
        stacked, is_alive = self.unstack()
        empty = jax.vmap(lambda metric: metric.empty())(stacked)
        return AcrossMembers.from_stacked(empty, jnp.ones_like(is_alive))

    def compute(self) -> dict[str, Any]:
        stacked, is_alive = self.unstack()
        results = [take_metric(stacked, index).compute() for index in range(len(is_alive))]
        if isinstance(results[0], dict):
            return {
                name: _summarize([result[name] for result in results], is_alive)
                for name in results[0]
            }
        return _summarize(results, is_alive)


def _summarize(results: list[Any], is_alive: Any) -> dict[str, Any]:
    """Return the value of each member, the mean and the deviation, by what follows the name.

    Args:
        results: of the members.
        is_alive: which of them count in mean and deviation.
    """
    values = jnp.stack(list(map(jnp.asarray, results)))
    mean = _average(values, is_alive)
    deviation = jnp.sqrt(_average(jnp.square(values - mean), is_alive))
    by_index = {f"[{index}]": value for index, value in enumerate(results)}
    return {"": mean, **by_index, "std": deviation}


def _average(values: Array, is_alive: Any) -> Array:
    """Return the mean of the values, `(members, ...)`, of those members that are alive."""
    is_alive = jnp.asarray(is_alive).reshape(-1, *(1,) * (values.ndim - 1))
    total = jnp.sum(jnp.where(is_alive, values, 0), axis=0)
    return total / jnp.sum(is_alive)


def stack_rows(rows: list[Float[Array, " members"]]) -> Float[Array, "rows members"]:
    """Return a matrix of rows; traced.

    Each is laid over those before, which is one kernel of XLA on CPU; a concatenation is one for
    each row.
    """
    shape = (len(rows), rows[0].size)
    stacked = jnp.broadcast_to(rows[0], shape)
    for index, row in enumerate(rows[1:], start=1):
        # A mask in the program: a comparison would be a kernel of its own.
        mask = np.zeros(shape, bool)
        mask[index] = True
        stacked = jnp.where(mask, row, stacked)
    return stacked


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
            entries[name] = AcrossMembers.from_stacked(value, is_alive)
        else:
            entries[name] = AcrossMembers.from_stacked(_as_means(value, num_examples), is_alive)
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
