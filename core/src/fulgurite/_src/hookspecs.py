"""The specification of every hook: when it is called, with what, and how answers are combined.

An implementation may leave out arguments that it does not need. `None` is always a valid answer.
`docs/generate_hooks.py` writes the reference `docs/hooks.md` from this module.
"""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import equinox as eqx
import jax
import optax
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh
from jaxtyping import Array, Int, Key, PyTree

from fulgurite._src.evaluation.evaluation import Evaluation
from fulgurite._src.fit.actions import ScheduledAction
from fulgurite._src.fit.engine_view import EngineView
from fulgurite._src.fit.records import Record
from fulgurite._src.fit.result import FitResult
from fulgurite._src.fit.run import LoggedRun, Run
from fulgurite._src.fit.snapshot import CheckpointRef, CheckpointSource, Snapshot
from fulgurite._src.metrics.base import CollectingMetric, Metric, RunningMetric
from fulgurite._src.model.context import Context
from fulgurite._src.model.media import Media
from fulgurite._src.model.module import OptimizerSpec
from fulgurite._src.model.output import Output
from fulgurite._src.plugins.markers import Combine, hookspec
from fulgurite._src.rng import RngStream
from fulgurite._src.sharding import ShardingStrategy
from fulgurite._src.timing import Timings
from fulgurite._src.training.nonfinite import NonFinitePolicy
from fulgurite._src.training.state import TrainState
from fulgurite._src.training.update import UpdateRule
from fulgurite._src.triggers import Trigger

# pyright: reportReturnType=false
# A specification has no body: what it returns is what implementations return.

_ENGINE_BUILT = "When the engine is built."
_PROGRAM_BUILT = (
    "When a program for a kind of module and batch is built, from shapes: arrays have no values "
    "yet."
)
_TRACED = "Wherever a training step is traced: once for each shape of batch, or more."
_FORWARD = "Wherever a forward pass is traced."
_EMITTED = (
    "As soon as the values of a record are computed, in step order, at the latest before the next "
    "scheduled action."
)

# --- build ----------------------------------------------------------------------------------------


@hookspec("build", Combine.BY_NAME, list[RngStream], _ENGINE_BUILT)
def register_rng_streams() -> list[RngStream] | None:
    """Declare random streams, in addition to the core's or instead of those of the same name."""


@hookspec("build", Combine.EXCLUSIVE, ShardingStrategy, _ENGINE_BUILT)
def sharding_strategy() -> ShardingStrategy | None:
    """Return where states, batches and outputs lie on the devices, and how several processes agree.

    The core's is `SingleDevice`. `fulgurite_sharding.MeshStrategy` is a base class for a mesh.
    """


@hookspec("build", Combine.EACH, when=_PROGRAM_BUILT)
def plugin_state_sharding(plugin_state: PyTree, mesh: Mesh) -> PyTree[jax.sharding.Sharding] | None:
    """Return a sharding for every array of this plugin's own state, instead of those that
    the sharding strategy gives it; called only if the state is sharded.

    Args:
        plugin_state: this plugin's state, as `jax.ShapeDtypeStruct`s.
        mesh: the mesh.
    """


@hookspec(
    "build",
    Combine.FOLD,
    eqx.Module,
    "Where a program is built, from shapes, and where a new state is made.",
)
def transform_module(module: PyTree, key: Key[Array, ""]) -> PyTree:
    """Return the module to train, made of the one that was given, such as with parameters of
    another dtype. It comes before optimizers and states of plugins, which see what this returns.
    Pure; a module that it has returned before keeps its shapes and dtypes.

    Args:
        module: the module; its arrays may be traced.
        key: a random key, this plugin's own, for parameters that it adds.
    """


@hookspec("build", Combine.EXCLUSIVE, UpdateRule, _PROGRAM_BUILT)
def make_update_rule(module: PyTree, optimizers: dict[str, OptimizerSpec]) -> UpdateRule | None:
    """Return the rule that turns a batch into a new state inside a step; the core's is one gradient
    update.

    Args:
        module: the module; its arrays are traced: they have shapes and dtypes, but no values.
        optimizers: the optimizers by name; a single one is called `default`.
    """


