"""The training loop: undisturbed steps up to the nearest thing that is due, then what is due, in
order."""

from collections.abc import Iterator
from contextlib import contextmanager

from fulgurite._src.callbacks import callback_error_context
from fulgurite._src.evaluation.service import EvaluationService
from fulgurite._src.fit.compiling import may_compile_ahead
from fulgurite._src.fit.current_state import CurrentState
from fulgurite._src.fit.dispatcher import StepDispatcher
from fulgurite._src.fit.due import DuePoint
from fulgurite._src.fit.engine_view import EngineView
from fulgurite._src.fit.plan import FitPlan
from fulgurite._src.fit.progress import Progress
from fulgurite._src.fit.record_dispatcher import RecordDispatcher
from fulgurite._src.fit.result import FitResult
from fulgurite._src.fit.run import Run
from fulgurite._src.fit.running import RunningFit
from fulgurite._src.fit.scheduler import Scheduler
from fulgurite._src.fit.signals import StopRequests
from fulgurite._src.fit.snapshot import Snapshot, read_shared
from fulgurite._src.fit.train_metrics import TrainMetrics
from fulgurite._src.plugins.selection import RegisteredPlugin


class Loop:
    """One fit: steps up to the nearest thing that is due, then what is due, in order.

    How the parts work together is written in `docs/architecture.md`, "Between steps".
    `StepDispatcher` takes the steps, `DuePoint` does what is due, and `RunningFit` holds what both
    need.

    Attributes:
        fit: the parts of the running fit.
        run: what plugins see of it.

    Args:
        engine: the engine.
        evaluations: of the engine.
        plan: what the fit begins with.
        signals: the signals that were received.
    """

    def __init__(
        self,
        engine: EngineView,
        evaluations: EvaluationService,
        plan: FitPlan,
        signals: StopRequests,
    ) -> None:
        self.fit = _assemble_fit(engine, evaluations, plan, signals)
        self._dispatcher = StepDispatcher(self.fit, plan.steps_per_execution, plan.device_arrays)
        self._train_metrics = TrainMetrics(self.fit, int(plan.state.nonfinite.skipped))
        self._start_messages = plan.messages
        self.run = Run(self.fit, self._dispatcher)

    @property
    def step(self) -> int:
        """The number of updates that were dispatched."""
        return self.fit.progress.step

    def run_to_end(self) -> FitResult:
        """Train, and tell the plugins how it ended."""
        compilations = self.fit.engine.services.compilations
        compilations.run = self.run
        self.fit.is_between_steps = False
        try:
            with callback_error_context(self._dispatcher.name_failed_steps):
                self._begin()
                self._train()
                result = self._finish()
            self.fit.call_event("on_fit_end", run=self.run, result=result)
            return result
        except BaseException as error:
            self._end_with_exception(error)
            raise
        finally:
            self.fit.is_between_steps = False
            compilations.run = None

    def _begin(self) -> None:
        """Check the evaluations, open the loggers, and tell the plugins that the fit begins."""
        fit = self.fit
        engine = fit.engine
        if engine.evaluations and fit.progress.should_train:
            with fit.timings.time("check"), fit.timings.describe("checking evaluations"):
                queue = fit.compilations if may_compile_ahead(engine) else None
                fit.evaluations.check_evaluations(fit.state.read(), queue)
        if fit.resumed_from is not None:
            self._note_newly_due(fit.resumed_from)
            fit.call_event("on_restore", run=self.run, step=self.step)
        # Before any other event, because messages are logged before `on_fit_start`.
        fit.records.open(self.step, run=self.run)
        if self.run.manifest is not None:
            self.run.log_config("fulgurite", self.run.manifest, stream="telemetry")
        for message in (*engine.plugins.messages, *fit.scheduler.warnings, *self._start_messages):
            fit.notify(message)
        fit.call_event("on_fit_start", run=self.run)

    def _note_newly_due(self, snapshot: Snapshot) -> None:
        """Note as pending what is due at this step only because the run has another end now than it
        had in the snapshot."""
        fit = self.fit
        newly_due = fit.scheduler.list_newly_due(
            self.step, snapshot.step_range, fit.progress.step_range
        )
        pending = (*fit.resume_point.pending_actions, *newly_due)
        fit.resume_point.pending_actions = tuple(dict.fromkeys(pending))

    def _train(self) -> None:
        """Do what is due at the first step, then take steps and do what is due, until the end."""
        fit = self.fit
        pending = fit.resume_point.pending_actions
        if fit.resumed_from is None or pending:
            self._run_due_actions(pending)
        else:
            # A plugin or a signal may ask to stop before the first step.
            self._stop_if_requested()
        while fit.progress.should_train:
            first = self.step
            self._dispatcher.run_until_due()
            if self.step == first:
                # The data was abandoned before it gave a batch: what was due here has been done.
                self._stop_if_requested()
                continue
            self._run_due_actions()
            fit.timings.note_step_durations(self.step - first)

    def _finish(self) -> FitResult:
        """Wait for the last step, have everything saved and logged, and return the result."""
        fit = self.fit
        if fit.abandoned_wait is not None:
            fit.notify(f"{fit.abandoned_wait}; the run ends at step {self.step}")
        fit.state.read()
        fit.records.flush(wait=True)
        self._train_metrics.notify_if_all_skipped()
        fit.result = fit.build_result()
        self.run.save()
        fit.records.close(self.step)
        # What is said of an evaluation in `on_fit_end` is not a record of the fit.
        fit.engine.services.compilations.run = None
        return fit.result

    def _run_due_actions(self, pending: tuple[str, ...] = ()) -> None:
        """Do what is due at this step, or what is `pending` of it where a run resumes."""
        DuePoint(self.fit, self.run, self._train_metrics, pending).run()
        if self.fit.resume_point.is_save_requested:
            self.run.save()

    def _stop_if_requested(self) -> None:
        """Stop here, without running actions, if all processes agree to."""
        if self.fit.scheduler.poll_requests(self.step):
            self.fit.obey_requests()

    def _end_with_exception(self, error: BaseException) -> None:
        """Tell every plugin of the exception, and close the loggers; what fails on the way is noted
        on the exception."""
        fit = self.fit
        fit.is_between_steps = True
        is_at_first_step = self.step == fit.progress.first_step
        fit.resume_point.break_by_exception(is_at_first_step=is_at_first_step)

        @contextmanager
        def note_further_error(_: RegisteredPlugin | None = None) -> Iterator[None]:
            try:
                yield
            except Exception as further:
                if (type(further), str(further)) == (type(error), str(error)):
                    return
                notes = "; ".join(getattr(further, "__notes__", []))
                error.add_note(f"and then {type(further).__name__}: {further} ({notes})")

        with note_further_error():
            fit.records.flush(wait=True)
        fit.engine.plugins.hooks.on_exception.call(
            self.step, guard=note_further_error, run=self.run, exception=error
        )
        with note_further_error():
            fit.records.close(self.step)


