"""The base of update rules that wrap another one."""

from typing import Self

import fulgurite as fg
from jaxtyping import PyTree


class UpdateRuleWrapper(fg.UpdateRule):
    """Passes everything on to another rule. A subclass overrides what it changes, and `rewrap`.

    Args:
        rule: the rule within.
    """

    def __init__(self, rule: fg.UpdateRule) -> None:
        self.rule = rule
        # By the identity of the rule within: another object would be another executable.
        self._rewrapped: dict[int, Self] = {}

    def init(self, module: PyTree) -> PyTree:
        return self.rule.init(module)

    def trainable_mask(self, module: PyTree) -> PyTree[bool]:
        return self.rule.trainable_mask(module)

    def apply_gradients(
        self, state: fg.TrainState, grads: PyTree, output: fg.Output
    ) -> tuple[fg.TrainState, fg.Output]:
        return self.rule.apply_gradients(state, grads, output)

    def for_step(self, step: int, step_range: fg.StepRange) -> fg.UpdateRule:
        rule = self.rule.for_step(step, step_range)
        if rule is self.rule:
            return self
        return self._rewrapped.setdefault(id(rule), self.rewrap(rule))

    def finalize(self, state: fg.TrainState) -> fg.TrainState:
        return self.rule.finalize(state)

    def rewrap(self, rule: fg.UpdateRule) -> Self:
        """Return a wrapper like this one around another rule."""
        raise NotImplementedError
