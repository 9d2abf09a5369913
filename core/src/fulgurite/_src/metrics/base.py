"""The three kinds of metrics, and the one place where they are merged.

A metric is made from the values of one batch by a static method such as `from_values`, where `mask`
is true for the values that count, over all or their leading axes. Numbers become float32; float64
stays. `compute` of NumPy fields gives NumPy without touching a device.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree, Shaped

from fulgurite._src.tree.vectors import join_scalars, split_into_scalars, stack_scalars
from fulgurite.errors import ConfigurationError, ModelError, error_context

MIN_GROUP = 4
"""Metrics of single numbers that are merged as one vector from so many of a kind on."""

Value = Array | np.ndarray | np.number
"""What a metric computes."""
Values = Shaped[ArrayLike, "..."]
"""Numbers of any shape, whose first axis is that of the examples."""
Mask = Bool[ArrayLike, "..."]
"""True for what counts; it broadcasts from the left with the values that it belongs to."""


class Metric(eqx.Module):
    """A metric that is merged on the device, over the steps of a window or the batches of an
    evaluation.

    `merge` is associative and commutative up to rounding, and `empty()` is its identity. A metric
    whose fields are metrics is merged field by field; one whose fields are arrays defines `merge`
    and `empty`.

    Example:
        class RelativeError(fg.metrics.Metric):
            error: fg.metrics.Sum
            size: fg.metrics.Sum

            @staticmethod
            def from_values(preds, targets, mask=None):
                return RelativeError(
                    fg.metrics.Sum.from_values(abs(preds - targets), mask),
                    fg.metrics.Sum.from_values(abs(targets), mask),
                )

            def compute(self):
                return self.error.compute() / self.size.compute()


        RelativeError.from_values(preds, targets).compute()

    Attributes:
        higher_is_better: whether a larger value is better; None where neither is.
    """

    higher_is_better: ClassVar[bool | None] = None

    def merge(self, other: Self) -> Self:
        """Return the metric over the examples of both."""
        for field in jax.tree.leaves(self, is_leaf=self._is_field):
            if not isinstance(field, Metric):
                raise ModelError(
                    f"{type(self).__name__} holds {field!r}, which is not a metric: define "
                    "merge(self, other) and empty(self), or build it from metrics"
                )
        return jax.tree.map(lambda a, b: a.merge(b), self, other, is_leaf=self._is_field)

    def empty(self) -> Self:
        """Return the metric over no examples, with the same structure, shapes and dtypes. Merging
        it changes no bit."""
        return jax.tree.map(lambda field: field.empty(), self, is_leaf=self._is_field)

    @abstractmethod
    def compute(self) -> Value | dict[str, Value]:
        """Return the result, or several by name."""

    def media(self) -> Any:
        """Return how to show the result besides its numbers: an `fg.Media`, or several by name;
        None for nothing. Called on the host, after an evaluation."""
        return None

    def _is_field(self, node: Any) -> bool:
        return isinstance(node, Metric) and node is not self


class RunningMetric(eqx.Module):
    """A metric that depends on the order of steps and is carried from step to step, across windows.

    Example:
        average = fg.metrics.ExponentialMovingAverage.from_values(1.0)
        average = average.update(fg.metrics.ExponentialMovingAverage.from_values(2.0))
    """

    value: Float[Array, "..."]

    @abstractmethod
    def update(self, new: Self) -> Self:
        """Return the value after one more step, whose own value is `new`.
        `empty().update(new)` equals `new`."""

    def empty(self) -> Self:
        """Return the value before the first step, with the same structure, shapes and dtypes."""
        return jax.tree.map(jnp.zeros_like, self)

    def compute(self) -> Value:
        """Return the value after the last step."""
        return self.value


class CollectingMetric(eqx.Module):
    """A metric that keeps every example, for evaluations only.

    It is computed on the host over all processes, in the order of the examples. A subclass adds
    fields for arrays that begin with the example axis, a traced function that makes it, and a
    `compute` of NumPy arrays.

    Example:
        class Spread(fg.metrics.CollectingMetric):
            values: jax.Array

            def compute(self):
                return np.ptp(self.values[self.mask])


        spread = Spread(mask=np.array([True, True, False]), values=np.array([1.0, 3.0, 9.0]))
        spread.compute()  # 2.0

    Attributes:
        mask: which examples count.
        higher_is_better: whether a larger value is better; None where neither is.
    """

    higher_is_better: ClassVar[bool | None] = None

    mask: Bool[Array | np.ndarray, " examples"]

    @abstractmethod
    def compute(self) -> PyTree[Value]:
        """Return the result over the examples that are not masked. Runs on the host."""

    def merge(self, *others: Self) -> Self:
        """Return the examples of all, in order, as NumPy arrays. Runs on the host; one call copies
        each example once."""

        def concatenate(*parts: Value) -> np.ndarray:
            specs = {f"{part.dtype}{list(part.shape[1:])}" for part in parts}
            if len(specs) > 1:
                raise ModelError(
                    f"{type(self).__name__} collects examples of several shapes: {sorted(specs)}; "
                    "pad them to one shape"
                )
            return np.concatenate(parts)

        return jax.tree.map(concatenate, self, *others)

    def empty(self) -> Self:
        """Return the metric of no examples, with the same structure, trailing shapes and dtypes."""
        return jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape[1:]), leaf.dtype), self)


class MetricAccumulator(eqx.Module):
    """Metrics by name, merged over steps or batches: what the window of a training run, an
    evaluation and microbatches accumulate.

    Every merge of `Metric`s goes through here, so that all of them treat a metric alike. Two things
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
        metrics: merged in any order, by name.
        running: carried from step to step, by name.
    """

    metrics: dict[str, Metric]
    running: dict[str, RunningMetric]

    @staticmethod
    def from_metrics(metrics: Mapping[str, Metric | RunningMetric]) -> "MetricAccumulator":
        """Return the accumulator of one batch, from its metrics of both kinds by name."""
        running = {
            name: metric for name, metric in metrics.items() if isinstance(metric, RunningMetric)
        }
        merged = {name: metric for name, metric in metrics.items() if isinstance(metric, Metric)}
        return MetricAccumulator(merged, running)

    @staticmethod
    def zeros(spec: "MetricAccumulator") -> "MetricAccumulator":
        """Return zeros of the structure, shapes and dtypes of `spec`, as a place for values.

        Zeros are not `empty()`: the first `update` must restart both kinds.
        """
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), spec)

    def empty(self) -> "MetricAccumulator":
        """Return the accumulator over no examples, with the same structure, shapes and dtypes."""
        metrics = {name: metric.empty() for name, metric in self.metrics.items()}
        running = {name: metric.empty() for name, metric in self.running.items()}
        return MetricAccumulator(metrics, running)

    def merge(self, other: "MetricAccumulator") -> "MetricAccumulator":
        """Return the metrics over the examples of both, and the running ones after `other`; either
        may lack some of the names.

        Raises:
            ModelError: a metric whose structure or shapes change when it is merged.
        """
        metrics: dict[str, Metric] = {**self.metrics, **other.metrics}
        for name in self.metrics.keys() & other.metrics.keys():
            metrics[name] = _merge_same_structure(
                name, other.metrics[name], self.metrics[name].merge
            )
        running: dict[str, RunningMetric] = {**self.running, **other.running}
        for name in self.running.keys() & other.running.keys():
            running[name] = _merge_same_structure(
                name, other.running[name], self.running[name].update
            )
        return MetricAccumulator(metrics, running)

    def update(
        self,
        new: "MetricAccumulator",
        restart: Bool[Array, ""],
        restart_running: Bool[Array, ""] | None = None,
    ) -> "MetricAccumulator":
        """Return the accumulator with one batch more; traced.

        Both cases are computed and one is selected, because what `self` holds before a restart need
        not be `empty()`: merging into it could give NaN.

        Args:
            new: the metrics of that batch; it may lack some of the names.
            restart: whether they replace the metrics, instead of being merged into them.
            restart_running: the same for the running metrics; None for the same as `restart`.
        """
        if restart_running is None:
            restart_running = restart
        updated: dict[str, Metric] = {}
        for names in group_alike(self.metrics, new.metrics):
            before = _stack_metrics([self.metrics[name] for name in names], join_scalars)
            after = _stack_metrics([new.metrics[name] for name in names], stack_scalars)
            merge = jax.vmap(lambda mine, other: mine.merge(other))
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
        for name, metric in {**self.metrics, **self.running}.items():
            results[name] = _call_with_metric_name(name, metric.compute)
        values = flatten_nested(results)
        for name, value in values.items():
            if not eqx.is_array_like(value):
                raise ModelError(
                    f"metric {name!r} computed {value!r}: compute gives a number, an array, or "
                    "several by name"
                )
        return values


def group_alike(metrics: Mapping[str, Metric], others: Mapping[str, Metric]) -> list[list[str]]:
    """Return the names of metrics of single numbers that are merged alike, at least four each."""
    groups: dict[Any, list[str]] = {}
    for name in sorted(metrics.keys() & others.keys()):
        signature = _get_scalar_signature(metrics[name])
        if signature is not None and signature == _get_scalar_signature(others[name]):
            groups.setdefault(signature, []).append(name)
    return [names for names in groups.values() if len(names) >= MIN_GROUP]


def _get_scalar_signature(metric: Metric) -> Any:
    """Return a key of the structure and dtypes of a metric; None if it has more than numbers."""
    leaves, treedef = jax.tree.flatten(metric)
    if any(jnp.shape(leaf) for leaf in leaves):
        return None
    return treedef, tuple(jnp.result_type(leaf) for leaf in leaves)


def _stack_metrics(metrics: list[Metric], stack: Callable[[list[Array]], Array]) -> Any:
    """Return one metric with the numbers of all as vectors, which `stack` makes."""
    # XLA would compute what follows once for each number that is taken from it. On CPU, where it
    # ignores the barrier, it would so for numbers that are not packed by the columns of
    # `find_columns`: then 300 means took 12 instead of 7 s to compile, and 200 MB more.
    return jax.lax.optimization_barrier(jax.tree.map(lambda *leaves: stack(list(leaves)), *metrics))


def _unstack_metrics(stacked: Any) -> list[Metric]:
    """Return the metrics whose numbers these vectors hold."""
    leaves, treedef = jax.tree.flatten(jax.lax.optimization_barrier(stacked))
    columns = zip(*map(split_into_scalars, leaves), strict=True)
    return [treedef.unflatten(column) for column in columns]


def _leave_out(metrics: Mapping[str, Metric], names: Iterable[str]) -> dict[str, Metric]:
    """Return the metrics but for those of these names."""
    return {name: metric for name, metric in metrics.items() if name not in names}


def _fill_with_empty(metrics: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics by name, and those of `others` over no examples for the names missing."""
    missing = {name: other.empty() for name, other in others.items() if name not in metrics}
    return {**metrics, **missing}


