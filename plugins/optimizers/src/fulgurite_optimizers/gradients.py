"""The gradient of each of several losses, apart or from one forward pass."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import ModelError
from fulgurite.model.module import get_loss_fns, prefix_output
from fulgurite.training.forward import count_examples
from fulgurite.training.update import Forward
from fulgurite.tree.paths import leaves_with_paths
from jax.extend.core import Literal
from jaxtyping import Array, Float, PyTree

from fulgurite_optimizers.metrics import Metrics, as_metrics
from fulgurite_optimizers.microbatches import run_microbatches
from fulgurite_optimizers.phase import Phase

Terms = dict[str, Float[Array, ""]]


class PhaseGradients(NamedTuple):
    """What a phase needs of one forward and backward pass; `terms` are those of its loss, `media`
    the arrays of what it shows, for `Gradients.media`."""

    grads: PyTree
    terms: Terms
    metrics: Metrics
    model_state: Any
    preds: PyTree
    media: list[Array]


Gradient = Callable[[str, Any, Any, fg.Context], PhaseGradients]
"""`gradient(phase, module, batch, ctx)`: of the loss of that phase, for what it updates; None
elsewhere."""


class Gradients:
    """Makes the gradients of the losses of `phases`. A term of a loss is called as the phase, or
    begins with its name and a slash. `functions` is whether a module may give its losses as
    functions."""

    def __init__(self, phases: dict[str, Phase], *, use_loss_functions: bool) -> None:
        self._phases = phases
        self._use_loss_functions = use_loss_functions
        # It runs in every step, so the metrics and media of `training_step` are from its forward
        # pass.
        self._metrics_of = next(name for name, phase in phases.items() if phase.every == 1)
        self._unchecked = set(phases)
        self._shown: dict[str, Any] = {}

    def compute_separately(self, forward: Forward) -> Gradient:
        """One forward pass for each phase, by microbatches if it says so."""

        def gradient(name: str, module: Any, batch: Any, ctx: fg.Context) -> PhaseGradients:
            params, rest = eqx.partition(module, self._phases[name].param_mask(module))

            def compute(batch: Any, ctx: fg.Context) -> tuple[Any, Metrics, Any, list[Array], Any]:
                def loss(params: Any) -> Any:
                    part = self._forward(forward, name, eqx.combine(params, rest), batch, ctx)
                    return total(part.terms), part

                self._warn(name, jax.grad(loss, has_aux=True), params)
                grads, part = jax.grad(loss, has_aux=True)(params)
                return (grads, part.terms), part.metrics, part.model_state, part.media, part.preds

            accumulate = self._phases[name].accumulate
            if accumulate is not None and accumulate.mode == "microbatch":
                (grads, terms), metrics, model_state, media = run_microbatches(
                    lambda batch, ctx: compute(batch, ctx)[:4], batch, ctx, accumulate.n
                )
                return PhaseGradients(grads, terms, metrics, model_state, None, media)
            (grads, terms), metrics, model_state, media, preds = compute(batch, ctx)
            return PhaseGradients(grads, terms, metrics, model_state, preds, media)

        return gradient

    def compute_shared(
        self, forward: Forward, module: Any, batch: Any, ctx: fg.Context
    ) -> Gradient:
        """One forward pass for all phases, with a pullback for each."""
        chosen = {name: phase.param_mask(module) for name, phase in self._phases.items()}
        params, rest = eqx.partition(module, jax.tree.map(lambda *yes: any(yes), *chosen.values()))

        def losses(params: Any) -> Any:
            output = forward(eqx.combine(params, rest), batch, ctx)
            parts = {name: self._part(name, output, batch, ctx) for name in chosen}
            return {name: total(part.terms) for name, part in parts.items()}, parts

        values, linear, parts = jax.linearize(losses, params, has_aux=True)

        def gradient(name: str, *_: Any) -> PhaseGradients:
            def pullback(like: Any) -> Any:
                # Of this loss alone: what only the others depend on is never transposed.
                grads = jax.linear_transpose(lambda tangents: linear(tangents)[name], params)(like)[
                    0
                ]
                return eqx.filter(grads, chosen[name]), None

            self._warn(name, lambda _: pullback(jnp.ones_like(values[name])), params)
            return parts[name]._replace(grads=pullback(jnp.ones_like(values[name]))[0])

        return gradient

    def media(self, shown: dict[str, list[Array]]) -> dict[str, Any]:
        """The media of the phases, of their arrays by phase."""
        made = [jax.tree.unflatten(self._shown[name], arrays) for name, arrays in shown.items()]
        return {key: one for media in made for key, one in media.items()}

    def is_disjoint(self, module: Any) -> bool:
        """Whether a module gives its losses as functions."""
        return self._use_loss_functions and callable(getattr(module, "losses", None))

    def _forward(
        self, forward: Forward, name: str, module: Any, batch: Any, ctx: fg.Context
    ) -> PhaseGradients:
        if not self.is_disjoint(module):
            return self._part(name, forward(module, batch, ctx), batch, ctx)

        def losses(module: Any, batch: Any, ctx: fg.Context) -> fg.Output:
            functions = get_loss_fns(module, batch, ctx)
            self._check(functions)
            return prefix_output(name, functions[name]())

        output = forward(module, batch, ctx, losses)
        # The loss terms of plugins are there for all phases.
        owners = self._owners(output.losses)
        self._check_owned(owners.values())
        own = {key: value for key, value in output.losses.items() if owners[key] == name}
        return self._collect_metrics(name, own, output, batch, ctx)

    def _part(self, name: str, output: fg.Output, batch: Any, ctx: fg.Context) -> PhaseGradients:
        owners = self._owners(output.losses)
        self._check(dict.fromkeys(owners.values()))
        own = {key: value for key, value in output.losses.items() if owners[key] == name}
        if name != self._metrics_of:
            output = output.replace(metrics={}, media={})
        return self._collect_metrics(name, own, output, batch, ctx)

    def _collect_metrics(
        self, name: str, terms: Terms, output: fg.Output, batch: Any, ctx: fg.Context
    ) -> PhaseGradients:
        if not terms:
            raise ModelError(f"the phase {name!r} got no loss: return one from its function")
        metrics = as_metrics(output.metrics, count_examples(batch, ctx.mask))
        media, self._shown[name] = jax.tree.flatten(output.media)
        return PhaseGradients(None, terms, metrics, output.model_state, output.preds, media)

    def _owners(self, terms: Terms) -> dict[str, str]:
        """The phase of each term. A single one has them all, unless the losses have names, of which
        its own is one."""
        owners = {term: term.partition("/")[0] for term in terms}
        name, *others = self._phases
        alone = not others and not (
            self._use_loss_functions and name != "loss" and name in owners.values()
        )
        return dict.fromkeys(terms, name) if alone else owners

    def _check(self, losses: Any) -> None:
        """Every loss has an optimizer, and every optimizer a loss."""
        self._check_owned(losses)
        if without := [name for name in self._phases if name not in losses]:
            raise ModelError(
                f"the optimizer {without[0]!r} has no loss; the module gives {', '.join(losses)}. "
                f"Call the phase like "
                "the loss, or leave it out"
            )

    def _check_owned(self, losses: Any) -> None:
        if without := [name for name in losses if name not in self._phases]:
            raise ModelError(
                f"the loss {without[0]!r} has no optimizer; there are phases for "
                f"{', '.join(self._phases)}. Give it "
                f"one, MultiOptimizer({without[0]}=Phase(...)), or call it by the phase whose loss "
                f"it is part of, such as "
                f"'{next(iter(self._phases))}/{without[0]}'"
            )

    def _warn(self, name: str, gradient: Callable[[Any], Any], params: Any) -> None:
        """Warns once of parameters whose gradient is zero whatever the batch."""
        if name not in self._unchecked:
            return
        self._unchecked.remove(name)
        jaxpr, shapes = jax.make_jaxpr(gradient, return_shape=True)(params)
        made = {out: equation for equation in jaxpr.jaxpr.eqns for out in equation.outvars}
        paths = [path for path, _ in leaves_with_paths(shapes[0])]
        zero = [
            path
            for path, out in zip(paths, jaxpr.jaxpr.outvars, strict=False)
            if _is_zero(out, made)
        ]
        if zero:
            warnings.warn(
                f"the loss of the phase {name!r} does not depend on {', '.join(zero[:6])}"
                f"{', ...' if len(zero) > 6 else ''}, which it is to update: their gradient is "
                f"zero whatever the "
                "batch. Select other arrays",
                stacklevel=2,
            )


def total(terms: Terms) -> Float[Array, ""]:
    """The sum of the terms of a loss."""
    first, *others = terms.values()
    return sum(others, start=first)


def _is_zero(out: Any, made: dict[Any, Any]) -> bool:
    """Whether a value of a jaxpr is zero as it is written there, as gradients are that nothing
    contributes to."""
    if isinstance(out, Literal):
        return not out.val.any() if hasattr(out.val, "any") else out.val == 0
    equation = made.get(out)
    copies = ("broadcast_in_dim", "convert_element_type", "reshape", "transpose", "copy")
    return (
        equation is not None
        and equation.primitive.name in copies
        and _is_zero(equation.invars[0], made)
    )
