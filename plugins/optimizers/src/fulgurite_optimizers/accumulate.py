"""The plugin for one update by the gradients of several microbatches or steps."""

from dataclasses import dataclass

import fulgurite as fg
from fulgurite.errors import PluginError
from fulgurite.plugins import hide_constructor_frames

from fulgurite_optimizers.finalize import FinalizeMixin
from fulgurite_optimizers.phase import AccumulationSettings, Phase, list_announcements
from fulgurite_optimizers.update import PhasedUpdate


@hide_constructor_frames
@dataclass(frozen=True)
class GradientAccumulation(AccumulationSettings, FinalizeMixin):
    """Updates once by the gradient of `n` microbatches or steps: that of all their examples in one
    batch.

    Each part counts by what its loss is a mean over: the number of its examples, or what the step
    says, `fg.Output(loss, weight=...)` or an `fg.metrics.Mean`. A loss that is a bare number must
    be a mean over examples. That is tried on a few of them before the first step, and refused if it
    is not so, as with a mean over tokens, a sum, or a loss that compares the examples of a batch.

    As a plugin it is for modules with one optimizer; with several, each has its own: `Phase(...,
    accumulate=...)`.

    `optax.MultiSteps` is not used for `steps`, for three reasons. What is left of an accumulation
    when training ends is applied by `UpdateRule.finalize`, for which `MultiSteps` has no method. It
    accumulates in float32 or in the dtype that it is told, not in that of the gradients. And it
    computes the update of the wrapped optimizer at every step and selects, where this runs the
    optimizer in a branch of `lax.cond` only when it is time.

    Attributes:
        n: the number of microbatches or steps. It may change in a run: with `{0: 1, 1000: 4}` it is
            4 from the update after step 1000 on. The step is then compiled again. With `steps`,
            gradients that wait there are part of the next mean.
        mode: with `microbatch`, a step splits its batch into `n` parts and processes them one after
            another, which takes a fraction of the activation memory. Examples `i`, `i + n`, ...
            form a microbatch, so examples spread over several devices stay where they are. Each has
            its own random keys; the model's state goes from one to the next; running metrics are
            averaged; the output has no `preds`, and the media of the first. With `steps`, only
            every `n`-th step changes the parameters. A remainder at the end of training is applied
            there; this is not a step, so plugins see it by the hook `after_finalize`, and the
            metrics of the last step, such as `default/updates`, do not count it.
        assume_mean: whether a loss that is a bare number is taken for a mean over examples untried.

    Example:

        from fulgurite_optimizers import GradientAccumulation

        fg.Engine(steps=1000, plugins=[GradientAccumulation(4)])
    """

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Announce the steps at which the number changes, and finalize at the end."""
        return [*list_announcements([self]), *super().register_actions()]

    @fg.hookimpl
    def make_update_rule(self, optimizers: dict[str, fg.OptimizerSpec]) -> fg.UpdateRule:
        """Return the rule for the only optimizer."""
        (name, spec), *others = optimizers.items()
        if others or isinstance(spec, Phase):
            raise PluginError(
                f"GradientAccumulation is a plugin for one optimizer, but there are phases "
                f"({', '.join(optimizers)}): replace it by MultiOptimizer() and pass it to each of "
                f"them, Phase(..., accumulate=GradientAccumulation({self.n!r}))"
            )
        phase = Phase(
            spec.optimizer,
            spec.params,
            gradient_transform=spec.gradient_transform,
            accumulate=self,
        )
        # `training_step` gives the loss, even where the module has a method `losses` for other use.
        return PhasedUpdate({name: phase}, simultaneous=False, use_loss_functions=False)
