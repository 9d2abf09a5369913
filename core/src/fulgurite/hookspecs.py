"""Every hook: when it is called, with what, and how several answers become one.

pluggy marks, registers and checks the implementations. It gives all of them the same arguments,
cannot chain them and does not say who failed, so the engine reads the sorted implementations once
and calls and folds them itself (`fulgurite.plugins`). An implementation may leave out arguments
that it does not need.

Kinds: *build* hooks answer before anything is compiled. *Traced* hooks run while the step is
traced, perhaps several times, and are part of it. *Event* and *sink* hooks run on the host between
steps. *Persistence* hooks save and restore.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import optax
import pluggy
from jaxtyping import Array, Key, PyTree

if TYPE_CHECKING:
    import jax

    from fulgurite.consensus import ProcessSync
    from fulgurite.engine import Engine
    from fulgurite.evaluation import EvaluatorSpec
    from fulgurite.fit.records import Record
    from fulgurite.fit.actions import ScheduledAction
    from fulgurite.fit.run import FitResult, Run
    from fulgurite.metrics import Metric, RunningMetric
    from fulgurite.model.context import Context
    from fulgurite.model.module import Output
    from fulgurite.rng import RngStream
    from fulgurite.runs import CheckpointRef, Snapshot
    from fulgurite.training.state import TrainState
    from fulgurite.training.update import OptimizerSpec, UpdateRule

PROJECT = "fulgurite"
Kind = Literal["build", "traced", "event", "sink", "persistence"]
F = TypeVar("F", bound=Callable[..., Any])

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's method as the implementation of the hook of the same name."""


def hookspec(
    kind: Kind, gives: str | None = None, deprecated: str | None = None
) -> Callable[[F], F]:
    """Marks a function as the specification of a hook of the given kind, whose answers are None or
    of a class called `gives`. `deprecated` says since which version it is and what to do: who
    implements it is warned of that."""

    def mark(function: F) -> F:
        function.fulgurite_kind, function.fulgurite_gives = kind, gives  # type: ignore[attr-defined]
        told = DeprecationWarning(f"hook {function.__name__} is deprecated {deprecated}")
        return pluggy.HookspecMarker(PROJECT)(function, warn_on_impl=told if deprecated else None)

    return mark


@hookspec("build", gives="list")
def register_rng_streams() -> "list[RngStream]":  # type: ignore[return]
    """The random streams this plugin declares. Merged by name over the core's; two plugins with one
    name clash."""


@hookspec("build", gives="Mesh")
def mesh() -> "jax.sharding.Mesh | None":
    """The mesh that everything is placed on. Exclusive."""


@hookspec("build")
def state_sharding(
    state: "TrainState", mesh: "jax.sharding.Mesh | None"
) -> "PyTree[jax.sharding.Sharding] | None":
    """A sharding for every array of `state`, whose arrays are `jax.ShapeDtypeStruct`s.
    Exclusive."""


@hookspec("build")
def plugin_state_sharding(
    plugin_state: PyTree, mesh: "jax.sharding.Mesh"
) -> "PyTree[jax.sharding.Sharding] | None":
    """A sharding for every array of this plugin's own slice, instead of those that `state_sharding`
    gives it; asked only where the state is sharded."""


@hookspec("build")
def batch_sharding(
    batch: PyTree, mesh: "jax.sharding.Mesh | None"
) -> "PyTree[jax.sharding.Sharding] | None":
    """A sharding for every array of `batch`, whose arrays are `jax.ShapeDtypeStruct`s; with several
    processes they may be of one process's part. The engine makes global arrays of batches.
    Exclusive."""


@hookspec("build", gives="UpdateRule")
def make_update_rule(module: PyTree, optimizers: "dict[str, OptimizerSpec]") -> "UpdateRule | None":
    """What happens inside a step between the batch and the new state. Exclusive; the core's is one
    gradient update."""


@hookspec("build", gives="UpdateRule")
def wrap_update_rule(module: PyTree, rule: "UpdateRule") -> "UpdateRule | None":
    """The update rule, wrapped in another one, such as one that hides the frozen part from it.
    Folded in order."""


@hookspec("build", gives="ProcessSync")
def consensus() -> "ProcessSync | None":
    """How several processes agree on what each sees for itself (clocks, signals, files).
    Exclusive."""


@hookspec("build", gives="dict")
def configure_optimizers(module: PyTree) -> "dict[str, OptimizerSpec] | None":
    """Optimizers by name, instead of the module's `configure_optimizers`. Exclusive."""


@hookspec("build", gives="list")
def register_evaluators() -> "list[EvaluatorSpec]":  # type: ignore[return]
    """Named evaluations, run by `run.evaluate(name)`. Concatenated; names are unique."""


@hookspec("build", gives="GradientTransformation")
def gradient_transform(
    module: PyTree, optimizer: str, key: Key[Array, ""]
) -> optax.GradientTransformation | None:
    """A transformation of the gradients before `optimizer` sees them. Chained in order; asked once
    per optimizer."""


@hookspec("build")
def init_plugin_state(module: PyTree, key: Key[Array, ""]) -> PyTree:
    """This plugin's slice of the train state, made under jit. Arrays only; donated, sharded and
    saved."""


@hookspec("build", gives="list")
def register_actions() -> "list[ScheduledAction]":  # type: ignore[return]
    """Actions and when they run. All of them; ordered by phase, then by plugin."""


@hookspec("build", gives="dict")
def module_views(state: "TrainState") -> "dict[str, PyTree]":  # type: ignore[return]
    """Other modules derived from a state, by name, such as averaged weights. Merged; a name twice
    clashes."""


