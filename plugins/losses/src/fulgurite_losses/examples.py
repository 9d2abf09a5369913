"""What all losses share: which examples count, how much, and how their values become one."""

from functools import partial
from typing import Any, Literal, get_args

import jax.numpy as jnp
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import Mask, Values, apply_mask, note_weight, share_weight, to_float
from jaxtyping import Array, Bool, Float

Reduction = Literal["mean", "weighted_mean", "sum", "none"]
"""What a loss returns of the values x of its examples and their weights w. `mean`: Σ w·x / the
number of values that are not masked. `weighted_mean`: Σ w·x / Σ w. `sum`: Σ w·x. `none`: w·x of
each, 0 where it is masked."""


class Examples:
    """The values of a loss: which of them count, and how much.

    Example:
        from fulgurite_losses import Examples

        examples = Examples(preds.shape, mask, weight=None)
        examples.weights  # [1., 1., 1., 0.]

    Attributes:
        shape: of the values.
        present: which are not masked.
        weights: 0 where masked.
    """

    shape: tuple[int, ...]
    present: Bool[Array, "..."]
    weights: Float[Array, "..."]

    def __init__(self, shape: tuple[int, ...], mask: Mask | None, weight: Values | None) -> None:
        """Set which values count.

        Args:
            shape: of the values.
            mask: bools over all axes of the values or the leading ones; None masks nothing.
            weight: numbers over all axes of the values or the leading ones; None for 1.
        """
        self.shape = shape
        self._sources = (mask, weight)
        self.present = apply_mask(jnp.ones(shape, jnp.bool_), mask, False)
        weights = jnp.float32(1) if weight is None else to_float(weight)
        if weights.shape != shape[: weights.ndim]:
            raise ConfigurationError(
                f"a weight of shape {list(weights.shape)} for losses of shape {list(shape)}; it "
                "must begin like these"
            )
        weights = weights.reshape(*weights.shape, *(1 for _ in shape[weights.ndim :]))
        self.weights = jnp.where(self.present, weights, 0)

    def hide(self, values: Array, fill: float = 0.0) -> Array:
        """Replace what belongs to masked examples.

        This must happen before anything is computed: the gradient of NaN is NaN, even where the
        value is selected away afterwards.

        Args:
            values: they begin with the axes of the losses.
            fill: a value at which the loss and its gradient are finite.
        """
        return apply_mask(values, self.present, fill)

    def reduce(
        self,
        values: Float[Array, "..."],
        reduction: Reduction,
        *,
        are_independent: bool = True,
    ) -> Float[Array, "..."]:
        """Return the values of all examples as what `reduction` says.

        Without any example a mean is 0, and so is its gradient. A step that returns the mean itself
        as its loss thereby says what it is a mean over.

        Args:
            values: of the examples.
            reduction: how they become one.
            are_independent: whether each depends on its own example alone, so that the mean over a
                batch is that of the means over its parts.
        """
        if reduction not in get_args(Reduction):
            raise ConfigurationError(
                f"reduction is {reduction!r}; choose 'mean', 'weighted_mean', 'sum' or 'none'"
            )
        weighted = jnp.where(self.present, values * self.weights, 0)
        if reduction == "none":
            return weighted
        total = jnp.sum(weighted)
        if reduction == "sum":
            return total
        size = share_weight(self._sources, (self.shape, reduction), partial(self._sum, reduction))
        mean = total / jnp.where(size == 0, 1, size).astype(total.dtype)
        # Over all values it is a mean over examples, as any number is by itself.
        is_weighted = any(source is not None for source in self._sources)
        return note_weight(mean, size) if is_weighted and are_independent else mean

    def _sum(self, reduction: Reduction) -> Array:
        counted = self.present if reduction == "mean" else self.weights
        return jnp.sum(counted, dtype=jnp.float32)


def as_same_shape(preds: Any, targets: Any, loss_name: str) -> tuple[Array, Array]:
    """Return predictions and targets as floats; an error if their shapes differ.

    Args:
        preds: of any shape.
        targets: of the same.
        loss_name: what needs them, for errors.
    """
    preds = to_float(preds)
    targets = to_float(targets)
    if preds.shape != targets.shape:
        raise ConfigurationError(
            f"{loss_name} of predictions {list(preds.shape)} and targets {list(targets.shape)}; "
            "they must have the same shape, so that none is broadcast by mistake"
        )
    return preds, targets


def check_positive(value: float, name: str, loss_name: str) -> None:
    """Raise an error unless a setting is positive.

    Args:
        value: the setting.
        name: of the argument, for errors.
        loss_name: what it is an argument of, for errors.
    """
    if not value > 0:
        raise ConfigurationError(f"{loss_name} with {name}={value}; it must be positive")
