"""All updates of one phase in one step."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite import conjugate_gradients
from fulgurite.errors import DataError, ModelError
from fulgurite.metrics import (
    ExponentialMovingAverage,
    LastValue,
    as_loss_metric,
    as_mean,
    as_metrics,
    group_by_weight,
    sum_values,
)
from fulgurite.plugins import apply_updates, call_optimizer, select_from_parts
from jaxtyping import Array, Bool, Float, Int, PyTree

from fulgurite_optimizers.gradients import ComputeGradient, LossTerms, PhaseGradients
from fulgurite_optimizers.metrics import (
    Metrics,
    empty_metrics,
    make_optional,
    merge_disjoint,
    merge_metrics,
    zeros_like_spec,
)
from fulgurite_optimizers.microbatches import add_weighted, divide, split_into_parts
from fulgurite_optimizers.phase import Phase
from fulgurite_optimizers.steps import StepsState


class PhaseState(NamedTuple):
    """The optimizer state of a phase.

    Attributes:
        gradient_transform: the state of what its gradients go through before the optimizer.
        optimizer: the state of its optimizer.
        updates: the number of its updates.
    """

    gradient_transform: PyTree
    optimizer: PyTree
    updates: Int[Array, ""]


class PhaseResult(NamedTuple):
    """The result of a phase in one step.

    Attributes:
        params: the new parameters, a tree like the module with None elsewhere.
        state: the new state of the phase.
        model_state: the new model state.
        raw_grads: the gradients of the last update, as they were computed; like `params`.
        grads: the gradients of the last update, as the optimizer received them; like `params`.
        updates: the last update; like `params`.
        losses: the terms of its loss by name, as they are logged.
        weights: what each of them is a mean over, by name.
        metrics: by name.
        preds: the predictions of the last update, None where the phase does not run in every step.
        aux: likewise, the further arrays of the step.
        media: the arrays of its media, for `Gradients.unflatten_media`.
        is_update: bool, whether the optimizer ran, in any of the repetitions.
    """

    params: PyTree
    state: PhaseState
    model_state: Any
    raw_grads: PyTree
    grads: PyTree
    updates: PyTree
    losses: LossTerms
    weights: LossTerms
    metrics: Metrics
    preds: PyTree
    aux: PyTree
    media: list[Array]
    is_update: Bool[Array, ""]


@dataclass(frozen=True, eq=False)
class PhaseStep:
    """One phase in one step. `run` and `skip` are the branches of a `lax.cond`.

    Attributes:
        name: of the phase.
        phase: its optimizer; accumulation over steps is part of it.
        is_only_phase: whether the step has no other phase.
        compute_gradient: computes the gradient of its loss.
        module: the module as the phases before left it.
        gradient_module: the module at which all gradients are taken; None for that of each update.
        batch: of the step.
        ctx: of the step.
    """

    name: str
    phase: Phase
    is_only_phase: bool
    compute_gradient: ComputeGradient
    module: PyTree
    gradient_module: PyTree | None
    batch: Any
    ctx: fg.Context

    def run(self, params: PyTree, state: PhaseState, model_state: Any) -> PhaseResult:
        """Return the result of all updates of the phase.

        Args:
            params: the parameters of the phase, a tree like the module with None elsewhere.
            state: of the phase.
            model_state: of the module.
        """
        module = eqx.combine(params, self.module)
        ctx = self.ctx
        if not self.is_only_phase:
            ctx = ctx.fork(self.name, model_state=model_state, optimizer=self.name)
        if self.phase.repeat == 1:
            return self._update_once(module, state, self.batch, ctx)
        return self._update_repeatedly(module, state, ctx)

    def skip(self, params: PyTree, state: PhaseState, model_state: Any) -> PhaseResult:
        """Return the result of a step at which the phase does not run: nothing changes.

        Losses, gradients and updates are zero and metrics are empty. Media are still shown where
        they are due.

        Args:
            params: the parameters of the phase, a tree like the module with None elsewhere.
            state: of the phase.
            model_state: of the module.
        """
        spec: PhaseResult = jax.eval_shape(self.run, params, state, model_state)
        raw_grads, grads, updates, losses, weights, media = jax.tree.map(
            zeros_like_spec,
            (spec.raw_grads, spec.grads, spec.updates, spec.losses, spec.weights, spec.media),
        )
        if media:
            media = jax.lax.cond(
                self.ctx.media_due,
                lambda: self.run(params, state, model_state).media,
                lambda: media,
            )
        return PhaseResult(
            params=params,
            state=state,
            model_state=model_state,
            raw_grads=raw_grads,
            grads=grads,
            updates=updates,
            losses=losses,
            weights=weights,
            metrics=empty_metrics(spec.metrics),
            preds=None,
            aux=None,
            media=media,
            is_update=jnp.bool_(False),
        )

    def _update_repeatedly(self, module: PyTree, state: PhaseState, ctx: fg.Context) -> PhaseResult:
        result = None
        model_state = ctx.model_state
        if self.phase.split and ctx.num_examples is not None:
            raise DataError(
                f"the phase {self.name!r} has split=True, and a fg.Batch with num_examples cannot "
                "be split, because the examples of each share are not counted: leave split out"
            )
        shares = _divide_batch(self.phase, self.batch, ctx.mask)
        has_examples = None
        if self.phase.split and ctx.mask is not None:
            # Padding may leave a share without an example: then there is nothing to learn from it.
            has_examples = [jnp.any(mask) for _, mask in shares]
        for index, (batch, mask) in enumerate(shares):
            repeat_ctx = ctx.fork("repeat", index, model_state=model_state, mask=mask)
            new = self._update_once(module, state, batch, repeat_ctx)
            if result is not None:
                losses = jax.tree.map(
                    _average, result.losses, result.weights, new.losses, new.weights
                )
                weights = jax.tree.map(jnp.add, result.weights, new.weights)
                metrics = merge_metrics(result.metrics, new.metrics)
                new = new._replace(
                    losses=losses,
                    weights=weights,
                    metrics=metrics,
                    is_update=result.is_update | new.is_update,
                )
                if has_examples is not None:
                    new = jax.tree.map(partial(jnp.where, has_examples[index]), new, result)
            result = new
            module = eqx.combine(new.params, module)
            state = new.state
            model_state = new.model_state
        assert result is not None
        return result

    def _update_once(
        self, module: PyTree, state: PhaseState, batch: Any, ctx: fg.Context
    ) -> PhaseResult:
        gradient_module = module if self.gradient_module is None else self.gradient_module
        part = self.compute_gradient(self.name, gradient_module, batch, ctx)
        part = part._replace(grads=conjugate_gradients(part.grads))
        params = eqx.filter(gradient_module, self.phase.param_mask(gradient_module))
        with select_from_parts(gradient_module):
            grads, transform_state = self.phase.gradient_transform.update(
                part.grads, state.gradient_transform, params
            )
            if isinstance(state.optimizer, StepsState):
                # The mean gradient of several steps does not belong to the loss of this one.
                extra_args = {"weight": self._get_only_weight(part)}
            else:
                extra_args = {"value": sum_values(part.terms.values()), "grad": grads}
            updates, optimizer_state = call_optimizer(
                self.phase.optimizer, grads, state.optimizer, params, **extra_args
            )
        params = apply_updates(eqx.filter(module, self.phase.param_mask(module)), updates)
        is_update = jnp.bool_(True)
        if isinstance(optimizer_state, StepsState):
            is_update = optimizer_state.num_accumulated == 0
        losses, weights = self._name_losses(part)
        return PhaseResult(
            params=params,
            state=PhaseState(
                transform_state, optimizer_state, state.updates + is_update.astype(jnp.int32)
            ),
            model_state=part.model_state,
            raw_grads=part.grads,
            grads=grads,
            updates=updates,
            losses=losses,
            weights=weights,
            metrics=self._collect_metrics(part),
            preds=part.preds if self.phase.every == 1 else None,
            aux=part.aux if self.phase.every == 1 else None,
            media=part.media,
            is_update=is_update,
        )

    def _get_only_weight(self, part: PhaseGradients) -> Array:
        """Return what all terms of the loss are means over; an error if they differ."""
        groups = group_by_weight(part.terms, part.weights)
        if len(groups) > 1:
            listed = " and ".join(", ".join(names) for _, names in groups)
            raise ModelError(
                f"the terms {listed} of the loss of the phase {self.name!r} are means over "
                "different weights, and gradients of several steps are added up as one: return "
                "plain numbers, such as jnp.mean(...), and one weight, fg.Output(losses=..., "
                "weight=...), where weight=1 has each step count alike; or accumulate "
                "microbatches, GradientAccumulation(n), of batches whose arrays all begin with one "
                "length"
            )
        ((weight, _),) = groups
        return weight

    def _name_losses(self, part: PhaseGradients) -> tuple[LossTerms, LossTerms]:
        """Return the losses as they are logged, and their weights; with several phases the sum is
        `PHASE/loss`."""
        if self.is_only_phase:
            return part.terms, part.weights
        names = [term for term in part.terms if term != self.name]
        total_name = f"{self.name}/loss"
        losses = merge_disjoint(
            {name: part.terms[name] for name in names},
            {total_name: sum_values(part.terms.values())},
        )
        # That of the sum is in its metric, see `_collect_metrics`.
        weights = {name: part.weights[name] for name in names}
        return losses, {**weights, total_name: sum_values(part.weights.values())}

    def _collect_metrics(self, part: PhaseGradients) -> Metrics:
        values: dict[str, Any] = {f"{self.name}/gradient_norm": _compute_norm(part.grads)}
        metrics = {}
        if not self.is_only_phase:
            loss = sum_values(part.terms.values())
            metrics = {
                name: as_mean(name, value, partial(part.weights.__getitem__, name))
                for name, value in part.terms.items()
                if name != self.name
            }
            values |= {
                f"{self.name}/loss": as_loss_metric(loss, part.terms, part.weights),
                f"{self.name}/batch_loss": LastValue.from_values(loss),
                f"{self.name}/loss_average": ExponentialMovingAverage.from_values(
                    loss, weight=sum_values(part.weights.values())
                ),
            }
        weight = next(iter(part.weights.values()))
        metrics |= as_metrics(values, lambda: weight)
        metrics = merge_disjoint(part.metrics, metrics)
        return metrics if self.phase.every == 1 else make_optional(metrics)


def _average(first: Array, first_weight: Array, second: Array, second_weight: Array) -> Array:
    """Return the mean of two means by weight; 0 over nothing."""
    total = add_weighted(
        add_weighted(jnp.zeros_like(first), first, first_weight), second, second_weight
    )
    return divide(total, first_weight + second_weight)


def _compute_norm(grads: PyTree) -> Float[Array, ""]:
    """Return the global norm; squares of half precision would be infinite from 256 on."""
    return optax.tree.norm(
        jax.tree.map(lambda grad: grad.astype(np.promote_types(grad.dtype, np.float32)), grads)
    )


def _divide_batch(phase: Phase, batch: Any, mask: Any) -> list[tuple[Any, Any]]:
    """Return a batch and its mask for each repetition of a phase."""
    if not phase.split:
        return [(batch, mask)] * phase.repeat
    parts = split_into_parts(batch, phase.repeat)
    masks = None if mask is None else split_into_parts(mask, phase.repeat)
    return [jax.tree.map(lambda leaf, i=i: leaf[i], (parts, masks)) for i in range(phase.repeat)]
