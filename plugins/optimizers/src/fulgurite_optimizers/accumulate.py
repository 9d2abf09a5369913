"""The plugin: gradients of several microbatches, or of several steps, for one update."""

from dataclasses import dataclass
from typing import Literal

import fulgurite as fg
from fulgurite.errors import ConfigurationError, PluginError

from fulgurite_optimizers.finishing import FinalizeMixin
from fulgurite_optimizers.phase import Phase
from fulgurite_optimizers.update import PhasedUpdate


@dataclass(frozen=True)
class GradientAccumulation(FinalizeMixin):
    """Takes the mean gradient of `n` parts for one update.

    As a plugin it is for modules with one optimizer; with several, each has its own: `Phase(...,
    accumulate=...)`.

    Attributes:
        n: the number of microbatches or steps.
        mode: with `microbatch`, a step splits its batch into `n` parts and processes them one after
            another, which takes a fraction of the activation memory. Examples `i`, `i + n`, ...
            form a microbatch, so examples spread over several devices stay where they are. Each has
            its own random keys; the model's state goes from one to the next; running metrics are
            averaged; the output has no `preds`, and the media of the first. With `steps`, only
            every `n`-th step changes the parameters. A remainder at the end of training is applied
            and constrained there; this is not a step, so no other plugin's `after_update` sees it.
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

    @fg.hookimpl
    def make_update_rule(self, optimizers: dict[str, fg.OptimizerSpec]) -> fg.UpdateRule:
        """The rule for one optimizer."""
        (name, phase), *others = optimizers.items()
        if others or isinstance(phase, Phase):
            raise PluginError(
                f"GradientAccumulation is a plugin for one optimizer, but there are phases "
                f"({', '.join(optimizers)}): add MultiOptimizer() "
                f"in its place and give it to each of them, Phase(..., "
                f"accumulate=GradientAccumulation({self.n}))"
            )
        accumulating = Phase(
            phase.optimizer,
            phase.params,
            gradient_transform=phase.gradient_transform,
            accumulate=self,
        )
        return PhasedUpdate({name: accumulating}, simultaneous=False, functions=False)
