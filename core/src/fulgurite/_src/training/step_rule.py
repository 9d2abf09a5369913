"""The update rule as `train_step` receives it, and the model state that goes through it."""

import operator
from dataclasses import replace
from typing import Any

import jax
from jaxtyping import PyTree

from fulgurite._src.model.context import Context
from fulgurite._src.model.output import Output
from fulgurite._src.training.state import TrainState
from fulgurite._src.training.update import Forward, UpdateRule, UpdateRuleWrapper
from fulgurite.errors import ModelError


def copy_model_state(model_state: Any) -> Any:
    """Return an `eqx.nn.State` with the same arrays, which can be updated once more."""
    return jax.tree.map(lambda leaf: leaf, model_state)


def check_not_used_up(model_state: Any, where: str) -> None:
    """Raise a ModelError if a layer or `set` has made another state of this one.

    Args:
        model_state: an `eqx.nn.State`, or None.
        where: who has it, for the message.
    """
    try:
        jax.tree.leaves(model_state)
    except ValueError as error:
        if not str(error).startswith("Attempted to use old state"):
            raise
        raise ModelError(
            f"{where} has a model state that `set` or a layer has used up. Each of them returns "
            "the next one: state = state.replace(model_state=the_next_one)"
        ) from None


class StepRule(UpdateRuleWrapper):
    """Has the forward pass of an update read the model state of the train state that is updated.

    `train_step` may change the model state and make several updates, and its context holds the one
    from before the step. A forward pass that read that one would undo what came between.

    Args:
        update_rule: the rule within.
        ctx: the context of the step.
    """

    def __init__(self, update_rule: UpdateRule, ctx: Context) -> None:
        super().__init__(update_rule)
        self._before = ctx.model_state
        # A copy, because `train_step` may use up the other.
        self._arrays_before = jax.tree.leaves(ctx.model_state)

    def __call__(
        self, forward: Forward, state: TrainState, batch: Any, ctx: Context
    ) -> tuple[TrainState, Output]:
        check_not_used_up(state.model_state, "the train state that update_rule(...) received")
        if ctx.model_state is not self._before:
            check_not_used_up(ctx.model_state, "the context that update_rule(...) received")
            if not _are_same_arrays(ctx.model_state, state.model_state):
                raise ModelError(
                    "update_rule(forward, state, batch, ctx) received two model states, one in "
                    "state and another in ctx: leave model_state out of ctx.fork(...), and give "
                    "the one to read to state.replace(model_state=...)"
                )
        ctx = replace(ctx, model_state=copy_model_state(state.model_state))
        return _separate(self.update_rule(forward, state, batch, ctx))

    def apply_gradients(
        self, state: TrainState, grads: PyTree, output: Output
    ) -> tuple[TrainState, Output]:
        check_not_used_up(state.model_state, "the train state that apply_gradients received")
        check_not_used_up(output.model_state, "the output that apply_gradients received")
        arrays = jax.tree.leaves(state.model_state)
        new_arrays = jax.tree.leaves(output.model_state)
        if len(arrays) == len(new_arrays) == len(self._arrays_before):
            for before, array, new in zip(self._arrays_before, arrays, new_arrays, strict=True):
                if new is before and array is not before:
                    raise ModelError(
                        "apply_gradients(state, grads, output) would replace the model state of "
                        "the train state by the one from before the step, which the forward pass "
                        "read: call it with ctx.fork(name, model_state=state.model_state)"
                    )
        return _separate(self.update_rule.apply_gradients(state, grads, output))


def _separate(answer: Any) -> Any:
    """Return what a rule returned with model states of their own in state and output, so that `set`
    on one leaves the other alone. Anything but such a pair is for the engine to refuse."""
    if not isinstance(answer, tuple) or not isinstance(answer[0], TrainState):
        return answer
    state, *output = answer
    return (state.replace(model_state=copy_model_state(state.model_state)), *output)


def _are_same_arrays(first: Any, second: Any) -> bool:
    first_leaves, second_leaves = jax.tree.leaves(first), jax.tree.leaves(second)
    if len(first_leaves) != len(second_leaves):
        return False
    return all(map(operator.is_, first_leaves, second_leaves))
