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
from fulgurite.metrics import ExponentialMovingAverage, LastValue
from fulgurite.training.forward import count_examples
from fulgurite.training.update import apply_updates, conjugate_gradients
from fulgurite.tree.select import select_from_parts
from jaxtyping import Array, Float, Int, PyTree

from fulgurite_optimizers.gradients import ComputeGradient, LossTerms, PhaseGradients, sum_terms
from fulgurite_optimizers.metrics import (
    Metrics,
    as_metrics,
    empty_metrics,
    make_optional,
    merge_disjoint,
    merge_metrics,
    zeros_like_spec,
)
from fulgurite_optimizers.microbatches import split_into_parts
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
        metrics: by name.
        preds: the predictions of the last update, None where the phase does not run in every step.
        aux: likewise, the further arrays of the step.
        media: the arrays of its media, for `Gradients.unflatten_media`.
    """

    params: PyTree
    state: PhaseState
    model_state: Any
    raw_grads: PyTree
    grads: PyTree
    updates: PyTree
    losses: LossTerms
    metrics: Metrics
    preds: PyTree
    aux: PyTree
    media: list[Array]


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
        raw_grads, grads, updates, losses, media = jax.tree.map(
            zeros_like_spec, (spec.raw_grads, spec.grads, spec.updates, spec.losses, spec.media)
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
            metrics=empty_metrics(spec.metrics),
            preds=None,
            aux=None,
            media=media,
        )

    def _update_repeatedly(self, module: PyTree, state: PhaseState, ctx: fg.Context) -> PhaseResult:
        result = None
        model_state = ctx.model_state
        shares = _divide_batch(self.phase, self.batch, ctx.mask)
        num_updates: Any = self.phase.repeat
        has_examples = None
        if self.phase.split and ctx.mask is not None:
            # Padding may leave a share without an example: then there is nothing to learn from it.
            has_examples = [jnp.any(mask) for _, mask in shares]
            num_updates = sum(flag.astype(jnp.float32) for flag in has_examples)
        for index, (batch, mask) in enumerate(shares):
            repeat_ctx = ctx.fork("repeat", index, model_state=model_state, mask=mask)
            new = self._update_once(module, state, batch, repeat_ctx)
            new = new._replace(losses=jax.tree.map(lambda loss: loss / num_updates, new.losses))
            if result is not None:
                losses = jax.tree.map(jnp.add, result.losses, new.losses)
                metrics = merge_metrics(result.metrics, new.metrics)
                new = new._replace(losses=losses, metrics=metrics)
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
        update = optax.with_extra_args_support(self.phase.optimizer).update
        with select_from_parts(gradient_module):
            grads, transform_state = self.phase.gradient_transform.update(
                part.grads, state.gradient_transform, params
            )
            extra_args = {}
            # The mean gradient of several steps does not belong to the loss of this one.
            if not isinstance(state.optimizer, StepsState):
                extra_args = {"value": sum_terms(part.terms), "grad": grads}
            updates, optimizer_state = update(grads, state.optimizer, params, **extra_args)
        params = apply_updates(eqx.filter(module, self.phase.param_mask(module)), updates)
        count = state.updates + 1
        if isinstance(optimizer_state, StepsState):
            is_update = optimizer_state.num_accumulated == 0
            count = jnp.where(is_update, count, state.updates)
        losses = self._name_losses(part)
        return PhaseResult(
            params=params,
            state=PhaseState(transform_state, optimizer_state, count),
            model_state=part.model_state,
            raw_grads=part.grads,
            grads=grads,
            updates=updates,
            losses=losses,
            metrics=self._collect_metrics(part, losses, count_examples(batch, ctx.mask)),
            preds=part.preds if self.phase.every == 1 else None,
            aux=part.aux if self.phase.every == 1 else None,
            media=part.media,
        )

    def _name_losses(self, part: PhaseGradients) -> LossTerms:
        """Return the losses as they are logged; with several phases the sum is `PHASE/loss`."""
        if self.is_only_phase:
            return part.terms
        further = {term: value for term, value in part.terms.items() if term != self.name}
        return merge_disjoint(further, {f"{self.name}/loss": sum_terms(part.terms)})

    def _collect_metrics(self, part: PhaseGradients, losses: LossTerms, weight: Array) -> Metrics:
        values: dict[str, Any] = {f"{self.name}/gradient_norm": _compute_norm(part.grads)}
        if not self.is_only_phase:
            loss = sum_terms(part.terms)
            values |= {
                **losses,
                f"{self.name}/batch_loss": LastValue.from_values(loss),
                f"{self.name}/loss_average": ExponentialMovingAverage.from_values(loss),
            }
        metrics = merge_disjoint(part.metrics, as_metrics(values, weight))
        return metrics if self.phase.every == 1 else make_optional(metrics)


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
