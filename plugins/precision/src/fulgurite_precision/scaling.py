"""Loss scaling: gradients that float16 would round to zero."""

from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite import UpdateRuleWrapper
from fulgurite.errors import (
    ConfigurationError,
    ModelError,
    set_ints,
)
from fulgurite.plugins import Forward, hide_constructor_frames
from jaxtyping import Array, Bool, Float, Int, PyTree


@hide_constructor_frames
@dataclass(frozen=True)
class Static:
    """A loss scale that stays.

    Example:
        from fulgurite_precision import Precision, Static

        Precision(compute="float16", scale=Static(1024))

    Attributes:
        scale: the factor.
    """

    scale: float

    def __post_init__(self) -> None:
        _check_positive("Static", scale=self.scale)

    @property
    def initial(self) -> float:
        """The scale of the first step."""
        return self.scale

    def adjust(self, state: "ScaleState", is_finite: Bool[Array, ""]) -> "ScaleState":
        """Return the state as it is.

        Args:
            state: the state.
            is_finite: whether the last update was finite.
        """
        return state


@hide_constructor_frames
@dataclass(frozen=True)
class Dynamic:
    """A loss scale that is halved when gradients are not finite, and doubled after `period` updates
    whose gradients are.

    Source: Micikevicius et al. 2018, arXiv:1710.03740.

    Example:
        from fulgurite_precision import Dynamic, Precision

        Precision(compute="float16", scale=Dynamic(period=1000))

    Attributes:
        initial: the first scale.
        period: the number of finite updates in a row after which it grows.
        factor: by which it grows and shrinks.
        minimum, maximum: its bounds.
    """

    initial: float = 2.0**15
    period: int = 2000
    factor: float = 2.0
    minimum: float = 1.0
    maximum: float = 2.0**24

    def __post_init__(self) -> None:
        _check_positive("Dynamic", initial=self.initial, minimum=self.minimum, maximum=self.maximum)
        set_ints(self, "period")
        if type(self.period) is not int or self.period < 1:
            raise ConfigurationError(
                f"Dynamic: period is {self.period!r}; it must be a positive integer"
            )
        _check_positive("Dynamic", factor=self.factor)
        if self.factor <= 1:
            raise ConfigurationError(f"Dynamic: factor is {self.factor!r}; it must be above 1")
        if not self.minimum <= self.initial <= self.maximum:
            raise ConfigurationError(
                f"Dynamic: initial is {self.initial!r}, minimum {self.minimum!r} and maximum "
                f"{self.maximum!r}; the first scale must lie between the two"
            )

    def adjust(self, state: "ScaleState", is_finite: Bool[Array, ""]) -> "ScaleState":
        """Return the state after an update.

        Args:
            state: the state before.
            is_finite: whether the update was finite.
        """
        num_finite = jnp.where(is_finite, state.num_finite + 1, 0)
        is_period_over = num_finite >= self.period
        larger = jnp.minimum(state.scale * self.factor, self.maximum)
        smaller = jnp.maximum(state.scale / self.factor, self.minimum)
        scale = jnp.where(is_period_over, larger, jnp.where(is_finite, state.scale, smaller))
        return ScaleState(scale, jnp.where(is_period_over, 0, num_finite), state.is_finite)


class ScaleState(eqx.Module):
    """What loss scaling holds on the device.

    Attributes:
        scale: float32, the scale of the newest step.
        num_finite: int32, the finite updates in a row since it changed.
        is_finite: bool, whether its gradients were finite. An update that is left out for another
            reason, such as a spike of the loss, is not an overflow.
    """

    scale: Float[Array, ""]
    num_finite: Int[Array, ""]
    is_finite: Bool[Array, ""]

    @staticmethod
    def init(scale: Static | Dynamic) -> "ScaleState":
        """Return the state before the first step. Less by one, because the first step counts the
        update before it, of which there is none."""
        return ScaleState(jnp.float32(scale.initial), jnp.int32(-1), jnp.bool_(True))


