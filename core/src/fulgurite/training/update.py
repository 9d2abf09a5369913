"""The inside of a step: from a batch to new parameters."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import optax
from jaxtyping import PyTree

from fulgurite.errors import ModelError
from fulgurite.model.context import Context
from fulgurite.model.module import OptimizerSpec, Output, is_floating_array
from fulgurite.training.state import TrainState
from fulgurite.triggers import StepRange

Forward = Callable[..., Output]
"""The engine's forward pass `forward(module, batch, ctx)`: `training_step` with the loss terms of
plugins and of `ctx.add_loss`; the output's `losses` are all terms by name and its `loss` is their
sum. `forward(module, batch, ctx, step)` calls `step(module, batch, ctx)` in the place of
`training_step`."""


class UpdateRule:
    """How a batch becomes an update. Pure; traced. The engine adds health, `after_update`, metrics,
    the step count."""

    @abstractmethod
    def init(self, module: PyTree) -> PyTree:
        """The optimizer state for `module`."""

    @abstractmethod
    def __call__(
        self, forward: Forward, state: TrainState, batch: Any, ctx: Context
    ) -> tuple[TrainState, Output]:
        """The state with new module, model state and optimizer state, and the step's output with
        `grads` (as the optimizer receives them) and `updates`."""

    def apply_gradients(
        self, state: TrainState, grads: PyTree, output: Output
    ) -> tuple[TrainState, Output]:
        """One update with these gradients, for the `train_step` of an engine; not every rule
        supports it."""
        raise ModelError(
            f"the rule {type(self).__name__} takes its own gradients: call update_rule(self.forward, ...)"
        )

    def trainable_mask(self, module: PyTree) -> PyTree[bool]:
        """True for the arrays of `module` that it may update, by default those of floating-point
        numbers."""
        return jax.tree.map(is_floating_array, module)

    def for_step(self, step: int, span: StepRange) -> "UpdateRule":
        """The rule that applies from the update after `step` on, for states of the same structure.
        Asked wherever something was due; a different object than before is compiled again."""
        return self

    def finalize(self, state: TrainState) -> TrainState:
        """The state at the end of training, after remaining work, such as applying accumulated
        gradients. Traced."""
        return state


@dataclass(frozen=True)
class GradientUpdate(UpdateRule):
    """One gradient of the total loss with respect to the arrays that the phase updates, and one
    optimizer."""

    spec: OptimizerSpec

    def init(self, module: PyTree) -> PyTree:
        params = eqx.filter(module, self.spec.param_mask(module))
        return self.spec.gradient_transform.init(params), self.spec.optimizer.init(params)

    def trainable_mask(self, module: PyTree) -> PyTree[bool]:
        return self.spec.param_mask(module)

    def __call__(
        self, forward: Forward, state: TrainState, batch: Any, ctx: Context
    ) -> tuple[TrainState, Output]:
        taken = compute_gradients(
            forward, state.module, batch, ctx, self.spec.param_mask(state.module)
        )
        return self.apply_gradients(
            state, *taken, lambda at: forward(eqx.combine(at, state.module), batch, ctx).loss
        )

    def apply_gradients(
        self, state: TrainState, grads: PyTree, output: Output, loss: Any = None
    ) -> tuple[TrainState, Output]:
        params, grads = (
            eqx.filter(tree, self.spec.param_mask(state.module)) for tree in (state.module, grads)
        )
        before, optimizer = state.opt_state
        grads, before = self.spec.gradient_transform.update(grads, before, params)
        update = optax.with_extra_args_support(self.spec.optimizer).update
        updates, optimizer = update(
            grads, optimizer, params, value=output.loss, grad=grads, value_fn=loss
        )
        module = eqx.apply_updates(state.module, updates)
        state = state.replace(
            module=module, model_state=output.model_state, opt_state=(before, optimizer)
        )
        return state, output.replace(grads=grads, updates=updates)


def compute_gradients(
    forward: Forward, module: PyTree, batch: Any, ctx: Context, chosen: PyTree[bool] = None
) -> tuple[PyTree, Output]:
    """The gradient of the total loss with respect to the arrays of `module` where `chosen` is true,
    by default every floating-point array (None elsewhere), and the forward pass's output."""
    params, static = eqx.partition(module, eqx.is_inexact_array if chosen is None else chosen)

    def total(params: PyTree) -> tuple[Any, Output]:
        output = forward(eqx.combine(params, static), batch, ctx)
        return output.loss, output

    return jax.grad(total, has_aux=True)(params)
