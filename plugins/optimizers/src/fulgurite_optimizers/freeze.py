"""The plugin: parts of the module that are not trained, for good or for a while."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite.training.update import Forward
from fulgurite.tree.paths import leaves_with_paths
from fulgurite.tree.select import Selector
from fulgurite.triggers import Or, UnboundedRange
from jaxtyping import PyTree

from fulgurite_optimizers.wrapper import UpdateRuleWrapper


@dataclass(frozen=True)
class Freeze:
    """Leaves a part of the module out of training, whatever its optimizers are.

    A frozen part gets no gradient, no weight decay and, if it stays frozen, no optimizer state.
    With `until`, that state exists from the beginning and is left alone until then, so checkpoints
    from before and after have the same structure.

    Example:
        from fulgurite_optimizers import Freeze

        engine = fg.Engine(steps=1000, plugins=[Freeze("encoder", until=500)])

    Attributes:
        where: what to freeze: a pattern, a function of the module, or a selection by `fg.select`
            and `fg.exclude`.
        until: when its training begins: a step, or the first time of a trigger. The step is then
            compiled again. A trigger by epochs counts those of the fit; a loop of `engine.step` has
            none. None for never.
    """

    where: Selector | str | Callable[[Any], Any]
    until: fg.Trigger | int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.where, Selector):
            object.__setattr__(self, "where", fg.select(self.where))
        if isinstance(self.until, int):
            object.__setattr__(self, "until", fg.At(self.until))
        timed = (
            isinstance(self.until, fg.Trigger)
            and self.until.exact
            and not isinstance(self.until, fg.AtStart)
        )
        if self.until is not None and not timed:
            raise ConfigurationError(
                f"Freeze: until is {self.until!r}; give a step or a trigger that goes by steps or "
                f"epochs, and not by "
                "the clock, so that a resumed run does the same"
            )

    @fg.hookimpl
    def wrap_update_rule(self, module: Any, rule: fg.UpdateRule) -> fg.UpdateRule:
        """Hides what is frozen from the rule."""
        assert isinstance(self.where, Selector)
        self.where(module)
        return FrozenUpdate(rule, self) if self.until is None else UnfreezingUpdate(rule, self)

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """The time at which the rule changes."""
        return [] if self.until is None else [fg.ScheduledAction("thaw", self.until, self.announce)]

    def announce(self, run: fg.Run) -> None:
        """Says that the step is about to be compiled again."""
        if self.unfreeze_step(run.step_range) == run.step:
            notice = f"{self._text} is trained from step {run.step} on: the step is compiled again"
            run.log_text("freeze", {"message": notice}, stream="telemetry")

    def unfreeze_step(self, span: fg.StepRange) -> int | None:
        """The step after which everything is trained, as far as it is known."""
        assert isinstance(self.until, fg.Trigger)
        parts = self.until.parts if isinstance(self.until, Or) else (self.until,)
        if isinstance(span, UnboundedRange) and any(
            isinstance(part, fg.EveryEpoch | fg.EvenlySpaced | fg.AtEnd) for part in parts
        ):
            raise ConfigurationError(
                f"Freeze: until is {self.until!r}, and a loop of engine.step knows of no epochs "
                f"and no end: give a "
                "step, or train with engine.fit"
            )
        return self.until.next(0, replace(span, start=0))

    def split_frozen(self, module: PyTree) -> tuple[PyTree, PyTree]:
        """The module with `HIDDEN` in the place of the arrays that are frozen, and those arrays,
        None elsewhere."""
        assert isinstance(self.where, Selector)
        chosen = self.where(module)
        trained = jax.tree.map(lambda leaf, yes: HIDDEN if yes else leaf, module, chosen)
        return trained, eqx.filter(module, chosen)

    @property
    def _text(self) -> str:
        return self.where.text if isinstance(self.where, Selector) else ""


def freeze(*what: str | Callable[[Any], Any]) -> Freeze:
    """Freezes permanently what `fg.select` selects with the same arguments."""
    return Freeze(fg.select(*what))


class _Hidden:
    """Stands for an array that is not trained: selectors find it at its path, but it holds no
    numbers."""

    shape, dtype = (), np.dtype(object)


HIDDEN = _Hidden()


class FrozenUpdate(UpdateRuleWrapper):
    """A rule for a module of which a part is frozen for good: it never sees that part, but in the
    forward pass."""

    def __init__(self, rule: fg.UpdateRule, freeze: Freeze) -> None:
        super().__init__(rule)
        self.freeze = freeze

    def init(self, module: PyTree) -> PyTree:
        return self.rule.init(self.freeze.split_frozen(module)[0])

    def trainable_mask(self, module: PyTree) -> PyTree[bool]:
        return self.rule.trainable_mask(self.freeze.split_frozen(module)[0])

    def __call__(
        self, forward: Forward, state: fg.TrainState, batch: Any, ctx: fg.Context
    ) -> tuple[fg.TrainState, fg.Output]:
        _, frozen = self.freeze.split_frozen(state.module)

        def whole(module: Any, *arguments: Any) -> fg.Output:
            return forward(eqx.combine(frozen, module), *arguments)

        return self.update_trainable(state, lambda state: self.rule(whole, state, batch, ctx))

    def apply_gradients(
        self, state: fg.TrainState, grads: PyTree, output: fg.Output
    ) -> tuple[fg.TrainState, fg.Output]:
        return self.update_trainable(
            state, lambda state: self.rule.apply_gradients(state, grads, output)
        )

    def finalize(self, state: fg.TrainState) -> fg.TrainState:
        return self.update_trainable(state, lambda state: (self.rule.finalize(state), None))[0]

    def update_trainable(
        self, state: fg.TrainState, update: Callable[[fg.TrainState], Any]
    ) -> tuple[fg.TrainState, Any]:
        """What `update` makes of the state as the rule within sees it, and what else it gives."""
        trained, frozen = self.freeze.split_frozen(state.module)
        state, output = update(state.replace(module=trained))
        return state.replace(module=eqx.combine(frozen, state.module)), output

    def rewrap(self, rule: fg.UpdateRule) -> Self:
        return type(self)(rule, self.freeze)


class UnfreezingUpdate(FrozenUpdate):
    """A rule for a module of which a part is frozen until a step; from there on it is the rule
    within.

    The optimizer state is always that of the whole module. While a part is frozen, the rule is
    handed the leaves that it would have for the rest, found by their paths.
    """

    def init(self, module: PyTree) -> PyTree:
        return self.rule.init(module)

    def for_step(self, step: int, span: fg.StepRange) -> fg.UpdateRule:
        thaws = self.freeze.unfreeze_step(span)
        return (
            super().for_step(step, span)
            if thaws is None or int(step) < thaws
            else self.rule.for_step(step, span)
        )

    def update_trainable(
        self, state: fg.TrainState, update: Callable[[fg.TrainState], Any]
    ) -> tuple[fg.TrainState, Any]:
        like = eqx.filter_eval_shape(self.rule.init, self.freeze.split_frozen(state.module)[0])
        new, output = super().update_trainable(
            state.replace(opt_state=fill_missing(like, state.opt_state)), update
        )
        return new.replace(opt_state=fill_missing(state.opt_state, new.opt_state)), output


def fill_missing(tree: PyTree, source: PyTree) -> PyTree:
    """The tree with the leaves of `source` at the same paths."""
    there = dict(leaves_with_paths(source))
    leaves = [there.get(path, leaf) for path, leaf in leaves_with_paths(tree)]
    for (path, leaf), found in zip(leaves_with_paths(tree), leaves, strict=True):
        if jnp.shape(leaf) != jnp.shape(found):
            raise ConfigurationError(
                f"Freeze(until=...): {path} of the optimizer's state is one array for all "
                f"parameters, as optax.flatten "
                "makes it, of which no part can be left alone: take an optimizer that keeps arrays "
                "for each"
            )
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)
