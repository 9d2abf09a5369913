"""The plugin: gradients of limited size."""

from dataclasses import dataclass

import fulgurite as fg
import optax
from fulgurite.errors import ConfigurationError


@dataclass(frozen=True)
class Clip:
    """Clips the gradients before an optimizer.

    Attributes:
        norm: the largest global norm over all arrays of the optimizer; larger gradients are scaled down.
        value: the largest absolute value of each number; clipped before the norm is taken.
        optimizer: the name of the phase; all of them by default.
    """

    norm: float | None = None
    value: float | None = None
    optimizer: str | None = None

    def __post_init__(self) -> None:
        limits = [limit for limit in (self.norm, self.value) if limit is not None]
        if not limits or not all(limit > 0 for limit in limits):
            raise ConfigurationError(f"{self} clips nothing: give norm=1.0, or value=, a positive number")

    @fg.hookimpl
    def gradient_transform(self, optimizer: str) -> optax.GradientTransformation | None:
        """The transformations of optax."""
        if self.optimizer not in (None, optimizer):
            return None
        by_value = [] if self.value is None else [optax.clip(self.value)]
        return optax.chain(*by_value, *([] if self.norm is None else [optax.clip_by_global_norm(self.norm)]))
