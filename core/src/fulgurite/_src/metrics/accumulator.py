"""Metrics by name, and the one place where they are merged."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from fulgurite._src.metrics.base import (
    AccumulatedMetric,
    CollectingMetric,
    Value,
    flatten_nested,
    sort_by_kind,
)
from fulgurite._src.tree.specs import put_constant
from fulgurite._src.tree.vectors import join_scalars, split_into_scalars, stack_scalars
from fulgurite.errors import ModelError, error_context

MIN_GROUP = 4
"""Metrics of single numbers that are merged as one vector from that many of a kind on."""


class MetricAccumulator(eqx.Module):
    """Metrics by name, merged over steps or batches: what the window of a training run, an
    evaluation and microbatches accumulate.

    Every merge of metrics goes through here, so that all of them treat a metric alike. Two things
    are elsewhere: a `CollectingMetric` is put together on the host, at the end of an evaluation,
    and running metrics of microbatches are averaged by the plugin that makes the microbatches.
    `merge` and `update` are traced; `compute` is traced for a training window, and runs on the
    host, on NumPy arrays, for an evaluation.

    Example:
        metrics = {"loss": fg.metrics.Mean.from_values(1.0)}
        more_metrics = {"loss": fg.metrics.Mean.from_values(3.0)}
        accumulator = fg.metrics.MetricAccumulator.from_metrics(metrics)
        accumulator = accumulator.merge(fg.metrics.MetricAccumulator.from_metrics(more_metrics))
        accumulator.compute()  # {"loss": 2.0}

    Attributes:
        metrics: those that restart with each window, by name.
        running: those that are carried across windows, by name.
    """

    # Checkpoints have the metrics under the names of these fields.
    metrics: dict[str, AccumulatedMetric]
    running: dict[str, AccumulatedMetric]

    @staticmethod
    def from_metrics(metrics: Mapping[str, AccumulatedMetric]) -> "MetricAccumulator":
        """Return the accumulator of one batch.

        Args:
            metrics: by name, of the kinds that are accumulated, or their specs.

        Raises:
            ModelError: a `CollectingMetric` is among them, or something else.
        """
        accumulated, collected = sort_by_kind(metrics, AccumulatedMetric, CollectingMetric)
        for name in collected:
            raise ModelError(
                f"metric {name!r} is a CollectingMetric, which keeps every example: return it from "
                "a validation step or an evaluator, not from a training step"
            )
        restarting: dict[str, AccumulatedMetric] = {}
        carried: dict[str, AccumulatedMetric] = {}
        for name, metric in accumulated.items():
            (restarting if metric.restarts_with_window else carried)[name] = metric
        return MetricAccumulator(restarting, carried)

    @staticmethod
    def zeros(spec: "MetricAccumulator") -> "MetricAccumulator":
        """Return zeros of the structure, shapes and dtypes of `spec`, as a place for values.

        Zeros are not `empty()`: the first `update` must restart all of them.
        """
        return jax.tree.map(lambda leaf: put_constant(np.zeros(leaf.shape, leaf.dtype)), spec)

    @property
    def by_name(self) -> dict[str, AccumulatedMetric]:
        """All metrics by name."""
        return {**self.metrics, **self.running}

    def empty(self) -> "MetricAccumulator":
        """Return the accumulator over no examples, with the same structure, shapes and dtypes."""
        metrics = {name: metric.empty() for name, metric in self.metrics.items()}
        running = {name: metric.empty() for name, metric in self.running.items()}
        return MetricAccumulator(metrics, running)

    def merge(self, other: "MetricAccumulator") -> "MetricAccumulator":
        """Return the metrics over the examples of both, and the carried ones after `other`; either
        may lack some of the names.

        Raises:
            ModelError: a metric whose structure or shapes change when it is merged.
        """
        return MetricAccumulator(
            _update_each(self.metrics, other.metrics), _update_each(self.running, other.running)
        )

    def update(
        self,
        new: "MetricAccumulator",
        restart: Bool[Array, ""],
        restart_running: Bool[Array, ""] | None = None,
    ) -> "MetricAccumulator":
        """Return the accumulator with one more batch; traced.

        Both cases are computed and one is selected, because what `self` holds before a restart need
        not be `empty()`: merging into it could give NaN.

        Args:
            new: the metrics of that batch; it may lack some of the names.
            restart: whether they replace the metrics, instead of being merged into them.
            restart_running: the same for those carried across windows; None for the same as
                `restart`.
        """
        if restart_running is None:
            restart_running = restart
        updated: dict[str, AccumulatedMetric] = {}
        for names in group_alike(self.metrics, new.metrics):
            before = _stack_metrics([self.metrics[name] for name in names], join_scalars)
            after = _stack_metrics([new.metrics[name] for name in names], stack_scalars)
            merge = jax.vmap(lambda mine, other: mine.update(other))
            merged = _merge_same_structure(names[0], after, partial(merge, before))
            stacked = jax.tree.map(partial(jnp.where, restart), after, merged)
            updated.update(zip(names, _unstack_metrics(stacked), strict=True))
        before = MetricAccumulator(_leave_out(self.metrics, updated), self.running)
        after = MetricAccumulator(_leave_out(new.metrics, updated), new.running)
        merged = before.merge(after)
        restarted = _fill_with_empty(after.metrics, before.metrics)
        restarted_running = _fill_with_empty(new.running, self.running)
        selected = jax.tree.map(partial(jnp.where, restart), restarted, merged.metrics)
        return MetricAccumulator(
            {**updated, **selected},
            jax.tree.map(partial(jnp.where, restart_running), restarted_running, merged.running),
        )

    def compute(self) -> dict[str, Value]:
        """Return the results by name, of a metric with several results as `name/key`."""
        results = {}
        for name, metric in self.by_name.items():
            # Of its class: `metric.compute` is an Equinox module, made at each access.
            results[name] = _call_with_metric_name(name, type(metric).compute, metric)
        values = flatten_nested(results)
        for name, value in values.items():
            if not eqx.is_array_like(value):
                raise ModelError(
                    f"metric {name!r} computed {value!r}: compute gives a number, an array, or "
                    "several by name"
                )
        return values


def group_alike(
    metrics: Mapping[str, AccumulatedMetric], others: Mapping[str, AccumulatedMetric]
) -> list[list[str]]:
    """Return the names of metrics of single numbers that are merged alike, at least four each."""
    groups: dict[Any, list[str]] = {}
    for name in sorted(metrics.keys() & others.keys()):
        signature = _get_scalar_signature(metrics[name])
        if signature is not None and signature == _get_scalar_signature(others[name]):
            groups.setdefault(signature, []).append(name)
    return [names for names in groups.values() if len(names) >= MIN_GROUP]


def _get_scalar_signature(metric: AccumulatedMetric) -> Any:
    """Return a key of the structure and dtypes of a metric; None if it has more than numbers."""
    leaves, treedef = jax.tree.flatten(metric)
    if any(jnp.shape(leaf) for leaf in leaves):
        return None
    return treedef, tuple(jnp.result_type(leaf) for leaf in leaves)


def _stack_metrics(metrics: list[AccumulatedMetric], stack: Callable[[list[Array]], Array]) -> Any:
    """Return one metric with the numbers of all as vectors, which `stack` makes."""
    # XLA would compute what follows once for each number that is taken from it. On CPU, where it
    # ignores the barrier, it would still do this for numbers that are not packed by the columns of
    # `find_columns`: then 300 means took 12 instead of 7 s to compile, and 200 MB more.
    return jax.lax.optimization_barrier(jax.tree.map(lambda *leaves: stack(list(leaves)), *metrics))


def _unstack_metrics(stacked: Any) -> list[AccumulatedMetric]:
    """Return the metrics whose numbers these vectors hold."""
    leaves, treedef = jax.tree.flatten(jax.lax.optimization_barrier(stacked))
    columns = zip(*map(split_into_scalars, leaves), strict=True)
    return [treedef.unflatten(column) for column in columns]


def _update_each(
    metrics: Mapping[str, AccumulatedMetric], others: Mapping[str, AccumulatedMetric]
) -> dict[str, AccumulatedMetric]:
    """Return the metrics of both by name, those in both updated by the others."""
    updated = {**metrics, **others}
    # Not by `keys() & keys()`: the order of a set differs from process to process, and so would
    # the program, which a compilation cache would then not find.
    for name, metric in metrics.items():
        if name in others:
            updated[name] = _merge_same_structure(name, others[name], metric.update)
    return updated


def _leave_out(
    metrics: Mapping[str, AccumulatedMetric], names: Iterable[str]
) -> dict[str, AccumulatedMetric]:
    """Return the metrics but for those of these names."""
    return {name: metric for name, metric in metrics.items() if name not in names}


def _fill_with_empty(metrics: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics by name, and those of `others` over no examples for the names missing."""
    missing = {name: other.empty() for name, other in others.items() if name not in metrics}
    return {**metrics, **missing}


def _merge_same_structure(name: str, new: Any, merge: Callable[[Any], Any]) -> Any:
    """Return what `merge(new)` gives; an error that names the metric if its structure changes."""
    merged = _call_with_metric_name(name, merge, new)
    if _get_structure(new) != _get_structure(merged):
        raise ModelError(
            f"metric {name!r} became {merged!r} when merged: it must stay {type(new).__name__} as "
            "it was, of the same shapes"
        )
    return merged


def _get_structure(metric: Any) -> list[Any]:
    return [jax.tree.structure(metric), *map(jnp.shape, jax.tree.leaves(metric))]


def _call_with_metric_name(name: str, function: Callable[..., Any], *args: Any) -> Any:
    with error_context(lambda: f"metric {name!r}"):
        return function(*args)
