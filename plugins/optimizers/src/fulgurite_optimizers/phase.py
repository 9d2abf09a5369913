"""An optimizer for one of several losses."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, Self

import fulgurite as fg
import optax
from fulgurite.errors import (
    ConfigurationError,
    as_int,
    check_one_of,
    check_positive_int,
    set_ints,
)
from fulgurite.plugins import hide_constructor_frames


@dataclass(frozen=True)
class AccumulationSettings:
    """The fields of `GradientAccumulation`, without the plugin: what a `Phase` reads of it.

    They stand here because the plugin imports the phase: the files must not form a circle.

    Attributes:
        n: the number of microbatches or steps, or a mapping from steps of the run to numbers.
        mode: what is accumulated over.
        assume_mean: whether a loss that is a bare number is taken for a mean over examples untried.
    """

    n: int | Mapping[int, int]
    mode: Literal["microbatch", "steps"] = "microbatch"
    assume_mean: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        set_ints(self, "n")
        numbers = self.n
        if isinstance(numbers, Mapping):
            numbers = {as_int(step): as_int(number) for step, number in numbers.items()}
            if any(type(step) is not int or step < 0 for step in numbers) or 0 not in numbers:
                raise ConfigurationError(
                    f"GradientAccumulation: n is {numbers!r}; a mapping begins with step 0, as in "
                    "{0: 1, 1000: 4}, and its keys are numbers of completed steps"
                )
            numbers = dict(sorted(numbers.items()))
            object.__setattr__(self, "n", numbers)
        for number in self.numbers:
            check_positive_int(number, "GradientAccumulation: n")
        check_one_of(self.mode, ("microbatch", "steps"), "GradientAccumulation: mode")

    @property
    def numbers(self) -> list[int]:
        """Return the numbers of all times; the first holds from the beginning."""
        return list(self.n.values()) if isinstance(self.n, Mapping) else [self.n]

    @property
    def needs_mean_loss(self) -> bool:
        """Whether it must be tried if the loss is a mean over examples."""
        return not self.assume_mean and max(self.numbers) > 1

    @property
    def changes(self) -> dict[int, int]:
        """Return the new number by the step after which it holds."""
        if not isinstance(self.n, Mapping):
            return {}
        numbers = list(self.n.items())
        return {
            step: number for (_, before), (step, number) in pairwise(numbers) if number != before
        }

    def for_step(self, step: int) -> Self:
        """Return these settings with the number that holds from the update after `step` on."""
        if not isinstance(self.n, Mapping):
            return self
        number = [number for start, number in self.n.items() if start <= step][-1]
        return replace(self, n=number)


def list_announcements(settings: Iterable[AccumulationSettings]) -> list[fg.ScheduledAction]:
    """Return an action at the steps at which a number of microbatches or steps changes. The engine
    looks for another update rule wherever an action was due."""
    changes: dict[int, list[str]] = {}
    for setting in settings:
        parts = "microbatches" if setting.mode == "microbatch" else "steps"
        for step, number in setting.changes.items():
            changes.setdefault(step, []).append(f"{number} {parts}")

    def announce(run: fg.Run) -> None:
        numbers = " and ".join(changes[run.step])
        run.notify(
            "accumulate",
            f"gradients are accumulated over {numbers} from step {run.step} on: the step is "
            "compiled again",
        )

    return [fg.ScheduledAction("accumulate", fg.At(*changes), announce)] if changes else []


@hide_constructor_frames
@dataclass(frozen=True)
class Phase(fg.OptimizerSpec):
    """An optimizer for one of several losses.

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

    Example:

        from fulgurite_optimizers import Phase

        Phase(optax.adam(1e-4), "generator", every=5)
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
                "GradientAccumulation(4, 'steps')"
            )
        set_ints(self, "every", "repeat")
        check_positive_int(self.every, "Phase: every")
        check_positive_int(self.repeat, "Phase: repeat")
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

        from fulgurite_optimizers import optimize_only

        def configure_optimizers(self):
            return optimize_only(optax.adam(1e-3), "head")
    """
    return {"default": fg.OptimizerSpec(optimizer, params)}
