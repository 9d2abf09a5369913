"""One training step as it is traced: batch in, new state out, with every traced hook in its
place."""

from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from fulgurite._src.data.batch import as_batch
from fulgurite._src.metrics.accumulator import MetricAccumulator
from fulgurite._src.metrics.base import flatten_nested
from fulgurite._src.metrics.columns import select_tree
from fulgurite._src.metrics.weights import collect_weights
from fulgurite._src.model.context import Context
from fulgurite._src.model.media import Media, render_if_due
from fulgurite._src.model.output import Output
from fulgurite._src.plugins.selection import RegisteredPlugin
from fulgurite._src.training.forward import get_weight
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
        state: the state after the update, with the step count and the previous window.
        output: of the forward pass, with gradients and updates.
        metrics: to be added to the window.
        is_bad: bool, whether anything was not finite.
        term_index: int32, the index of the first such term among `finite_check_names`.
    """

    state: TrainState
    output: Output
    metrics: MetricAccumulator
    is_bad: Bool[Array, ""]
    term_index: Int[Array, ""]


class TrainStep:
    """The traced step of an engine by one update rule.

    Example:
        from fulgurite.plugins import Program, TrainStep, as_model_init

        batch = next(iter(engine.iter_batches(data, epochs=1)))
        program = Program(engine.services, as_model_init(model), (batch,), None)
        step = TrainStep(engine.services, program.update_rule, finite_check_names=[])

    Args:
        services: of the engine.
        update_rule: how a batch becomes an update; another rule is another executable.
        finite_check_names: what was checked to be finite, by index; the trace adds to it.
    """

    def __init__(
        self, services: Services, update_rule: UpdateRule, finite_check_names: list[str]
    ) -> None:
        self._services = services
        self._plugins = services.plugins
        self._update_rule = update_rule
        self._finite_check_names = finite_check_names
        self._traced_update = CachedTrace(self._update)

    def __call__(
        self, state: TrainState, batch: Any, due: Bool[Array, " names"], *, step_number: int
    ) -> tuple[TrainState, Output]:
        """Return the state after one more update, and the step's output.

        Args:
            state: the state before.
            batch: arrays with a leading example axis, in a `Batch` or not.
            due: what is due after this step, in the order of `Services.due_names`.
            step_number: of the step that is traced, for errors.
        """
        outcome = self.update(state, batch, due, step_number=step_number)
        new = outcome.state
        window = state.metric_window.add(outcome.metrics)
        check_same_structure(state.metric_window, window, "the metrics of the training step")
        policy = self._services.settings.on_nonfinite
        if policy == "skip":
            new, window = self._undo_if_bad(state, outcome, window)
        nonfinite = state.nonfinite
        if policy != "ignore":
            nonfinite = nonfinite.update(
                state.step + 1, outcome.is_bad, outcome.term_index, policy == "skip"
            )
        new = new.replace(step=state.step + 1, metric_window=window, nonfinite=nonfinite)
        return new, outcome.output

    def _undo_if_bad(
        self, state: TrainState, outcome: StepOutcome, window: MetricWindow
    ) -> tuple[TrainState, MetricWindow]:
        """Return state and window after the step, or those before it if it was not finite.

        The states of plugins that are `kept_on_skip` stay those after it.
        """
        new_states = outcome.state.plugin_states
        kept_states = {}
        for plugin in self._plugins.hooks.init_plugin_state.plugins:
            if plugin.name in new_states and plugin.options.kept_on_skip:
                kept_states[plugin.name] = new_states[plugin.name]

        def select(before: Any, after: Any) -> Any:
            return jnp.where(outcome.is_bad, before, after) if eqx.is_array(after) else after

        new = jax.tree.map(select, state, outcome.state)
        window = select_tree(outcome.is_bad, state.metric_window, window)
        return new.replace(plugin_states={**new.plugin_states, **kept_states}), window

    def update(
        self, state: TrainState, batch: Any, due: Bool[Array, " names"], *, step_number: int
    ) -> StepOutcome:
        """Run the step up to its metrics; the arguments are those of `__call__`.

        It is traced once for each kind of batch: building the program, which must know the metrics
        before there can be a window for them, and compiling the step share the trace.
        """
        window = state.metric_window
        state = state.replace(metric_window=MetricWindow.zeros(MetricAccumulator({}, {})))
        outcome = self._traced_update(state, batch, due, step_number=step_number)
        return outcome._replace(state=outcome.state.replace(metric_window=window))

    def _update(
        self, state: TrainState, batch: Any, due: Bool[Array, " names"], step_number: int
    ) -> StepOutcome:
        parts = as_batch(batch)
        ctx = Context(
            self._services.make_rng_streams(state.key),
            state.step,
            training=True,
            model_state=state.model_state,
            mask=parts.mask,
            spec=parts.spec,
            num_examples=parts.num_examples,
            due_flags=dict(zip(self._services.due_names, due, strict=True)),
            rng_step=state.step,
            step_number=step_number,
            plugin_states=state.plugin_states,
        )
        batch = self.transform_batch(parts.value, ctx)
        new, output = self._compute_update(state, batch, ctx)
        check_same_structure(_get_user_fields(state), _get_user_fields(new), "the training step")
        updated_module = new.module
        new = self._after_update(new, output, ctx)
        checked = output.replace(grads=None) if self._update_rule.checks_gradients else output
        is_bad, term_index, names = state.nonfinite.check(
            checked, updated_module, new.module, is_sharded=self._services.sharding.mesh is not None
        )
        term_index += self._find_offset(names)
        plugin_metrics, plugin_media = self._collect_plugin_metrics(new, output, batch, ctx)
        with collect_weights():
            metrics = collect_step_metrics(
                output, plugin_metrics, partial(get_weight, output, batch, ctx)
            )
        output = _drop_model_state(output).replace(media={**output.media, **plugin_media})
        return StepOutcome(new, output, metrics, is_bad, term_index)

    def _find_offset(self, names: list[str]) -> int:
        """Return where these names begin among `finite_check_names`, to which they are added if
        they are new: batches of another structure may have other loss terms."""
        for start in range(0, len(self._finite_check_names) - len(names) + 1):
            if self._finite_check_names[start : start + len(names)] == names:
                return start
        self._finite_check_names += names
        return len(self._finite_check_names) - len(names)

    def transform_batch(self, batch: Any, ctx: Context) -> Any:
        """Return a batch as plugins change it; the arguments are those of their hook."""
        return self._plugins.hooks.transform_batch.fold(
            "batch",
            batch,
            ctx.step_number,
            per_plugin=lambda plugin: {"ctx": ctx.for_plugin(plugin.name)},
            accept=_check_is_batch,
        )

    def _compute_update(
        self, state: TrainState, batch: Any, ctx: Context
    ) -> tuple[TrainState, Output]:
        """Run the update rule, or what a subclass of the engine does instead, and check what it
        returns."""
        # Copies: a model state can be updated once, and the engine needs the one from before too.
        ctx = replace(ctx, model_state=copy_model_state(ctx.model_state))
        update_rule = StepRule(self._update_rule, ctx)
        state = state.replace(model_state=copy_model_state(state.model_state))
        custom_train_step = self._services.custom_train_step
        with batch_error_context(self._describe_step(ctx), batch):
            if custom_train_step is None:
                function = f"the update rule {type(self._update_rule).__name__}"
                answer: Any = update_rule(self._services.forward, state, batch, ctx)
            else:
                function = custom_train_step.__qualname__
                answer = custom_train_step(state, batch, ctx, update_rule)
            is_pair = isinstance(answer, tuple) and len(answer) == 2
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

    def _describe_step(self, ctx: Context) -> str:
        """Name the step for an error about its batch."""
        names = [repr(plugin.name) for plugin in self._plugins.hooks.transform_batch.plugins]
        if not names:
            return f"training step {ctx.step_number}"
        return f"training step {ctx.step_number}, its batch transformed by {', '.join(names)},"

    def _after_update(self, state: TrainState, output: Output, ctx: Context) -> TrainState:
        """Fold the module through the plugins, each of which writes its own state."""
        plugin_states = dict(state.plugin_states)

        def get_arguments(plugin: RegisteredPlugin) -> dict[str, Any]:
            name = plugin.name
            return {"plugin_state": plugin_states.get(name), "ctx": ctx.for_plugin(name)}

        def accept(plugin: RegisteredPlugin, answer: Any) -> Any:
            name = plugin.name
            where = f"plugin {name!r}, hook after_update"
            if not isinstance(answer, tuple) or len(answer) != 2:
                raise ModelError(
                    f"{where}: return (module, plugin_state), not {type(answer).__name__}"
                )
            module, plugin_state = answer
            before = {name: plugin_states.get(name)}
            check_same_structure(state.module, module, f"{where},")
            check_same_structure(before, {name: plugin_state}, f"{where},")
            if name in plugin_states:
                plugin_states[name] = plugin_state
            return module

        module = self._plugins.hooks.after_update.fold(
            "module",
            state.module,
            ctx.step_number,
            per_plugin=get_arguments,
            accept=accept,
            output=output,
        )
        return state.replace(module=module, plugin_states=plugin_states)

    def _collect_plugin_metrics(
        self, state: TrainState, output: Output, batch: Any, ctx: Context
    ) -> tuple[dict[str, Any], dict[str, Media]]:
        """Return the metrics and the media of plugins, as `PLUGIN/NAME`; each sees its own plugin
        state alone."""

        def get_arguments(plugin: RegisteredPlugin) -> dict[str, Any]:
            name = plugin.name
            plugin_states = {
                key: value for key, value in state.plugin_states.items() if key == name
            }
            plugin_state = state.replace(plugin_states=plugin_states)
            return {"state": plugin_state, "ctx": ctx.for_plugin(name)}

        answers = self._plugins.hooks.step_metrics.each(
            ctx.step_number,
            per_plugin=get_arguments,
            output=output,
            grads=output.grads,
            updates=output.updates,
            batch=batch,
        )
        metrics: dict[str, Any] = {}
        media: dict[str, Any] = {}
        for plugin, answer in answers:
            for key, value in flatten_nested(answer or {}).items():
                group = media if isinstance(value, Media) or callable(value) else metrics
                group[f"{plugin.name}/{key}"] = value
        if media and ctx.media_due is not None:
            return metrics, render_if_due(media, ctx.media_due)
        return metrics, {}


def _check_is_batch(plugin: RegisteredPlugin, batch: Any) -> Any:
    if batch is None:
        raise PluginError(
            f"plugin {plugin.name!r}, hook transform_batch: return the batch, not None"
        )
    return batch


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