def _assemble_fit(
    engine: EngineView, evaluations: EvaluationService, plan: FitPlan, signals: StopRequests
) -> RunningFit:
    """Return the parts of a fit, which stands where its plan says.

    Args:
        engine: the engine.
        evaluations: of the engine.
        plan: what the fit begins with.
        signals: the signals that were received.
    """
    snapshot = plan.resumed_from
    is_trial = engine.fast_dev_run is not None
    progress = Progress(int(plan.state.step), plan.step_range, plan.requested_length)
    fit = RunningFit(
        engine=engine,
        evaluations=evaluations,
        program=plan.program,
        data_iterator=plan.data_iterator,
        signals=signals,
        progress=progress,
        state=CurrentState(plan.program, plan.state, engine.plugins.timings),
        records=RecordDispatcher(
            engine.plugins,
            history=() if snapshot is None else snapshot.history,
            loggers=() if is_trial else None,
        ),
        timings=engine.plugins.timings,
        scheduler=Scheduler(
            engine.actions,
            progress.step,
            engine.services.due_names,
            engine.sharding.sync,
            signals,
        ),
        compilations=plan.compilations,
        resumed_from=snapshot,
        resume=plan.resume,
        metrics={} if snapshot is None else dict(snapshot.metrics),
        shared={} if snapshot is None else read_shared(snapshot),
        untried_actions={action.name for action in engine.actions} if is_trial else set(),
    )
    if snapshot is not None:
        progress.data_position = snapshot.data_position
        fit.resume_point.pending_actions = snapshot.pending_actions
        if progress.is_at_end:
            # A run that an action has ended: it says so again, and trains no further.
            progress.action_stop_reason = snapshot.stop_reason
            progress.stop_reason = snapshot.stop_reason
    return fit
