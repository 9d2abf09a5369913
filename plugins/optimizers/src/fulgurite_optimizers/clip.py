"""The plugin: gradients of limited size."""

from dataclasses import dataclass, field
from typing import Any

import fulgurite as fg
import optax
from fulgurite.errors import ConfigurationError, did_you_mean


@dataclass(frozen=True)
class GradientClip:
    """Clips the gradients before an optimizer.

    Example:
        from fulgurite_optimizers import GradientClip

        engine = fg.Engine(steps=1000, plugins=[GradientClip(max_norm=1.0)])

    Attributes:
        norm: the largest global norm over all arrays of the optimizer; larger gradients are scaled
            down.
        value: the largest absolute value of each number; clipped before the norm is taken.
        optimizer: the name of a phase; all phases by default.
    """

    max_norm: float | None = None
    max_value: float | None = None
    optimizer: str | None = None
    _asked: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        limits = [limit for limit in (self.max_norm, self.max_value) if limit is not None]
        numbers = all(
            isinstance(limit, int | float) and type(limit) is not bool for limit in limits
        )
        if not limits or not numbers or not all(limit > 0 for limit in limits):
            raise ConfigurationError(
                f"{self} clips nothing: give norm=1.0, or value=, a positive number"
            )

    @fg.hookimpl
    def gradient_transform(self, optimizer: str) -> optax.GradientTransformation | None:
        """The transformations of optax."""
        self._asked.add(optimizer)
        if self.optimizer not in (None, optimizer):
            return None
        by_value = [] if self.max_value is None else [optax.clip(self.max_value)]
        return optax.chain(
            *by_value,
            *([] if self.max_norm is None else [optax.clip_by_global_norm(self.max_norm)]),
        )

    @fg.hookimpl
    def wrap_update_rule(self, rule: Any) -> None:
        """Changes nothing: all optimizers are known by now, and that of this one has to be among
        them."""
        if self.optimizer is not None and self.optimizer not in self._asked:
            raise ConfigurationError(
                f"{self}: there is no such optimizer. "
                f"{did_you_mean(str(self.optimizer), self._asked)}"
            )
