"""One training step as it is traced: batch in, new state out, with every traced hook in its place."""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fulgurite.annotations import check_batch, describe, described
from fulgurite.context import Context
from fulgurite.data import Masked
from fulgurite.errors import DataError, ModelError, PluginError
from fulgurite.media import shown
from fulgurite.metrics import Metric, Running
from fulgurite.module import Output, method_of
from fulgurite.placing import constrained
from fulgurite.plugins import Implementation, PluginManager, blame, merge
from fulgurite.state import TrainState, check_same_structure
from fulgurite.update import UpdateRule
from fulgurite.window import by_name, metrics_of

if TYPE_CHECKING:
    from fulgurite.engine import Engine

Step = str | Callable[[Any, Any, Context], Output]
"""The name of a module's method, or a function `step(module, batch, ctx)`."""


class TrainStep:
    """The traced step of an engine.

    Attributes:
        tasks: the names that `ctx.due` knows; the flags come in this order.
        terms: what health looked at, by the index of a culprit; known once the step was traced.
        done: the number of updates before the next step; it may be on the device still.
        rule: the update rule that holds; another one is another executable.
    """

    def __init__(self, engine: "Engine", rule: UpdateRule) -> None:
        self._engine, self._plugins, self.rule = engine, engine.plugins, rule
        self.tasks = [*(task.name for task in engine.tasks if task.name != "log"), "log"]
        self.terms: list[str] = []
        self.done: Any = 0

    @property
    def at(self) -> int:
        """The number of the step that is being traced, for notes on errors. Waits for the device if `done` is there."""
        return int(self.done) + 1

    def __call__(self, state: TrainState, batch: Any, due: Bool[Array, " tasks"]) -> tuple[TrainState, Output]:
        """The state after one more update and the step's output."""
        new, output, metrics, running, bad, culprit = self.update(state, batch, due)
        window = state.window.add(metrics, running)
        check_same_structure(state.window, window, "the metrics of the training step")
        policy = self._engine.nonfinite
        skip = policy == "skip"
        if skip:
            new, window = jax.tree.map(
                lambda old, made: jnp.where(bad, old, made) if eqx.is_array(made) else made,
                (state, state.window),
                (new, window),
            )
        health = state.health.after(state.step + 1, bad, culprit, skip) if policy != "ignore" else state.health
        return new.replace(step=state.step + 1, window=window, health=health), output

    def update(
        self, state: TrainState, batch: Any, due: Bool[Array, " tasks"]
    ) -> tuple[TrainState, Output, dict[str, Metric], dict[str, Running], Array, Array]:
        """The step without its window: state, output, metrics, running metrics, whether it is bad, and the culprit."""
        batch, mask = unmasked(batch)
        ctx = Context(
            self._engine.streams(state.key),
            state.step,
            training=True,
            model_state=state.model_state,
            mask=mask,
            flags=dict(zip(self.tasks, due, strict=True)),
            key_step=state.step,
            rule=self.rule,
            at=self.at,
            slices=state.plugins,
        )
        for hook in self._plugins.implementations("transform_batch"):
            batch = self._call(hook, ctx, batch=batch)
            if batch is None:
                raise PluginError(f"plugin {hook.plugin.name!r}, hook transform_batch: return the batch, not None")
        changed = [repr(hook.plugin.name) for hook in self._plugins.implementations("transform_batch")]
        by = f", its batch transformed by {', '.join(changed)}," if changed else ""
        with described(f"training step {self.at}{by}", batch):
            answer = self._engine.train_step(state, batch, ctx)
            if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], Output):
                name = self._engine.train_step.__qualname__
                name = f"the update rule {type(self.rule).__name__}" if name == "Engine.train_step" else name
                raise ModelError(f"{name} returned {type(answer).__name__}: return (state, fg.Output(...))")
        new, output = answer
        check_same_structure(_part(state), _part(new), "the training step")
        few, updated = 256 if self._engine.mesh is None else 0, new.module  # divided arrays would have to be gathered
        new = self._after_update(new, output, ctx)
        bad, culprit, self.terms = state.health.examine(output, updated, new.module, few)
        extra, given = dict[str, Any](), {"output": output, "grads": output.grads, "updates": output.updates}
        for hook in self._plugins.implementations("step_metrics"):
            name = hook.plugin.name
            seen = new.replace(plugins={key: own for key, own in new.plugins.items() if key == name})
            extra |= {f"{name}/{key}": one for key, one in (self._call(hook, ctx, state=seen, **given) or {}).items()}
        metrics, running = metrics_of(output, extra, examples_in(batch, mask))
        return new, output, metrics, running, bad, culprit

    def _after_update(self, state: TrainState, output: Output, ctx: Context) -> TrainState:
        module, slices = state.module, dict(state.plugins)
        for hook in self._plugins.implementations("after_update"):
            name = hook.plugin.name
            changed = self._call(hook, ctx, module=module, own=slices.get(name), output=output)
            where = f"plugin {name!r}, hook after_update"
            if not isinstance(changed, tuple) or len(changed) != 2:
                raise ModelError(f"{where}: return (module, own), not {type(changed).__name__}")
            check_same_structure(module, changed[0], f"{where},")
            check_same_structure({name: slices.get(name)}, {name: changed[1]}, f"{where},")
            module = changed[0]
            if name in slices:
                slices[name] = changed[1]
        return state.replace(module=module, plugins=slices)

    def _call(self, hook: Implementation, ctx: Context, **arguments: Any) -> Any:
        return hook(self.at, ctx=ctx.for_plugin(hook.plugin.name), **arguments)


