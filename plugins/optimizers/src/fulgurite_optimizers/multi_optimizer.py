"""The plugin: several optimizers in one step."""

from itertools import combinations
from typing import Any, Literal

import fulgurite as fg
import jax
from fulgurite.errors import ConfigurationError
from fulgurite.tree.paths import leaves_with_paths

from fulgurite_optimizers.finalize import FinalizeMixin
from fulgurite_optimizers.phase import Phase
from fulgurite_optimizers.update import PhasedUpdate


class MultiOptimizer(FinalizeMixin):
    """Trains each loss with its own optimizer, all in one compiled step.

    The losses come by name from `training_step`, `fg.Output(losses={"generator": ..., ...})`, or as
    functions from a method `losses(batch, ctx)` of the module, so that a phase computes only what
    it needs. A further term `generator/l2`, from a plugin or from `ctx.add_loss`, is part of the
    loss `generator`.

    Example:
        from fulgurite_optimizers import MultiOptimizer, Phase

        phases = MultiOptimizer(
            generator=Phase(optax.adam(1e-4), params="generator"),
            critic=Phase(optax.adam(1e-4), params="critic", repeat=5),
        )
        engine = fg.Engine(steps=1000, plugins=[phases])

    Args:
        order: with `alternating`, each phase sees the updates of those before it and runs its own
            forward pass; with `simultaneous`, all gradients are taken at the same parameters and
            the updates are applied together. Then the losses of `training_step` come from one
            forward pass, with one pullback per phase.
        overlap: whether two phases may update the same array.
        phases: by the name of their loss. If none are given, they come from the module's
            `configure_optimizers`.
    """

    plugin_name = "phases"

    def __init__(
        self,
        *,
        order: Literal["alternating", "simultaneous"] = "alternating",
        overlap: bool = False,
        **phases: fg.OptimizerSpec,
    ) -> None:
        if order not in ("alternating", "simultaneous"):
            raise ConfigurationError(
                f"MultiOptimizer: order is {order!r}; choose 'alternating' or 'simultaneous'"
            )
        for name, phase in phases.items():
            if not isinstance(phase, fg.OptimizerSpec):
                raise ConfigurationError(
                    f"MultiOptimizer: {name} is {phase!r}; give Phase(optax.adam(1e-3), params=...)"
                )
        self.simultaneous, self.overlap, self.phases = order == "simultaneous", overlap, phases

    @fg.hookimpl
    def configure_optimizers(self) -> dict[str, fg.OptimizerSpec] | None:
        """The phases that were given."""
        return dict(self.phases) or None

    @fg.hookimpl
    def make_update_rule(
        self, module: Any, optimizers: dict[str, fg.OptimizerSpec]
    ) -> PhasedUpdate:
        """The rule, after a look at what the phases select."""
        made = {name: Phase.from_spec(phase) for name, phase in optimizers.items()}
        if all(phase.every > 1 for phase in made.values()):
            raise ConfigurationError(
                f"of the phases {', '.join(made)} one must run at every step, with every=1: a step "
                f"is an update"
            )
        for name, phase in made.items() if self.simultaneous else ():
            if phase.repeat > 1 or (
                phase.accumulate is not None and phase.accumulate.mode == "microbatch"
            ):
                raise ConfigurationError(
                    f"the phase {name!r} repeats or takes microbatches, but simultaneous phases "
                    f"take one gradient of "
                    "the whole batch each, at the same parameters: use order='alternating'"
                )
        chosen = {name: phase.param_mask(module) for name, phase in made.items()}
        for name, arrays in chosen.items():
            if not any(jax.tree.leaves(arrays)):
                raise ConfigurationError(
                    f"the phase {name!r} selects no array of floating-point numbers, so it updates "
                    f"nothing; take others"
                )
        for first, second in combinations(chosen, 2) if not self.overlap else ():
            both = jax.tree.map(lambda a, b: a and b, chosen[first], chosen[second])
            if shared := [path for path, yes in leaves_with_paths(both) if yes]:
                more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
                raise ConfigurationError(
                    f"the phases {first!r} and {second!r} both update {shared[0]}{more}: select "
                    f"other arrays, or say "
                    "MultiOptimizer(overlap=True)"
                )
        return PhasedUpdate(made, simultaneous=self.simultaneous)
