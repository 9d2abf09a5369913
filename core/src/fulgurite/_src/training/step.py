"""One training step as it is traced: batch in, new state out, with every traced hook in its
place."""

from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from fulgurite._src.metrics.base import Metric, RunningMetric, flatten_nested
from fulgurite._src.metrics.columns import select_tree
from fulgurite._src.metrics.weights import collect_weights
from fulgurite._src.model.context import Context
from fulgurite._src.model.media import Media, render_if_due
from fulgurite._src.model.output import Output
from fulgurite._src.plugins.manager import HookImpl
from fulgurite._src.training.forward import get_weight, split_batch
from fulgurite._src.training.metric_window import MetricWindow, collect_step_metrics
from fulgurite._src.training.services import Services
from fulgurite._src.training.state import TrainState
from fulgurite._src.training.step_rule import StepRule, check_not_used_up, copy_model_state
from fulgurite._src.training.trace import CachedTrace
from fulgurite._src.training.update import UpdateRule
from fulgurite._src.tree.specs import check_same_structure
from fulgurite._src.tree.typecheck import batch_error_context
from fulgurite.errors import ModelError, PluginError


class StepOutcome(NamedTuple):
    """What a step leaves before its metrics are merged into the window.

    Attributes:
        state: the state after the update, with the step count and the window of before.
        output: of the forward pass, with gradients and updates.
        metrics: to be merged over the window, by name.
        running_metrics: carried from step to step, by name.
        is_bad: bool, whether anything was not finite.
        term_index: int32, the index of the first such term among `finite_check_names`.
    """

    state: TrainState
    output: Output
    metrics: dict[str, Metric]
    running_metrics: dict[str, RunningMetric]
    is_bad: Bool[Array, ""]
    term_index: Int[Array, ""]