def forward(plugins: PluginManager, step: Step, module: Any, batch: Any, ctx: Context) -> Output:
    """The module's `step` on a batch, with every loss term: its own, those of plugins, and those of `ctx.add_loss`.
    The output's `losses` are all terms by name and its `loss` is their sum; in training no term at all is an error."""
    ctx = ctx.for_forward()
    module = constrained(plugins, "forward_sharding", module=module)
    function = method_of(module, step) if isinstance(step, str) else step
    where = f"{type(module).__name__}.{function.__name__}"
    check_batch(function, batch)
    output = function(module, batch, ctx)
    if not isinstance(output, Output):
        raise ModelError(f"{where} returned {type(output).__name__}: return fg.Output(...)")
    for kind in ("losses", "metrics", "media"):
        if not isinstance(given := getattr(output, kind), dict):
            raise ModelError(f"the {kind} of {where} are of type {type(given).__name__}: return a dictionary, by name")
    output = constrained(plugins, "output_sharding", output=output)
    terms = {} if output.loss is None else {"loss": _term("loss", output.loss, module)}
    added = []
    for hook in plugins.implementations("loss_terms"):
        given = hook(ctx.at, module=module, output=output, batch=batch, ctx=ctx.for_plugin(hook.plugin.name))
        with blame(hook.plugin, "hook loss_terms", ctx.at):
            added.append((hook.plugin, {name: _term(name, value, module) for name, value in (given or {}).items()}))
    for source in (output.losses, merge(added, "loss term"), ctx.losses or {}):
        for name, value in source.items():
            if name in terms:
                raise ModelError(f"the loss term {name!r} comes twice in {where}; rename one")
            terms[name] = _term(name, value, module)
    if not terms and ctx.training:
        raise ModelError(f"{where} gave no loss: return fg.Output(loss, ...) or call ctx.add_loss(name, value)")
    total = sum(list(terms.values())[1:], start=next(iter(terms.values()))) if terms else None
    by_name(total, terms, output.metrics)
    model_state = ctx.model_state if output.model_state is None else output.model_state
    if ctx.training and step == "training_step" and ctx.model_state is not None and output.model_state is None:
        gap = f"{where} gave no model_state, so statistics such as BatchNorm's would never change"
        warnings.warn(f"{gap}: return fg.Output(..., model_state=state), or ctx.model_state itself", stacklevel=1)
    media = {} if ctx.showing is None or not output.media else shown(output.media, ctx.showing)
    return output.replace(loss=total, losses=terms, model_state=model_state, media=media)


def _term(name: Any, value: Any, module: Any) -> Array:
    """One term of the loss, which is a floating-point number."""
    term = jnp.asarray(value) if eqx.is_array_like(value) else value
    if not isinstance(term, jax.Array) or term.shape != () or not jnp.issubdtype(term.dtype, jnp.floating):
        kind = describe(term) if isinstance(term, jax.Array) else repr(value)
        gap = f"the loss term {name!r} of {type(module).__name__} is {kind}"
        raise ModelError(f"{gap}: a loss is one floating-point number; average it over the batch")
    return term


def unmasked(batch: Any) -> tuple[Any, Any]:
    """A batch and its mask, which is None where the source does not pad."""
    if not isinstance(batch, Masked):
        return batch, None
    shapes, mask = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch.value)}, batch.mask
    if mask.shape not in shapes or mask.dtype != bool:
        raise DataError(f"the mask is {describe(mask)}, not bool with one value an example of {describe(batch.value)}")
    return batch.value, mask


def examples_in(batch: Any, mask: Bool[Array, " batch"] | None) -> Array:
    """The number of examples in a batch, float32: those not masked, or the first leaf's leading dimension."""
    if mask is not None:
        return jnp.sum(mask, dtype=jnp.float32)
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    return jnp.float32(next((shape[0] for shape in shapes if shape), 1))


def _part(state: TrainState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in ("module", "model_state", "opt_state", "key", "plugins")}