@hookspec("traced")
def transform_batch(batch: PyTree, ctx: "Context") -> PyTree:
    """The batch, changed on the device, before the step sees it; training only. Folded in order."""


@hookspec("traced")
def forward_sharding(module: PyTree) -> "PyTree[jax.sharding.Sharding | None] | None":
    """A sharding for every array of the module where its step uses it, such as whole where the
    state is divided; None for those that the compiler may place. Exclusive."""


@hookspec("traced")
def output_sharding(output: "Output") -> "PyTree[jax.sharding.Sharding | None] | None":
    """A sharding for every array of what the module's step returned, None for those that the
    compiler may place. Exclusive."""


@hookspec("traced", gives="dict")
def loss_terms(module: PyTree, output: "Output", batch: PyTree, ctx: "Context") -> dict[str, Array]:  # type: ignore[return]
    """Further scalar terms of the loss, by name. Merged; a name twice clashes. If each loss has its
    own optimizer, a term is named like `generator/l2`."""


@hookspec("traced")
def after_update(
    module: PyTree, plugin_state: PyTree, output: "Output", ctx: "Context"
) -> tuple[PyTree, PyTree]:  # type: ignore[return]
    """The module after its update, possibly changed, and this plugin's new slice. The module is
    folded in order; `own` is the only slice that a plugin can write."""


@hookspec("traced", gives="dict")
def step_metrics(
    state: "TrainState", output: "Output", grads: PyTree, updates: PyTree, ctx: "Context"
) -> "dict[str, Metric | RunningMetric | Array]":  # type: ignore[return]
    """Metrics of this step, put into the window as `PLUGIN/NAME`. Module, model state, optimizer
    state and the plugin's own slice, the only one in `state`, are those after the update."""


@hookspec("event")
def on_fit_start(run: "Run") -> None:
    """Training is about to begin, or to continue after a restore."""


@hookspec("event")
def on_epoch_end(run: "Run", epoch: int) -> None:
    """The data's epoch number `epoch` (from 0) has ended at `run.step`."""


@hookspec("event")
def on_evaluate_end(run: "Run", name: str, metrics: dict[str, Any]) -> None:
    """The evaluation `name` has ended with `metrics`."""


@hookspec("event")
def on_compile(
    run: "Run | None", name: str, batch_spec: PyTree, compiled: "jax.stages.Compiled"
) -> None:
    """An executable of the training step (not of an evaluation) was made:
    `compiled.cost_analysis()` and `compiled.memory_analysis()` say what it costs. `run` is None
    outside of a fit."""


@hookspec("event")
def on_save(run: "Run", step: int) -> None:
    """A checkpoint of `step` is about to be written; called by the checkpointer. May not change
    state."""


@hookspec("event")
def on_restore(run: "Run", step: int) -> None:
    """The state of `step` was restored, before `on_fit_start`."""


@hookspec("event")
def on_exception(run: "Run", exception: BaseException) -> None:
    """The run ends with `exception`. Called for all plugins, whatever the others do."""


@hookspec("event")
def on_fit_end(run: "Run", result: "FitResult") -> None:
    """The run has ended, by itself or on request, and nothing more will be emitted."""


@hookspec("sink")
def open_logger(run: "Run") -> None:
    """Opens the place that records are written to, before any other event of the run except
    `on_restore`. A
    `FulguriteError` ends the run: it says what is wrong with the place."""


@hookspec("sink")
def log_scalars(record: "Record") -> None:
    """Numbers by name."""


@hookspec("sink")
def log_media(record: "Record") -> None:
    """Images, histograms and figures by name."""


@hookspec("sink")
def log_text(record: "Record") -> None:
    """Text by name, such as notices."""


@hookspec("sink")
def log_config(record: "Record") -> None:
    """A description of the run: configuration, plugins, versions, environment."""


@hookspec("sink")
def flush_logger(step: int) -> "Future[Any]":  # type: ignore[return]
    """Makes everything up to `step` durable; the future's result is a JSON position to `rewind`
    to."""


@hookspec("sink")
def rewind_logger(position: Any) -> None:
    """Drops everything after `position`, before training resumes from the checkpoint that holds it.
    If the sink had failed, it is a dictionary whose `failed` says why."""


@hookspec("sink")
def close_logger() -> None:
    """Writes everything out and releases it, in bounded time: no more records come. Called at the
    end of every fit,
    however it ended: before `on_fit_end`, after `on_exception`."""


@hookspec("persistence")
def get_host_state() -> Any:
    """This plugin's state on the host, as JSON; its version is the plugin's `state_version` (1
    unless set)."""


@hookspec("persistence")
def set_host_state(state: Any, version: int) -> None:
    """Restores what `get_host_state` returned, with the version that wrote it."""


@hookspec("persistence")
def save_checkpoint(run: "Run") -> None:
    """Saves `run.snapshot()`; called by `run.save()` and at the end of a run. Exclusive: the
    checkpointer."""


@hookspec("persistence", gives="Snapshot")
def restore_checkpoint(
    reference: "CheckpointRef", template: "TrainState", engine: "Engine"
) -> "Snapshot | None":
    """The snapshot that `reference` names, with arrays placed as in `template` (`jax.ShapeDtypeStruct`s
    with shardings), or None if `reference` is optional and there is none. What `reference.map`
    leaves out stays as in `template`, and so do the slices of plugins that were not active when it was
    saved. Writes nothing. Exclusive."""
