"""The update rule whose gradients are those at the worst point near the weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite.errors import ModelError
from jaxtyping import Array, Float, PyTree

Forward = Callable[..., fg.Output]


@dataclass(frozen=True)
class Ascent:
    """The way from the weights to the point of the highest loss in a ball, to first order.

    Attributes:
        radius: of the ball.
        offset: added to the size of each weight, by which the ball is then stretched; None for a
            ball that is the same in all directions.
    """

    radius: float
    offset: float | None

    def find_worst(self, params: PyTree, grads: PyTree) -> tuple[PyTree, Float[Array, ""]]:
        """Return the point, and the norm of the gradient; stretched, if the ball is.

        Args:
            params: the weights.
            grads: the direction of steepest ascent there, of the same structure.
        """
        sizes = jax.tree.map(self._compute_size, params)
        with jax.numpy_dtype_promotion("standard"):
            scaled = jax.tree.map(jnp.multiply, sizes, jax.tree.map(_widen, grads))
        norm = optax.tree.norm(scaled)
        # A gradient of zero has no direction: then the worst point is the weights.
        factor = jnp.where(norm > 0, self.radius / jnp.where(norm > 0, norm, 1), 0)

        def move(param: Array, size: Array, direction: Array) -> Array:
            # Of complex weights sizes are real, also where jax is told to promote nothing.
            with jax.numpy_dtype_promotion("standard"):
                return (_widen(param) + factor * size * direction).astype(param.dtype)

        return jax.tree.map(move, params, sizes, scaled), norm

    def _compute_size(self, param: Array) -> Array:
        param = _widen(param)
        if self.offset is None:
            return jnp.ones_like(param)
        # What is infinite from the beginning, such as a mask, stays where it is.
        return jnp.where(jnp.isfinite(param), jnp.abs(param) + self.offset, 0)


class SharpnessAwareUpdate(fg.UpdateRuleWrapper):
    """A rule whose gradients are those at the worst point near the weights.

    The rule within sees a forward pass whose values are those at the weights, and whose gradients
    are those at the worst point. So each of its gradients has a worst point of its own: those of
    microbatches, of several optimizers, and of the updates of one step.

    Args:
        update_rule: the rule within.
        ascent: finds the worst point.
    """

    def __init__(self, update_rule: fg.UpdateRule, ascent: Ascent) -> None:
        super().__init__(update_rule)
        self._ascent = ascent

    def __call__(
        self, forward: Forward, state: fg.TrainState, batch: Any, ctx: fg.Context
    ) -> tuple[fg.TrainState, fg.Output]:
        def forward_at_worst(module: Any, batch: Any, ctx: fg.Context, *step: Any) -> fg.Output:
            def compute_output(module: Any) -> fg.Output:
                return forward(module, batch, ctx, *step)

            return self._compute_output(compute_output, module, ctx)

        return self.update_rule(forward_at_worst, state, batch, ctx)

    def apply_gradients(
        self, state: fg.TrainState, grads: PyTree, output: fg.Output
    ) -> tuple[fg.TrainState, fg.Output]:
        raise ModelError(
            "Sam takes each gradient at two points, and apply_gradients brings one that is already "
            "there: in train_step call update_rule(self.forward, state, batch, ctx), or leave Sam "
            "out"
        )

    def rewrap(self, update_rule: fg.UpdateRule) -> "SharpnessAwareUpdate":
        return SharpnessAwareUpdate(update_rule, self._ascent)

    def _compute_output(
        self, compute_output: Callable[[Any], fg.Output], module: Any, ctx: fg.Context
    ) -> fg.Output:
        """Return the output at a module, with gradients of its losses from the worst points.

        Args:
            compute_output: the forward pass, as a function of the module.
            module: where it is differentiated.
            ctx: of the pass.
        """
        points = {
            optimizer: self._differentiate(compute_output, module, mask, optimizer)
            for optimizer, mask in self._list_masks(module, ctx).items()
        }
        output = next(iter(points.values())).output
        losses = dict(output.losses)
        metrics = dict(output.metrics)
        for optimizer, point in points.items():
            losses |= point.losses
            prefix = "sam" if optimizer is None else f"sam/{optimizer}"
            metrics[f"{prefix}/ascent_norm"] = point.norm
        return output.replace(loss=_sum_terms(losses), losses=losses, metrics=metrics)

    def _differentiate(
        self,
        compute_output: Callable[[Any], fg.Output],
        module: Any,
        mask: PyTree[bool],
        optimizer: str | None,
    ) -> "TwoPoints":
        """Return what the passes at the weights and at the worst point give one optimizer.

        Args:
            compute_output: the forward pass, as a function of the module.
            module: where it is differentiated.
            mask: True for what the optimizer updates.
            optimizer: its name; None for a single one, which owns all losses.
        """
        params, static = eqx.partition(module, mask)
        first_params, first_static = _stop_gradient((params, static))

        def compute_loss(params: PyTree) -> tuple[Array, fg.Output]:
            output = compute_output(eqx.combine(params, first_static))
            return _sum_terms(_select_losses(output, optimizer)), output

        grads, output = jax.grad(compute_loss, has_aux=True)(first_params)
        worst, norm = self._ascent.find_worst(first_params, fg.conjugate_gradients(grads))
        # The worst point is the weights plus a constant, so that a gradient there counts as one by
        # the weights.
        moved = jax.tree.map(_replace_value, params, worst)
        second = compute_output(eqx.combine(moved, static))
        losses = {
            name: _replace_value(value, output.losses[name])
            for name, value in _select_losses(second, optimizer).items()
        }
        return TwoPoints(output, losses, norm)

    def _list_masks(self, module: Any, ctx: fg.Context) -> dict[str | None, PyTree[bool]]:
        """Return which arrays each optimizer updates whose loss a forward pass is for; None is the
        name of a single one, which owns all losses.

        Args:
            module: the model.
            ctx: of the pass.
        """
        trainable = self.update_rule.trainable_mask(module)
        optimizers = self.update_rule.list_optimizers()
        if len(optimizers) < 2:
            return {None: trainable}
        if ctx.optimizer is not None:
            optimizers = {ctx.optimizer: optimizers[ctx.optimizer]}
        return {
            name: jax.tree.map(lambda a, b: a and b, trainable, spec.param_mask(module))
            for name, spec in optimizers.items()
        }


class TwoPoints(NamedTuple):
    """What the passes at two points give one optimizer.

    Attributes:
        output: at the weights, without gradients.
        losses: those of the optimizer by name, with gradients of the worst point.
        norm: of the gradient at the weights; stretched, if the ball is.
    """

    output: fg.Output
    losses: dict[str, Array]
    norm: Float[Array, ""]


def _select_losses(output: fg.Output, optimizer: str | None) -> dict[str, Array]:
    """Return the losses that an optimizer minimizes: that of its name, and `NAME/TERM`.

    Args:
        output: of the forward pass.
        optimizer: its name; None for a single one, which owns all of them.
    """
    if optimizer is None:
        return output.losses
    return {
        name: value for name, value in output.losses.items() if name.partition("/")[0] == optimizer
    }


def _sum_terms(losses: dict[str, Array]) -> Array:
    first, *others = losses.values()
    # Their dtypes may differ, also where jax is told to promote nothing by itself.
    with jax.numpy_dtype_promotion("standard"):
        return sum(others, start=first)


def _stop_gradient(tree: PyTree) -> PyTree:
    arrays, others = eqx.partition(tree, eqx.is_inexact_array)
    return eqx.combine(jax.lax.stop_gradient(arrays), others)


@jax.custom_jvp
def _replace_value(variable: Array, value: Array) -> Array:
    """Return `value`, with the gradient of `variable`: exact, unlike adding their difference."""
    return value


@_replace_value.defjvp
def _differentiate_replaced(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    return primals[1], tangents[0]


def _widen(array: Array) -> Array:
    """Return an array in float32 at least: squares of half precision are infinite from 256 on."""
    return array.astype(np.promote_types(array.dtype, np.float32))
