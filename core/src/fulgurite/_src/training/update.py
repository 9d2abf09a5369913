"""The inside of a step: from a batch to new parameters."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jaxtyping import Array, PyTree

from fulgurite._src.identity import ByIdentity
from fulgurite._src.model.context import Context
from fulgurite._src.model.module import OptimizerSpec, is_floating_array
from fulgurite._src.model.output import Output
from fulgurite._src.training.state import TrainState
from fulgurite._src.tree.select import select_from_parts
from fulgurite._src.triggers import StepRange
from fulgurite.errors import ConfigurationError, ModelError, PluginError

Forward = Callable[..., Output]
"""The engine's forward pass `forward(module, batch, ctx)`: `training_step` with the loss terms of
plugins and of `ctx.add_loss`; the output's `losses` are all terms by name and its `loss` is their
sum. `forward(module, batch, ctx, step)` calls `step(module, batch, ctx)` in the place of
`training_step`."""


class UpdateRule:
    """How a batch becomes an update. Pure; traced.

    The engine adds the check of finiteness, `after_update`, metrics and the step count.

    Example:
        class HalvedUpdate(fg.GradientUpdate):
            def apply_gradients(self, state, grads, output, loss=None):
                grads = jax.tree.map(lambda grad: grad / 2, grads)
                return super().apply_gradients(state, grads, output, loss)


        update_rule = HalvedUpdate(fg.OptimizerSpec(optax.adam(1e-3)))

    Attributes:
        checks_gradients: whether the rule itself looks whether gradients are finite. Then the
            engine looks at losses and parameters alone.
        needs_mean_loss: whether it divides batches or adds up gradients of several, so that a loss
            that is a bare number must be a mean over examples. The engine then tries it.
    """

    checks_gradients: bool = False
    needs_mean_loss: bool = False

    @abstractmethod
    def init(self, module: PyTree) -> PyTree:
        """Return the optimizer state for a module."""

    @abstractmethod
    def __call__(
        self, forward: Forward, state: TrainState, batch: Any, ctx: Context
    ) -> tuple[TrainState, Output]:
        """Return the state after one update, and the step's output.

        Args:
            forward: the engine's forward pass.
            state: its module, model state and optimizer state are replaced.
            batch: the batch.
            ctx: the context of the step. In `train_step` the model state that the forward pass
                reads is that of `state`; one that `ctx.fork` was given must be the same.

        Returns:
            The new state, and the output with `raw_grads` (as they were computed; `grads` if there
            are none), `grads` (as the optimizer receives them) and `updates`.
        """

    def apply_gradients(
        self, state: TrainState, grads: PyTree, output: Output
    ) -> tuple[TrainState, Output]:
        """Return the state after an update with these gradients, and the output.

        For the `train_step` of an engine; not every rule supports it.

        Args:
            state: the state before.
            grads: the gradients, a tree like the module, as `compute_gradients` returns them; those
                of `jax.grad` after `conjugate_gradients`.
            output: of the forward pass, whose model state the new state has.
        """
        raise ModelError(
            f"the rule {type(self).__name__} takes its own gradients: call "
            "update_rule(self.forward, ...)"
        )

    def trainable_mask(self, module: PyTree) -> PyTree[bool]:
        """Return True for the arrays of a module that this ever updates, by default those of
        floating-point numbers. Displays read it; a rule that wraps another passes it on."""
        return jax.tree.map(is_floating_array, module)

    def list_optimizers(self) -> dict[str, OptimizerSpec]:
        """Return the optimizers by name, as far as they are known; displays read them."""
        return {}

    def for_step(self, step: int, step_range: StepRange) -> "UpdateRule":
        """Return the rule that applies from the update after `step` on.

        What is trained may change over time, the structure of the state may not. This is a pure
        function of both arguments, asked wherever something was due, and another object than before
        is another executable. So a part that is frozen until a step has its optimizer state from
        the beginning, a checkpoint of either time fits, and a resumed run needs no note of where it
        was.

        Args:
            step: the number of completed updates.
            step_range: the steps of the fit.
        """
        return self

    def finalize(self, state: TrainState) -> TrainState:
        """Return the state at the end of training, after remaining work, such as applying
        accumulated gradients. Traced.

        This is not a step, because where training ends may be known only after its last one:
        whoever calls this calls the hook `after_finalize` of plugins in the place of
        `after_update`.
        """
        return state


class UpdateRuleWrapper(UpdateRule):
    """Passes everything on to another rule. A subclass overrides what it changes, and `rewrap` if
    it has an `__init__` of its own.

    Args:
        update_rule: the rule within.

    Example:
        class HalvedLoss(fg.UpdateRuleWrapper):
            def __call__(self, forward, state, batch, ctx):
                def forward_halved(*args):
                    output = forward(*args)
                    return output.replace(loss=output.loss / 2)

                return self.update_rule(forward_halved, state, batch, ctx)


        class HalfLoss:
            @fg.hookimpl
            def wrap_update_rule(self, update_rule):
                return HalvedLoss(update_rule)


        engine = fg.Engine(steps=100, plugins=[HalfLoss()])
    """

    def __init__(self, update_rule: UpdateRule) -> None:
        self.update_rule = update_rule
        self.checks_gradients = update_rule.checks_gradients
        self.needs_mean_loss = update_rule.needs_mean_loss
        # Each time the same object for the same rule: another one would be another executable.
        self._rewrapped: dict[ByIdentity, Self] = {}

    def init(self, module: PyTree) -> PyTree:
        return self.update_rule.init(module)

    def trainable_mask(self, module: PyTree) -> PyTree[bool]:
        return self.update_rule.trainable_mask(module)

    def list_optimizers(self) -> dict[str, OptimizerSpec]:
        return self.update_rule.list_optimizers()

    def apply_gradients(
        self, state: TrainState, grads: PyTree, output: Output
    ) -> tuple[TrainState, Output]:
        return self.update_rule.apply_gradients(state, grads, output)

    def for_step(self, step: int, step_range: StepRange) -> UpdateRule:
        update_rule = self.update_rule.for_step(step, step_range)
        if update_rule is self.update_rule:
            return self
        key = ByIdentity(update_rule)
        if key not in self._rewrapped:
            self._rewrapped[key] = self.rewrap(update_rule)
        return self._rewrapped[key]

    def finalize(self, state: TrainState) -> TrainState:
        return self.update_rule.finalize(state)

    def rewrap(self, update_rule: UpdateRule) -> Self:
        """Return a wrapper like this one around another rule, in whose place it comes where what is
        trained changes: a copy, if the class has no `__init__` of its own."""
        check_can_rewrap(self)
        wrapper = copy(self)
        UpdateRuleWrapper.__init__(wrapper, update_rule)
        return wrapper


def check_can_rewrap(update_rule: UpdateRule) -> None:
    """Raise `PluginError` if an update rule, or one within it, is a wrapper that cannot be put
    around another rule: a run would end where what is trained changes."""
    while isinstance(update_rule, UpdateRuleWrapper):
        wrapper = type(update_rule)
        is_asked = wrapper.for_step is UpdateRuleWrapper.for_step
        has_init = wrapper.__init__ is not UpdateRuleWrapper.__init__
        if is_asked and has_init and wrapper.rewrap is UpdateRuleWrapper.rewrap:
            raise PluginError(
                f"{wrapper.__name__} has an __init__ of its own and no method rewrap(update_rule): "
                "define it to return a wrapper like this one around another rule, which is asked "
                "for where what is trained changes"
            )
        update_rule = update_rule.update_rule


@dataclass(frozen=True)
class GradientUpdate(UpdateRule):
    """One gradient of the total loss, and one optimizer.

    Example:
        class SgdOnly:
            @fg.hookimpl
            def make_update_rule(self, module, optimizers):
                return fg.GradientUpdate(fg.OptimizerSpec(optax.sgd(0.1)))


        engine = fg.Engine(steps=100, plugins=[SgdOnly()])
    """

    spec: OptimizerSpec

    def init(self, module: PyTree) -> PyTree:
        params = eqx.filter(module, self.spec.param_mask(module))
        with select_from_parts(module):
            return self.spec.gradient_transform.init(params), self.spec.optimizer.init(params)

    def trainable_mask(self, module: PyTree) -> PyTree[bool]:
        return self.spec.param_mask(module)

    def list_optimizers(self) -> dict[str, OptimizerSpec]:
        return {"default": self.spec}

    def __call__(
        self, forward: Forward, state: TrainState, batch: Any, ctx: Context
    ) -> tuple[TrainState, Output]:
        param_mask = self.spec.param_mask(state.module)
        grads, output = compute_gradients(forward, state.module, batch, ctx, param_mask)

        def compute_loss(params: PyTree) -> Any:
            return forward(eqx.combine(params, state.module), batch, ctx).loss

        return self.apply_gradients(state, grads, output, compute_loss)

    def apply_gradients(
        self, state: TrainState, grads: PyTree, output: Output, loss: Any = None
    ) -> tuple[TrainState, Output]:
        param_mask = self.spec.param_mask(state.module)
        params = eqx.filter(state.module, param_mask)
        raw_grads = eqx.filter(grads, param_mask)
        transform_state, optimizer_state = state.opt_state
        # Line searches and the like need the loss, its gradient, and a function to compute it.
        functions = {} if loss is None else {"value_fn": loss}
        with select_from_parts(state.module):
            grads, transform_state = self.spec.gradient_transform.update(
                raw_grads, transform_state, params
            )
            updates, optimizer_state = call_optimizer(
                self.spec.optimizer,
                grads,
                optimizer_state,
                params,
                value=output.loss,
                grad=grads,
                **functions,
            )
        state = state.replace(
            module=apply_updates(state.module, updates),
            model_state=output.model_state,
            opt_state=(transform_state, optimizer_state),
        )
        return state, output.replace(raw_grads=raw_grads, grads=grads, updates=updates)


def compute_gradients(
    forward: Forward, module: PyTree, batch: Any, ctx: Context, param_mask: PyTree[bool] = None
) -> tuple[PyTree, Output]:
    """Return the gradient of the total loss, and the output of the forward pass.

    The gradient by complex numbers is conjugated, as `conjugate_gradients` says.

    Args:
        forward: the engine's forward pass.
        module: the model.
        batch: the batch.
        ctx: the context of the step.
        param_mask: True for the arrays to differentiate by; the gradient is None elsewhere. By
            default every floating-point array.
    """
    filter_spec = eqx.is_inexact_array if param_mask is None else param_mask
    params, static = eqx.partition(module, filter_spec)

    def total(params: PyTree) -> tuple[Any, Output]:
        output = forward(eqx.combine(params, static), batch, ctx)
        return output.loss, output

    grads, output = jax.grad(total, has_aux=True)(params)
    grads = conjugate_gradients(grads)
    has_known_length = ctx.mask is None and ctx.num_examples is None
    if not has_known_length or not {*output.loss_weights}.issubset(output.bare_terms):
        grads = zero_weightless_grads(grads, output.loss_weights.values())
    # Otherwise all terms are means over the examples of the batch, which has some: three operations
    # for each array that XLA would have to find out about.
    return grads, output


def zero_weightless_grads(grads: PyTree, weights: Iterable[Array]) -> PyTree:
    """Return zeros in the place of the gradient of a loss that is a mean over nothing, which may
    be NaN.

    Args:
        grads: the gradient of the sum of terms.
        weights: what each term is a mean over. Where they are several, nothing is hidden: the
            gradient of one of them is not known here.
    """
    first, *others = [*weights, None]
    if not isinstance(first, Tracer) or any(weight is not first for weight in others[:-1]):
        return grads
    # Once for all arrays, of which there may be hundreds.
    is_over_nothing = first == 0
    return jax.tree.map(lambda grad: jnp.where(is_over_nothing, 0, grad), grads)


def conjugate_gradients(grads: PyTree) -> PyTree:
    """Return the direction of steepest ascent, which optimizers follow backwards.

    `jax.grad` returns the conjugate of it: of `abs(z) ** 2` by `z` it is `2 * conj(z)`, and the
    loss grows fastest along `2 * z`. Real gradients are returned unchanged.

    Args:
        grads: as `jax.grad` returns them, None for what has no gradient.
    """
    return jax.tree.map(lambda grad: grad.conj() if jnp.iscomplexobj(grad) else grad, grads)


def apply_updates(module: PyTree, updates: PyTree) -> PyTree:
    """Return a module with updates added, each array in the dtype that it had.

    Like `optax.apply_updates`, which casts too: an optimizer with moments in float32 returns
    float32 updates of bfloat16 parameters.

    Args:
        module: the module, or the part of it that is trained; None stands for other leaves.
        updates: what an optimizer returned, None for what it does not update.
    """

    def add(update: Any, param: Any) -> Any:
        if update is None:
            return param
        return (param + update).astype(param.dtype)

    # Wider than either, also where jax is told to promote nothing by itself.
    with jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(add, updates, module, is_leaf=lambda node: node is None)


def call_optimizer(
    optimizer: optax.GradientTransformation,
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    **extra_args: Any,
) -> tuple[PyTree, PyTree]:
    """Return the updates and the new state of an optimizer.

    Args:
        optimizer: an optax transformation, with or without extra arguments.
        grads: of the structure of `params`.
        state: what the optimizer returned at the previous update, or from `init`.
        params: the arrays that are trained, None for other leaves.
        extra_args: what else there is at this update, such as the loss.

    Raises:
        ConfigurationError: the optimizer needs what there is not at this update.
    """
    update = optax.with_extra_args_support(optimizer).update
    try:
        return update(grads, state, params, **extra_args)
    except (TypeError, ValueError) as error:
        text = str(error)
        if "obj_fn must be provided" in text and "value_fn" in extra_args:
            # `optax.contrib.sophia` has a name of its own for the loss, which line searches do not
            # take: they hand what they do not know to it.
            return update(grads, state, params, obj_fn=extra_args["value_fn"], **extra_args)
        if "required keyword-only argument" not in text and "must be provided" not in text:
            raise
        raise ConfigurationError(
            f"the optimizer needs more than this update has ({text}). Line searches as of "
            "optax.lbfgs, and optax.contrib.sophia, compute the loss of the whole step again, "
            "which only a module with one optimizer has that accumulates nothing: leave out "
            "MultiOptimizer and GradientAccumulation, or choose another optimizer"
        ) from error
