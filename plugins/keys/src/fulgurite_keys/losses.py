"""Losses whose inputs are keys, on the functions of `fulgurite_losses`."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal

import equinox as eqx
import fulgurite_losses
import jax
import jax.numpy as jnp
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import is_metric, note_weight, split_loss, sum_values
from fulgurite.plugins import hide_constructor_frames, scale_loss
from fulgurite_losses import Examples
from jaxtyping import Array

from fulgurite_keys.fields import Keyed, make_call_scope
from fulgurite_keys.scope import Key, Scope

Weight = float | Callable[[Array], Any]


@dataclass(frozen=True)
class Loss(Keyed):
    """A loss by key. A subclass adds keys and settings, and `compute`.

    What is a tree, such as a key with wildcards, gives the mean of the losses of its arrays; of a
    module, of those of floats.

    Example:
        import dataclasses

        from fulgurite_keys import Key, Loss

        @dataclasses.dataclass(frozen=True)
        class Smoothness(Loss):
            values: Key

            def compute(self, values, *, mask, weight, reduction):
                return jnp.mean(jnp.diff(values, axis=1) ** 2)

    Attributes:
        weight: a factor, or a schedule `step -> factor`.
        mask: the key of bools: what counts, besides the mask of the batch.
        example_weight: the key of how much each example counts.
        reduction: how the values of the examples become one number; see `fulgurite_losses`.
    """

    _: KW_ONLY
    weight: Weight = 1.0
    mask: Key | None = None
    example_weight: Key | None = None
    reduction: Literal["mean", "weighted_mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        where = type(self).__name__
        if self.needs_update:
            names = [str(key) for key in self.get_keys().values()]
            raise ConfigurationError(
                f"{where}({', '.join(names)}): what is there after the update only is not "
                "available to losses; Metrics may measure it"
            )
        if self.reduction not in ("mean", "weighted_mean", "sum"):
            raise ConfigurationError(
                f"{where}: reduction is {self.reduction!r}; choose 'mean', 'weighted_mean' or 'sum'"
            )

    def compute(self, *values: Any, **options: Any) -> Any:
        """Return the loss as a number.

        Args:
            values: what the keys of the subclass find, in the order of its fields.
            options: `mask`, `weight` (of the examples) and `reduction`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no compute: define it")

    def evaluate(self, scope: Scope, mask: Any, step: Any) -> Any:
        """Return the weighted loss of a batch.

        Args:
            scope: where the keys are looked up.
            mask: of the batch, or None.
            step: the number of updates so far, for a schedule.
        """
        values = self.resolve(scope)
        example_weight = values.pop("example_weight")
        example_mask = self.make_mask(values, mask)
        names = [field.name for field in fields(self) if field.name in values]
        inputs = [eqx.filter(values[name], self._get_filter(name)) for name in names]
        for name, value in zip(names, inputs, strict=True):
            if values[name] is not None and not jax.tree.leaves(value):
                raise ConfigurationError(
                    f"{self.describe()}: {name} finds no array, or in a module none of floats"
                )

        def compute(*leaves: Any) -> Any:
            optional = iter(leaves)
            arguments = [None if value is None else next(optional) for value in inputs]
            return self.compute(
                *arguments, mask=example_mask, weight=example_weight, reduction=self.reduction
            )

        losses = jax.tree.leaves(
            jax.tree.map(compute, *[value for value in inputs if value is not None]),
            is_leaf=is_metric,
        )
        factor = self.weight(step) if callable(self.weight) else self.weight
        if len(losses) == 1:
            return scale_loss(self.describe(), losses[0], factor)
        # One mask for all, so that their weights have a constant ratio.
        numbers, weights = zip(*[split_loss(self.describe(), loss) for loss in losses], strict=True)
        return note_weight(factor * (sum_values(numbers) / len(losses)), weights[0])

    def _get_filter(self, name: str) -> Callable[[Any], bool]:
        """Return which leaves count of what a key finds: of a module the parameters alone, and not
        its counters and random keys."""
        key = self.get_keys().get(name)
        is_module = key is not None and key.prefix == "module"
        return eqx.is_inexact_array if is_module else eqx.is_array

    def __call__(self, preds: Any, batch: Any, mask: Any = None) -> Any:
        """Return the loss as an evaluator calls it, with keys in `batch` and `preds` only."""
        if callable(self.weight):
            raise ConfigurationError(
                f"{self.describe()}: an evaluator's own losses have no step for a schedule; give "
                "weight= as a number"
            )
        return self.evaluate(make_call_scope(preds, batch), mask, None)


