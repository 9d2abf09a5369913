"""The inside of a step with several optimizers."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import optax
from fulgurite.metrics import LastValue
from fulgurite.training.forward import count_examples
from fulgurite.training.update import Forward
from jaxtyping import Array, Float, Int, PyTree

from fulgurite_optimizers.gradients import Gradient, Gradients, PhaseGradients, Terms, total
from fulgurite_optimizers.metrics import (
    Metrics,
    as_metrics,
    empty_metrics,
    merge_disjoint,
    merge_metrics,
    zeros_like_spec,
)
from fulgurite_optimizers.microbatches import split
from fulgurite_optimizers.phase import Phase
from fulgurite_optimizers.steps import StepsState, accumulate_over_steps


class PhaseState(NamedTuple):
    """What a phase keeps: the states of what its gradients go through, and the number of its
    updates."""

    gradient_transform: PyTree
    optimizer: PyTree
    updates: Int[Array, ""]


class PhaseResult(NamedTuple):
    """What a phase did in a step. `params`, `grads` and `updates` have the module's structure, with
    None elsewhere."""

    params: PyTree
    state: PhaseState
    model_state: Any
    grads: PyTree
    updates: PyTree
    losses: Terms
    metrics: Metrics
    preds: PyTree
    media: list[Array]


class PhasedUpdate(fg.UpdateRule):
    """One optimizer for each loss: one after the other, or `simultaneous`.

    Without `use_loss_functions` the loss is that of `training_step`, whatever a method `losses` of
    the module is for.
    """

    def __init__(
        self, phases: dict[str, Phase], *, simultaneous: bool, use_loss_functions: bool = True
    ) -> None:
        self._phases, self._simultaneous = (
            {name: _resolve_accumulation(phase) for name, phase in phases.items()},
            simultaneous,
        )
        self._gradients = Gradients(self._phases, use_loss_functions=use_loss_functions)

    def init(self, module: PyTree) -> dict[str, PhaseState]:
        states = {}
        for name, phase in self._phases.items():
            params = eqx.filter(module, phase.param_mask(module))
            states[name] = PhaseState(
                phase.gradient_transform.init(params), phase.optimizer.init(params), jnp.int32(0)
            )
        return states

    def trainable_mask(self, module: PyTree) -> PyTree[bool]:
        chosen = [phase.param_mask(module) for phase in self._phases.values()]
        return jax.tree.map(lambda *yes: any(yes), *chosen)

    def __call__(
        self, forward: Forward, state: fg.TrainState, batch: Any, ctx: fg.Context
    ) -> tuple[fg.TrainState, fg.Output]:
        gradient = self._gradients.compute_separately(forward)
        if self._simultaneous and not self._gradients.is_disjoint(state.module):
            gradient = self._gradients.compute_shared(forward, state.module, batch, ctx)
        module, model_state, done = state.module, state.model_state, {}
        for name, phase in self._phases.items():

            def run(
                params: Any, own: Any, model_state: Any, name: str = name, module: Any = module
            ) -> PhaseResult:
                module = eqx.combine(params, module)
                start = ctx.fork(name, model_state=model_state) if len(self._phases) > 1 else ctx
                return self._run_phase(name, module, state.module, own, gradient, batch, start)

            given = (
                eqx.filter(module, phase.param_mask(module)),
                state.opt_state[name],
                model_state,
            )
            if phase.every == 1:
                done[name] = run(*given)
            else:
                due = (state.step + 1) % phase.every == 0
                done[name] = jax.lax.cond(
                    due,
                    run,
                    lambda *given, name=name, run=run: _skip(name, run, ctx, *given),
                    *given,
                )
            module, model_state = eqx.combine(done[name].params, module), done[name].model_state
        opt_state = {name: one.state for name, one in done.items()}
        return state.replace(
            module=module, model_state=model_state, opt_state=opt_state
        ), self._output(done)

    def finalize(self, state: fg.TrainState) -> fg.TrainState:
        """Applies the gradients of steps that were not applied yet."""
        module, opt_state = state.module, dict(state.opt_state)
        for name, phase in self._phases.items():
            before, steps, count = opt_state[name]
            if isinstance(steps, StepsState):
                optimizer = optax.with_extra_args_support(phase.optimizer)
                params = eqx.filter(module, phase.param_mask(module))
                updates, left = optimizer.update(None, steps, params, finish=True)  # pyright: ignore[reportArgumentType]
                module = eqx.apply_updates(module, updates)
                opt_state[name] = PhaseState(before, left, count + (steps.num_accumulated > 0))
        return state.replace(module=module, opt_state=opt_state)

    def _run_phase(
        self,
        name: str,
        module: Any,
        old: Any,
        own: PhaseState,
        gradient: Gradient,
        batch: Any,
        ctx: fg.Context,
    ) -> PhaseResult:
        """All updates of a phase in one step, of a module that was `old` before the step."""
        phase = self._phases[name]
        if phase.repeat == 1:
            return self._update_once(name, module, old, own, gradient, batch, ctx)
        done, model_state, shares = None, ctx.model_state, _split_batch(phase, batch, ctx.mask)
        # Padding may leave a share without an example: then there is nothing to learn from it.
        there = (
            [jnp.any(mask) for _, mask in shares] if phase.split and ctx.mask is not None else None
        )
        turns = phase.repeat if there is None else sum(one.astype(jnp.float32) for one in there)
        for index, (share, mask) in enumerate(shares):
            turn = ctx.fork("repeat", index, model_state=model_state, mask=mask)
            new = self._update_once(name, module, old, own, gradient, share, turn)
            new = new._replace(losses=jax.tree.map(lambda loss: loss / turns, new.losses))
            if done is not None:
                losses = jax.tree.map(jnp.add, done.losses, new.losses)
                new = new._replace(losses=losses, metrics=merge_metrics(done.metrics, new.metrics))
                if there is not None:
                    new = jax.tree.map(partial(jnp.where, there[index]), new, done)
            done = new
            module, own, model_state = eqx.combine(new.params, module), new.state, new.model_state
        assert done is not None
        return done

    def _update_once(
        self,
        name: str,
        module: Any,
        old: Any,
        own: PhaseState,
        gradient: Gradient,
        batch: Any,
        ctx: fg.Context,
    ) -> PhaseResult:
        """One update of a phase."""
        phase, at = self._phases[name], old if self._simultaneous else module
        part, params = gradient(name, at, batch, ctx), eqx.filter(at, phase.param_mask(at))
        grads, before = phase.gradient_transform.update(part.grads, own.gradient_transform, params)
        told = (
            {}
            if isinstance(own.optimizer, StepsState)
            else {"value": total(part.terms), "grad": grads}
        )
        updates, optimizer = optax.with_extra_args_support(phase.optimizer).update(
            grads, own.optimizer, params, **told
        )
        params = eqx.apply_updates(eqx.filter(module, phase.param_mask(module)), updates)
        count = own.updates + (
            optimizer.num_accumulated == 0 if isinstance(optimizer, StepsState) else 1
        )
        losses = self._prefix_losses(name, part)
        logged = {
            **(losses if len(self._phases) > 1 else {}),
            f"{name}/gradient_norm": _norm(part.grads),
        }
        metrics = merge_disjoint(part.metrics, as_metrics(logged, count_examples(batch, ctx.mask)))
        preds = part.preds if phase.every == 1 else None
        after = PhaseState(before, optimizer, count)
        return PhaseResult(
            params, after, part.model_state, grads, updates, losses, metrics, preds, part.media
        )

    def _prefix_losses(self, name: str, part: PhaseGradients) -> Terms:
        """The losses of a phase as they are logged; of several phases the whole is `PHASE/loss`."""
        if len(self._phases) == 1:
            return part.terms
        further = {key: value for key, value in part.terms.items() if key != name}
        return merge_disjoint(further, {f"{name}/loss": total(part.terms)})

    def _output(self, done: dict[str, PhaseResult]) -> fg.Output:
        """The output of the step; the sum of the losses of several optimizers would mean
        nothing."""
        losses = {key: value for one in done.values() for key, value in one.losses.items()}
        metrics = {key: value for one in done.values() for key, value in one.metrics.items()}
        for name, one in done.items():
            metrics = merge_disjoint(
                metrics, {f"{name}/updates": LastValue.from_values(one.state.updates)}
            )
            if rates := optax.tree.get_all_with_path(one.state.optimizer, "learning_rate"):
                metrics = merge_disjoint(
                    metrics, {f"{name}/learning_rate": LastValue.from_values(rates[0][1])}
                )
        return fg.Output(
            loss=total(losses) if len(done) == 1 else None,
            metrics=metrics,
            losses=losses,
            media=self._gradients.media({name: one.media for name, one in done.items()}),
            preds=next((one.preds for one in done.values() if one.preds is not None), None),
            grads=_sum_trees([one.grads for one in done.values()]),
            updates=_sum_trees([one.updates for one in done.values()]),
        )


def _norm(grads: PyTree) -> Float[Array, ""]:
    """The global norm; squares of half precision would be infinite from 256 on."""
    return optax.tree.norm(
        jax.tree.map(lambda grad: grad.astype(jnp.promote_types(grad.dtype, jnp.float32)), grads)
    )


def _resolve_accumulation(phase: Phase) -> Phase:
    """The phase with an optimizer that accumulates over steps, if that is wanted."""
    if phase.accumulate is None or phase.accumulate.mode != "steps":
        return phase
    optimizer = accumulate_over_steps(
        optax.chain(phase.gradient_transform, phase.optimizer), phase.accumulate.n
    )
    return replace(phase, gradient_transform=optax.identity(), optimizer=optimizer)


def _split_batch(phase: Phase, batch: Any, mask: Any) -> list[tuple[Any, Any]]:
    """A batch and its mask for each repetition of a phase."""
    if not phase.split:
        return [(batch, mask)] * phase.repeat
    parts, masks = split(batch, phase.repeat), None if mask is None else split(mask, phase.repeat)
    return [jax.tree.map(lambda leaf, i=i: leaf[i], (parts, masks)) for i in range(phase.repeat)]


def _skip(
    name: str, run: Any, ctx: fg.Context, params: PyTree, own: PhaseState, model_state: Any
) -> PhaseResult:
    """What is left of `run` at a step at which the phase `name` does nothing: what it shows, where
    it is to show it."""
    like: PhaseResult = jax.eval_shape(run, params, own, model_state)
    grads, updates, losses, media = jax.tree.map(
        zeros_like_spec, (like.grads, like.updates, like.losses, like.media)
    )
    if media:
        media = jax.lax.cond(
            ctx.media_due, lambda: run(params, own, model_state).media, lambda: media
        )
    return PhaseResult(
        params,
        own,
        model_state,
        grads,
        updates,
        losses,
        empty_metrics(like.metrics, name),
        None,
        media,
    )


def _sum_trees(trees: list[PyTree]) -> PyTree:
    """One tree of several of the same structure but for leaves that are None in some."""

    def sum_of(*leaves: Any) -> Any:
        there = [leaf for leaf in leaves if leaf is not None]
        return sum(there[1:], start=there[0]) if there else None

    return jax.tree.map(sum_of, *trees, is_leaf=lambda leaf: leaf is None)
