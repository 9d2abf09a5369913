"""One training step as it is traced: batch in, new state out, with every traced hook in its
place."""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fulgurite.data.sources import MaskedBatch
from fulgurite.errors import DataError, ModelError, PluginError
from fulgurite.media import render_if_due
from fulgurite.metrics import Metric, RunningMetric
from fulgurite.model.context import Context
from fulgurite.model.module import Output, get_method
from fulgurite.placing import constrain_sharding
from fulgurite.plugins.manager import HookImpl, PluginManager, merge_by_name, plugin_error_context
from fulgurite.training.metric_window import collect_step_metrics, merge_named_values
from fulgurite.training.state import TrainState, check_same_structure
from fulgurite.training.update import UpdateRule
from fulgurite.tree.typecheck import batch_error_context, check_batch, format_tree

if TYPE_CHECKING:
    from fulgurite.engine import Engine

Step = str | Callable[[Any, Any, Context], Output]
"""The name of a module's method, or a function `step(module, batch, ctx)`."""


class TrainStep:
    """The traced step of an engine.

    Attributes:
        tasks: the names that `ctx.is_due` knows; the flags come in this order.
        terms: what health looked at, by the index of a culprit; known once the step was traced.
        done: the number of updates before the next step; it may be on the device still.
        rule: the update rule that holds; another one is another executable.
    """

    def __init__(self, engine: "Engine", rule: UpdateRule) -> None:
        self._engine, self._plugins, self.update_rule = engine, engine.plugins, rule
        self.tasks = [*(task.name for task in engine.tasks if task.name != "log"), "log"]
        self.finite_check_names: list[str] = []
        self.steps_done: Any = 0

    @property
    def step_number(self) -> int:
        """The number of the step that is being traced, for notes on errors. Waits for the device if
        `done` is there."""
        return int(self.steps_done) + 1

    def __call__(
        self, state: TrainState, batch: Any, due: Bool[Array, " tasks"]
    ) -> tuple[TrainState, Output]:
        """The state after one more update and the step's output."""
        new, output, metrics, running, bad, culprit = self.update(state, batch, due)
        window = state.metric_window.add(metrics, running)
        check_same_structure(state.metric_window, window, "the metrics of the training step")
        policy = self._engine.on_nonfinite
        skip = policy == "skip"
        if skip:
            new, window = jax.tree.map(
                lambda old, made: jnp.where(bad, old, made) if eqx.is_array(made) else made,
                (state, state.metric_window),
                (new, window),
            )
        health = (
            state.nonfinite.update(state.step + 1, bad, culprit, skip)
            if policy != "ignore"
            else state.nonfinite
        )
        return new.replace(step=state.step + 1, metric_window=window, nonfinite=health), output

    def update(
        self, state: TrainState, batch: Any, due: Bool[Array, " tasks"]
    ) -> tuple[TrainState, Output, dict[str, Metric], dict[str, RunningMetric], Array, Array]:
        """The step without its window: state, output, metrics, running metrics, whether it is bad,
        and the culprit."""
        batch, mask = split_mask(batch)
        ctx = Context(
            self._engine.make_rng_streams(state.key),
            state.step,
            training=True,
            model_state=state.model_state,
            mask=mask,
            due_flags=dict(zip(self.tasks, due, strict=True)),
            rng_step=state.step,
            rule=self.update_rule,
            step_number=self.step_number,
            plugin_states=state.plugin_states,
        )
        for hook in self._plugins.implementations("transform_batch"):
            batch = self._call(hook, ctx, batch=batch)
            if batch is None:
                raise PluginError(
                    f"plugin {hook.plugin.name!r}, hook transform_batch: return the batch, not None"
                )
        changed = [
            repr(hook.plugin.name) for hook in self._plugins.implementations("transform_batch")
        ]
        by = f", its batch transformed by {', '.join(changed)}," if changed else ""
        with batch_error_context(f"training step {self.step_number}{by}", batch):
            answer = self._engine.train_step(state, batch, ctx)
            if (
                not isinstance(answer, tuple)
                or len(answer) != 2
                or not isinstance(answer[1], Output)
            ):
                name = self._engine.train_step.__qualname__
                name = (
                    f"the update rule {type(self.update_rule).__name__}"
                    if name == "Engine.train_step"
                    else name
                )
                raise ModelError(
                    f"{name} returned {type(answer).__name__}: return (state, fg.Output(...))"
                )
        new, output = answer
        check_same_structure(_user_fields(state), _user_fields(new), "the training step")
        few, updated = (
            256 if self._engine.mesh is None else 0,
            new.module,
        )  # divided arrays would have to be gathered
        new = self._after_update(new, output, ctx)
        bad, culprit, self.finite_check_names = state.nonfinite.check(
            output, updated, new.module, few
        )
        extra, given = (
            dict[str, Any](),
            {"output": output, "grads": output.grads, "updates": output.updates},
        )
        for hook in self._plugins.implementations("step_metrics"):
            name = hook.plugin.name
            seen = new.replace(
                plugin_states={key: own for key, own in new.plugin_states.items() if key == name}
            )
            extra |= {
                f"{name}/{key}": one
                for key, one in (self._call(hook, ctx, state=seen, **given) or {}).items()
            }
        metrics, running = collect_step_metrics(output, extra, count_examples(batch, mask))
        return new, output, metrics, running, bad, culprit

    def _after_update(self, state: TrainState, output: Output, ctx: Context) -> TrainState:
        module, slices = state.module, dict(state.plugin_states)
        for hook in self._plugins.implementations("after_update"):
            name = hook.plugin.name
            changed = self._call(
                hook, ctx, module=module, plugin_state=slices.get(name), output=output
            )
            where = f"plugin {name!r}, hook after_update"
            if not isinstance(changed, tuple) or len(changed) != 2:
                raise ModelError(
                    f"{where}: return (module, plugin_state), not {type(changed).__name__}"
                )
            check_same_structure(module, changed[0], f"{where},")
            check_same_structure({name: slices.get(name)}, {name: changed[1]}, f"{where},")
            module = changed[0]
            if name in slices:
                slices[name] = changed[1]
        return state.replace(module=module, plugin_states=slices)

    def _call(self, hook: HookImpl, ctx: Context, **arguments: Any) -> Any:
        return hook(self.step_number, ctx=ctx.for_plugin(hook.plugin.name), **arguments)


