"""The inside of a step: from a batch to new parameters."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import optax
from jaxtyping import PyTree

from fulgurite.errors import ConfigurationError
from fulgurite.module import Output

if TYPE_CHECKING:
    from fulgurite.context import Context
    from fulgurite.state import TrainState

Forward = Callable[[Any, Any, "Context"], Output]
"""The engine's forward pass `forward(module, batch, ctx)`: `training_step` with the loss terms of plugins and of
`ctx.add_loss`; the output's `losses` are all terms by name and its `loss` is their sum."""


@dataclass(frozen=True)
class Phase:
    """An optimizer, and what the gradients go through before it: the `gradient_transform`s of plugins, set by the
    engine."""

    optimizer: optax.GradientTransformation
    before: optax.GradientTransformation = field(default_factory=optax.identity)

    def preceded_by(self, before: optax.GradientTransformation) -> "Phase":
        """The same phase with gradients that go through `before` first."""
        return replace(self, before=before)


class UpdateRule:
    """How a batch becomes an update. Pure; traced. The engine adds health, `after_update`, metrics and the step
    count."""

    @abstractmethod
    def init(self, module: PyTree) -> PyTree:
        """The optimizer state for `module`."""

    @abstractmethod
    def __call__(
        self, forward: Forward, state: "TrainState", batch: Any, ctx: "Context"
    ) -> "tuple[TrainState, Output]":
        """The state with new module, model state and optimizer state, and the step's output with `grads` (as the
        optimizer receives them) and `updates`."""


@dataclass(frozen=True)
class GradientUpdate(UpdateRule):
    """One gradient of the total loss with respect to every floating-point array, one optimizer."""

    phase: Phase

    def init(self, module: PyTree) -> PyTree:
        params = eqx.filter(module, eqx.is_inexact_array)
        return self.phase.before.init(params), self.phase.optimizer.init(params)

    def __call__(
        self, forward: Forward, state: "TrainState", batch: Any, ctx: "Context"
    ) -> "tuple[TrainState, Output]":
        return self.apply(state, *gradient(forward, state.module, batch, ctx))

    def apply(self, state: "TrainState", grads: PyTree, output: Output) -> "tuple[TrainState, Output]":
        """One update with these gradients."""
        params = eqx.filter(state.module, eqx.is_inexact_array)
        before, optimizer = state.opt_state
        grads, before = self.phase.before.update(grads, before, params)
        updates, optimizer = self.phase.optimizer.update(grads, optimizer, params)
        module = eqx.apply_updates(state.module, updates)
        state = state.replace(module=module, model_state=output.model_state, opt_state=(before, optimizer))
        return state, output.replace(grads=grads, updates=updates)


def gradient(forward: Forward, module: PyTree, batch: Any, ctx: "Context") -> tuple[PyTree, Output]:
    """The gradient of the total loss with respect to every floating-point array of `module` (None elsewhere), and the
    forward pass's output."""
    params, static = eqx.partition(module, eqx.is_inexact_array)

    def total(params: PyTree) -> tuple[Any, Output]:
        output = forward(eqx.combine(params, static), batch, ctx)
        return output.loss, output

    return jax.grad(total, has_aux=True)(params)


def phases_of(configured: Any, source: str) -> dict[str, Phase]:
    """`configure_optimizers`' answer as phases by name; one optimizer is called `default`."""
    if isinstance(configured, optax.GradientTransformation):
        return {"default": Phase(configured)}
    if isinstance(configured, dict) and configured and all(isinstance(one, Phase) for one in configured.values()):
        return configured
    raise ConfigurationError(
        f"{source} gave {type(configured).__name__}; give an optax.GradientTransformation such as optax.adam(1e-3), "
        "or a dict of fg.Phase by name"
    )