@hookspec("build", Combine.FOLD, UpdateRule, _PROGRAM_BUILT)
def wrap_update_rule(
    module: PyTree, update_rule: UpdateRule, on_nonfinite: NonFinitePolicy
) -> UpdateRule | None:
    """Return the update rule wrapped in another one, such as one that hides a frozen part of the
    module from it.

    Args:
        module: the module; its arrays are traced: they have shapes and dtypes, but no values.
        update_rule: the rule so far.
        on_nonfinite: what the engine does with a step that is not finite.
    """


@hookspec("build", Combine.EXCLUSIVE, dict, _PROGRAM_BUILT)
def configure_optimizers(module: PyTree) -> dict[str, OptimizerSpec] | None:
    """Return optimizers by name, instead of the module's `configure_optimizers`.

    Args:
        module: the module; its arrays are traced: they have shapes and dtypes, but no values.
    """


@hookspec("build", Combine.BY_NAME, list[Evaluation], _ENGINE_BUILT)
def register_evaluations() -> list[Evaluation] | None:
    """Declare evaluations, which `run.evaluate(name)` runs."""


@hookspec("build", Combine.CHAIN, optax.GradientTransformation, _PROGRAM_BUILT)
def gradient_transform(
    module: PyTree, optimizer: str, key: Key[Array, ""]
) -> optax.GradientTransformation | None:
    """Return a transformation that the gradients pass before an optimizer; called once for each
    optimizer.

    Args:
        module: the module; its arrays are traced: they have shapes and dtypes, but no values.
        optimizer: the name of the optimizer.
        key: a random key, this plugin's own.
    """


@hookspec(
    "build",
    Combine.EACH,
    when="Where a new state is made; traced where the state is divided among devices.",
)
def init_plugin_state(
    module: PyTree, key: Key[Array, ""], model_state: eqx.nn.State | None
) -> PyTree:
    """Return this plugin's own part of the train state: arrays only; donated, sharded and saved.

    With `on_nonfinite="skip"` a step that was not finite leaves it as it was, as everything else in
    the state, unless the plugin has the class attribute `kept_on_skip = True`: then `after_update`
    of such a step changes it, as a loss scale must.

    Args:
        module: the module; its arrays are traced: they have shapes and dtypes, but no values.
        key: a random key, this plugin's own.
        model_state: the module's `eqx.nn.State`, traced as well, or None.
    """


@hookspec("build", Combine.ALL, list[ScheduledAction], _ENGINE_BUILT)
def register_actions(log_trigger: Trigger | None) -> list[ScheduledAction] | None:
    """Schedule actions. At one step they run by stage (`evaluate`, `decide`, `log`, `act`, `save`),
    then by `after` and `before`, then in the order of plugins.

    Args:
        log_trigger: when the engine logs; None for never, and then no action can run with `log`.
    """


@hookspec(
    "build",
    Combine.MERGE,
    dict,
    "By `engine.get_module_view(state, name)`, and by evaluations that ask for such weights.",
)
def module_views(state: TrainState) -> dict[str, PyTree] | None:
    """Return other modules that derive from a state, by name, such as averaged weights; a pair of a
    module and its `eqx.nn.State` where the model state is another, too.

    Args:
        state: the train state.
    """


# --- traced ---------------------------------------------------------------------------------------


@hookspec("traced", Combine.FOLD, when=_TRACED)
def transform_batch(batch: PyTree, ctx: Context) -> PyTree:
    """Return the batch, changed on the device before the step sees it; training only.

    Args:
        batch: the batch; `ctx.mask` says which examples count.
        ctx: the step's context, with keys and `plugin_state` of this plugin's own.
    """


@hookspec(
    "traced",
    Combine.MERGE,
    dict,
    "Wherever a forward pass is traced, in evaluations too; `ctx.training` says which.",
)
def loss_terms(
    module: PyTree, output: Output, batch: PyTree, ctx: Context
) -> dict[str, Array] | None:
    """Return further scalar terms of the loss, by name. If each loss has its own optimizer, a term
    is named like `generator/l2`.

    Args:
        module: the module.
        output: what its step returned.
        batch: the batch; `ctx.mask` says which examples count.
        ctx: the step's context, with keys and `plugin_state` of this plugin's own.
    """


@hookspec("traced", Combine.FOLD, tuple, _TRACED)
def after_update(
    module: PyTree, plugin_state: PyTree, output: Output, ctx: Context
) -> tuple[PyTree, PyTree]:
    """Return the module after its update, possibly changed, and this plugin's new state. The module
    is folded; its own state is all that a plugin can write.

    Args:
        module: the module after its update, as the plugins before left it.
        plugin_state: this plugin's own part of the train state.
        output: what the module's step returned, with all loss terms.
        ctx: the step's context, with keys of this plugin's own.
    """


