"""A fit while it runs: its parts, and what a run would resume from if it ended now."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from typing import Any

from fulgurite._src.data.iterator import BatchIterator
from fulgurite._src.evaluation.service import EvaluationService
from fulgurite._src.evaluation.target import apply_module_view
from fulgurite._src.execution.executables import CompilationQueue
from fulgurite._src.execution.program import Program
from fulgurite._src.fit.current_state import CurrentState
from fulgurite._src.fit.engine_view import EngineView
from fulgurite._src.fit.progress import Progress
from fulgurite._src.fit.record_dispatcher import RecordDispatcher
from fulgurite._src.fit.result import FitResult
from fulgurite._src.fit.scheduler import Scheduler
from fulgurite._src.fit.signals import StopRequests
from fulgurite._src.fit.snapshot import (
    HostSnapshot,
    Snapshot,
    copy_host,
    has_logger_with_host_state,
)
from fulgurite._src.timing import Timings
from fulgurite._src.waits import WaitAbandoned
from fulgurite.errors import StateError


class LoopState(Enum):
    """Where a loop is, and so what an exception leaves behind."""

    STEPPING = "a dispatch is under way: an exception leaves no state to resume from"
    FETCHING = "getting the next steps ready: the state is that of the newest step"
    ACTING = "actions before saves run: what they ask to save is saved after them"
    SAVING = "actions that save run"
    INTERRUPTED = (
        "an action failed or was given up before it emitted an exact record: it is pending, and "
        "repeated on resume"
    )
    BROKEN = "an exception left no state to resume from"


@dataclass(eq=False)
class ResumePoint:
    """Whether a run could resume from where it is, and what it would do first.

    Attributes:
        loop_state: where the loop is.
        broken_reason: why there may be nothing to resume from.
        pending_actions: the names of the actions that are due at this step and not done.
        host_before_action: what plugins held before the action that runs, or None. An evaluation in
            the middle of it takes minutes, and a signal or an error of its data ends it: until then
            the action, and the hooks that it calls, may have changed what any plugin holds.
        num_exact_records_before_action: how many exact records there were before the newest action.
            Telemetry may appear again, and differs between processes.
        is_save_requested: whether to save at the end of the step's actions.
    """

    loop_state: LoopState = LoopState.STEPPING
    broken_reason: str = "it failed in the middle of a step"
    pending_actions: tuple[str, ...] = ()
    host_before_action: HostSnapshot | None = None
    num_exact_records_before_action: int = 0
    is_save_requested: bool = False

    def defer_save(self) -> bool:
        """Return whether the save is put off to the end of the step's actions, as before the stage
        `save`: what is still due would be neither in the checkpoint nor done by the run that
        resumes from it."""
        self.is_save_requested = self.loop_state is LoopState.ACTING
        return self.is_save_requested

    def break_by_exception(self, *, is_at_first_step: bool) -> None:
        """Note that an exception ends the fit, unless it has left a state to resume from.

        Args:
            is_at_first_step: whether no step was taken.
        """
        if self.loop_state in (LoopState.FETCHING, LoopState.INTERRUPTED):
            return
        if self.loop_state is not LoopState.STEPPING:
            self.broken_reason = "an action failed half way"
        elif is_at_first_step:
            self.broken_reason = "no step was taken"
        self.loop_state = LoopState.BROKEN


@dataclass(eq=False)
class RunningFit:
    """The parts of a fit while it runs, which the loop, its due points and `Run` share.

    Attributes:
        engine: the engine.
        evaluations: of the engine.
        program: the training program.
        data_iterator: where batches come from.
        signals: the signals that were received.
        progress: how far the fit is.
        state: the train state.
        records: hands records to the loggers.
        timings: where the wall time went so far.
        scheduler: says what is due.
        compilations: those that are done behind other work.
        resumed_from: the snapshot that the fit resumes from, or None.
        resume: what `fit(resume=...)` was.
        metrics: the newest metrics by source.
        shared: `run.shared`.
        untried_actions: the names of the actions that a trial has still to run: it runs each once,
            also those whose trigger it does not reach.
        resume_point: what a run would resume from if it ended now.
        is_between_steps: whether plugins may read the state. True at first: `fit_context` describes
            the run from its state.
        abandoned_wait: the wait for data that was left after a signal, or None.
        result: of the fit, once its last step is taken and only saves and ends are left.
    """

    engine: EngineView
    evaluations: EvaluationService
    program: Program
    data_iterator: BatchIterator
    signals: StopRequests
    progress: Progress
    state: CurrentState
    records: RecordDispatcher
    timings: Timings
    scheduler: Scheduler
    compilations: CompilationQueue
    resumed_from: Snapshot | None
    resume: Any
    metrics: dict[str, dict[str, Any]]
    shared: dict[str, dict[str, Any]]
    untried_actions: set[str]
    resume_point: ResumePoint = field(default_factory=ResumePoint)
    is_between_steps: bool = True
    abandoned_wait: WaitAbandoned | None = None
    result: FitResult | None = None

    @cached_property
    def do_records_change_host_states(self) -> bool:
        """Whether a logger keeps a host state."""
        return has_logger_with_host_state(self.engine.plugins)

    @property
    def is_complete(self) -> bool:
        """Whether the planned end is reached and nothing is pending there."""
        return self.progress.is_at_end and not self.resume_point.pending_actions

    def call_event(self, hook: str, **arguments: Any) -> None:
        """Call an event hook, in which plugins may read the state.

        Args:
            hook: its name.
            arguments: of the hook.
        """
        self.call_between_steps(self.engine.plugins.hooks[hook].call, **arguments)

    def call_between_steps(self, call: Callable[..., Any], **arguments: Any) -> None:
        """Call what calls plugins, which may read the state in it.

        Args:
            call: a method of a hook's caller.
            arguments: of the hook.
        """
        was_between_steps = self.is_between_steps
        self.is_between_steps = True
        call(self.progress.step, **arguments)
        # Stays True on an error: `name_failed_steps` reads it.
        self.is_between_steps = was_between_steps

    def notify(self, message: str) -> None:
        """Tell the user something, in one sentence."""
        self.records.notify("fulgurite", message, self.progress.step)

    def should_give_up_action(self) -> bool:
        """Return whether an evaluation should end between two batches, because training is to stop.

        False outside of actions, and once its action has emitted an exact record: the resumed run
        repeats the whole action and would emit the record twice.
        """
        # Whatever this process has done: all processes poll equally often.
        self.scheduler.poll_requests(self.progress.step)
        is_wanted = bool(self.scheduler.stop_reasons) and self.signals.is_in_action
        return is_wanted and not self.has_action_emitted

    @property
    def has_action_emitted(self) -> bool:
        """Whether the newest action has emitted an exact record."""
        before = self.resume_point.num_exact_records_before_action
        return self.records.num_exact_records > before

    def obey_requests(self) -> None:
        """Take the reason to stop from what was agreed on, and forget the requests. A fit whose
        planned end is reached and done has none."""
        if self.progress.stop_reason is None and not self.is_complete:
            self.progress.stop_reason = next(iter(self.scheduler.stop_reasons), None)
        self.scheduler.forget_requests()

    def take_host_snapshot(self) -> HostSnapshot:
        """Return what the run holds on the host now."""
        return copy_host(self.engine.plugins, self.progress.step, self.shared, self.metrics)

    def take_snapshot(self) -> Snapshot:
        """Return everything needed to continue from here.

        Raises:
            StateError: an exception has left nothing to continue from.
        """
        resume_point = self.resume_point
        progress = self.progress
        if resume_point.loop_state is LoopState.BROKEN:
            raise StateError(
                f"{resume_point.broken_reason}: there is no state here from which a run could "
                "resume exactly"
            )
        self.records.flush(wait=True)
        # The run that resumes does an interrupted action again, so from what was before it.
        is_interrupted = resume_point.loop_state is LoopState.INTERRUPTED
        before_action = resume_point.host_before_action if is_interrupted else None
        host = before_action or self.take_host_snapshot()
        metrics = host.metrics
        if "train" in self.metrics:
            # Those of a window that was closed before an action may have been computed since.
            metrics = metrics | {"train": self.metrics["train"]}
        return Snapshot(
            self.state.read(),
            progress.step_range,
            progress.data_position,
            resume_point.pending_actions,
            host.host_states,
            metrics,
            progress.requested_length,
            tuple(self.records.history.records),
            progress.action_stop_reason,
        )

    def build_result(self) -> FitResult:
        """Return what the fit returns if it ends here."""
        state = self.state.read()
        return FitResult(
            module=state.module,
            model_state=state.model_state,
            state=state,
            history=self.records.history,
            metrics=self.metrics,
            timings=self.timings,
            stop_reason=self.progress.stop_reason,
            failures=self.records.failures,
            messages=self.records.messages,
            shared=self.shared,
            _apply_module_view=partial(apply_module_view, self.engine.plugins),
        )
