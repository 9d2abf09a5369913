"""The plugin that excludes parts of the module from training, always or until a step."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite import Selector, UpdateRuleWrapper
from fulgurite.errors import (
    ConfigurationError,
    as_int,
)
from fulgurite.plugins import (
    Forward,
    Or,
    UnboundedRange,
    hide_constructor_frames,
    is_floating_array,
    leaves_with_paths,
)
from jaxtyping import PyTree

from fulgurite_optimizers.freeze_hooks import FreezeHooks
from fulgurite_optimizers.steps import count_waiting


@hide_constructor_frames
@dataclass(frozen=True)
class Freeze(fg.Plugin):
    """Leaves a part of the module out of training, whatever its optimizers are.

    A frozen part gets no gradient, no weight decay and, if it stays frozen, no optimizer state. Its
    model state, such as the running statistics of a BatchNorm layer, stays as it is, too; a layer
    still normalizes with the statistics of the batch in training, and dropout is active, unless the
    part is in inference mode: call it as `eqx.nn.inference_mode(self.encoder)`.
    With `since` or `until`, that state exists from the beginning and is left alone while the part
    is frozen, so checkpoints from all times have the same structure. Optimizers that correct the
    bias of their moments by one count for all parameters, as Adam does, begin with updates that
    are too large where a part is trained late: `BackboneFinetuning` avoids that.

    Attributes:
        where: what to freeze: a pattern, a function of the module, or a selection by `fg.select`
            and `fg.exclude`.
        until: when its training begins: a step, or the first time of a trigger. The step is then
            compiled again. A trigger by epochs counts those of the fit; a loop of `engine.step` has
            none. None for never.
        train_statistics: whether the model state of the frozen part keeps changing.
        since: when its training ends: a step, or the first time of a trigger; None for from the
            beginning. With both, it is frozen in between, or, if `until` comes first, before and
            after.

    Example:

        from fulgurite_optimizers import Freeze

        fg.Engine(steps=1000, plugins=[Freeze("encoder", until=500)])
    """

    hookspecs = FreezeHooks

    where: Selector | str | Callable[[Any], Any]
    until: fg.Trigger | int | None = None
    train_statistics: bool = False
    since: fg.Trigger | int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.where, Selector):
            object.__setattr__(self, "where", fg.select(self.where))
        for name in ("since", "until"):
            time = as_int(getattr(self, name))
            if isinstance(time, int):
                time = fg.At(time)
                object.__setattr__(self, name, time)
            if time is not None and not _is_exact_time(time):
                raise ConfigurationError(
                    f"Freeze: {name} is {time!r}; pass a step, or a trigger that counts steps or "
                    "epochs, not seconds, so that a resumed run does the same"
                )

    @fg.hookimpl
    def wrap_update_rule(self, module: Any, update_rule: fg.UpdateRule) -> fg.UpdateRule:
        """Hide the frozen arrays from the rule."""
        assert isinstance(self.where, Selector)
        self.where(module)
        is_scheduled = self.since is not None or self.until is not None
        return (
            UnfreezingUpdate(update_rule, self) if is_scheduled else FrozenUpdate(update_rule, self)
        )

    @fg.hookimpl
    def list_kept_state(self, module: Any) -> list[eqx.nn.StateIndex]:
        """Return the model state that stays as it is; none if the part is trained at some steps.

        Args:
            module: the module.
        """
        is_scheduled = self.since is not None or self.until is not None
        return [] if is_scheduled else self.list_frozen_indices(module)

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Tell if the fit ends before the part is trained, or is frozen, as far as is known."""
        stop = run.step_range.stop
        if stop is None or run.engine.fast_dev_run is not None:
            return
        for name, change in (("until", "trained"), ("since", "frozen")):
            trigger = getattr(self, name)
            time = None if trigger is None else trigger.next(0, fg.StepRange(0, None))
            if time is not None and time >= stop:
                run.notify(
                    "freeze",
                    f"{self._text} is to be {change} from step {time} on, and the fit ends at step "
                    f"{stop}, before that",
                )

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Announce the steps at which the rule changes."""
        actions = []
        if self.since is not None:
            actions.append(fg.ScheduledAction("freeze", self.since, self.announce_freezing))
        if self.until is not None:
            actions.append(fg.ScheduledAction("thaw", self.until, self.announce))
        return actions

    def announce(self, run: fg.Run) -> None:
        """Log that the part is trained from now on, and the step is about to be compiled again."""
        self._announce(
            run,
            "until",
            "trained",
            "{} steps of the accumulation in progress have no gradient of it and count in its "
            "mean, so that its first update is too small",
        )

    def announce_freezing(self, run: fg.Run) -> None:
        """Log that the part is frozen from now on, and the step is about to be compiled again."""
        self._announce(
            run,
            "since",
            "frozen",
            "Its gradients of {} steps of the accumulation in progress are not applied while it is "
            "frozen",
        )

    def _announce(self, run: fg.Run, trigger: str, change: str, warning: str) -> None:
        """Log what happens to the part at this step, if the trigger is due here.

        Args:
            run: the run.
            trigger: `until` or `since`.
            change: `trained` or `frozen`.
            warning: what follows for an accumulation in progress, with `{}` for its steps.
        """
        if self._find_time(trigger, run.step_range) != run.step:
            return
        message = f"{self._text} is {change} from step {run.step} on: the step is compiled again"
        num_waiting = self._count_waiting(run.state)
        if num_waiting:
            consequence = warning.format(num_waiting)
            message += f". {consequence}: choose a step at which parameters are updated"
        run.notify("freeze", message)

    def _count_waiting(self, state: fg.TrainState) -> int:
        """Return how many steps of an accumulation over steps have not updated the part yet."""
        assert isinstance(self.where, Selector)
        flags = leaves_with_paths(self.where(state.module))
        return count_waiting(state.opt_state, {path for path, is_frozen in flags if is_frozen})

    def is_frozen(self, step: int, step_range: fg.StepRange) -> bool:
        """Return whether the part is frozen in the update after a step.

        Args:
            step: the number of completed updates.
            step_range: of the fit.
        """
        since = 0 if self.since is None else self._find_time("since", step_range)
        until = None if self.until is None else self._find_time("until", step_range)
        is_begun = since is not None and step >= since
        is_over = until is not None and step >= until
        if self.since is not None and until is not None and (since is None or until <= since):
            return is_begun or not is_over
        return is_begun and not is_over

    def _find_time(self, name: str, step_range: fg.StepRange) -> int | None:
        """Return the first step of a trigger; None for never, as far as is known.

        Args:
            name: `since` or `until`.
            step_range: of the fit.
        """
        trigger = getattr(self, name)
        assert isinstance(trigger, fg.Trigger)
        parts = trigger.parts if isinstance(trigger, Or) else (trigger,)
        needs_end = any(
            isinstance(part, fg.EveryEpoch | fg.EvenlySpaced | fg.AtEnd) for part in parts
        )
        if needs_end and isinstance(step_range, UnboundedRange):
            raise ConfigurationError(
                f"Freeze: {name} is {trigger!r}, and a loop of engine.step knows of no epochs "
                "and no end: pass a step, or train with engine.fit"
            )
        return trigger.next(0, replace(step_range, start=0))

    def split_frozen(self, module: PyTree) -> tuple[PyTree, PyTree]:
        """Return the module with `HIDDEN` in the place of the frozen arrays, and those arrays, with
        None elsewhere."""
        assert isinstance(self.where, Selector)
        is_frozen = self.where(module)
        trained = jax.tree.map(
            lambda leaf, is_hidden: HIDDEN if is_hidden else leaf, module, is_frozen
        )
        return trained, eqx.filter(module, is_frozen)

    def list_frozen_indices(self, module: PyTree) -> list[eqx.nn.StateIndex]:
        """Return the indices of the model state that stays as it is: of those layers whose
        parameters are all frozen. A layer without parameters goes with the module around it."""
        if self.train_statistics:
            return []
        assert isinstance(self.where, Selector)
        flags = jax.tree_util.tree_leaves_with_path(self.where(module))
        leaves = jax.tree_util.tree_leaves_with_path(module)
        frozen_by_path = {
            keys: is_frozen
            for (keys, is_frozen), (_, leaf) in zip(flags, leaves, strict=True)
            if is_floating_array(leaf)
        }
        nodes = jax.tree_util.tree_leaves_with_path(module, is_leaf=_is_state_index)
        return [
            node
            for keys, node in nodes
            if _is_state_index(node) and _is_layer_frozen(keys[:-1], frozen_by_path)
        ]

    @property
    def _text(self) -> str:
        return self.where.text if isinstance(self.where, Selector) else ""


def freeze(*where: str | Callable[[Any], Any]) -> Freeze:
    """Return a plugin that freezes permanently what `fg.select` selects with the same arguments."""
    return Freeze(fg.select(*where))


def _is_state_index(node: Any) -> bool:
    return isinstance(node, eqx.nn.StateIndex)


def _is_layer_frozen(path: tuple[Any, ...], frozen_by_path: dict[tuple[Any, ...], bool]) -> bool:
    """Return whether all parameters of a layer are frozen, or of the nearest module around it that
    has any.

    Args:
        path: of the layer in the module, a key path of `jax.tree_util`.
        frozen_by_path: whether each parameter of the module is frozen.
    """
    for depth in range(len(path), -1, -1):
        flags = [flag for keys, flag in frozen_by_path.items() if keys[:depth] == path[:depth]]
        if flags:
            return all(flags)
    return False


def _is_exact_time(until: Any) -> bool:
    is_exact = isinstance(until, fg.Trigger) and until.exact
    return is_exact and not isinstance(until, fg.AtStart)


class _Hidden:
    """Stands for an array that is not trained. It has a shape and a dtype, so selectors find it at
    its path, but it holds no numbers."""

    shape = ()
    dtype = np.dtype(object)


HIDDEN = _Hidden()


class FrozenUpdate(UpdateRuleWrapper):
    """A rule for a module of which a part is always frozen.

    The rule within sees that part in the forward pass only.

    Args:
        update_rule: the rule within.
        freeze: says what is frozen.
    """

    def __init__(self, update_rule: fg.UpdateRule, freeze: Freeze) -> None:
        super().__init__(update_rule)
        self.freeze = freeze

    def init(self, module: PyTree) -> PyTree:
        return self.update_rule.init(self.freeze.split_frozen(module)[0])

    def trainable_mask(self, module: PyTree) -> PyTree[bool]:
        return self.update_rule.trainable_mask(self.freeze.split_frozen(module)[0])

    def __call__(
        self, forward: Forward, state: fg.TrainState, batch: Any, ctx: fg.Context
    ) -> tuple[fg.TrainState, fg.Output]:
        _, frozen = self.freeze.split_frozen(state.module)

        def forward_whole(module: Any, *args: Any) -> fg.Output:
            return forward(eqx.combine(frozen, module), *args)

        # Taken before the step, which uses the old model state up.
        frozen_state = None
        if state.model_state is not None:
            indices = self.freeze.list_frozen_indices(state.module)
            frozen_state = state.model_state.substate(indices)
        new, output = self.update_trainable(
            state, lambda state: self.update_rule(forward_whole, state, batch, ctx)
        )
        if frozen_state is not None and new.model_state is not None:
            # Of a copy, because an update makes the old object unusable, which the output holds.
            model_state = jax.tree.map(lambda leaf: leaf, new.model_state).update(frozen_state)
            new = new.replace(model_state=model_state)
            output = output.replace(model_state=model_state)
        return new, output

    def apply_gradients(
        self, state: fg.TrainState, grads: PyTree, output: fg.Output
    ) -> tuple[fg.TrainState, fg.Output]:
        return self.update_trainable(
            state, lambda state: self.update_rule.apply_gradients(state, grads, output)
        )

    def finalize(self, state: fg.TrainState) -> fg.TrainState:
        state, _ = self.update_trainable(
            state, lambda state: (self.update_rule.finalize(state), None)
        )
        return state

    def update_trainable(
        self, state: fg.TrainState, update: Callable[[fg.TrainState], Any]
    ) -> tuple[fg.TrainState, Any]:
        """Return the state after `update`, and its output.

        Args:
            state: of the whole module.
            update: called with the state that the rule within sees, without the frozen part;
                returns the new one and an output.
        """
        trained, frozen = self.freeze.split_frozen(state.module)
        state, output = update(state.replace(module=trained))
        return state.replace(module=eqx.combine(frozen, state.module)), output

    def rewrap(self, update_rule: fg.UpdateRule) -> Self:
        return type(self)(update_rule, self.freeze)


class UnfreezingUpdate(FrozenUpdate):
    """A rule for a module of which a part is frozen at some steps; at others it is the rule within.

    The optimizer state is always that of the whole module. While a part is frozen, the rule within
    gets the leaves of the rest, which are found by their paths.
    """

    def init(self, module: PyTree) -> PyTree:
        return self.update_rule.init(module)

    def for_step(self, step: int, step_range: fg.StepRange) -> fg.UpdateRule:
        if self.freeze.is_frozen(int(step), step_range):
            return super().for_step(step, step_range)
        return self.update_rule.for_step(step, step_range)

    def update_trainable(
        self, state: fg.TrainState, update: Callable[[fg.TrainState], Any]
    ) -> tuple[fg.TrainState, Any]:
        trained, _ = self.freeze.split_frozen(state.module)
        spec = eqx.filter_eval_shape(self.update_rule.init, trained)
        new, output = super().update_trainable(
            state.replace(opt_state=fill_leaves(spec, state.opt_state)), update
        )
        return new.replace(opt_state=fill_leaves(state.opt_state, new.opt_state)), output


def fill_leaves(tree: PyTree, source: PyTree) -> PyTree:
    """Return a tree with the leaves of another one at the same paths.

    Args:
        tree: an optimizer state; its leaves stay where `source` has none.
        source: an optimizer state of more or fewer arrays.
    """
    source_leaves = dict(leaves_with_paths(source))
    leaves = []
    for path, leaf in leaves_with_paths(tree):
        new_leaf = source_leaves.get(path, leaf)
        if jnp.shape(leaf) != jnp.shape(new_leaf):
            raise ConfigurationError(
                f"Freeze(until=...): {path} of the optimizer's state is one array for all "
                "parameters, as optax.flatten makes it, of which no part can be left alone: use an "
                "optimizer that keeps an array for each parameter"
            )
        leaves.append(new_leaf)
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)