@hookspec(
    "traced",
    Combine.FOLD,
    tuple,
    "Once at the end of training, if the update rule then applied the gradients that were left.",
)
def after_finalize(
    module: PyTree, plugin_state: PyTree, model_state: PyTree, step: Int[Array, ""]
) -> tuple[PyTree, PyTree]:
    """Return the module after its last update, possibly changed, and this plugin's new state.

    What is left of an accumulation over steps is applied where training ends. This is not a step,
    so there is no output, and `after_update` is not called: a plugin that must see each update of
    the parameters, such as an average or a constraint, implements both.

    Args:
        module: the module after that update, as the plugins before left it.
        plugin_state: this plugin's own part of the train state.
        model_state: the `eqx.nn.State` of the model, or None.
        step: int32 scalar, the number of completed steps.
    """


@hookspec("traced", Combine.EACH, dict, _TRACED)
def step_metrics(
    state: TrainState,
    output: Output,
    grads: PyTree,
    updates: PyTree,
    batch: PyTree,
    ctx: Context,
) -> dict[str, Metric | RunningMetric | Array | Media | Callable[[], Media]] | None:
    """Return metrics of this step by name; they are logged as `PLUGIN/NAME`.

    Media, and functions that return media, are rendered at the steps that show media.

    Args:
        state: the train state after the update; of the states of plugins it has this one's alone.
        output: what the module's step returned, with all loss terms.
        grads: the gradients, as the optimizer received them.
        updates: what the optimizer returned.
        batch: the batch that the step saw; `ctx.mask` says which examples count.
        ctx: the step's context, with keys of this plugin's own.
    """


@hookspec("traced", Combine.EACH, dict, "Wherever the step of an evaluation is traced.")
def evaluation_metrics(
    module: PyTree, output: Output, batch: PyTree, ctx: Context
) -> dict[str, Metric | CollectingMetric | RunningMetric | Array] | None:
    """Return metrics of a batch of an evaluation by name, which are merged over its batches; they
    are logged as `PLUGIN/NAME`.

    Args:
        module: the module, with the weights that the evaluation asks for, in inference mode.
        output: what the module's `validation_step` returned.
        batch: the batch; `ctx.mask` says which examples count.
        ctx: the context of the batch, with keys of this plugin's own.
    """


@hookspec(
    "traced",
    Combine.WRAP,
    when="Around the module's step wherever it is traced: in training, evaluation and prediction.",
)
def around_forward(
    call: Callable[[PyTree, PyTree], Any], module: PyTree, batch: PyTree, ctx: Context
) -> Any:
    """Return what the module's step returns, as `call(module, batch)` does, possibly with another
    module or batch, or with the result changed. What the loss terms, metrics and `after_update` of
    plugins see is not changed by it.

    Args:
        call: the module's step, or the implementation of the next plugin around it.
        module: the module.
        batch: the batch; `ctx.mask` says which examples count.
        ctx: the context of the step, with keys and `plugin_state` of this plugin's own; the step
            itself gets the module's. `ctx.training` tells training from evaluation.
    """


# --- events ---------------------------------------------------------------------------------------


@hookspec(
    "event",
    returns=AbstractContextManager,
    when="Once per fit, before data is read, a checkpoint is loaded or anything is traced.",
)
def around_fit(timings: Timings) -> AbstractContextManager[Any] | None:
    """Return a context that encloses a call of `fit` from its beginning, when there is no run yet.
    It is entered before `fit_context` and left after it, also if the fit cannot start.

    Args:
        timings: of this fit; its `active_names` say what is going on.
    """


@hookspec(
    "event",
    returns=AbstractContextManager,
    when="Once per fit, when the state to train from is known, before host states are restored.",
)
def fit_context(run: Run) -> AbstractContextManager[Any] | None:
    """Return a context that encloses a fit, such as the lock of the run directory. It is entered
    before any event except `around_fit`, and left after `on_fit_end` or `on_exception`, in reverse
    order.

    Args:
        run: a view of the run; its state can be read; host states are not restored yet.
    """


@hookspec(
    "event", when="Once per fit, after `on_restore` and `open_logger`, before the first step."
)
def on_fit_start(run: Run) -> None:
    """React to the start of training, or to its continuation after a restore.

    Args:
        run: a view of the run, valid during the call.
    """