@hide_constructor_frames
@dataclass(frozen=True)
class L1(Loss):
    """The mean of |p - t|, or of |p| without targets.

    Example:
        from fulgurite_keys import L1

        L1("preds.image", "batch.image", weight=0.5)
        L1("interms.net.layers[0]", weight=optax.linear_schedule(0.0, 1e-3, 1000))  # sparse
    """

    preds: Key
    targets: Key | None = None

    def compute(self, preds: Any, targets: Any, **options: Any) -> Any:
        targets = jnp.zeros_like(preds) if targets is None else targets
        return fulgurite_losses.absolute_error(preds, targets, **options)


@hide_constructor_frames
@dataclass(frozen=True)
class L2(Loss):
    """The mean of (p - t)², or of p² without targets.

    Example:
        from fulgurite_keys import L2

        L2("preds", "batch.image")
        L2("module.**.weight", weight=1e-4)
    """

    preds: Key
    targets: Key | None = None

    def compute(self, preds: Any, targets: Any, **options: Any) -> Any:
        targets = jnp.zeros_like(preds) if targets is None else targets
        return fulgurite_losses.squared_error(preds, targets, **options)


@hide_constructor_frames
@dataclass(frozen=True)
class Huber(Loss):
    """`fulgurite_losses.huber_loss`.

    Example:
        from fulgurite_keys import Huber

        Huber("preds", "batch.target", delta=2.0)
    """

    preds: Key
    targets: Key
    delta: float = 1.0

    def compute(self, preds: Any, targets: Any, **options: Any) -> Any:
        return fulgurite_losses.huber_loss(preds, targets, delta=self.delta, **options)


@hide_constructor_frames
@dataclass(frozen=True)
class SoftmaxCrossEntropy(Loss):
    """`fulgurite_losses.softmax_cross_entropy`, of labels that are integers or one-hot.

    Example:
        from fulgurite_keys import SoftmaxCrossEntropy

        SoftmaxCrossEntropy(logits="preds.logits", labels="batch.label", label_smoothing=0.1)
    """

    logits: Key
    labels: Key
    label_smoothing: float = 0.0

    def compute(self, logits: Any, labels: Any, **options: Any) -> Any:
        return fulgurite_losses.softmax_cross_entropy(
            logits, labels, label_smoothing=self.label_smoothing, **options
        )


@hide_constructor_frames
@dataclass(frozen=True)
class SigmoidBinaryCrossEntropy(Loss):
    """`fulgurite_losses.sigmoid_binary_cross_entropy`.

    Example:
        from fulgurite_keys import SigmoidBinaryCrossEntropy

        SigmoidBinaryCrossEntropy("preds.logit", "batch.label")
    """

    logits: Key
    labels: Key
    label_smoothing: float = 0.0

    def compute(self, logits: Any, labels: Any, **options: Any) -> Any:
        return fulgurite_losses.sigmoid_binary_cross_entropy(
            logits, labels, label_smoothing=self.label_smoothing, **options
        )


@hide_constructor_frames
@dataclass(frozen=True)
class NegativeCosine(Loss):
    """`fulgurite_losses.negative_cosine`.

    Example:
        from fulgurite_keys import NegativeCosine

        NegativeCosine("preds.first", "preds.second")
    """

    preds: Key
    targets: Key

    def compute(self, preds: Any, targets: Any, **options: Any) -> Any:
        return fulgurite_losses.negative_cosine(preds, targets, **options)


@hide_constructor_frames
@dataclass(frozen=True)
class Value(Loss):
    """The mean of a value that the model computes itself, one for each example or one number.

    Example:
        from fulgurite_keys import Value

        Value("preds.penalty", weight=0.1)
    """

    values: Key

    def compute(self, values: Any, **options: Any) -> Any:
        if jnp.ndim(values) == 0:
            return values
        loss_options: Any = options
        examples = Examples(values.shape, loss_options)
        return examples.reduce(examples.hide(values))


@hide_constructor_frames
@dataclass(frozen=True)
class LossFunction(Loss):
    """Any function of `fulgurite_losses`, or another that takes `mask`, `weight` and `reduction`.

    Example:
        import functools

        import fulgurite_losses as losses
        from fulgurite_keys import LossFunction

        LossFunction(functools.partial(losses.triplet_loss, margin=0.5), "preds", "batch.label")

    Attributes:
        function: called with what the keys find.
        first: the key of its first argument.
        second: the key of its second one.
        third: the key of its third one.
    """

    function: Callable[..., Any]
    first: Key
    second: Key | None = None
    third: Key | None = None

    def compute(self, *values: Any, **options: Any) -> Any:
        return self.function(*[value for value in values if value is not None], **options)
