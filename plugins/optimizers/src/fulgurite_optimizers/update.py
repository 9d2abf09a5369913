"""The update rule of several optimizers in one step."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import optax
from fulgurite.metrics import LastValue, sum_values
from fulgurite.plugins import Forward, apply_updates, select_from_parts
from jaxtyping import Array, Bool, PyTree

from fulgurite_optimizers.gradients import Gradients
from fulgurite_optimizers.metrics import Metrics, merge_disjoint
from fulgurite_optimizers.microbatches import split_into_parts
from fulgurite_optimizers.phase import Phase
from fulgurite_optimizers.phase_step import PhaseResult, PhaseState, PhaseStep
from fulgurite_optimizers.steps import StepsState, accumulate_over_steps
from fulgurite_optimizers.switching import SwitchState


class PhasedUpdate(fg.UpdateRule):
    """One optimizer for each loss, in one step.

    Args:
        phases: by the name of their loss.
        simultaneous: whether all gradients are taken at the parameters from before the step,
            instead of one phase after the other.
        use_loss_functions: whether a method `losses` of the module gives the losses. Otherwise they
            are those of `training_step`, whatever that method is for.
    """

    def __init__(
        self, phases: dict[str, Phase], *, simultaneous: bool, use_loss_functions: bool = True
    ) -> None:
        self._all_phases = phases
        settings = [phase.accumulate for phase in phases.values() if phase.accumulate is not None]
        self.needs_mean_loss = any(setting.needs_mean_loss for setting in settings)
        current = {name: _choose_accumulation(phase, 0) for name, phase in phases.items()}
        self._phases = {name: _resolve_accumulation(phase) for name, phase in current.items()}
        self._simultaneous = simultaneous
        self._use_loss_functions = use_loss_functions
        # By the numbers of microbatches or steps: another object would be another executable.
        self._rules: dict[tuple[Any, ...], PhasedUpdate] = {_list_numbers(current): self}
        self._gradients = Gradients(self._phases, use_loss_functions=use_loss_functions)

    def init(self, module: PyTree) -> dict[str, PhaseState]:
        states = {}
        for name, phase in self._phases.items():
            params = eqx.filter(module, phase.param_mask(module))
            with select_from_parts(module):
                transform_state = phase.gradient_transform.init(params)
                optimizer_state = phase.optimizer.init(params)
            states[name] = PhaseState(transform_state, optimizer_state, jnp.int32(0))
        return states

    def trainable_mask(self, module: PyTree) -> PyTree[bool]:
        masks = [phase.param_mask(module) for phase in self._phases.values()]
        return jax.tree.map(lambda *flags: any(flags), *masks)

    def list_optimizers(self) -> dict[str, fg.OptimizerSpec]:
        return dict(self._phases)

    def __call__(
        self, forward: Forward, state: fg.TrainState, batch: Any, ctx: fg.Context
    ) -> tuple[fg.TrainState, fg.Output]:
        self._check_microbatches(batch)
        if self._simultaneous and not self._gradients.has_loss_functions(state.module):
            compute_gradient = self._gradients.compute_shared(forward, state.module, batch, ctx)
        else:
            compute_gradient = self._gradients.compute_separately(forward)
        module = state.module
        model_state = state.model_state
        results: dict[str, PhaseResult] = {}
        for name, phase in self._phases.items():
            step = PhaseStep(
                name=name,
                phase=phase,
                is_only_phase=len(self._phases) == 1,
                compute_gradient=compute_gradient,
                module=module,
                gradient_module=state.module if self._simultaneous else None,
                batch=batch,
                ctx=ctx,
            )
            params = eqx.filter(module, phase.param_mask(module))
            if phase.every == 1:
                result = step.run(params, state.opt_state[name], model_state)
            else:
                is_due = (state.step + 1) % phase.every == 0
                result = jax.lax.cond(
                    is_due, step.run, step.skip, params, state.opt_state[name], model_state
                )
            results[name] = result
            module = eqx.combine(result.params, module)
            model_state = result.model_state
        opt_state = {name: result.state for name, result in results.items()}
        state = state.replace(module=module, model_state=model_state, opt_state=opt_state)
        return state, self._build_output(results)

    def for_step(self, step: int, step_range: fg.StepRange) -> "PhasedUpdate":
        phases = {
            name: _choose_accumulation(phase, int(step)) for name, phase in self._all_phases.items()
        }
        numbers = _list_numbers(phases)
        if numbers not in self._rules:
            rule = copy.copy(self)
            rule._phases = {name: _resolve_accumulation(phase) for name, phase in phases.items()}
            rule._gradients = Gradients(rule._phases, use_loss_functions=self._use_loss_functions)
            self._rules[numbers] = rule
        return self._rules[numbers]

    def finalize(self, state: fg.TrainState) -> fg.TrainState:
        """Apply the gradients of steps that were not applied yet."""
        module = state.module
        opt_state = dict(state.opt_state)
        for name, phase in self._phases.items():
            phase_state = opt_state[name]
            pending = phase_state.optimizer
            if isinstance(pending, StepsState):
                optimizer = optax.with_extra_args_support(phase.optimizer)
                params = eqx.filter(module, phase.param_mask(module))
                with select_from_parts(module):
                    updates, optimizer_state = optimizer.update(None, pending, params, finish=True)  # pyright: ignore[reportArgumentType]
                module = apply_updates(module, updates)
                opt_state[name] = PhaseState(
                    phase_state.gradient_transform,
                    optimizer_state,
                    phase_state.updates + jnp.minimum(pending.num_accumulated, 1),
                )
        return state.replace(module=module, opt_state=opt_state)

    def _check_microbatches(self, batch: Any) -> None:
        """Raise an error unless a batch can be split into the microbatches of all times: the
        error of a later one would come late."""
        for phase in self._all_phases.values():
            if phase.accumulate is not None and phase.accumulate.mode == "microbatch":
                for number in phase.accumulate.numbers:
                    jax.eval_shape(partial(split_into_parts, n=number), batch)

    def _build_output(self, results: dict[str, PhaseResult]) -> fg.Output:
        """Return the output of the step. The sum of the losses of several optimizers would mean
        nothing, so there is a total only of one."""
        losses = {}
        weights = {}
        metrics: Metrics = {}
        for result in results.values():
            losses |= result.losses
            weights |= result.weights
            metrics |= result.metrics
        for name, result in results.items():
            metrics = merge_disjoint(metrics, _collect_optimizer_metrics(name, result.state))
        preds = [result.preds for result in results.values() if result.preds is not None]
        aux = [result.aux for result in results.values() if result.aux is not None]
        return fg.Output(
            loss=sum_values(losses.values()) if len(results) == 1 else None,
            metrics=metrics,
            losses=losses,
            loss_weights=weights,
            is_update=self._find_update(results),
            media=self._gradients.unflatten_media(
                {name: result.media for name, result in results.items()}
            ),
            preds=preds[0] if preds else None,
            aux=aux[0] if aux else None,
            raw_grads=_sum_trees([result.raw_grads for result in results.values()]),
            grads=_sum_trees([result.grads for result in results.values()]),
            updates=_sum_trees([result.updates for result in results.values()]),
        )

    def _find_update(self, results: dict[str, PhaseResult]) -> Bool[Array, ""] | None:
        """Return whether any phase updated parameters; None where one does in every step."""
        for name, result in results.items():
            waits = isinstance(result.state.optimizer, StepsState)
            if self._phases[name].every == 1 and not waits:
                return None
        return jnp.any(jnp.stack([result.is_update for result in results.values()]))


def _collect_optimizer_metrics(name: str, state: PhaseState) -> Metrics:
    """Return the number of updates of a phase, and its learning rate if the optimizer tells it."""
    metrics: Metrics = {f"{name}/updates": LastValue.from_values(state.updates)}
    rates = optax.tree.get_all_with_path(state.optimizer, "learning_rate")
    nodes = jax.tree.leaves(state.optimizer, is_leaf=_is_switch_state)
    # Of several optimizers one after the other it is not known here which one is in use.
    if rates and not any(map(_is_switch_state, nodes)):
        _, rate = rates[0]
        # `optax.inject_hyperparams` holds it in the dtype of the parameters, which may be complex.
        metrics[f"{name}/learning_rate"] = LastValue.from_values(jnp.real(rate))
    return metrics


def _is_switch_state(node: Any) -> bool:
    return isinstance(node, SwitchState)


def _choose_accumulation(phase: Phase, step: int) -> Phase:
    """Return a phase with the accumulation that holds from the update after a step on.

    Args:
        phase: the phase.
        step: the number of completed updates.
    """
    if phase.accumulate is None:
        return phase
    return replace(phase, accumulate=phase.accumulate.for_step(step))


def _list_numbers(phases: dict[str, Phase]) -> tuple[Any, ...]:
    return tuple(phase.accumulate and phase.accumulate.n for phase in phases.values())


def _resolve_accumulation(phase: Phase) -> Phase:
    """Return the phase with an optimizer that accumulates over steps, if it asks for that."""
    if phase.accumulate is None or phase.accumulate.mode != "steps":
        return phase
    optimizer = accumulate_over_steps(
        optax.chain(phase.gradient_transform, phase.optimizer), phase.accumulate.numbers[0]
    )
    return replace(phase, gradient_transform=optax.identity(), optimizer=optimizer)


def _sum_trees(trees: list[PyTree]) -> PyTree:
    """Return the sum of trees of one structure, some of whose leaves may be None."""

    def sum_leaves(*leaves: Any) -> Any:
        arrays = [leaf for leaf in leaves if leaf is not None]
        return sum(arrays[1:], start=arrays[0]) if arrays else None

    return jax.tree.map(sum_leaves, *trees, is_leaf=lambda leaf: leaf is None)