@hookspec(
    "event",
    when="At the last batch of an epoch, after everything else that is due there except saves "
    "and what asks to come after it.",
)
def on_epoch_end(run: Run, epoch: int) -> None:
    """React to the end of an epoch, at `run.step`.

    Args:
        run: a view of the run, valid during the call.
        epoch: its number in the fit, from 0; a resumed fit continues to count.
    """


@hookspec("event", when="After an action has returned `fg.ReplaceState`.")
def on_replace_state(run: Run) -> None:
    """React to a state that the steps so far have not made; `run.state` is the new one.

    Args:
        run: a view of the run, valid during the call.
    """


@hookspec("event", when="After each evaluation during training, once its metrics are computed.")
def on_evaluate_end(run: Run, source: str, metrics: dict[str, Any]) -> None:
    """React to the metrics of an evaluation.

    Args:
        run: a view of the run, valid during the call.
        source: the name of the evaluation, which is the source of its records and the key of
            `run.metrics`.
        metrics: by name, as Python numbers or NumPy arrays.
    """


@hookspec("event", when="After each compilation of a step, an evaluation or a prediction.")
def on_compile(
    run: Run | None,
    name: str,
    batch_spec: PyTree,
    compiled: jax.stages.Compiled,
    jaxpr: ClosedJaxpr,
    lowered: jax.stages.Lowered,
) -> None:
    """React to a new executable: `compiled.cost_analysis()` and `compiled.memory_analysis()` say
    what it costs.

    Args:
        run: a view of the run, valid during the call; None outside of a fit.
        name: `step` for the training step, `evaluate.NAME` for an evaluation, or `predict`.
        batch_spec: the batch that it was compiled for, as `jax.ShapeDtypeStruct`s.
        compiled: the executable. Its `cost_analysis()` counts the body of a loop once, and on a
            mesh what one device does.
        jaxpr: the program as it was traced, with the trip counts of its loops, for the whole mesh.
        lowered: the program as it was handed to XLA: `lowered.as_text()` is what XLA began with.
    """


@hookspec("event", when="Before a checkpoint is written, at its step.")
def on_save(run: Run, step: int) -> None:
    """React to a checkpoint that is about to be written, without changing the state. The
    checkpointer calls this, because it alone knows whether it really writes.

    Args:
        run: a view of the run, valid during the call.
        step: the step of the checkpoint.
    """


@hookspec(
    "event",
    when="Once in a fit that resumes from a checkpoint, after `fit_context`, once host states are "
    "restored and evaluations are checked, before `open_logger`.",
)
def on_restore(run: Run, step: int) -> None:
    """React to a restored state.

    Args:
        run: a view of the run, valid during the call.
        step: the step of the checkpoint.
    """


@hookspec(
    "event",
    when="Once, when a run ends with an exception, before loggers are closed. Not where a fit "
    "cannot start: if planning it, `fit_context` or restoring a host state fails.",
)
def on_exception(run: Run, exception: BaseException) -> None:
    """React to the exception that ends the run. Called for all plugins, also if one of them fails.

    Args:
        run: a view of the run, valid during the call.
        exception: what ends the run.
    """


@hookspec("event", when="Once, when a run ends without an exception, after loggers are closed.")
def on_fit_end(run: Run, result: FitResult) -> None:
    """React to the end of the run, as planned or on request. No more records may be logged.

    Args:
        run: a view of the run, valid during the call.
        result: what the fit returns.
    """


# --- loggers --------------------------------------------------------------------------------------


@hookspec(
    "logger",
    Combine.EACH,
    when="Once per fit, before the first record; once in `fulgurite evaluate`, of loggers with "
    "`flush_logger`.",
)
def open_logger(run: LoggedRun) -> None:
    """Open the file or service that records are written to, before any other event of the run
    except `on_restore`. A `FulguriteError` ends the run.

    Args:
        run: the run, valid during the call; see `fg.LoggedRun`.
    """


@hookspec("logger", Combine.EACH, when=_EMITTED)
def log_record(record: Record) -> None:
    """Write values by name, of any kind: a logger passes over records whose `kind` it does not
    write.

    Args:
        record: the record; it must not be changed.
    """


