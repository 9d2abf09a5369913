"""Metrics whose inputs are keys, on those of `fulgurite.metrics` and `fulgurite_metrics`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from types import MethodType
from typing import Any

import equinox as eqx
import fulgurite as fg
import fulgurite_metrics
import jax
from fulgurite.errors import ConfigurationError
from fulgurite.plugins import (
    hide_constructor_frames,
    hide_internal_frames,
    is_array_like,
    leaves_with_paths,
)

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
        if not leaves:
            raise ConfigurationError(f"{self.describe()}: its key finds no array")
        return MeanOfMeans([fg.metrics.Mean.from_values(leaf, mask) for leaf in leaves])


@dataclass(frozen=True)
class MeasureFunction(Measure):
    """A metric that a function makes, as `keyed` returns it.

    Attributes:
        function: called with what the keys find, the settings, and `mask=` if it takes that.
        first: the key of its first argument.
        second: the key of its second one.
        third: the key of its third one.
        settings: further arguments of the function, by name.
    """

    function: Callable[..., Any]
    first: Key
    second: Key | None = None
    third: Key | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    def compute(self, *values: Any, mask: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        arguments = [value for value in values if value is not None]
        if self.function in _OF_FLOATS:
            arguments = [eqx.filter(value, eqx.is_inexact_array) for value in arguments]
        if self.function not in _OF_ONE_ARRAY or is_array_like(arguments[0]):
            return self._call(arguments, mask)
        arrays = list(leaves_with_paths(eqx.filter(arguments[0], eqx.is_array)))
        if not arrays:
            raise ConfigurationError(f"{self.describe()}: its first key finds no array")
        return {path: self._call([array, *arguments[1:]], mask) for path, array in arrays}

    def describe(self) -> str:
        keys = [repr(key) for key in (self.first, self.second, self.third) if key is not None]
        settings = [f"{name}={value!r}" for name, value in self.settings.items()]
        return f"keyed({', '.join([_get_name(self.function), *keys, *settings])})"

    def _call(self, arguments: Sequence[Any], mask: Any) -> Any:
        options = dict(self.settings)
        if _takes_mask(self.function):
            options["mask"] = mask
        elif mask is not None:
            raise ConfigurationError(
                f"{self.describe()}: the function takes no mask, so that it would count the "
                "padding of a padded batch; give another one, such as Norm.from_vectors for the "
                "mean norm of the examples"
            )
        return self.function(*arguments, **options)


@hide_internal_frames
def keyed(
    function: Callable[..., Any],
    first: Key,
    second: Key | None = None,
    third: Key | None = None,
    *,
    mask: Key | None = None,
    for_evaluations: bool | None = None,
    **settings: Any,
) -> Measure:
    """Return a metric by key, made by a function such as `fg.metrics.Accuracy.from_logits`.

    What makes a metric of the numbers of one array, such as `Mean.from_values`, makes one for each
    array where the key finds a tree, by its path.

    Args:
        function: called with what the keys find, and with `mask=` if it takes that; it returns a
            metric, or several by name.
        first: the key of its first argument.
        second: the key of its second one.
        third: the key of its third one.
        mask: the key of bools: what counts, besides the mask of the batch.
        for_evaluations: whether only evaluations have it, as what keeps every example must be;
            it is known of `RocAuc` and `AveragePrecision`.
        settings: further arguments of the function.

    Example:
        from fulgurite_keys import Metrics, keyed
        from fulgurite_metrics import Norm, RocAuc

        Metrics(
            top=keyed(fg.metrics.Accuracy.from_logits, "preds.logits", "batch.label", top_k=5),
            auc=keyed(RocAuc.from_scores, "preds.logit", "batch.label"),
            update=keyed(Norm.from_tree, "updates"),
        )
    """
    if for_evaluations is None:
        for_evaluations = function in _FOR_EVALUATIONS
    return MeasureFunction(
        function,
        first,
        second,
        third,
        mask=mask,
        for_evaluations=for_evaluations,
        settings=settings,
    )


# Tuples: a function may be a module with arrays, which has no hash.
_OF_ONE_ARRAY = (
    fg.metrics.Max.from_values,
    fg.metrics.Mean.from_values,
    fg.metrics.Min.from_values,
    fg.metrics.Std.from_values,
    fulgurite_metrics.Norm.from_vectors,
)
_OF_FLOATS = (fulgurite_metrics.Norm.from_tree,)
"""Of a tree they get the floats alone: no functions, and no counters of an optimizer."""
_FOR_EVALUATIONS = (
    fulgurite_metrics.AveragePrecision.from_scores,
    fulgurite_metrics.RocAuc.from_scores,
)


def _get_name(function: Callable[..., Any]) -> str:
    if isinstance(function, MethodType) and isinstance(function.__self__, type):
        return f"{function.__self__.__name__}.{function.__name__}"
    return getattr(function, "__qualname__", repr(function))


def _takes_mask(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(
        parameter.name == "mask" or parameter.kind is parameter.VAR_KEYWORD
        for parameter in parameters
    )
