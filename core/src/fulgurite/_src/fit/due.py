"""What happens at a step where something is due: its actions, in order, and what they return."""

from typing import Any

from fulgurite._src.fit.actions import ReplaceState, StopTraining
from fulgurite._src.fit.run import Run
from fulgurite._src.fit.running import LoopState, RunningFit
from fulgurite._src.fit.scheduler import BoundAction
from fulgurite._src.fit.train_metrics import TrainMetrics
from fulgurite._src.plugins.answers import check_has_run
from fulgurite._src.plugins.implementations import plugin_error_context
from fulgurite._src.triggers import is_exact
from fulgurite.errors import EvaluationInterrupted, PluginError


class DuePoint:
    """The actions that are due at the present step.

    What is due is looked up again after each action: a stop request makes everything due that waits
    for the end.

    Args:
        fit: the running fit.
        run: what the actions receive.
        train_metrics: logs the metric window, once it is due.
        pending: where a run resumes in the middle of a step, the actions that are left of it.
    """

    def __init__(
        self,
        fit: RunningFit,
        run: Run,
        train_metrics: TrainMetrics,
        pending: tuple[str, ...] = (),
    ) -> None:
        self._fit = fit
        self._run = run
        self._train_metrics = train_metrics
        self._pending = pending
        self._taken: set[str] = set()
        self._done_before: set[str] = set()
        self._window_is_logged = False

    def run(self) -> None:
        """Run the actions, up to the first that is interrupted.

        To see what happens in which order, read this function, `_run_action`, `_call` and
        `_apply_answer`; the rest says which actions are due, and handles interruptions.
        """
        fit = self._fit
        fit.is_between_steps = True
        fit.resume_point.loop_state = LoopState.ACTING
        fit.resume_point.pending_actions = ()
        fit.records.flush(wait=True)
        self._agree_on_requests()
        if self._pending:
            # What is due and not pending was done before the interruption. What falls due by a
            # pending action, such as the end of the run by early stopping, was not.
            due = {action.name for action in fit.engine.actions if self._is_due_by_trigger(action)}
            self._done_before = due - set(self._pending)
        while (action := self._take_next()) is not None:
            try:
                self._run_action(action)
            except EvaluationInterrupted as interruption:
                self._note_interruption(action, interruption)
                break
        fit.obey_requests()
        fit.is_between_steps = False
        if fit.resume_point.loop_state not in (LoopState.INTERRUPTED, LoopState.BROKEN):
            fit.resume_point.loop_state = LoopState.STEPPING

    # --- which actions ----------------------------------------------------------------------------

    def _take_next(self) -> BoundAction | None:
        """Return the next action to run; None at the end."""
        for action in self._fit.engine.actions:
            if self._is_due(action):
                self._taken.add(action.name)
                return action
        return None

    def _list_later(self, action: BoundAction) -> tuple[str, ...]:
        """Return the names of what is due after an action."""
        later = self._fit.engine.actions[self._fit.engine.actions.index(action) + 1 :]
        return tuple(action.name for action in later if self._is_due(action))

    def _is_due(self, action: BoundAction) -> bool:
        """Return whether an action has still to run at this step."""
        if action.name in self._taken:
            return False
        if self._pending:
            return action.name in self._pending or (
                action.name not in self._done_before and self._is_due_by_trigger(action)
            )
        is_trial_run = self._fit.progress.is_at_end and action.name in self._fit.untried_actions
        return is_trial_run or self._is_due_by_trigger(action)

    def _is_due_by_trigger(self, action: BoundAction) -> bool:
        progress = self._fit.progress
        return self._fit.scheduler.is_due(action, progress.step, progress.step_range)

    def _agree_on_requests(self) -> None:
        """Ask all processes what they request, unless it is known."""
        if not self._fit.scheduler.agreed:
            self._fit.scheduler.poll_requests(self._fit.progress.step)

    # --- one action -------------------------------------------------------------------------------

    def _run_action(self, action: BoundAction) -> None:
        """Run an action. One that fails without having emitted an exact record is pending, and so
        is everything after it: the run that resumes does them, so that its records come in the same
        order."""
        fit, resume_point = self._fit, self._fit.resume_point
        if action.closes_window and not self._window_is_logged:
            self._window_is_logged = True
            self._train_metrics.log_window()
        if action.stage == "save":
            fit.records.flush(wait=True)
            resume_point.loop_state = LoopState.SAVING
            resume_point.pending_actions = self._list_later(action)
            if not fit.progress.should_train:
                fit.result = fit.build_result()
        resume_point.num_exact_records_before_action = fit.records.num_exact_records
        if action.scheduled.action is not None:
            # Records from before the action are not part of it.
            if fit.do_records_change_host_states:
                fit.records.flush(wait=True)
            resume_point.host_before_action = fit.take_host_snapshot()
        fit.signals.is_in_action = True
        try:
            self._call(action)
        except Exception:
            if not fit.has_action_emitted:
                resume_point.pending_actions = (action.name, *self._list_later(action))
                resume_point.loop_state = LoopState.INTERRUPTED
            raise
        finally:
            fit.signals.is_in_action = False
        resume_point.host_before_action = None
        fit.scheduler.mark_done(action, fit.progress.step)
        fit.untried_actions.discard(action.name)

    def _call(self, action: BoundAction) -> None:
        """Call an action, and do what it returns."""
        function = action.scheduled.action
        if function is None:
            return
        if action.is_engine_action:
            function(self._run)
            return
        where = f"action {action.scheduled.name}"
        with (
            self._fit.timings.time(action.name),
            plugin_error_context(action.plugin, where, self._fit.progress.step),
        ):
            # What an action does by the clock is telemetry, whatever it says itself: only the
            # engine knows the trigger.
            self._fit.records.is_exact = is_exact(action.trigger)
            try:
                answer = function(self._run)
            finally:
                self._fit.records.is_exact = True
            check_has_run(where, answer)
            self._apply_answer(action, answer)

    def _apply_answer(self, action: BoundAction, answer: Any) -> None:
        if isinstance(answer, StopTraining):
            self._fit.progress.stop_by_action(answer.reason)
        elif isinstance(answer, ReplaceState):
            self._fit.state.replace(answer.state, f"the action {action.name}")
            self._fit.call_event("on_replace_state", run=self._run)
        elif answer is not None:
            raise PluginError(
                "an action returns None, fg.StopTraining(reason) or fg.ReplaceState(state), "
                f"not {answer!r}"
            )

    def _note_interruption(self, action: BoundAction, interruption: Exception) -> None:
        """Stop, because an action was given up between two batches.

        An evaluation is not given up once its action has emitted an exact record, but a fit within
        it is: the action is neither done nor can it be done again from here. The run resumes from
        the newest checkpoint, which is as exact, and takes these steps again.
        """
        fit, resume_point = self._fit, self._fit.resume_point
        self._agree_on_requests()
        fit.progress.stop_reason = next(iter(fit.scheduler.stop_reasons), str(interruption))
        if resume_point.loop_state is LoopState.INTERRUPTED:
            return
        resume_point.loop_state = LoopState.BROKEN
        resume_point.pending_actions = (action.name,)
        fit.notify(
            f"{interruption}, after {action.name} had emitted exact records: nothing is saved at "
            f"step {fit.progress.step}, and the run resumes from the previous checkpoint"
        )