@hookspec(
    "logger",
    Combine.EACH,
    when="By the checkpointer, when it saves, after all records up to that step have been passed "
    "on; by `fulgurite evaluate` after each result.",
)
def flush_logger(step: int) -> Future[Any]:
    """Make everything up to a step durable; the future's result is a JSON position for
    `rewind_logger`.

    Args:
        step: the number of completed updates.
    """


@hookspec(
    "logger",
    Combine.EACH,
    when="By the checkpointer, for each checkpoint of the run itself that it might resume from.",
)
def check_logger_position(position: Any, step: int, engine: EngineView) -> None:
    """Raise a `CheckpointError` if `rewind_logger` could not go back to a position, so that an
    earlier checkpoint is used; change nothing.

    Args:
        position: the result of `flush_logger`, read from a checkpoint.
        step: of the checkpoint.
        engine: the engine that resumes.
    """


@hookspec(
    "logger",
    Combine.EACH,
    when="By the checkpointer, in `on_restore`, before `open_logger`; by `fulgurite evaluate` when "
    "it continues.",
)
def rewind_logger(position: Any) -> None:
    """Drop everything after a position, before training resumes from the checkpoint that holds it.

    Args:
        position: the result of `flush_logger`, read from a checkpoint. If the logger had failed, it
            is a dictionary whose `failed` says why.
    """


@hookspec(
    "logger",
    Combine.EACH,
    when="At the end of every fit, however it ended: before `on_fit_end`, after `on_exception`; "
    "at the end of `fulgurite evaluate`.",
)
def close_logger() -> None:
    """Write everything out and release it, in bounded time. No more records follow."""


# --- persistence ----------------------------------------------------------------------------------


@hookspec(
    "persistence",
    Combine.EACH,
    when="Whenever a snapshot is taken, as the checkpointer does to save.",
)
def get_host_state() -> Any:
    """Return this plugin's state on the host, as JSON; its version is the plugin's `state_version`
    (1 unless set)."""


@hookspec(
    "persistence",
    Combine.EACH,
    when="In a fit that resumes from a checkpoint, before `on_restore`.",
)
def set_host_state(state: Any, version: int) -> None:
    """Restore what `get_host_state` returned.

    Raise an exception if the state is something else, as a checkpoint that was edited may have it:
    the fit ends before its first step, with a `CheckpointError` that names the plugin.

    Args:
        state: the value of `get_host_state`, read from a checkpoint.
        version: the `state_version` of the plugin that wrote it.
    """


@hookspec(
    "persistence",
    Combine.EXCLUSIVE,
    when="By `run.save()`, which the checkpointer schedules, and when a run ends.",
)
def save_checkpoint(run: Run) -> None:
    """Save `run.snapshot()`.

    Args:
        run: a view of the run, valid during the call.
    """


@hookspec(
    "persistence",
    Combine.EXCLUSIVE,
    when="By `init_from=` and `weights=`, before `restore_checkpoint`.",
)
def read_weights(source: CheckpointRef, module: Any, engine: EngineView) -> Any:
    """Return the module with weights of another form than a checkpoint, such as those of others;
    None for what this plugin does not read.

    Args:
        source: what was given; a path stands in a reference.
        module: of `jax.ShapeDtypeStruct`s, with the shardings that the arrays should get. What is
            left of these stays as the model makes it.
        engine: the engine that trains or evaluates.
    """


@hookspec(
    "persistence",
    Combine.EXCLUSIVE,
    Snapshot,
    "By a fit with `resume=`, and by `init_from=` and `weights=`.",
)
def restore_checkpoint(
    resume: CheckpointSource | int,
    template: TrainState,
    engine: EngineView,
    announce: Callable[[Snapshot], None],
) -> Snapshot | None:
    """Return a snapshot; write nothing. None says that there is no checkpoint, which only "auto"
    and an optional `CheckpointRef` allow.

    Args:
        resume: what `fit(resume=...)` was: "auto", "latest", "best", a step, the path of a run or
            of a checkpoint, or a `CheckpointRef`. For `init_from=` and `weights=` it is always a
            `CheckpointRef`, whose `map` says which part to read.
        template: a state of `jax.ShapeDtypeStruct`s, with the shardings that the arrays should get.
            What a `map` leaves out stays as in it, and so do the states of plugins that were not
            active when the checkpoint was saved.
        engine: the engine that trains or evaluates.
        announce: may be called with the snapshot before its arrays are read, with those of
            `template` in their places, all but `step`: a fit then compiles while they are read. It
            counts for nothing else, and another snapshot may be returned.
    """
