"""The update rule that trains adapters alone."""

from collections.abc import Callable
from typing import Any

import fulgurite as fg
from fulgurite_optimizers import Freeze
from jaxtyping import PyTree

from fulgurite_lora.adapters import list_scales


class AdapterUpdate(fg.UpdateRuleWrapper):
    """A rule from which everything is hidden but the adapters of all `Lora` plugins of an engine.

    One rule for all of them, because each would freeze the adapters of the others.

    Args:
        module: with all adapters.
        update_rule: the rule within.
        trained: what the first plugin trains.
    """

    def __init__(self, module: PyTree, update_rule: fg.UpdateRule, trained: fg.Selector) -> None:
        self._module = module
        self._rule_within = update_rule
        self._trained = trained
        super().__init__(self._freeze_others())

    @property
    def freeze(self) -> Freeze:
        """What freezes everything but the adapters of all plugins, and what they train too."""
        return Freeze(~self._trained | fg.select(list_scales))

    def train_too(self, trained: fg.Selector) -> None:
        """Train what another plugin trains as well. Only while the rules of an engine are built.

        Args:
            trained: what the other plugin trains.
        """
        self._trained = self._trained | trained
        self.update_rule = self._freeze_others()

    def __call__(
        self, forward: Callable[..., fg.Output], state: fg.TrainState, batch: Any, ctx: fg.Context
    ) -> tuple[fg.TrainState, fg.Output]:
        return self.update_rule(forward, state, batch, ctx)

    def for_step(self, step: int, step_range: fg.StepRange) -> fg.UpdateRule:
        # No more is added once there are steps, and then the rule within is all there is.
        return self.update_rule.for_step(step, step_range)

    def _freeze_others(self) -> fg.UpdateRule:
        return self.freeze.wrap_update_rule(self._module, self._rule_within)


def find_adapter_update(update_rule: Any) -> AdapterUpdate | None:
    """Return the rule of an earlier `Lora` among a rule and those within it."""
    while update_rule is not None:
        if isinstance(update_rule, AdapterUpdate):
            return update_rule
        update_rule = getattr(update_rule, "update_rule", None)
    return None
