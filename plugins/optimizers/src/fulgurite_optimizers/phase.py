"""An optimizer for one of several losses."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import fulgurite as fg
import optax
from fulgurite.errors import ConfigurationError

if TYPE_CHECKING:
    from fulgurite_optimizers.accumulate import GradientAccumulation


@dataclass(frozen=True)
class Phase(fg.OptimizerSpec):
    """An optimizer for one of several losses.

    Attributes:
        optimizer: an `optax.GradientTransformation`. It counts its own updates, and its schedules
            follow that count.
        params: the arrays that it updates: a pattern, a function of the module, or what `fg.select`
            and `fg.exclude` give; all of them by default.
        every: it runs in every `every`-th update of the engine, as `fg.Every(n)` counts them.
        repeat: the number of its updates in one step, each with random keys of its own.
        split: whether each repetition takes a share of the batch instead of the whole.
        accumulate: takes the mean gradient of several microbatches or steps for one update.
    """

    every: int = field(default=1, kw_only=True)
    repeat: int = field(default=1, kw_only=True)
    split: bool = field(default=False, kw_only=True)
    accumulate: "GradientAccumulation | None" = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accumulate is not None and not hasattr(self.accumulate, "mode"):
            raise ConfigurationError(
                f"Phase: accumulate is {self.accumulate!r}; give GradientAccumulation(4), or with "
                f"'steps'"
            )
        for name, value in (("every", self.every), ("repeat", self.repeat)):
            if type(value) is not int or value < 1:
                raise ConfigurationError(
                    f"Phase: {name} is {value!r}; it must be a positive integer"
                )
        if self.split and self.repeat == 1:
            raise ConfigurationError(
                "Phase: split=True is for repeat=2 and more, which then share the batch"
            )

    @staticmethod
    def from_spec(phase: fg.OptimizerSpec) -> "Phase":
        """A phase of the core, extended by the fields of this package."""
        return (
            phase
            if isinstance(phase, Phase)
            else Phase(phase.optimizer, phase.params, gradient_transform=phase.gradient_transform)
        )


def optimize_only(
    optimizer: optax.GradientTransformation, params: Any
) -> dict[str, fg.OptimizerSpec]:
    """For `configure_optimizers`: an optimizer that updates only the arrays that `params` selects.
    All others get no gradient, no optimizer state and no weight decay. Needs no plugin."""
    return {"default": fg.OptimizerSpec(optimizer, params)}