class ScaledGradients(UpdateRuleWrapper):
    """A rule whose backward pass computes with scaled gradients; it sees and returns unscaled ones.

    The forward pass is the identity: losses are not scaled. What leaves it multiplies the gradients
    that go in by the scale, and the parameters divide those that come out.

    Args:
        update_rule: the rule within.
        state_name: the name of the plugin state that is a `ScaleState`.
        scale: how the scale changes.
    """

    def __init__(
        self, update_rule: fg.UpdateRule, state_name: str, scale: Static | Dynamic
    ) -> None:
        super().__init__(update_rule)
        self._state_name = state_name
        self._scale = scale

    def __call__(
        self, forward: Forward, state: fg.TrainState, batch: Any, ctx: fg.Context
    ) -> tuple[fg.TrainState, fg.Output]:
        before: ScaleState = state.plugin_states[self._state_name]
        scaling = self._scale.adjust(before, before.is_finite)

        def forward_scaled(module: Any, *args: Any) -> fg.Output:
            output = forward(multiply_gradients(module, 1 / scaling.scale), *args)
            return output.replace(
                loss=multiply_gradients(output.loss, scaling.scale),
                losses=multiply_gradients(output.losses, scaling.scale),
                preds=multiply_gradients(output.preds, scaling.scale),
            )

        new_state, output = self.update_rule(forward_scaled, state, batch, ctx)
        raw_grads = output.grads if output.raw_grads is None else output.raw_grads
        # If nothing transforms the gradients, XLA makes one look of this and of that of the engine.
        is_overflow, _, _ = state.nonfinite.check(
            fg.Output(grads=raw_grads), None, None, is_sharded=True
        )
        if not _has_same_arrays(raw_grads, output.grads):
            # The engine looks at what is left of them: clipped by value, infinity is a number.
            losses = {
                name: jnp.where(is_overflow, jnp.nan, value)
                for name, value in output.losses.items()
            }
            output = output.replace(losses=losses)
        scaling = replace(scaling, is_finite=~is_overflow)
        return new_state.with_plugin_state(self._state_name, scaling), output

    def apply_gradients(
        self, state: fg.TrainState, grads: PyTree, output: fg.Output
    ) -> tuple[fg.TrainState, fg.Output]:
        raise ModelError(
            "Precision: a loss is scaled by the rule that takes its gradient, and apply_gradients "
            "brings one of a loss that was not, in which small numbers have become zero: in "
            "train_step call update_rule(self.forward, state, batch, ctx), or compute in bfloat16"
        )

    def rewrap(self, update_rule: fg.UpdateRule) -> "ScaledGradients":
        return ScaledGradients(update_rule, self._state_name, self._scale)


def multiply_gradients(tree: PyTree, factor: Float[Array, ""]) -> PyTree:
    """Return a tree as it is, whose gradients are multiplied by a factor in the backward pass.

    Args:
        tree: any tree; only its floating-point arrays count.
        factor: a scalar.
    """
    return jax.tree.map(
        lambda leaf: _multiply(leaf, factor) if eqx.is_inexact_array(leaf) else leaf, tree
    )


@jax.custom_vjp
def _multiply(value: Array, factor: Array) -> Array:
    return value


def _multiply_forward(value: Array, factor: Array) -> tuple[Array, Array]:
    return value, factor


def _multiply_backward(factor: Array, gradient: Array) -> tuple[Array, Array]:
    # Wider than either, also where jax is told to promote nothing by itself.
    with jax.numpy_dtype_promotion("standard"):
        product = gradient * factor
    return product.astype(gradient.dtype), jnp.zeros_like(factor)


_multiply.defvjp(_multiply_forward, _multiply_backward)


def _has_same_arrays(first: PyTree, second: PyTree) -> bool:
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(leaf is other for leaf, other in pairs)


def _check_positive(name: str, **values: float) -> None:
    for field, value in values.items():
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not 0 < value < float("inf"):
            raise ConfigurationError(
                f"{name}: {field} is {value!r}; it must be a positive finite number"
            )