class TrainStep:
    """The traced step of an engine.

    Attributes:
        update_rule: the rule that holds; another one is another executable.
        finite_check_names: what was checked to be finite, by index; known once the step was traced.
        steps_done: the number of updates before the next step; it may be on the device still.
    """

    def __init__(self, services: Services, update_rule: UpdateRule) -> None:
        self.update_rule = update_rule
        self.finite_check_names: list[str] = []
        self.steps_done: Any = 0
        self._services = services
        self._hooks = services.hooks
        # For each rule, which is kept, so that no other one gets its id.
        self._updates: dict[int, tuple[UpdateRule, CachedTrace]] = {}

    @property
    def step_number(self) -> int:
        """The number of the step that is being traced, for notes on errors. Waits for the device if
        `steps_done` is there."""
        return int(self.steps_done) + 1

    def __call__(
        self, state: TrainState, batch: Any, due: Bool[Array, " names"]
    ) -> tuple[TrainState, Output]:
        """Return the state after one more update, and the step's output.

        Args:
            state: the state before.
            batch: arrays with a leading example axis, in a `MaskedBatch` or `Batch` or not.
            due: what is due after this step, in the order of `Settings.due_names`.
        """
        record = self.update(state, batch, due)
        new = record.state
        window = state.metric_window.add(record.metrics, record.running_metrics)
        check_same_structure(state.metric_window, window, "the metrics of the training step")
        policy = self._services.settings.on_nonfinite
        if policy == "skip":
            new, window = self._undo_if_bad(state, record, window)
        nonfinite = state.nonfinite
        if policy != "ignore":
            nonfinite = nonfinite.update(
                state.step + 1, record.is_bad, record.term_index, policy == "skip"
            )
        new = new.replace(step=state.step + 1, metric_window=window, nonfinite=nonfinite)
        return new, record.output

    def _undo_if_bad(
        self, state: TrainState, record: StepOutcome, window: MetricWindow
    ) -> tuple[TrainState, MetricWindow]:
        """Return state and window after the step, or those before it if it was not finite.

        The states of plugins that are `kept_on_skip` stay those after it.
        """
        new_states = record.state.plugin_states
        kept_states = {}
        for hook in self._hooks.implementations("init_plugin_state"):
            name = hook.plugin.name
            if name in new_states and hook.plugin.options.kept_on_skip:
                kept_states[name] = new_states[name]

        def select(before: Any, after: Any) -> Any:
            return jnp.where(record.is_bad, before, after) if eqx.is_array(after) else after

        new = jax.tree.map(select, state, record.state)
        window = select_tree(record.is_bad, state.metric_window, window)
        return new.replace(plugin_states={**new.plugin_states, **kept_states}), window

    def update(self, state: TrainState, batch: Any, due: Bool[Array, " names"]) -> StepOutcome:
        """Run the step up to its metrics; the arguments are those of `__call__`.

        It is traced once for each kind of batch: building the program, which must know the metrics
        before there can be a window for them, and compiling the step share the trace.
        """
        rule = self.update_rule
        _, update = self._updates.setdefault(id(rule), (rule, CachedTrace(self._update)))
        window = state.metric_window
        outcome = update(state.replace(metric_window=MetricWindow.zeros({}, {})), batch, due)
        return outcome._replace(state=outcome.state.replace(metric_window=window))

    def _update(self, state: TrainState, batch: Any, due: Bool[Array, " names"]) -> StepOutcome:
        batch, mask, spec, num_examples = split_batch(batch)
        ctx = Context(
            self._services.make_rng_streams(state.key),
            state.step,
            training=True,
            model_state=state.model_state,
            mask=mask,
            spec=spec,
            num_examples=num_examples,
            due_flags=dict(zip(self._services.settings.due_names, due, strict=True)),
            rng_step=state.step,
            step_number=self.step_number,
            plugin_states=state.plugin_states,
        )
        batch = self.transform_batch(batch, ctx)
        new, output = self._compute_update(state, batch, ctx)
        check_same_structure(_get_user_fields(state), _get_user_fields(new), "the training step")
        updated_module = new.module
        new = self._after_update(new, output, ctx)
        checked = output.replace(grads=None) if self.update_rule.checks_gradients else output
        is_bad, term_index, names = state.nonfinite.check(
            checked, updated_module, new.module, is_sharded=self._services.sharding.mesh is not None
        )
        term_index += self._find_offset(names)
        plugin_metrics, plugin_media = self._collect_plugin_metrics(new, output, batch, ctx)
        with collect_weights():
            metrics, running_metrics = collect_step_metrics(
                output, plugin_metrics, partial(get_weight, output, batch, ctx)
            )
        output = _drop_model_state(output).replace(media={**output.media, **plugin_media})
        return StepOutcome(new, output, metrics, running_metrics, is_bad, term_index)

    def _find_offset(self, names: list[str]) -> int:
        """Return where these names begin among `finite_check_names`, to which they are added if
        they are new: batches of another structure may have other loss terms."""
        for start in range(0, len(self.finite_check_names) - len(names) + 1):
            if self.finite_check_names[start : start + len(names)] == names:
                return start
        self.finite_check_names += names
        return len(self.finite_check_names) - len(names)

    def transform_batch(self, batch: Any, ctx: Context) -> Any:
        """Return a batch as plugins change it; the arguments are those of their hook."""
        for hook in self._hooks.implementations("transform_batch"):
            batch = self._call(hook, ctx, batch=batch)
            if batch is None:
                raise PluginError(
                    f"plugin {hook.plugin.name!r}, hook transform_batch: return the batch, not None"
                )
        return batch

    def _compute_update(
        self, state: TrainState, batch: Any, ctx: Context
    ) -> tuple[TrainState, Output]:
        """Run `Engine.train_step`, and check what it returns."""
        # Copies: a model state can be updated once, and the engine needs the one from before too.
        ctx = replace(ctx, model_state=copy_model_state(ctx.model_state))
        rule = StepRule(self.update_rule, ctx)
        state = state.replace(model_state=copy_model_state(state.model_state))
        with batch_error_context(self._describe_step(), batch):
            answer = self._services.compute_update(state, batch, ctx, rule)
            is_pair = isinstance(answer, tuple) and len(answer) == 2
            function = self._services.compute_update.__qualname__
            if function == "Engine.train_step":
                function = f"the update rule {type(self.update_rule).__name__}"
            if not is_pair or not isinstance(answer[1], Output):
                raise ModelError(
                    f"{function} returned {type(answer).__name__}: return (state, fg.Output(...))"
                )
        new, output = answer
        check_not_used_up(new.model_state, "the train state that train_step returned")
        # The train state says what the model's state has become, also to plugins.
        output = _drop_model_state(output).resolve().replace(model_state=new.model_state)
        _check_losses(output, function)
        if output.raw_grads is None:
            # A rule of one's own need not tell them apart.
            output = output.replace(raw_grads=output.grads)
        return new, output

    def _describe_step(self) -> str:
        """Name the step for an error about its batch."""
        names = [repr(hook.plugin.name) for hook in self._hooks.implementations("transform_batch")]
        if not names:
            return f"training step {self.step_number}"
        return f"training step {self.step_number}, its batch transformed by {', '.join(names)},"

    def _after_update(self, state: TrainState, output: Output, ctx: Context) -> TrainState:
        """Fold the module through the plugins, each of which writes its own state."""
        module = state.module
        plugin_states = dict(state.plugin_states)
        for hook in self._hooks.implementations("after_update"):
            name = hook.plugin.name
            where = f"plugin {name!r}, hook after_update"
            before = plugin_states.get(name)
            answer = self._call(hook, ctx, module=module, plugin_state=before, output=output)
            if not isinstance(answer, tuple) or len(answer) != 2:
                raise ModelError(
                    f"{where}: return (module, plugin_state), not {type(answer).__name__}"
                )
            new_module, after = answer
            check_same_structure(module, new_module, f"{where},")
            check_same_structure({name: before}, {name: after}, f"{where},")
            module = new_module
            if name in plugin_states:
                plugin_states[name] = after
        return state.replace(module=module, plugin_states=plugin_states)

    def _collect_plugin_metrics(
        self, state: TrainState, output: Output, batch: Any, ctx: Context
    ) -> tuple[dict[str, Any], dict[str, Media]]:
        """Return the metrics and the media of plugins, as `PLUGIN/NAME`; each sees its own plugin
        state alone."""
        metrics: dict[str, Any] = {}
        media: dict[str, Any] = {}
        for hook in self._hooks.implementations("step_metrics"):
            name = hook.plugin.name
            plugin_states = {
                key: value for key, value in state.plugin_states.items() if key == name
            }
            answer = self._call(
                hook,
                ctx,
                state=state.replace(plugin_states=plugin_states),
                output=output,
                grads=output.grads,
                updates=output.updates,
                batch=batch,
            )
            for key, value in flatten_nested(answer or {}).items():
                group = media if isinstance(value, Media) or callable(value) else metrics
                group[f"{name}/{key}"] = value
        if media and ctx.media_due is not None:
            return metrics, render_if_due(media, ctx.media_due)
        return metrics, {}

    def _call(self, hook: HookImpl, ctx: Context, **arguments: Any) -> Any:
        return hook(self.step_number, ctx=ctx.for_plugin(hook.plugin.name), **arguments)


def _check_losses(output: Output, function: str) -> None:
    """Raise a ModelError if an output is that of several updates, one after the other."""
    for name, value in {"loss": output.loss, **output.losses}.items():
        if value is not None and jnp.shape(value):
            raise ModelError(
                f"{function} returned the loss term {name!r} of shape {jnp.shape(value)}, and an "
                "output is that of one update: of several, as jax.lax.scan stacks them, return "
                "the last, jax.tree.map(lambda leaf: leaf[-1], outputs), and what you want to log "
                "of all of them as a metric"
            )


def _drop_model_state(output: Output) -> Output:
    """Return the output without the model state, which the new train state has.

    Whoever used up this one with `set` has another one there, and then Equinox lets nobody look at
    this one.
    """
    names = [field.name for field in fields(output) if field.name != "model_state"]
    return Output(**{name: getattr(output, name) for name in names})


def _get_user_fields(state: TrainState) -> dict[str, Any]:
    """Return the fields that a user's `train_step` may write."""
    names = ("module", "model_state", "opt_state", "key", "plugin_states")
    return {name: getattr(state, name) for name in names}
