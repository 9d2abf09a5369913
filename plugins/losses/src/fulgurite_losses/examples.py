"""What all losses share: which examples count, how much, and how their values become one."""

from typing import Any, get_args

import jax.numpy as jnp
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import apply_mask, note_weight, share_weight, to_float
from jaxtyping import Array, Bool, Float

from fulgurite_losses.signature import DEFAULTS, LossOptions, Reduction


class Examples:
    """The values of a loss: which of them count, and how much.

    Example:
        from fulgurite_losses import Examples

        examples = Examples(preds.shape, {"mask": mask})
        examples.weights  # [1., 1., 1., 0.]

    Attributes:
        shape: of the values.
        present: which are not masked.
        weights: 0 where masked.
    """

    shape: tuple[int, ...]
    present: Bool[Array, "..."]
    weights: Float[Array, "..."]

    def __init__(self, shape: tuple[int, ...], options: LossOptions) -> None:
        """Set which values count.

        Args:
            shape: of the values.
            options: of the loss: how the mask and the weight belong to the values, and the
                reduction.
        """
        settings: dict[str, Any] = {**DEFAULTS, **options}
        mask, weight = settings["mask"], settings["weight"]
        self.shape = shape
        self._sources = (mask, weight)
        self._reduction = settings["reduction"]
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
        self, values: Float[Array, "..."], *, are_independent: bool = True
    ) -> Float[Array, "..."]:
        """Return the values of all examples as what the reduction says.

        Without any example a mean is 0, and so is its gradient. A step that returns the mean itself
        as its loss thereby says what it is a mean over.

        Args:
            values: of the examples.
            are_independent: whether each depends on its own example alone, so that the mean over a
                batch is that of the means over its parts.
        """
        reduction = self._reduction
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
        size = share_weight(self._sources, (self.shape, reduction), self._sum_weights)
        mean = total / jnp.where(size == 0, 1, size).astype(total.dtype)
        # Over all values it is a mean over examples, as any number is by itself.
        is_weighted = any(source is not None for source in self._sources)
        return note_weight(mean, size) if is_weighted and are_independent else mean

    def _sum_weights(self) -> Array:
        counted = self.present if self._reduction == "mean" else self.weights
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
