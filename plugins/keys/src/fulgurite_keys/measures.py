"""Metrics whose inputs are keys, on those of `fulgurite.metrics` and `fulgurite_metrics`."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

import equinox as eqx
import fulgurite as fg
import fulgurite_metrics
import jax
import jax.numpy as jnp
from fulgurite.errors import ConfigurationError
from fulgurite.plugins import hide_constructor_frames, is_array_like, leaves_with_paths

from fulgurite_keys.fields import Keyed, make_call_scope
from fulgurite_keys.scope import Key, Scope


@dataclass(frozen=True)
class Measure(Keyed):
    """A metric by key. A subclass adds keys and settings, and `compute`.

    Example:
        import dataclasses

        from fulgurite_keys import Key, Measure

        @dataclasses.dataclass(frozen=True)
        class Sparsity(Measure):
            values: Key

            def compute(self, values, *, mask):
                return fg.metrics.Mean.from_values(values == 0, mask)

    Attributes:
        mask: the key of bools: what counts, besides the mask of the batch.
        for_evaluations: whether only evaluations have it, as one that keeps every example.
    """

    _: KW_ONLY
    mask: Key | None = None
    for_evaluations: bool = False

    def compute(self, *values: Any, **options: Any) -> Any:
        """Return the metric of a batch, or several by name.

        Args:
            values: what the keys of the subclass find, in the order of its fields.
            options: `mask`, which examples count, or None.
        """
        raise NotImplementedError(f"{type(self).__name__} has no compute: define it")

    def evaluate(self, scope: Scope, mask: Any) -> Any:
        """Return the metric of a batch.

        Args:
            scope: where the keys are looked up.
            mask: of the batch, or None.
        """
        values = self.resolve(scope)
        example_mask = self.make_mask(values, mask)
        names = [item.name for item in fields(self) if item.name in values]
        return self.compute(*[values[name] for name in names], mask=example_mask)

    def __call__(self, preds: Any, batch: Any, mask: Any = None) -> Any:
        """Return the metric as an evaluator calls it, with keys in `batch` and `preds` only."""
        return self.evaluate(make_call_scope(preds, batch), mask)


@hide_constructor_frames
@dataclass(frozen=True)
class Accuracy(Measure):
    """`fg.metrics.Accuracy`.

    Example:
        from fulgurite_keys import Accuracy

        Accuracy("preds.logits", "batch.label", top_k=5)
    """

    logits: Key
    labels: Key
    top_k: int = 1

    def compute(self, logits: Any, labels: Any, *, mask: Any) -> Any:
        return fg.metrics.Accuracy.from_logits(logits, labels, mask, self.top_k)


@dataclass(frozen=True)
class _OfValues(Measure):
    """A metric of numbers; of a tree, one for each array by its path."""

    values: Key

    def compute(self, values: Any, *, mask: Any) -> Any:
        if is_array_like(values):
            return self._from_values(values, mask)
        return {
            path: self._from_values(leaf, mask)
            for path, leaf in leaves_with_paths(eqx.filter(values, eqx.is_array))
        }

    def _from_values(self, values: Any, mask: Any) -> Any:
        raise NotImplementedError


@hide_constructor_frames
@dataclass(frozen=True)
class Mean(_OfValues):
    """The mean of all numbers; of a tree, one for each array by its path.

    Example:
        from fulgurite_keys import Mean

        Mean("preds.confidence")
    """

    def _from_values(self, values: Any, mask: Any) -> Any:
        return fg.metrics.Mean.from_values(values, mask)


@hide_constructor_frames
@dataclass(frozen=True)
class Std(_OfValues):
    """The standard deviation of all numbers; of a tree, one for each array by its path.

    Example:
        from fulgurite_keys import Std

        Std("interms.encoder")
    """

    def _from_values(self, values: Any, mask: Any) -> Any:
        return fg.metrics.Std.from_values(values, mask)


@hide_constructor_frames
@dataclass(frozen=True)
class Max(_OfValues):
    """The largest number; of a tree, one for each array by its path.

    Example:
        from fulgurite_keys import Max

        Max("interms.net.layers[*]")
    """

    def _from_values(self, values: Any, mask: Any) -> Any:
        return fg.metrics.Max.from_values(values, mask)


@hide_constructor_frames
@dataclass(frozen=True)
class Min(_OfValues):
    """The smallest number; of a tree, one for each array by its path.

    Example:
        from fulgurite_keys import Min

        Min("preds.variance")
    """

    def _from_values(self, values: Any, mask: Any) -> Any:
        return fg.metrics.Min.from_values(values, mask)


class MeanOfMeans(fg.metrics.Metric):
    """The mean over several means, each of which counts the same.

    Example:
        from fulgurite_keys import MeanOfMeans

        first, second = map(fg.metrics.Mean.from_values, (jnp.arange(2.0), jnp.arange(4.0)))
        MeanOfMeans([first, second]).compute()  # 1.0
    """

    means: list[fg.metrics.Mean]

    def compute(self) -> Any:
        total: Any = sum(mean.compute() for mean in self.means)
        return total / len(self.means)


@hide_constructor_frames
@dataclass(frozen=True)
class TreeMean(Measure):
    """The mean of each array of a tree, and then of those means.

    Example:
        from fulgurite_keys import TreeMean

        TreeMean("batch.**.depth")
    """

    tree: Key

    def compute(self, tree: Any, *, mask: Any) -> Any:
        leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
        return MeanOfMeans([fg.metrics.Mean.from_values(leaf, mask) for leaf in leaves])


@hide_constructor_frames
@dataclass(frozen=True)
class Norm(Measure):
    """The Euclidean norm of all numbers of a tree together, or the mean norm of each example.

    Example:
        from fulgurite_keys import Norm

        Norm("grads")
        Norm("interms.encoder", axis=-1)  # of each example, averaged

    Attributes:
        tree: the key.
        axis: over which axis; None for all numbers together, of which no example is left out.
    """

    tree: Key
    axis: int | None = None

    def compute(self, tree: Any, *, mask: Any) -> Any:
        if self.axis is None:
            if mask is not None:
                raise ConfigurationError(
                    f"{self.describe()}: the norm over all examples of a padded batch would count "
                    "the padding; give axis=-1 for the mean norm of the examples"
                )
            return fulgurite_metrics.Norm.from_tree(eqx.filter(tree, eqx.is_inexact_array))
        if is_array_like(tree):
            norms = jnp.linalg.norm(tree.astype(jnp.float32), axis=self.axis)
            return fg.metrics.Mean.from_values(norms, mask)
        raise ConfigurationError(
            f"{self.describe()}: an axis is of one array, and the key finds a tree"
        )


@hide_constructor_frames
@dataclass(frozen=True)
class MeasureFunction(Measure):
    """Any metric, made by a function such as `fulgurite_metrics.F1.from_predictions`.

    Example:
        import fulgurite_metrics as metrics
        from fulgurite_keys import MeasureFunction

        MeasureFunction(metrics.R2.from_predictions, "preds", "batch.target")
        MeasureFunction(metrics.RocAuc.from_scores, "preds", "batch.label", for_evaluations=True)

    Attributes:
        function: called with what the keys find and `mask=`; it returns the metric.
        first: the key of its first argument.
        second: the key of its second one.
        third: the key of its third one.
    """

    function: Callable[..., Any]
    first: Key
    second: Key | None = None
    third: Key | None = None

    def compute(self, *values: Any, mask: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.function(*[value for value in values if value is not None], mask=mask)


@hide_constructor_frames
@dataclass(frozen=True)
class RocAuc(Measure):
    """`fulgurite_metrics.RocAuc`; in evaluations only.

    Example:
        from fulgurite_keys import RocAuc

        RocAuc("preds.logit", "batch.label")
    """

    scores: Key
    labels: Key
    for_evaluations: bool = field(default=True, kw_only=True)

    def compute(self, scores: Any, labels: Any, *, mask: Any) -> Any:
        return fulgurite_metrics.RocAuc.from_scores(scores, labels, mask)


@hide_constructor_frames
@dataclass(frozen=True)
class AveragePrecision(Measure):
    """`fulgurite_metrics.AveragePrecision`; in evaluations only.

    Example:
        from fulgurite_keys import AveragePrecision

        AveragePrecision("preds.logit", "batch.label")
    """

    scores: Key
    labels: Key
    for_evaluations: bool = field(default=True, kw_only=True)

    def compute(self, scores: Any, labels: Any, *, mask: Any) -> Any:
        return fulgurite_metrics.AveragePrecision.from_scores(scores, labels, mask)
