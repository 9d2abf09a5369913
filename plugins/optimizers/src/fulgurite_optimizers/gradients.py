"""The gradient of each of several losses, from a forward pass for each or from one for all."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import ModelError
from fulgurite.metrics import as_metrics, group_by_weight, sum_values
from fulgurite.plugins import (
    Forward,
    get_loss_fns,
    get_weight,
    leaves_with_paths,
    prefix_output,
    zero_weightless_grads,
)
from jax.extend.core import Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, Float, PyTree

from fulgurite_optimizers.metrics import Metrics
from fulgurite_optimizers.microbatches import MicrobatchResult, WeightedMeans, run_microbatches
from fulgurite_optimizers.phase import Phase

LossTerms = dict[str, Float[Array, ""]]
"""The terms of a loss by name."""

NUM_LISTED = 6
"""The number of paths that a warning lists."""

COPYING_PRIMITIVES = ("broadcast_in_dim", "convert_element_type", "reshape", "transpose", "copy")


class PhaseGradients(NamedTuple):
    """What a forward and backward pass gives one phase.

    Attributes:
        grads: the gradient of its loss, a tree like the module with None for what the phase does
            not update.
        terms: the terms of its loss by name.
        weights: what each term is a mean over, by name.
        metrics: by name.
        model_state: the new model state.
        preds: the predictions, None with microbatches.
        aux: further arrays of the step, None with microbatches.
        media: the arrays of its media, for `Gradients.unflatten_media`.
    """

    grads: PyTree
    terms: LossTerms
    weights: LossTerms
    metrics: Metrics
    model_state: Any
    preds: PyTree
    aux: PyTree
    media: list[Array]


ComputeGradient = Callable[[str, Any, Any, fg.Context], PhaseGradients]
"""`compute_gradient(phase_name, module, batch, ctx)` returns the gradient of the loss of a phase by
what it updates."""


class Gradients:
    """Computes the gradients of the losses of phases.

    A term of a loss is named after its phase, or begins with the name of the phase and a slash.

    Args:
        phases: by the name of their loss.
        use_loss_functions: whether a method `losses` of the module gives the losses as functions.
    """

    def __init__(self, phases: dict[str, Phase], *, use_loss_functions: bool) -> None:
        self._phases = phases
        self._use_loss_functions = use_loss_functions
        # It runs in every step, so the metrics and media of `training_step` are from its forward
        # pass.
        self._metrics_phase = next(name for name, phase in phases.items() if phase.every == 1)
        self._unchecked = set(phases)
        # By phase, the structure of its media, known once its forward pass is traced: only arrays
        # pass through `lax.cond` and `jax.linearize`.
        self._media_structures: dict[str, Any] = {}

    def compute_separately(self, forward: Forward) -> ComputeGradient:
        """Return a function that runs one forward pass for each phase, by microbatches if the phase
        says so."""
        return partial(self._compute_one, forward)

    def compute_shared(
        self, forward: Forward, module: Any, batch: Any, ctx: fg.Context
    ) -> ComputeGradient:
        """Run one forward pass for all phases, and return a function that runs a pullback for each.

        Args:
            forward: the engine's forward pass.
            module: the model.
            batch: the batch.
            ctx: the context of the step.
        """
        masks = {name: phase.param_mask(module) for name, phase in self._phases.items()}
        any_mask = jax.tree.map(lambda *flags: any(flags), *masks.values())
        params, static = eqx.partition(module, any_mask)

        def compute_losses(params: Any) -> Any:
            output = forward(eqx.combine(params, static), batch, ctx)
            parts = {name: self._select_part(name, output, batch, ctx) for name in masks}
            return {name: sum_values(part.terms.values()) for name, part in parts.items()}, parts

        losses, linear, parts = jax.linearize(compute_losses, params, has_aux=True)
        pullbacks = {
            name: SharedPullback(name, linear, params, mask) for name, mask in masks.items()
        }

        def compute_gradient(name: str, *_: Any) -> PhaseGradients:
            pullback = pullbacks[name]
            self._warn_zero_gradients(
                name, lambda _: (pullback(jnp.ones_like(losses[name])), None), params
            )
            grads = zero_weightless_grads(
                pullback(jnp.ones_like(losses[name])), parts[name].weights.values()
            )
            return parts[name]._replace(grads=grads)

        return compute_gradient

    def unflatten_media(self, arrays: dict[str, list[Array]]) -> dict[str, Any]:
        """Return the media of the phases by name, from their arrays by phase."""
        media: dict[str, Any] = {}
        for name, leaves in arrays.items():
            media |= jax.tree.unflatten(self._media_structures[name], leaves)
        return media

    def has_loss_functions(self, module: Any) -> bool:
        """Return whether a module gives its losses as functions."""
        return self._use_loss_functions and callable(getattr(module, "losses", None))

    def compute_part(
        self, forward: Forward, name: str, module: Any, batch: Any, ctx: fg.Context
    ) -> PhaseGradients:
        """Run the forward pass of one phase, and return what is its own, without gradients.

        Args:
            forward: the engine's forward pass.
            name: of the phase.
            module: the model.
            batch: the batch.
            ctx: the context of the step.
        """
        if not self.has_loss_functions(module):
            return self._select_part(name, forward(module, batch, ctx), batch, ctx)

        def call_loss_function(module: Any, batch: Any, ctx: fg.Context) -> fg.Output:
            functions = get_loss_fns(module, batch, ctx)
            self._check_losses(functions)
            return prefix_output(name, functions[name]())

        output = forward(module, batch, ctx, call_loss_function)
        # The loss terms of plugins are there for all phases.
        owners = self._find_owners(output.losses)
        self._check_has_optimizer(owners.values())
        terms = {term: value for term, value in output.losses.items() if owners[term] == name}
        return self._build_part(name, terms, output, batch, ctx)

    def _compute_one(
        self, forward: Forward, name: str, module: Any, batch: Any, ctx: fg.Context
    ) -> PhaseGradients:
        phase = self._phases[name]
        params, static = eqx.partition(module, phase.param_mask(module))
        loss = PhaseLoss(self, forward, name, static)
        # A trace of its own, once in the life of the rule. The step is not built from it: its first
        # executable would then come from another trace than the ones after it.
        check = partial(self._warn_zero_gradients, name)
        if phase.accumulate is None:
            return loss.differentiate(params, batch, ctx, check)
        if phase.accumulate.mode == "steps":
            part = loss.differentiate(params, batch, ctx, check)
            return part._replace(weights=loss.unify_weights(part, params, batch, ctx))

        def compute_microbatch(batch: Any, ctx: fg.Context) -> MicrobatchResult:
            part, means = loss.differentiate_by_weight(params, batch, ctx, check)
            return MicrobatchResult(means, part.metrics, part.model_state, part.media)

        result = run_microbatches(compute_microbatch, batch, ctx, phase.accumulate.numbers[0])
        groups = [group.values for group in result.means]
        terms = {term: value for _, group in groups for term, value in group.items()}
        weights = {term: group.weight for group in result.means for term in group.values[1]}
        return PhaseGradients(
            jax.tree.map(lambda *grads: sum_values(grads), *[grads for grads, _ in groups]),
            terms,
            weights,
            result.metrics,
            result.model_state,
            preds=None,
            aux=None,
            media=result.media,
        )

    def _select_part(
        self, name: str, output: fg.Output, batch: Any, ctx: fg.Context
    ) -> PhaseGradients:
        owners = self._find_owners(output.losses)
        self._check_losses(dict.fromkeys(owners.values()))
        terms = {term: value for term, value in output.losses.items() if owners[term] == name}
        if name != self._metrics_phase:
            output = output.replace(metrics={}, media={})
        return self._build_part(name, terms, output, batch, ctx)

    def _build_part(
        self, name: str, terms: LossTerms, output: fg.Output, batch: Any, ctx: fg.Context
    ) -> PhaseGradients:
        if not terms:
            raise ModelError(f"the phase {name!r} got no loss: return one from its function")
        get_step_weight = cache(partial(get_weight, output, batch, ctx))
        weights = {
            term: output.loss_weights[term] if term in output.loss_weights else get_step_weight()
            for term in terms
        }
        metrics = as_metrics(output.metrics, get_step_weight)
        media, self._media_structures[name] = jax.tree.flatten(output.media)
        return PhaseGradients(
            None, terms, weights, metrics, output.model_state, output.preds, output.aux, media
        )

    def _find_owners(self, terms: LossTerms) -> dict[str, str]:
        """Return the phase of each term. A single phase owns all terms, unless the losses have
        names of which one is that of the phase."""
        owners = {term: term.partition("/")[0] for term in terms}
        name, *others = self._phases
        has_named_losses = self._use_loss_functions and name != "loss" and name in owners.values()
        if others or has_named_losses:
            return owners
        return dict.fromkeys(terms, name)

    def _check_losses(self, losses: Iterable[str]) -> None:
        """Check that every loss has an optimizer, and every optimizer a loss."""
        self._check_has_optimizer(losses)
        for name in self._phases:
            if name not in losses:
                raise ModelError(
                    f"the optimizer {name!r} has no loss; the module gives {', '.join(losses)}. "
                    "Give the phase the name of its loss, or leave it out"
                )

    def _check_has_optimizer(self, losses: Iterable[str]) -> None:
        for loss in losses:
            if loss not in self._phases:
                raise ModelError(
                    f"the loss {loss!r} has no optimizer; there are phases for "
                    f"{', '.join(self._phases)}. Add one, MultiOptimizer({loss}=Phase(...)), or "
                    "begin its name with that of the phase whose loss it is part of, such as "
                    f"'{next(iter(self._phases))}/{loss}'"
                )

    def _warn_zero_gradients(
        self, name: str, compute_grads: Callable[[Any], Any], params: Any
    ) -> None:
        """Warn once of parameters whose gradient is zero whatever the batch.

        Args:
            name: of the phase.
            compute_grads: returns the gradient by the parameters, and anything else.
            params: its argument.
        """
        if name not in self._unchecked:
            return
        self._unchecked.remove(name)
        jaxpr, (grads, _) = jax.make_jaxpr(compute_grads, return_shape=True)(params)
        paths = [path for path, _ in leaves_with_paths(grads)]
        zero = _find_zero_outputs(jaxpr.jaxpr, paths)
        if zero:
            shown = ", ".join(zero[:NUM_LISTED])
            if len(zero) > NUM_LISTED:
                shown += ", ..."
            warnings.warn(
                f"the loss of the phase {name!r} does not depend on {shown}, which the phase "
                "updates: their gradient is zero whatever the batch. Select other arrays",
                stacklevel=2,
            )


@dataclass(frozen=True, eq=False)
class PhaseLoss:
    """The loss of one phase as a function of what the phase updates.

    Attributes:
        gradients: computes the terms.
        forward: the engine's forward pass.
        name: of the phase.
        static: the module without what the phase updates.
        groups: the names of the terms that are means over the same weight, for each weight; known
            once `compute` was traced, because only arrays pass through `jax.grad`.
    """

    gradients: Gradients
    forward: Forward
    name: str
    static: PyTree
    groups: list[list[str]] = field(default_factory=list, init=False)

    def compute(
        self, params: PyTree, batch: Any, ctx: fg.Context
    ) -> tuple[Float[Array, ""], PhaseGradients]:
        """Return the loss, and what the forward pass gives the phase, without gradients.

        Args:
            params: what the phase updates, a tree like the module with None elsewhere.
            batch: the batch or microbatch.
            ctx: its context.
        """
        module = eqx.combine(params, self.static)
        part = self.gradients.compute_part(self.forward, self.name, module, batch, ctx)
        self.groups[:] = [names for _, names in group_by_weight(part.terms, part.weights)]
        return sum_values(part.terms.values()), part

    def differentiate(
        self,
        params: PyTree,
        batch: Any,
        ctx: fg.Context,
        check: Callable[[Callable[[Any], Any], Any], None],
    ) -> PhaseGradients:
        """Return what the forward pass gives the phase, with gradients.

        Args:
            params: what the phase updates, a tree like the module with None elsewhere.
            batch: the batch or microbatch.
            ctx: its context.
            check: called with the function that computes the gradients, and with `params`.
        """
        compute_grads = jax.grad(partial(self.compute, batch=batch, ctx=ctx), has_aux=True)
        check(compute_grads, params)
        grads, part = compute_grads(params)
        weights = {name: part.weights[names[0]] for names in self.groups for name in names}
        return part._replace(grads=zero_weightless_grads(grads, weights.values()), weights=weights)

    def unify_weights(
        self, part: PhaseGradients, params: PyTree, batch: Any, ctx: fg.Context
    ) -> LossTerms:
        """Return the weights of the terms, of which those that do not depend on the batch, such as
        a penalty on the parameters, get the weight of the others: any is right for them.

        Args:
            part: what `differentiate` returned.
            params: its argument.
            batch: its argument.
            ctx: its argument.
        """
        if len(self.groups) == 1:
            return part.weights

        names = [*part.terms]

        def compute_terms(batch: Any, mask: Any) -> list[Array]:
            _, part = self.compute(params, batch, replace(ctx, mask=mask))
            return [part.terms[name] for name in names]

        jaxpr = jax.make_jaxpr(compute_terms)(batch, ctx.mask).jaxpr
        dependent = [
            name
            for index, name in enumerate(names)
            if any(dce_jaxpr(jaxpr, [index == other for other in range(len(names))])[1])
        ]
        weights = dict(part.weights)
        if dependent:
            common = weights[dependent[0]]
            weights |= {name: common for name in names if name not in dependent}
        return weights

    def differentiate_by_weight(
        self,
        params: PyTree,
        batch: Any,
        ctx: fg.Context,
        check: Callable[[Callable[[Any], Any], Any], None],
    ) -> tuple[PhaseGradients, list[WeightedMeans]]:
        """Return what the forward pass gives the phase, without gradients, and for each weight the
        gradient of the terms that are means over it, with these terms by name.

        Args:
            params: what the phase updates, a tree like the module with None elsewhere.
            batch: the microbatch.
            ctx: its context.
            check: called with the function that computes the gradients, and with `params`.
        """

        def compute_groups(params: PyTree) -> tuple[list[Array], PhaseGradients]:
            _, part = self.compute(params, batch, ctx)
            sums = [sum_values(part.terms[name] for name in names) for names in self.groups]
            return sums, part

        compute_grads = jax.grad(partial(self.compute, batch=batch, ctx=ctx), has_aux=True)
        check(compute_grads, params)
        grads, part = compute_grads(params)
        grads_by_group = [grads]
        if len(self.groups) > 1:
            sums, linear, part = jax.linearize(compute_groups, params, has_aux=True)
            mask = jax.tree.map(lambda _: True, params)
            grads_by_group = [
                SharedPullback(index, linear, params, mask)(jnp.ones_like(loss))
                for index, loss in enumerate(sums)
            ]
        means = [
            WeightedMeans(
                part.weights[names[0]], (grads, {name: part.terms[name] for name in names})
            )
            for names, grads in zip(self.groups, grads_by_group, strict=True)
        ]
        return part, means


@dataclass(frozen=True, eq=False)
class SharedPullback:
    """The gradient of one loss, from a forward pass that several losses share.

    Attributes:
        name: of the phase, or the index of the loss.
        linear: from tangents of the parameters to those of all losses by name or index.
        params: what all phases update.
        mask: True for what this phase updates.
    """

    name: Any
    linear: Callable[[PyTree], Any]
    params: PyTree
    mask: PyTree[bool]

    def __call__(self, cotangent: Float[Array, ""]) -> PyTree:
        """Return the gradient, None for what the phase does not update."""
        # Transposed for this loss alone: what only the others depend on is left out.
        (grads,) = jax.linear_transpose(self._compute_tangent, self.params)(cotangent)
        return eqx.filter(grads, self.mask)

    def _compute_tangent(self, tangents: PyTree) -> Float[Array, ""]:
        return self.linear(tangents)[self.name]


def _find_zero_outputs(jaxpr: Jaxpr, names: list[str]) -> list[str]:
    """Return the names of the outputs that the program sets to zero, whatever its inputs."""
    equations = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    # The outputs after these are not gradients.
    return [
        name
        for name, output in zip(names, jaxpr.outvars, strict=False)
        if _is_zero(output, equations)
    ]


def _is_zero(variable: Any, equations: dict[Any, Any]) -> bool:
    """Return whether a value of a program is a zero or a copy of one, as JAX writes gradients that
    nothing contributes to.

    Args:
        variable: of the program.
        equations: by the variables that they set.
    """
    if isinstance(variable, Literal):
        is_array = hasattr(variable.val, "any")
        return not variable.val.any() if is_array else variable.val == 0
    equation = equations.get(variable)
    if equation is None or equation.primitive.name not in COPYING_PRIMITIVES:
        return False
    return _is_zero(equation.invars[0], equations)
