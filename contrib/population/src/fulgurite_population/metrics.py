"""What a population logs: each member's metrics, and their mean and deviation."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.metrics import CollectingMetric, Metric, RunningMetric, sort_by_kind
from jaxtyping import Array, Bool, Float, PyTree, Shaped


@dataclass(frozen=True)
class _Structure:
    """How a metric is put together again.

    Attributes:
        treedef: of the metric.
        is_number: whether each of its leaves is one float32 number of each member.
    """

    treedef: Any
    is_number: tuple[bool, ...]


class AcrossMembers(Metric):
    """A metric of every member, merged member by member: the values of each, and their mean and
    standard deviation over the members that are alive.

    One metric for all, because a metric for each member doubled the time of a step of four; and its
    numbers in one array, because XLA on CPU runs a kernel for each that goes into the metric
    window: a step of four small members takes 1.84 of the time of one, and 1.97 with one each.

    Attributes:
        numbers: `(numbers, members)`, those fields of the metric that are float32 numbers, and at
            last whether each member counts in mean and deviation: 2 for one that does, 1 for one
            that measured nothing yet, 0 for one that is frozen.
        others: the other fields of the metric, with a leading axis of members.
        structure: of the metric.
    """

    numbers: Float[Array, "numbers members"]
    others: list[Shaped[Array, "members ..."]]
    structure: _Structure = eqx.field(static=True)

    @staticmethod
    def from_stacked(stacked: Any, standing: Float[Array, " members"]) -> "AcrossMembers":
        """Return the metric of all members.

        Args:
            stacked: the metric, every array with a leading axis of members.
            standing: whether each member counts in mean and deviation, as the last of `numbers`.
        """
        leaves, treedef = jax.tree.flatten(stacked)
        leaves = list(map(jnp.asarray, leaves))
        is_number = tuple(leaf.ndim == 1 and leaf.dtype == jnp.float32 for leaf in leaves)
        rows = [leaf for leaf, is_row in zip(leaves, is_number, strict=True) if is_row]
        others = [leaf for leaf, is_row in zip(leaves, is_number, strict=True) if not is_row]
        rows.append(standing)
        return AcrossMembers(stack_rows(rows), others, _Structure(treedef, is_number))

    def unstack(self) -> tuple[Any, Any]:
        """Return the metric, every array with a leading axis of members, and whether each member
        counts, as the last of `numbers`."""
        rows = iter([self.numbers[index] for index in range(len(self.numbers))])
        others = iter(self.others)
        is_number = self.structure.is_number
        leaves = [next(rows) if is_row else next(others) for is_row in is_number]
        return self.structure.treedef.unflatten(leaves), next(rows)

    def merge(self, other: Any) -> "AcrossMembers":
        mine, my_standing = self.unstack()
        its, its_standing = other.unstack()
        merged = jax.vmap(lambda metric, other: metric.merge(other))(mine, its)
        is_frozen = my_standing * its_standing == 0
        standing = jnp.where(is_frozen, 0, jnp.maximum(my_standing, its_standing))
        return AcrossMembers.from_stacked(merged, standing)

    def empty(self) -> "AcrossMembers":
        stacked, standing = self.unstack()
        return AcrossMembers.from_stacked(_make_empty(stacked), jnp.ones_like(standing))

    def compute(self) -> dict[str, Any]:
        stacked, standing = self.unstack()
        is_counted = standing > 1
        results = [take_metric(stacked, index).compute() for index in range(len(standing))]
        if isinstance(results[0], dict):
            return {
                name: _summarize([result[name] for result in results], is_counted)
                for name in results[0]
            }
        return _summarize(results, is_counted)


class LastMeasured(RunningMetric):
    """A running metric of one member, which steps that the member leaves out do not change.

    Attributes:
        value: of the metric.
        metric: the metric.
        is_measured: whether a step has measured it.
    """

    metric: Any
    is_measured: Bool[Array, ""]

    def update(self, new: Any) -> "LastMeasured":
        updated = self.metric.update(new.metric)
        updated = jax.tree.map(partial(jnp.where, self.is_measured), updated, new.metric)
        metric = jax.tree.map(partial(jnp.where, new.is_measured), updated, self.metric)
        return LastMeasured(metric.value, metric, self.is_measured | new.is_measured)

    def empty(self) -> "LastMeasured":
        return LastMeasured(jnp.zeros_like(self.value), self.metric.empty(), jnp.bool_(False))

    def compute(self) -> Any:
        return self.metric.compute()


def _summarize(results: list[Any], is_counted: Any) -> dict[str, Any]:
    """Return the value of each member, the mean and the deviation, by what follows the name.

    Args:
        results: of the members.
        is_counted: which of them count in mean and deviation.
    """
    values = jnp.stack(list(map(jnp.asarray, results)))
    mean = _average(values, is_counted)
    deviation = jnp.sqrt(_average(jnp.square(values - mean), is_counted))
    by_index = {f"[{index}]": value for index, value in enumerate(results)}
    return {"": mean, **by_index, "std": deviation}


def _average(values: Array, is_counted: Any) -> Array:
    """Return the mean of the values, `(members, ...)`, of those members that count."""
    is_counted = jnp.asarray(is_counted).reshape(-1, *(1,) * (values.ndim - 1))
    total = jnp.sum(jnp.where(is_counted, values, 0), axis=0)
    return total / jnp.sum(is_counted, dtype=total.dtype)


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
    metrics: dict[str, Any],
    is_alive: Bool[Array, " members"],
    is_measured: Bool[Array, " members"] | None = None,
) -> dict[str, Any]:
    """Return the metrics to log: `NAME[2]` of each member, `NAME` and `NAME/std` over the members
    that are alive.

    Args:
        metrics: those of the members by name, stacked; the loss and its terms are among them.
        is_alive: which members count in mean and deviation.
        is_measured: which members have measured anything; None for all. Others leave the step out.
    """
    standing = 2 * is_alive.astype(jnp.float32)
    if is_measured is not None:
        standing = jnp.where(is_alive & ~is_measured, 1, standing)
    _, running, collected = sort_by_kind(metrics, Metric, RunningMetric, CollectingMetric)
    entries: dict[str, Any] = {}
    for name, metric in metrics.items():
        if name in running or name in collected:
            parts = [take_metric(metric, index) for index in range(len(is_alive))]
            if is_measured is not None and name in running:
                parts = [
                    LastMeasured(part.value, part, is_measured[index])
                    for index, part in enumerate(parts)
                ]
            entries |= {f"{name}[{index}]": part for index, part in enumerate(parts)}
            continue
        if is_measured is not None:
            metric = select_members(is_measured, metric, _make_empty(metric))
        entries[name] = AcrossMembers.from_stacked(metric, standing)
    return entries


def _make_empty(stacked: Any) -> Any:
    """Return the metric of each member over no examples."""
    return jax.vmap(lambda metric: metric.empty())(stacked)


def take_metric(metric: Any, index: int) -> Any:
    """Return one member's metric.

    Args:
        metric: every array has a leading axis of members.
        index: of the member.
    """
    return jax.tree.map(
        lambda leaf: leaf[index] if eqx.is_array_like(leaf) and jnp.ndim(leaf) else leaf, metric
    )


def select_members(is_chosen: Bool[Array, " members"], after: PyTree, before: PyTree) -> PyTree:
    """Return `after` for some members, `before` for the others.

    Args:
        is_chosen: for which members.
        after: every array has a leading axis of members.
        before: a tree of the same structure.
    """

    def choose(new: Any, old: Any) -> Any:
        if not eqx.is_array(new):
            return new
        if jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
            return jax.vmap(jnp.where)(is_chosen, new, old)
        return jnp.where(is_chosen.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, after, before)
