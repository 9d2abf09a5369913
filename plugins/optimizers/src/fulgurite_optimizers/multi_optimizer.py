"""The plugin for several optimizers in one step."""

from itertools import combinations
from typing import Any, Literal

import fulgurite as fg
import jax
from fulgurite.errors import ConfigurationError, check_one_of
from fulgurite.plugins import hide_constructor_frames, hint_at_arguments, leaves_with_paths
from jaxtyping import PyTree

from fulgurite_optimizers.finalize import FinalizeMixin
from fulgurite_optimizers.phase import Phase, list_announcements
from fulgurite_optimizers.update import PhasedUpdate


@hide_constructor_frames
class MultiOptimizer(FinalizeMixin):
    """Trains each loss with its own optimizer, all in one compiled step.

    The losses come by name from `training_step`, `fg.Output(losses={"generator": ..., ...})`, or as
    functions from a method `losses(batch, ctx)` of the module, so that a phase computes only what
    it needs. A further term `generator/l2`, from a plugin or from `ctx.add_loss`, is part of the
    loss `generator`.

    Args:
        order: with `alternating`, each phase sees the updates of those before it and runs its own
            forward pass; with `simultaneous`, all gradients are taken at the same parameters and
            the updates are applied together. Then the losses of `training_step` come from one
            forward pass, with one pullback per phase.
        overlap: whether two phases may update the same array.
        phases: by the name of their loss. If none are given, they come from the module's
            `configure_optimizers`.

    Example:

        from fulgurite_optimizers import MultiOptimizer, Phase

        MultiOptimizer(
            discriminator=Phase(optax.adam(1e-4), "discriminator"),
            generator=Phase(optax.adam(1e-4), "generator", every=5),
        )
    """

    plugin_name = "multi_optimizer"

    @hint_at_arguments(
        {},
        "MultiOptimizer",
        too_many="give each phase by the name of its loss, as in "
        "MultiOptimizer(generator=Phase(optax.adam(1e-4), 'generator'))",
    )
    def __init__(
        self,
        *,
        order: Literal["alternating", "simultaneous"] = "alternating",
        overlap: bool = False,
        **phases: fg.OptimizerSpec,
    ) -> None:
        check_one_of(order, ("alternating", "simultaneous"), "MultiOptimizer: order")
        check_one_of(overlap, (True, False), "MultiOptimizer: overlap")
        for name, phase in phases.items():
            if not isinstance(phase, fg.OptimizerSpec):
                raise ConfigurationError(
                    f"MultiOptimizer: {name} is {phase!r}; pass Phase(optax.adam(1e-3), params=...)"
                )
        self.simultaneous = order == "simultaneous"
        self.overlap = overlap
        self.phases = phases

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Announce the steps at which an accumulation changes, and finalize at the end."""
        settings = [
            phase.accumulate
            for phase in self.phases.values()
            if isinstance(phase, Phase) and phase.accumulate is not None
        ]
        return [*list_announcements(settings), *super().register_actions()]

    @fg.hookimpl
    def configure_optimizers(self) -> dict[str, fg.OptimizerSpec] | None:
        """Return the phases, None for those of the module."""
        return dict(self.phases) or None

    @fg.hookimpl
    def make_update_rule(
        self, module: Any, optimizers: dict[str, fg.OptimizerSpec]
    ) -> PhasedUpdate:
        """Return the rule, after a check of what the phases select.

        Args:
            module: the model.
            optimizers: by the name of their loss.
        """
        phases = {name: Phase.from_spec(spec) for name, spec in optimizers.items()}
        if all(phase.every > 1 for phase in phases.values()):
            raise ConfigurationError(
                f"of the phases {', '.join(phases)} one must run at every step, with every=1: a "
                "step is an update"
            )
        for name, phase in phases.items():
            if name not in self.phases and phase.accumulate and phase.accumulate.changes:
                raise ConfigurationError(
                    f"the accumulation of the phase {name!r} changes during the run: give the "
                    f"phases to MultiOptimizer itself, MultiOptimizer({name}=Phase(...)), so that "
                    "it knows the steps"
                )
        if self.simultaneous:
            _check_one_gradient_each(phases)
        masks = {name: phase.param_mask(module) for name, phase in phases.items()}
        for name, mask in masks.items():
            if not any(jax.tree.leaves(mask)):
                raise ConfigurationError(
                    f"the phase {name!r} selects no array of floating-point numbers, so it updates "
                    "nothing: select others"
                )
        if not self.overlap:
            _check_disjoint(masks)
        return PhasedUpdate(phases, simultaneous=self.simultaneous)


def _check_one_gradient_each(phases: dict[str, Phase]) -> None:
    for name, phase in phases.items():
        uses_microbatches = phase.accumulate is not None and phase.accumulate.mode == "microbatch"
        if phase.repeat > 1 or uses_microbatches:
            raise ConfigurationError(
                f"the phase {name!r} repeats or uses microbatches, but simultaneous phases take "
                "one gradient of the whole batch each, at the same parameters: use "
                "order='alternating'"
            )


def _check_disjoint(masks: dict[str, PyTree[bool]]) -> None:
    for first, second in combinations(masks, 2):
        both = jax.tree.map(lambda a, b: a and b, masks[first], masks[second])
        shared = [path for path, is_shared in leaves_with_paths(both) if is_shared]
        if shared:
            more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
            raise ConfigurationError(
                f"the phases {first!r} and {second!r} both update {shared[0]}{more}: select "
                "other arrays, or pass MultiOptimizer(overlap=True)"
            )
