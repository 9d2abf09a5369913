"""What plugins see of a run, what they can ask of it, and what is left of it in the end."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, get_args

import equinox as eqx
import jax
import numpy as np

from fulgurite._src.data.iterator import BatchIterator
from fulgurite._src.evaluation.evaluation import Evaluation, EvaluationResult, ShouldStop
from fulgurite._src.execution.dispatch import StepsPerExecution
from fulgurite._src.execution.program import Program
from fulgurite._src.fit.actions import StopTraining
from fulgurite._src.fit.records import (
    History,
    Record,
    RecordDispatcher,
    RecordKind,
    RecordStream,
)
from fulgurite._src.fit.scheduler import BoundAction
from fulgurite._src.fit.snapshot import PathLike, Snapshot
from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.redact import redact_text
from fulgurite._src.sharding import ShardingStrategy
from fulgurite._src.timing import Timings
from fulgurite._src.training.nonfinite import NonFinitePolicy
from fulgurite._src.training.services import Services
from fulgurite._src.training.state import TrainState
from fulgurite._src.triggers import StepRange
from fulgurite.errors import (
    ConfigurationError,
    PluginError,
    StateError,
    did_you_mean,
    error_context,
)


class EngineView(Protocol):
    """What a fit and its plugins use of the engine; `Engine` describes the members.

    A protocol, because the engine is above everything that it is made of.
    """

    steps: int | None
    epochs: int | None
    seed: int
    steps_per_execution: StepsPerExecution
    limit_train_batches: int | None
    on_nonfinite: NonFinitePolicy
    max_compilations: int
    fast_dev_run: int | None
    config: dict[str, Any] | None
    program_file: str | None
    run_dir: str | PathLike | None
    plugins: PluginManager
    sharding: ShardingStrategy
    actions: list[BoundAction]
    due_names: tuple[str, ...]
    evaluators: dict[str, Evaluation]
    services: Services

    @property
    def evaluate(self) -> Callable[..., dict[str, Any]]: ...

    @property
    def predict(self) -> Callable[..., Any]: ...

    def run_evaluator(
        self, name: str, state: TrainState, should_stop: ShouldStop = ...
    ) -> EvaluationResult: ...

    def check_evaluators(self, state: TrainState) -> None: ...

    def get_module_view(self, state: TrainState, name: str) -> Any: ...

    def apply_module_view(self, state: TrainState, name: str) -> TrainState: ...

    def get_metric_types(self, state: TrainState, source: str = ...) -> dict[str, type]: ...


class LoggedRun(Protocol):
    """What a logger is told when it opens: a `Run`, or the evaluation of a run's checkpoints by
    `fulgurite evaluate`, which has no more than these members.

    Example:
        class LinesLogger:
            @fg.hookimpl
            def open_logger(self, run: fg.LoggedRun):
                self.file = open(run.run_dir.path / "lines.txt", "a")

    Attributes:
        engine: the engine of this run.
        run_dir: the directory to write into; None without one.
        manifest: the description of the run, as JSON; None without one.
        attempt: the number of this start, from 1.
        step: the number of completed updates; of an evaluation, that of its last checkpoint that
            was logged.
        step_range: the steps of this fit; of an evaluation, it begins at 0 and has no end.
    """

    @property
    def engine(self) -> EngineView: ...

    @property
    def run_dir(self) -> Any: ...

    @property
    def manifest(self) -> Any: ...

    @property
    def attempt(self) -> int: ...

    @property
    def step(self) -> int: ...

    @property
    def step_range(self) -> StepRange: ...


class LoopView(Protocol):
    """What a `Run` shows of the loop; `Loop` describes the members."""

    engine: EngineView
    program: Program
    data_iterator: BatchIterator
    dispatcher: RecordDispatcher
    metrics: dict[str, dict[str, Any]]
    step: int
    step_range: StepRange
    requested_length: tuple[int | None, int | None]
    resumed_from: Snapshot | None
    resume: Any
    stop_reason: str | None
    is_between_steps: bool
    is_exact: bool
    shared: dict[str, dict[str, Any]]

    @property
    def is_complete(self) -> bool: ...

    def state(self) -> TrainState: ...

    def snapshot(self) -> Snapshot: ...

    def save(self) -> None: ...

    def run_evaluator(self, name: str, state: TrainState) -> EvaluationResult: ...

    def report_evaluation(
        self, name: str, metrics: dict[str, Any], media: dict[str, Any], stream: RecordStream
    ) -> None: ...

    def emit_media(self) -> None: ...

    def reset_train_metrics(self) -> None: ...

    def request_stop(self, reason: str) -> None: ...


@dataclass
class FitResult:
    """What a fit returns.

    Example:
        result = engine.fit(model, data)
        loss = result.metrics["train"]["loss"]
        result = engine.fit(data=data, state=result.state, steps=1)  # trains on

    Attributes:
        module: the trained module; it shares its arrays with `state`, so a fit from `state`
            consumes it.
        model_state: its `eqx.nn.State`, or None.
        state: to continue training: `engine.fit(data=data, state=result.state)`.
        history: the newest exact scalars of the run, from before a resume too.
        metrics: the newest metrics by source: `metrics["train"]`, `metrics["test"]`.
        timings: where the wall time went.
        stop_reason: None at the planned end, else why the run stopped earlier: `SIGINT`, `SIGTERM`,
            or the reason of a plugin.
        failures: why something failed that did not end the run: loggers, by plugin name, and
            what plugins report, such as evaluators as `evaluate.NAME`.
        messages: what the run and its plugins had to say, such as that the step is compiled again;
            see `Run.notify`.
        shared: what plugins told each other, as `Run.shared`.
    """

    module: Any = field(repr=False)
    model_state: eqx.nn.State | None = field(repr=False)
    state: TrainState = field(repr=False)
    history: History
    metrics: dict[str, dict[str, Any]]
    timings: Timings = field(repr=False)
    stop_reason: str | None
    failures: dict[str, str]
    messages: list[str]
    shared: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    _apply_module_view: Callable[[TrainState, str], TrainState] | None = field(
        default=None, repr=False
    )

    def __reduce__(self) -> Any:
        """Refuse to be pickled: whether a module can be depends on the functions in it."""
        raise TypeError(
            "a FitResult cannot be pickled or copied: hand over its metrics or history.to_dict(), "
            "and write what was trained by fulgurite_checkpoint.save_weights(result, path) to a "
            "directory, from which fit(init_from=path) and evaluate(weights=path) read it"
        )

    def view(self, name: str) -> TrainState:
        """Return the state with a module that a plugin derives from it, to evaluate or predict
        with: `engine.evaluate(result.view("average"), data)`.

        Args:
            name: of the module, as plugins give it in the hook `module_views`.

        Raises:
            PluginError: there is no such module.
        """
        if self._apply_module_view is None:
            raise StateError("this result is not of a fit, so no plugin derives modules from it")
        return self._apply_module_view(self.state, name)


class Run:
    """A read-only view of a running fit, valid during the call that receives it.

    Example:
        class WeightNorm:
            @fg.hookimpl
            def on_epoch_end(self, run, epoch):
                weights = eqx.filter(run.state.module, eqx.is_array)
                run.log_scalars("weights", {"norm": optax.tree.norm(weights)})


        result = fg.Engine(epochs=1, plugins=[WeightNorm()]).fit(model, data)

    Attributes:
        engine: the engine of this run.
        update_rule: how a batch becomes an update.
        timings: where the wall time went so far.
        resume: what `fit(resume=...)` was.
        requested_length: the steps and epochs that the fit was asked for, one of them None.
        module_text: the module as text, in which everything that is no array shows by its value.
        run_dir: the directory of the run, as the plugin that opened it in `fit_context` set it;
            None without one.
        manifest: the description of the run, as JSON, as a plugin set it in `fit_context`; None
            without one. Loggers get it as the first record of kind `config`.
    """

    def __init__(self, loop: LoopView) -> None:
        self._loop = loop
        self.engine: Final = loop.engine
        self.update_rule: Final = loop.program.update_rule
        self.timings: Final = loop.engine.plugins.timings
        self.resume: Final = loop.resume
        self.requested_length: Final = loop.requested_length
        self.module_text: Final = loop.program.module_text
        self.run_dir: Any = None
        self.manifest: Any = None

    @property
    def attempt(self) -> int:
        """The number of this start of the run, from 1."""
        return self._loop.dispatcher.attempt

    def set_run_dir(self, run_dir: Any, attempt: int) -> None:
        """Note where this run writes; for the plugin that opens the directory in `fit_context`.

        Args:
            run_dir: becomes `run.run_dir`.
            attempt: the number of this start of the run, from 1.
        """
        self.run_dir = run_dir
        self._loop.dispatcher.attempt = attempt

    def set_manifest(self, manifest: dict[str, Any]) -> None:
        """Set the description of the run, a JSON value by name; for a plugin in `fit_context`."""
        self.manifest = manifest

    @property
    def is_complete(self) -> bool:
        """Whether the fit has reached its planned end, with nothing left to do there."""
        return self._loop.is_complete

    @property
    def resumed_from(self) -> Snapshot | None:
        """The snapshot that this fit resumes from, or None."""
        return self._loop.resumed_from

    def report_failure(self, name: str, what: str, error: Exception) -> None:
        """Warn that something failed that does not end the fit, and note it in `result.failures`.

        Args:
            name: under which the failure is noted.
            what: what failed, in words.
            error: why.
        """
        self._loop.dispatcher.record_failure(name, what, error, self.step)

    @property
    def failures(self) -> dict[str, str]:
        """What failed so far without ending the fit, as in `result.failures`."""
        return dict(self._loop.dispatcher.failures)

    @property
    def step(self) -> int:
        """The number of updates dispatched to the device; reading any of their results waits for
        them."""
        return self._loop.step

    @property
    def step_range(self) -> StepRange:
        """Start, stop (as far as it is known) and epoch ends of this fit."""
        return self._loop.step_range

    @property
    def epoch(self) -> int:
        """The number of completed epochs of this fit, or of the run that it resumes."""
        return bisect_right(self.step_range.epoch_ends, self.step)

    @property
    def shared(self) -> dict[str, dict[str, Any]]:
        """What plugins tell each other, by plugin name and key, on the host alone:
        `run.shared.setdefault("tuner", {})["factor"] = 0.5`. Values that are JSON are part of
        checkpoints."""
        return self._loop.shared

    def reset_train_metrics(self) -> None:
        """Begin the metrics of training anew: those of the open window, and running ones such as
        moving averages. Waits for the device."""
        self._loop.reset_train_metrics()

    @property
    def state(self) -> TrainState:
        """The state after `step` updates. The next step consumes its arrays: copy any that you
        keep.

        Waits for the device to check that the state is finite, and raises `NonFiniteError` if it is
        not.
        """
        if not self._loop.is_between_steps:
            raise StateError(
                "run.state is valid only during the call that `run` was given to; copy what you "
                "need"
            )
        return self._loop.state()

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """The newest metrics by source: `metrics["train"]["loss"]`, `metrics["test"]["accuracy"]`.
        Waits for any that are still being computed, so decisions based on them do not depend on
        timing."""
        self._loop.dispatcher.flush(wait=True)
        return self._loop.metrics

    def get_metric(self, monitor: str) -> float:
        """Return the newest value of a metric `SOURCE/NAME`, such as `test/loss`.

        Waits as `metrics` does.

        Raises:
            ConfigurationError: there is none of this name yet, or it is not a number.
        """
        values = {
            f"{source}/{name}": value
            for source, metrics in self.metrics.items()
            for name, value in metrics.items()
        }
        if monitor not in values:
            raise ConfigurationError(
                f"there is no metric {monitor!r} at step {self.step}. "
                f"{did_you_mean(monitor, values)} An evaluator must run at the same steps"
            )
        value = values[monitor]
        if np.ndim(value):
            raise ConfigurationError(
                f"{monitor!r} is an array {np.shape(value)}; choose a metric that is a number"
            )
        return float(value)

    @property
    def history(self) -> History:
        """The newest exact scalars, from before a resume too; waits as `metrics` does."""
        self._loop.dispatcher.flush(wait=True)
        return self._loop.dispatcher.history

    @property
    def is_resumed(self) -> bool:
        """Whether this fit resumes from a checkpoint and host states were restored; otherwise
        plugins start afresh."""
        return self._loop.resumed_from is not None

    @property
    def data(self) -> Any:
        """The training data, as `fit` got it; for data with an attribute `train`, that one."""
        return self._loop.data_iterator.data

    @property
    def data_iterator(self) -> BatchIterator:
        """Where the batches come from."""
        return self._loop.data_iterator

    @property
    def num_records(self) -> int:
        """How many records this process has emitted so far."""
        return self._loop.dispatcher.num_records

    @property
    def stop_reason(self) -> str | None:
        """Why training is about to stop before its planned end, or None."""
        return self._loop.stop_reason

    def log_scalars(
        self, source: str, values: dict[str, Any], *, stream: RecordStream = "exact"
    ) -> None:
        """Pass numbers by name to the loggers, after the records already emitted.

        Device arrays are copied to the host in the background; other values are copied at once.

        Args:
            source: where the values come from: `train`, an evaluator's name, a plugin's name.
            values: numbers, or arrays of numbers, by name.
            stream: `exact` only for values that depend on program, configuration, seed and data
                alone, so never for an action that runs by the clock.
        """
        self._emit("scalars", source, values, stream)

    def log_media(
        self, source: str, values: dict[str, Any], *, stream: RecordStream = "exact"
    ) -> None:
        """Pass images, histograms, figures and the like by name to the loggers; the arguments are
        those of `log_scalars`."""
        self._emit("media", source, values, stream)

    def log_text(
        self, source: str, values: dict[str, Any], *, stream: RecordStream = "exact"
    ) -> None:
        """Pass texts by name to the loggers; the arguments are those of `log_scalars`. Registered
        secrets in them become `***`."""
        self._emit("text", source, values, stream)

    def notify(self, source: str, message: str) -> None:
        """Tell the user something, in one sentence: in `FitResult.messages`, in the terminal, and
        in the telemetry.

        Args:
            source: who says it, a plugin's name.
            message: the sentence.
        """
        message = redact_text(message)
        self._loop.dispatcher.messages.append(message)
        self.log_text(source, {"message": message}, stream="telemetry")

    def log_config(
        self, source: str, values: dict[str, Any], *, stream: RecordStream = "exact"
    ) -> None:
        """Pass a description of the run, a JSON value by name, to the loggers; the arguments are
        those of `log_scalars`. What looks like a secret becomes `***`."""
        self._emit("config", source, values, stream)

    def _emit(
        self, kind: RecordKind, source: str, values: dict[str, Any], stream: RecordStream
    ) -> None:
        if stream not in get_args(RecordStream):
            raise PluginError(
                f"run.log_{kind} knows no stream {stream!r}. "
                f"{did_you_mean(stream, get_args(RecordStream))}"
            )
        writable = self._loop.dispatcher.validate(kind, source, values)
        if writable is None:
            return
        step = self.step
        if not self._loop.is_exact:
            stream = "telemetry"
        arrays = [leaf for leaf in jax.tree.leaves(writable) if isinstance(leaf, jax.Array)]

        def finish() -> Record:
            on_host = jax.device_get(writable) if arrays else writable
            return Record(kind, source, step, on_host, stream)

        self._loop.dispatcher.enqueue(arrays, finish)

    def emit_media(self) -> None:
        """Emit the media of the newest step; the scheduled action `media.show` calls it."""
        self._loop.emit_media()

    def request_stop(self, reason: str) -> None:
        """Ask to stop training before its planned end, as a signal does, once all processes agree.

        It is for a reason that only this process sees, such as a file. A decision based on metrics
        returns `StopTraining` instead.
        """
        self._loop.request_stop(StopTraining(reason).reason)

    def evaluate(self, name: str) -> dict[str, Any]:
        """Run the evaluation `name` on the current state; report and return its metrics."""
        state = self._loop.state()
        with (
            self.timings.time(f"evaluate.{name}"),
            error_context(lambda: f"evaluator {name!r}, step {self.step}"),
        ):
            result = self.run_evaluator(name, state)
        is_exact = self.engine.evaluators[name].exact
        stream = "exact" if is_exact else "telemetry"
        self.report_evaluation(name, result.metrics, result.media, stream=stream)
        return dict(result.metrics)

    def run_evaluator(self, name: str, state: TrainState) -> EvaluationResult:
        """Return what the evaluation `name` gives for a state, without reporting it.

        Args:
            name: of an evaluation that a plugin declared in `register_evaluators`.
            state: the train state to evaluate.

        Raises:
            EvaluationInterrupted: training is to stop; let it through.
        """
        return self._loop.run_evaluator(name, state)

    def report_evaluation(
        self,
        name: str,
        metrics: dict[str, Any],
        media: dict[str, Any] | None = None,
        *,
        stream: RecordStream = "exact",
    ) -> None:
        """Report the results of an evaluation that a plugin has made in its own way.

        They become `run.metrics[name]` and records of the source `name`, and go to the hook
        `on_evaluate_end`, as those of `run.evaluate(name)` do.

        Args:
            name: the name of the evaluation.
            metrics: numbers, or arrays of numbers, by name.
            media: media by name.
            stream: as of `log_scalars`.
        """
        self._loop.report_evaluation(name, dict(metrics), media or {}, stream)

    def forget_metrics(self, source: str) -> None:
        """Remove the metrics of a source, so that no decision is based on those of an earlier
        step."""
        self._loop.metrics.pop(source, None)

    def save(self) -> None:
        """Ask the checkpointer to save: at once in the stage `save`; in an earlier stage, at the
        end of the step's actions."""
        self._loop.save()

    def snapshot(self) -> Snapshot:
        """Return everything needed to continue from here."""
        return self._loop.snapshot()