def flatten_nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what nested dictionaries hold, by names such as `outer/inner`.

    The key "" is the outer name itself, and an index such as `[2]` follows it without a slash.

    Raises:
        ModelError: two of the names are the same.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        parts = {name: value}
        if isinstance(value, dict):
            parts = {_join_names(name, key): part for key, part in flatten_nested(value).items()}
        duplicates = sorted(flat.keys() & parts.keys())
        if duplicates:
            raise ModelError(f"{duplicates[0]!r} appears twice in nested dictionaries: rename one")
        flat |= parts
    return flat


def _join_names(outer: str, inner: str) -> str:
    separator = "" if not inner or inner.startswith("[") else "/"
    return f"{outer}{separator}{inner}"


def as_class_indices(logits: Array, labels: Values, metric_name: str) -> Int[Array, "..."]:
    """Convert labels to class indices.

    Args:
        logits: `(..., classes)`.
        labels: integers or booleans `(...)`, or one-hot `(..., classes)`.
        metric_name: what needs them, for errors.

    Returns:
        Indices `(...)`, -1 for a label that is not a class.
    """
    labels = jnp.asarray(labels)
    is_index_shape = logits.ndim > 0 and labels.shape == logits.shape[:-1]
    if labels.ndim > 1 and labels.shape == logits.shape:
        labels = jnp.argmax(labels, axis=-1)
    elif not is_index_shape or jnp.issubdtype(labels.dtype, jnp.inexact):
        raise ConfigurationError(
            f"{metric_name} of logits {list(logits.shape)} with labels "
            f"{labels.dtype}{list(labels.shape)}; the logits end with an axis of classes, the "
            f"labels are integers of shape {list(logits.shape[:-1])}, or one-hot of shape "
            f"{list(logits.shape)}"
        )
    labels = labels.astype(int)
    return jnp.where((labels >= 0) & (labels < logits.shape[-1]), labels, -1)