def forward(plugins: PluginManager, step: Step, module: Any, batch: Any, ctx: Context) -> Output:
    """The module's `step` on a batch, with every loss term: its own, those of plugins, and those of
    `ctx.add_loss`. The output's `losses` are all terms by name and its `loss` is their sum; in
    training no term at all is an error."""
    ctx = ctx.for_forward()
    module = constrain_sharding(plugins, "forward_sharding", module=module)
    function = get_method(module, step) if isinstance(step, str) else step
    where = f"{type(module).__name__}.{function.__name__}"
    check_batch(function, batch)
    output = function(module, batch, ctx)
    if not isinstance(output, Output):
        raise ModelError(f"{where} returned {type(output).__name__}: return fg.Output(...)")
    for kind in ("losses", "metrics", "media"):
        if not isinstance(given := getattr(output, kind), dict):
            raise ModelError(
                f"the {kind} of {where} are of type {type(given).__name__}: return a dictionary, by name"
            )
    output = constrain_sharding(plugins, "output_sharding", output=output)
    terms = {} if output.loss is None else {"loss": as_loss_scalar("loss", output.loss, module)}
    added = []
    for hook in plugins.implementations("loss_terms"):
        given = hook(
            ctx.step_number,
            module=module,
            output=output,
            batch=batch,
            ctx=ctx.for_plugin(hook.plugin.name),
        )
        with plugin_error_context(hook.plugin, "hook loss_terms", ctx.step_number):
            added.append(
                (
                    hook.plugin,
                    {
                        name: as_loss_scalar(name, value, module)
                        for name, value in (given or {}).items()
                    },
                )
            )
    for source in (output.losses, merge_by_name(added, "loss term"), ctx.losses or {}):
        for name, value in source.items():
            if name in terms:
                raise ModelError(f"the loss term {name!r} comes twice in {where}; rename one")
            terms[name] = as_loss_scalar(name, value, module)
    if not terms and ctx.training:
        raise ModelError(
            f"{where} gave no loss: return fg.Output(loss, ...) or call ctx.add_loss(name, value)"
        )
    total = sum(list(terms.values())[1:], start=next(iter(terms.values()))) if terms else None
    merge_named_values(total, terms, output.metrics)
    model_state = ctx.model_state if output.model_state is None else output.model_state
    if (
        ctx.training
        and step == "training_step"
        and ctx.model_state is not None
        and output.model_state is None
    ):
        gap = f"{where} gave no model_state, so statistics such as BatchNorm's would never change"
        warnings.warn(
            f"{gap}: return fg.Output(..., model_state=state), or ctx.model_state itself",
            stacklevel=1,
        )
    media = (
        {}
        if ctx.media_due is None or not output.media
        else render_if_due(output.media, ctx.media_due)
    )
    return output.replace(loss=total, losses=terms, model_state=model_state, media=media)


def as_loss_scalar(name: Any, value: Any, module: Any) -> Array:
    """One term of the loss, which is a floating-point number."""
    term = jnp.asarray(value) if eqx.is_array_like(value) else value
    if (
        not isinstance(term, jax.Array)
        or term.shape != ()
        or not jnp.issubdtype(term.dtype, jnp.floating)
    ):
        kind = format_tree(term) if isinstance(term, jax.Array) else repr(value)
        gap = f"the loss term {name!r} of {type(module).__name__} is {kind}"
        raise ModelError(f"{gap}: a loss is one floating-point number; average it over the batch")
    return term


def split_mask(batch: Any) -> tuple[Any, Any]:
    """A batch and its mask, which is None where the source does not pad."""
    if not isinstance(batch, MaskedBatch):
        return batch, None
    shapes, mask = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch.batch)}, batch.mask
    if mask.shape not in shapes or mask.dtype != bool:
        raise DataError(
            f"the mask is {format_tree(mask)}, not bool with one value an example of {format_tree(batch.batch)}"
        )
    return batch.batch, mask


def count_examples(batch: Any, mask: Bool[Array, " batch"] | None) -> Array:
    """The number of examples in a batch, float32: those not masked, or the first leaf's leading
    dimension."""
    if mask is not None:
        return jnp.sum(mask, dtype=jnp.float32)
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    return jnp.float32(next((shape[0] for shape in shapes if shape), 1))


def _user_fields(state: TrainState) -> dict[str, Any]:
    return {
        name: getattr(state, name)
        for name in ("module", "model_state", "opt_state", "key", "plugin_states")
    }
