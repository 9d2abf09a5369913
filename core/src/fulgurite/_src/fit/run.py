"""What plugins see of a run and what they can ask of it."""

from typing import Any, Protocol, get_args

from fulgurite._src.evaluation.evaluation import EvaluationResult
from fulgurite._src.fit.actions import StopTraining
from fulgurite._src.fit.dispatcher import StepDispatcher
from fulgurite._src.fit.engine_view import EngineView
from fulgurite._src.fit.records import RecordKind, RecordStream
from fulgurite._src.fit.run_view import RunView
from fulgurite._src.fit.running import LoopState, RunningFit
from fulgurite._src.fit.snapshot import Snapshot
from fulgurite._src.training.state import TrainState
from fulgurite._src.triggers import StepRange
from fulgurite._src.waits import WaitAbandoned
from fulgurite.errors import (
    DataError,
    EvaluationInterrupted,
    PluginError,
    did_you_mean,
    error_context,
)


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


class Run(RunView):
    """A running fit, as plugins see it, valid during the call that receives it.

    The properties say how the fit stands, and the methods log, evaluate, save and stop.

    Example:
        class WeightNorm:
            @fg.hookimpl
            def on_epoch_end(self, run, epoch):
                weights = eqx.filter(run.state.module, eqx.is_array)
                run.log_scalars("weights", {"norm": optax.tree.norm(weights)})


        result = fg.Engine(epochs=1, plugins=[WeightNorm()]).fit(model, data)
    """

    def __init__(self, fit: RunningFit, dispatcher: StepDispatcher) -> None:
        super().__init__(fit)
        self._dispatcher = dispatcher

    # --- the directory and the description of the run ---------------------------------------------

    def set_run_dir(self, run_dir: Any, attempt: int) -> None:
        """Note where this run writes; for the plugin that opens the directory in `fit_context`.

        Args:
            run_dir: becomes `run.run_dir`.
            attempt: the number of this start of the run, from 1.
        """
        self.run_dir = run_dir
        self._fit.records.attempt = attempt

    def set_manifest(self, manifest: dict[str, Any]) -> None:
        """Set the description of the run, a JSON value by name; for a plugin in `fit_context`."""
        self.manifest = manifest

    # --- records and messages ---------------------------------------------------------------------

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
        """Pass strings by name to the loggers; the arguments are those of `log_scalars`. Registered
        secrets in them become `***`."""
        self._emit("text", source, values, stream)

    def log_config(
        self, source: str, values: dict[str, Any], *, stream: RecordStream = "exact"
    ) -> None:
        """Pass a description of the run, a JSON value by name, to the loggers; the arguments are
        those of `log_scalars`. What looks like a secret becomes `***`."""
        self._emit("config", source, values, stream)

    def emit_media(self) -> None:
        """Emit the media of the newest step; the scheduled action `media.show` calls it."""
        self._dispatcher.emit_media()

    def notify(self, source: str, message: str) -> None:
        """Tell the user something, in one sentence: in `FitResult.messages`, in the terminal, and
        in the telemetry.

        Args:
            source: who says it, a plugin's name.
            message: the sentence.
        """
        self._fit.records.notify(source, message, self.step)

    def report_failure(self, name: str, what: str, error: Exception) -> None:
        """Warn that something failed that does not end the fit, and note it in `result.failures`.

        Args:
            name: under which the failure is noted.
            what: what failed, in words.
            error: why.
        """
        self._fit.records.record_failure(name, what, error, self.step)

    # --- evaluations and metrics ------------------------------------------------------------------

    def evaluate(self, name: str) -> dict[str, Any]:
        """Run the evaluation `name` on the current state; report and return its metrics."""
        state = self._fit.state.read()
        with (
            self.timings.time(f"evaluate.{name}"),
            error_context(lambda: f"evaluator {name!r}, step {self.step}"),
        ):
            result = self.run_evaluation(name, state)
        is_exact = self.engine.evaluations[name].exact
        stream = "exact" if is_exact else "telemetry"
        self.report_evaluation(name, result.metrics, result.media, stream=stream)
        return dict(result.metrics)

    def run_evaluation(self, name: str, state: TrainState) -> EvaluationResult:
        """Return what the evaluation `name` gives for a state, without reporting it. It is given up
        between two batches, or in a wait for one, if training is to stop.

        Args:
            name: of an evaluation that a plugin declared in `register_evaluations`.
            state: the train state to evaluate.

        Raises:
            EvaluationInterrupted: training is to stop; let it through.
        """
        try:
            return self._fit.evaluations.run_evaluation(
                name, state, self._fit.should_give_up_action
            )
        except WaitAbandoned as wait:
            self._fit.abandoned_wait = wait
            if self._fit.should_give_up_action():
                raise EvaluationInterrupted(str(wait)) from wait
            # It would be recorded twice if it were done again from here.
            raise DataError(str(wait)) from wait

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
        metrics = dict(metrics)
        writable = self._fit.records.select_writable(name, metrics)
        if writable or not metrics:
            self._fit.metrics[name] = writable
        self.log_scalars(name, metrics, stream=stream)
        if media:
            self.log_media(name, media, stream=stream)
        self._fit.call_event("on_evaluate_end", run=self, source=name, metrics=dict(metrics))

    def forget_metrics(self, source: str) -> None:
        """Remove the metrics of a source, so that no decision is based on those of an earlier
        step."""
        self._fit.metrics.pop(source, None)

    def reset_train_metrics(self) -> None:
        """Reset the training metrics: those of the open window, and running ones such as moving
        averages. Waits for the device."""
        self._fit.state.reset_metrics()

    # --- saving and stopping ----------------------------------------------------------------------

    def save(self) -> None:
        """Ask the checkpointer to save: at once in the stage `save`; in an earlier stage, at the
        end of the step's actions. A trial saves nothing."""
        fit = self._fit
        is_deferred = fit.resume_point.defer_save()
        is_broken = fit.resume_point.loop_state is LoopState.BROKEN
        is_trial = self.engine.fast_dev_run is not None
        if is_deferred or is_broken or is_trial:
            return
        save_checkpoint = self.engine.plugins.hooks.save_checkpoint
        if save_checkpoint.plugins:
            fit.call_between_steps(save_checkpoint.ask, run=self)

    def snapshot(self) -> Snapshot:
        """Return everything needed to continue from here."""
        return self._fit.take_snapshot()

    def request_stop(self, reason: str) -> None:
        """Ask to stop training before its planned end, as a signal does, once all processes agree.

        It is for a reason that only this process sees, such as a file. A decision based on metrics
        returns `StopTraining` instead.
        """
        self._fit.signals.request(StopTraining(reason).reason)

    def _emit(
        self, kind: RecordKind, source: str, values: dict[str, Any], stream: RecordStream
    ) -> None:
        if stream not in get_args(RecordStream):
            raise PluginError(
                f"run.log_{kind} knows no stream {stream!r}. "
                f"{did_you_mean(stream, get_args(RecordStream))}"
            )
        self._fit.records.emit(kind, source, values, self.step, stream)