def to_float(values: Any) -> Array:
    """Convert to a strongly typed float array: float64 stays, all else becomes float32.

    Raises:
        ConfigurationError: the values are complex, and their imaginary parts would be lost.
    """
    values = jnp.asarray(values)
    if jnp.iscomplexobj(values):
        raise ConfigurationError(
            f"the values of a metric are {values.dtype}: give real ones, such as "
            "jnp.abs(values), jnp.real(values) or jnp.imag(values)"
        )
    dtype = jnp.float64 if values.dtype == jnp.float64 else jnp.float32
    return jax.lax.convert_element_type(values, dtype)


def apply_mask(values: Array, mask: Mask | None, fill: float) -> Array:
    """Replace masked values. They are selected, never multiplied: masked values may be NaN.

    Args:
        values: of any shape.
        mask: bools over all axes of `values` or the leading ones; None masks nothing.
        fill: the value where the mask is False.
    """
    if mask is None:
        return values
    dtype = jnp.asarray(mask).dtype
    if dtype != jnp.bool_:
        raise ConfigurationError(
            f"a mask is {dtype}: give bools, such as `mask > 0`; how much a value counts is a "
            "weight, Mean.from_values(values, weight=...)"
        )
    return jnp.where(expand_leading(mask, values, "mask"), values, fill)


def expand_leading(leading: Any, values: Array, what: str) -> Array:
    """Return a mask or weight with axes of length one for the trailing axes of `values`.

    Args:
        leading: an array over the leading axes of `values`.
        values: of any shape.
        what: what `leading` is, for errors.
    """
    leading = jnp.asarray(leading)
    if leading.shape != values.shape[: leading.ndim]:
        raise ConfigurationError(
            f"a {what} of shape {list(leading.shape)} for values of shape {list(values.shape)}; "
            "it must begin like these"
        )
    return leading.reshape(leading.shape + (1,) * (values.ndim - leading.ndim))


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
