"""An optimizer for one of several losses."""

from dataclasses import dataclass, field
from typing import Any, Literal

import fulgurite as fg
import optax
from fulgurite.errors import ConfigurationError


@dataclass(frozen=True)
class AccumulationSettings:
    """The fields of `GradientAccumulation`, without the plugin: what a `Phase` has to know.

    Attributes:
        n: the number of microbatches or steps.
        mode: what is accumulated over.
    """

    n: int
    mode: Literal["microbatch", "steps"] = "microbatch"

    def __post_init__(self) -> None:
        if type(self.n) is not int or self.n < 1:
            raise ConfigurationError(
                f"GradientAccumulation: n is {self.n!r}; it must be a positive integer"
            )
        if self.mode not in ("microbatch", "steps"):
            raise ConfigurationError(
                f"GradientAccumulation: mode is {self.mode!r}; choose 'microbatch' or 'steps'"
            )


@dataclass(frozen=True)
class Phase(fg.OptimizerSpec):
    """An optimizer for one of several losses.

    Example:
        from fulgurite_optimizers import MultiOptimizer, Phase

        critic = Phase(optax.adam(1e-4), params="critic", repeat=5)
        generator = Phase(optax.adam(1e-4), params="generator", every=2)
        phases = MultiOptimizer(critic=critic, generator=generator)

    Attributes:
        optimizer: an `optax.GradientTransformation`. It counts its own updates, and its schedules
            follow that count.
        params: the arrays that it updates: a pattern, a function of the module, or what `fg.select`
            and `fg.exclude` return; all of them by default.
        every: it runs in every `every`-th step, as `fg.Every(n)` counts them.
        repeat: the number of its updates in one step, each with random keys of its own.
        split: whether each repetition gets a share of the batch instead of all of it.
        accumulate: a `GradientAccumulation`, for one update by the mean gradient of several
            microbatches or steps.
    """

    every: int = field(default=1, kw_only=True)
    repeat: int = field(default=1, kw_only=True)
    split: bool = field(default=False, kw_only=True)
    accumulate: AccumulationSettings | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accumulate is not None and not isinstance(self.accumulate, AccumulationSettings):
            raise ConfigurationError(
                f"Phase: accumulate is {self.accumulate!r}; pass GradientAccumulation(4), or "
                f"GradientAccumulation(4, 'steps')"
            )
        for name, value in (("every", self.every), ("repeat", self.repeat)):
            if type(value) is not int or value < 1:
                raise ConfigurationError(
                    f"Phase: {name} is {value!r}; it must be a positive integer"
                )
        if self.split and self.repeat == 1:
            raise ConfigurationError(
                "Phase: split=True divides the batch between repetitions, but repeat is 1; set "
                "repeat=2 or more"
            )

    @staticmethod
    def from_spec(spec: fg.OptimizerSpec) -> "Phase":
        """Return a specification of the core as a phase that runs once in every step; a phase as it
        is."""
        if isinstance(spec, Phase):
            return spec
        return Phase(spec.optimizer, spec.params, gradient_transform=spec.gradient_transform)


def optimize_only(
    optimizer: optax.GradientTransformation, params: Any
) -> dict[str, fg.OptimizerSpec]:
    """Return, for `configure_optimizers`, an optimizer for a part of the module.

    All other arrays get no gradient, no optimizer state and no weight decay. Needs no plugin.

    Args:
        optimizer: the optimizer.
        params: the arrays that it updates: a pattern, a function of the module, or what `fg.select`
            and `fg.exclude` return.

    Example:

        def configure_optimizers(self):
            return optimize_only(optax.adam(1e-3), "head")
    """
    return {"default": fg.OptimizerSpec(optimizer, params)}
