"""The base of rules that do something around another one."""

from typing import Self

import fulgurite as fg
from jaxtyping import PyTree


class Wrapped(fg.UpdateRule):
    """Does what `rule` does."""

    def __init__(self, rule: fg.UpdateRule) -> None:
        self.rule = rule
        self._later: dict[int, Self] = {}

    def init(self, module: PyTree) -> PyTree:
        return self.rule.init(module)

    def trained(self, module: PyTree) -> PyTree[bool]:
        return self.rule.trained(module)

    def apply(self, state: fg.TrainState, grads: PyTree, output: fg.Output) -> tuple[fg.TrainState, fg.Output]:
        return self.rule.apply(state, grads, output)

    def at(self, step: int, span: fg.Span) -> fg.UpdateRule:
        rule = self.rule.at(step, span)
        if rule is self.rule:
            return self
        return self._later.setdefault(id(rule), self.around(rule))

    def finish(self, state: fg.TrainState) -> fg.TrainState:
        return self.rule.finish(state)

    def around(self, rule: fg.UpdateRule) -> Self:
        """The same around another rule."""
        raise NotImplementedError
