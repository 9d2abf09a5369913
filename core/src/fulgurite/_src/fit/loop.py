"""The training loop: undisturbed steps up to the nearest thing that is due, then what is due, in
order."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import partial
from time import monotonic, perf_counter
from typing import Any

import jax
import jax.numpy as jnp

from fulgurite._src.callbacks import RUNTIME_ERRORS, callback_error_context
from fulgurite._src.data.readers import BatchItem
from fulgurite._src.evaluation.evaluation import EvaluationResult
from fulgurite._src.execution.compiled_step import BatchBuffer, Dispatch, StepResults
from fulgurite._src.fit.actions import ReplaceState, ScheduledAction, StopTraining
from fulgurite._src.fit.records import (
    Record,
    RecordDispatcher,
    RecordStream,
)
from fulgurite._src.fit.run import EngineView, FitResult, Run
from fulgurite._src.fit.scheduler import (
    EPOCH_END_ACTION,
    BoundAction,
    DuePoint,
    Scheduler,
    get_engine_plugin,
    insert_epoch_end_action,
)
from fulgurite._src.fit.signals import StopRequests
from fulgurite._src.fit.snapshot import (
    HostSnapshot,
    Snapshot,
    copy_host,
    has_logger_with_host_state,
    read_shared,
)
from fulgurite._src.fit.start import FitPlan
from fulgurite._src.model.media import MEDIA_ACTION
from fulgurite._src.plugins.answers import check_has_run
from fulgurite._src.plugins.manager import plugin_error_context
from fulgurite._src.timing import StepRate
from fulgurite._src.training.nonfinite import SkippedSteps
from fulgurite._src.training.state import TrainState
from fulgurite._src.tree.specs import check_same_structure, shape_signature
from fulgurite._src.triggers import EveryEpoch, StepRange, is_exact
from fulgurite._src.waits import WaitAbandoned
from fulgurite.errors import (
    DataError,
    EvaluationInterrupted,
    PluginError,
    StateError,
)

# Dispatches at once: enough that the device never waits for the host (2 cost a small step 10 % more
# than 4), and no more, because each holds its batch, and jax 0.10.2 on CPU was seen to deadlock
# with many of them where several processes have several devices each.
MAX_IN_FLIGHT = 4


class LoopState(Enum):
    """Where a loop is, and so what an exception leaves behind."""

    STEPPING = "a dispatch is under way: an exception leaves no state to resume from"
    FETCHING = "getting the next steps ready: the state is that of the newest step"
    ACTING = "actions before saves run: what they ask to save is saved behind them"
    SAVING = "actions that save run"
    INTERRUPTED = "an action stopped before it had any effect: it is pending"
    BROKEN = "an exception left no state to resume from"


class Loop:
    """One fit: steps up to the nearest thing that is due, then what is due, in order.

    Attributes:
        engine: the engine.
        program: the training program.
        step_range: start, stop (as far as it is known) and epoch ends of the fit.
        step: the number of updates that were dispatched.
        metrics: the newest metrics by source.
        stop_reason: why training ends before its planned end.
        requested_length: the steps and epochs to train, one of them None.
        dispatcher: hands records to the loggers.
        run: what plugins see.
        resumed_from: the snapshot that the fit goes on from, or None.
        result: of the fit, once its last step is taken and only saves and ends are left.

    Args:
        engine: the engine.
        plan: what the fit begins with.
        signals: the signals that were received.
    """

    result: FitResult | None = None
    _before_action: HostSnapshot | None = None
    _num_records_before_action: int = 0
    _pending_error: Exception | None = None
    _abandoned_wait: WaitAbandoned | None = None
    _save_requested: bool = False
    _broken_reason: str = "it failed in the middle of a step"
    _newest_steps: str = "a step"

    def __init__(self, engine: EngineView, plan: FitPlan, signals: StopRequests) -> None:
        self.engine = engine
        self.program = plan.program
        self.data_iterator = plan.data_iterator
        self.step = int(plan.state.step)
        self._first_step = self.step
        self._skipped = SkippedSteps(self.step, int(plan.state.nonfinite.skipped))
        self.step_range = plan.step_range
        self.requested_length = plan.requested_length
        self.resumed_from = plan.resumed_from
        self.resume = plan.resume
        self._start_messages = plan.messages
        self.metrics: dict[str, dict[str, Any]] = {}
        self.stop_reason: str | None = None
        self.dispatcher = RecordDispatcher(
            engine.plugins,
            history=() if plan.resumed_from is None else plan.resumed_from.history,
            loggers=None if engine.fast_dev_run is None else (),
        )
        # What opens the run's directory describes the state.
        self.is_between_steps = True
        self.is_exact = True
        self.shared: dict[str, dict[str, Any]] = {}
        self._action_stop_reason: str | None = None
        self.run = Run(self)
        self._sync = engine.sharding.sync
        self._timings = engine.plugins.timings
        self._resident = engine.sharding.replicate(plan.device_arrays)
        self._flat = plan.program.layout.flatten_on_host(plan.state)
        self._state: TrainState | None = None
        self._epochs = plan.requested_length[1]
        self._signals = signals
        self._data_position = None
        self._pending_actions: tuple[str, ...] = ()
        if plan.resumed_from is not None:
            self._continue_from(plan.resumed_from)
        # What was dispatched, in words, and an array of each.
        self._in_flight: deque[tuple[str, Any]] = deque()
        self._actions = insert_epoch_end_action(engine.actions, self._make_epoch_end_action())
        # A trial runs every action once, also those whose trigger it does not reach.
        self._untried_actions = {
            action.name for action in self._actions if engine.fast_dev_run is not None
        }
        self._due_names = engine.due_names
        self._scheduler = Scheduler(self._actions, self.step, self._due_names, self._sync, signals)
        self._compiled_step = plan.program.get_compiled_step(self._choose_steps_per_execution(plan))
        self._loop_state = LoopState.STEPPING
        self._last_dispatch: tuple[StepResults | None, Any] = (None, None)
        self._do_records_change_host_states = has_logger_with_host_state(engine.plugins)
        self._rate = StepRate()

    def _choose_steps_per_execution(self, plan: FitPlan) -> int:
        if plan.steps_per_execution != "auto":
            return plan.steps_per_execution
        interval = self._scheduler.find_interval(plan.step_range)
        epoch_length = plan.data_iterator.epoch_length or math.inf
        return plan.program.choose_steps_per_execution(interval, epoch_length).steps

    def run_to_end(self) -> FitResult:
        """Train, and tell the plugins how it ended."""
        self.engine.services.compilations.run = self.run
        self.is_between_steps = False
        try:
            with callback_error_context(self._name_failed_steps):
                result = self._fit()
            self._call_event("on_fit_end", result=result)
            return result
        except BaseException as error:
            self._end_with_exception(error)
            raise
        finally:
            self.is_between_steps = False
            self.engine.services.compilations.run = None

    def state(self) -> TrainState:
        """Return the state after the newest step; raises if it is not finite."""
        if self._state is None:
            # Otherwise the plugin that asks for the state would be charged for the training.
            with self._timings.time("wait"):
                nonfinite = self.program.read_nonfinite(self._flat)
            self.program.check_finite(nonfinite)
            self._state = self.program.layout.unflatten_on_host(self._flat)
        return self._state

    def snapshot(self) -> Snapshot:
        """Return everything needed to go on from here.

        Raises:
            StateError: an exception has left nothing to go on from.
        """
        if self._loop_state is LoopState.BROKEN:
            raise StateError(
                f"{self._broken_reason}: there is no state here from which a run could resume "
                "exactly"
            )
        self.dispatcher.flush(wait=True)
        # The run that resumes does an interrupted action again, so from what was before it.
        is_interrupted = self._loop_state is LoopState.INTERRUPTED
        before_action = self._before_action if is_interrupted else None
        host = before_action or copy_host(self.engine.plugins, self.step, self.shared, self.metrics)
        metrics = host.metrics
        if "train" in self.metrics:
            # Those of a window that was closed before an action may have been computed since.
            metrics = metrics | {"train": self.metrics["train"]}
        return Snapshot(
            self.state(),
            self.step_range,
            self._data_position,
            self._pending_actions,
            host.host_states,
            metrics,
            self.requested_length,
            tuple(self.dispatcher.history.records),
            self._action_stop_reason,
        )

    def save(self) -> None:
        """Ask the checkpointer to save, if there is one and this is no trial.

        Before the stage `save` of a step, it is done at the end of the step's actions: what is
        still due would be neither in the checkpoint nor done by the run that goes on from it.
        """
        self._save_requested = self._loop_state is LoopState.ACTING
        if self._save_requested or self._loop_state is LoopState.BROKEN:
            return
        if self.engine.fast_dev_run is not None:
            return
        if self.engine.plugins.implementations("save_checkpoint"):
            self._call_event("save_checkpoint")

    def request_stop(self, reason: str) -> None:
        """Note that this process wants to stop."""
        self._signals.request(reason)

    def run_evaluator(self, name: str, state: TrainState) -> EvaluationResult:
        """Run the evaluation `name` on a state; given up between two batches, or in a wait for
        one, if training is to stop."""
        try:
            return self.engine.run_evaluator(name, state, self._should_stop)
        except WaitAbandoned as wait:
            self._abandoned_wait = wait
            if self._should_stop():
                raise EvaluationInterrupted(str(wait)) from wait
            # It would be recorded twice if it were done again from here.
            raise DataError(str(wait)) from wait

    def report_evaluation(
        self, name: str, metrics: dict[str, Any], media: dict[str, Any], stream: RecordStream
    ) -> None:
        """Hand the results of an evaluation to decisions, loggers and plugins.

        Args:
            name: of the evaluation.
            metrics: numbers by name.
            media: by name.
            stream: of the records.
        """
        writable = self.dispatcher.select_writable(name, metrics)
        if writable or not metrics:
            self.metrics[name] = writable
        self.run.log_scalars(name, metrics, stream=stream)
        if media:
            self.run.log_media(name, media, stream=stream)
        self._call_event("on_evaluate_end", name=name, metrics=dict(metrics))

    def emit_media(self) -> None:
        """Emit the media of the newest step, if it was known beforehand that they are due."""
        results, due = self._last_dispatch
        if results is None or not due[self._due_names.index(MEDIA_ACTION)]:
            return
        media = self._compiled_step.get_media(results)
        if not media:
            return
        step = self.step
        flat = self._flat

        def finish() -> Record:
            self.program.check_finite(self.program.read_nonfinite(flat))
            values = self.dispatcher.select_writable("train", jax.device_get(media))
            return Record("media", "train", step, values)

        self.dispatcher.enqueue([*jax.tree.leaves(media), *flat.packed], finish)

    def reset_train_metrics(self) -> None:
        """Begin the metrics of training anew, at this step."""
        self._flat = self.program.layout.flatten_on_host(self.state().reset_metrics())
        self._state = None

    def _continue_from(self, snapshot: Snapshot) -> None:
        self.metrics = dict(snapshot.metrics)
        self.shared = read_shared(snapshot)
        self._data_position = snapshot.data_position
        self._pending_actions = snapshot.pending_actions
        if self.step == self.step_range.stop:
            # A run that an action has ended: it says so again, and trains no further.
            self._action_stop_reason = snapshot.stop_reason
            self.stop_reason = snapshot.stop_reason

    def _note_newly_due(self, snapshot: Snapshot) -> None:
        """Note as pending what is due at this step only because the run has another end now than it
        had in the snapshot."""
        newly_due = self._scheduler.list_newly_due(self.step, snapshot.step_range, self.step_range)
        self._pending_actions = tuple(dict.fromkeys((*self._pending_actions, *newly_due)))

    def _fit(self) -> FitResult:
        if self.engine.evaluators and self._should_train():
            with self._timings.time("check"):
                self.engine.check_evaluators(self.state())
        if self.resumed_from is not None:
            self._note_newly_due(self.resumed_from)
            self._call_event("on_restore", step=self.step)
        # Before any other event, because messages are logged before `on_fit_start`.
        self.dispatcher.open(self.step, run=self.run)
        if self.run.manifest is not None:
            self.run.log_config("fulgurite", self.run.manifest, stream="telemetry")
        messages = (*self.engine.plugins.messages, *self._scheduler.warnings, *self._start_messages)
        for message in messages:
            self.run.notify("fulgurite", message)
        self._call_event("on_fit_start")
        if self.resumed_from is None:
            self._run_due_actions()
        elif self._pending_actions:
            self._run_due_actions(only=self._pending_actions)
        else:
            # A plugin or a signal may ask to stop before the first step.
            self._stop_if_requested()
        while self._should_train():
            first = self.step
            self._run_until_due()
            if self.step == first:
                # The data was abandoned before it gave a batch: what was due here has been done.
                self._stop_if_requested()
                continue
            self._run_due_actions()
            self._timings.note_step_durations(self.step - first)
        if self._abandoned_wait is not None:
            message = f"{self._abandoned_wait}; the run ends at step {self.step}"
            self.run.notify("fulgurite", message)
        self.state()
        self.dispatcher.flush(wait=True)
        self._check_skipped()
        self.result = self._build_result()
        self.save()
        self.dispatcher.close(self.step)
        return self.result

    def _check_skipped(self) -> None:
        """Tell the user if the fit has trained nothing, because every step was skipped."""
        if self.engine.on_nonfinite != "skip":
            return
        self._skipped.note(self.step, int(self.state().nonfinite.skipped))
        if self._skipped.are_all:
            self.run.notify(
                "fulgurite",
                f"nothing was trained: each of the {self._skipped.num_steps} steps was skipped, "
                "because it was not finite. Engine(on_nonfinite='raise') says what of it",
            )

    def _stop_if_requested(self) -> None:
        if self._scheduler.poll_requests(self.step):
            self.stop_reason = next(iter(self._scheduler.stop_reasons), self.stop_reason)
            self._scheduler.forget_requests()

    @property
    def is_complete(self) -> bool:
        """Whether the planned end is reached and nothing is pending there."""
        return self.step == self.step_range.stop and not self._pending_actions

    def _should_train(self) -> bool:
        if self.stop_reason is not None:
            return False
        return self.step_range.stop is None or self.step < self.step_range.stop

    def _build_result(self) -> FitResult:
        state = self.state()
        return FitResult(
            module=state.module,
            model_state=state.model_state,
            state=state,
            history=self.dispatcher.history,
            metrics=self.metrics,
            timings=self._timings,
            stop_reason=self.stop_reason,
            failures=self.dispatcher.failures,
            messages=self.dispatcher.messages,
            shared=self.shared,
            _apply_module_view=self.engine.apply_module_view,
        )

    def _end_with_exception(self, error: BaseException) -> None:
        """Tell every plugin of the exception, and close the loggers; what fails on the way is noted
        on the exception."""
        self.is_between_steps = True
        if self._loop_state not in (LoopState.FETCHING, LoopState.INTERRUPTED):
            if self._loop_state is not LoopState.STEPPING:
                self._broken_reason = "an action failed half way"
            elif self.step == self._first_step:
                self._broken_reason = "no step was taken"
            self._loop_state = LoopState.BROKEN
        calls = [partial(self.dispatcher.flush, wait=True)]
        for hook in self.engine.plugins.implementations("on_exception"):
            calls.append(partial(hook, self.step, run=self.run, exception=error))
        calls.append(partial(self.dispatcher.close, self.step))
        for call in calls:
            try:
                call()
            except Exception as further:
                if (type(further), str(further)) == (type(error), str(error)):
                    continue
                notes = "; ".join(getattr(further, "__notes__", []))
                error.add_note(f"and then {type(further).__name__}: {further} ({notes})")

    def _call_event(self, hook: str, **arguments: Any) -> None:
        was_between_steps = self.is_between_steps
        self.is_between_steps = True
        self.engine.plugins.call(hook, self.step, run=self.run, **arguments)
        self.is_between_steps = was_between_steps

    # --- steps ------------------------------------------------------------------------------------

    def _run_until_due(self) -> None:
        """Run steps until something is due: by a step, by the clock, at the end of an epoch, or
        because of a stop request."""
        first = self.step
        compile_seconds = self._timings.seconds["compile"]
        data_seconds = 0.0
        wait_seconds = 0.0
        dispatch_seconds = 0.0
        self._state = None
        self.program.select_update_rule(self.step, self.step_range)
        target = self._scheduler.next_due(self.step, self.step_range)
        while True:
            started = perf_counter()
            self._loop_state = LoopState.FETCHING
            items, batches = self._collect_batches(target)
            fetched = perf_counter()
            if not items:
                self._loop_state = LoopState.STEPPING
                break
            self._bound_in_flight()
            free = perf_counter()
            dispatch = self._prepare(batches)
            self._loop_state = LoopState.STEPPING
            target = self._advance(items, target)
            self._run(dispatch, len(items), is_due=self.step == target)
            del dispatch  # it holds batches, as the device does for as long as it needs them
            # Not before: what was not trained on is the next fit's.
            self.data_iterator.consume(len(items))
            dispatched = perf_counter()
            data_seconds += fetched - started
            wait_seconds += free - fetched
            dispatch_seconds += dispatched - free
            self.dispatcher.flush(wait=False)
            if items[-1].epoch_end or self.step >= target:
                break
            if self._scheduler.poll_requests(self.step):
                break
        dispatch_seconds -= self._timings.seconds["compile"] - compile_seconds
        num_steps = self.step - first
        self._timings.add("data", data_seconds, num_steps)
        self._timings.add("dispatch", dispatch_seconds, num_steps)
        self._timings.add("wait", wait_seconds, num_steps)

    def _advance(self, items: list[BatchItem], target: float) -> float:
        """Count the steps of a dispatch, and return where something is due next."""
        self.step += len(items)
        self._data_position = items[-1].position
        if items[-1].epoch_end:
            self._extend_step_range()
            return self._scheduler.next_due(self.step - 1, self.step_range)
        if self._epochs is not None and self.step == self.step_range.stop:
            # The last epoch is longer than the one from which its end was guessed.
            self._move_end(replace(self.step_range, stop=self.step + 1))
            return self._scheduler.next_due(self.step - 1, self.step_range)
        return target

    def _bound_in_flight(self) -> None:
        """Wait for an old dispatch, if as many as may be are under way."""
        if len(self._in_flight) == MAX_IN_FLIGHT:
            self._in_flight[0][1].block_until_ready()
            self._in_flight.popleft()

    def _prepare(self, batches: BatchBuffer) -> Dispatch:
        """Check and place the batches of the next steps, and compile these if need be."""
        if self.step == self._first_step:
            # There is nothing to save yet.
            self._loop_state = LoopState.STEPPING
        self.program.step.steps_done = self.step
        due = self._scheduler.nothing_due
        return self._compiled_step.prepare(self._flat, batches, due, self._resident)

    def _run(self, dispatch: Dispatch, num_steps: int, *, is_due: bool) -> None:
        """Hand the steps of a dispatch to the device."""
        due = self._scheduler.due_flags if is_due else self._scheduler.nothing_due
        first = self.step - num_steps + 1
        self._newest_steps = f"training step {first}"
        if num_steps > 1:
            self._newest_steps = (
                f"one of the training steps {first} to {self.step} (Engine(steps_per_execution=1) "
                "tells which)"
            )
        self._flat, results = self._compiled_step.run(dispatch, due)
        self._in_flight.append((self._newest_steps, self._flat.packed[0]))
        self._last_dispatch = (results, due)

    def _name_failed_steps(self) -> str:
        """Name the steps a callback of which has failed: those of the oldest dispatch whose results
        cannot be read, or those that were being dispatched."""
        for steps, array in self._in_flight:
            try:
                array.block_until_ready()
            except RUNTIME_ERRORS:
                return steps
        return f"after step {self.step}" if self.is_between_steps else self._newest_steps

    def _collect_batches(self, target: float) -> tuple[list[BatchItem], BatchBuffer]:
        """Return the batches of the next dispatch: as many as fit before `target`, all of the same
        shapes, of one epoch. Where the data fails, those before it are trained on first; none where
        it was abandoned."""
        if self._pending_error is not None:
            raise self._pending_error
        batches = self._compiled_step.make_buffer()
        try:
            items = [self._look_ahead(0)]
        except WaitAbandoned as wait:
            self._abandoned_wait = wait
            return [], batches
        batches.add(items[0].batch)
        room = self._divide_evenly(target - self.step)
        while len(items) < room and not items[-1].epoch_end:
            if self._scheduler.should_stop_soon:
                break
            try:
                item = self._look_ahead(len(items))
            except Exception as error:
                self._pending_error = error
                break
            except WaitAbandoned as wait:
                self._abandoned_wait = wait
                break
            if shape_signature(item.batch) != shape_signature(items[0].batch):
                break
            items.append(item)
            batches.add(item.batch)
        return items, batches

    def _divide_evenly(self, num_steps: float) -> float:
        """Return the number of steps of the next of so many, in dispatches of about equal size: of
        50 steps 13 and not 16, which would leave a dispatch of 2."""
        largest = self._compiled_step.steps_per_execution
        if num_steps <= largest or math.isinf(num_steps):
            return min(largest, num_steps)
        return math.ceil(num_steps / math.ceil(num_steps / largest))

    def _look_ahead(self, number: int) -> BatchItem:
        """Return an item that is not trained on yet.

        Args:
            number: how many items come before it.
        """
        step = self.step + number
        try:
            item = self.data_iterator.look_ahead(number)
        except Exception as error:
            label = self.data_iterator.label
            error.add_note(f"while {label} made the batch for step {step + 1}")
            raise
        if item is None:
            of_steps = "" if self.step_range.stop is None else f" of {self.step_range.stop}"
            raise DataError(
                f"data ended after {step} steps{of_steps}. An iterator can be used up once: pass "
                "what can be iterated over again, such as fg.ArrayData or a list, or ask for fewer "
                "steps"
            )
        return item

    def _extend_step_range(self) -> None:
        """Take the present step as the end of an epoch, and with it the end of a run that is
        counted in epochs."""
        epoch_ends = (*self.step_range.epoch_ends, self.step)
        stop = self.step_range.stop
        if self._epochs is not None:
            previous_end = epoch_ends[-2] if len(epoch_ends) > 1 else self.step_range.start
            epochs_left = max(self._epochs - len(epoch_ends), 0)
            stop = self.step + epochs_left * (self.step - previous_end)
        self._move_end(replace(self.step_range, epoch_ends=epoch_ends, stop=stop))

    def _move_end(self, step_range: StepRange) -> None:
        """Change the planned range, and notify the user once of each action that is not evenly
        spaced any more."""
        expected, self.step_range = self.step_range, step_range
        if step_range.stop == expected.stop:
            return
        was = "was not known before the first epoch had ended"
        if expected.stop is not None:
            was = f"was expected at step {expected.stop} until an epoch had another length"
        uneven = self._scheduler.find_uneven_spacing(self.step, expected, step_range)
        for name, (trigger, steps) in uneven.items():
            times = "once more" if len(steps) == 1 else f"{len(steps)} more times"
            self.run.notify(
                "fulgurite",
                f"{trigger!r} of {name} is not even over this fit, whose end {was}. It is step "
                f"{step_range.stop} now; if it stays there, the action runs {times}, next at step "
                f"{steps[0]}. Give steps= for an end that is known",
            )

    # --- what is due ------------------------------------------------------------------------------

    def _make_epoch_end_action(self) -> BoundAction:
        """Return the action that calls `on_epoch_end`: so it is ordered, and pending after an
        interruption, as any other."""
        scheduled = ScheduledAction(EPOCH_END_ACTION, EveryEpoch(), self._call_on_epoch_end)
        owner = get_engine_plugin(self.engine.plugins)
        return BoundAction(EPOCH_END_ACTION, owner, scheduled, is_engine_action=True)

    def _call_on_epoch_end(self, run: Run) -> None:
        self._call_event("on_epoch_end", epoch=len(self.step_range.epoch_ends) - 1)

    def _should_stop(self) -> bool:
        """Return whether an evaluation should end between two batches, because training is to stop.

        False once its action has emitted a record: the resumed run repeats the whole action and
        would emit the record twice.
        """
        if self.dispatcher.num_records > self._num_records_before_action:
            return False
        return self._scheduler.poll_requests(self.step) and bool(self._scheduler.stop_reasons)

    def _run_due_actions(self, only: tuple[str, ...] = ()) -> None:
        """Run what is due, or `only` what a resumed run still has to do at this step."""
        self.is_between_steps = True
        self._loop_state = LoopState.ACTING
        self._pending_actions = ()
        self.dispatcher.flush(wait=True)
        if not self._scheduler.agreed:
            self._scheduler.poll_requests(self.step)

        due_point = DuePoint(self._actions, self._make_due_rule(only))
        while (action := due_point.take_next()) is not None:
            try:
                self._run_due_action(action, due_point)
            except EvaluationInterrupted as interruption:
                self._note_interruption(action, interruption)
                break
        if self.stop_reason is None:
            self.stop_reason = next(iter(self._scheduler.stop_reasons), None)
        self._scheduler.forget_requests()
        self.is_between_steps = False
        if self._loop_state not in (LoopState.INTERRUPTED, LoopState.BROKEN):
            self._loop_state = LoopState.STEPPING
        if self._save_requested:
            self.save()

    def _make_due_rule(self, pending: tuple[str, ...]) -> Callable[[BoundAction], bool]:
        """Return the rule that says whether an action is due at this step; where a resumed run goes
        on in the middle of a step, what is pending."""

        def is_due(action: BoundAction) -> bool:
            return self._scheduler.is_due(action, self.step, self.step_range)

        if not pending:
            return lambda action: (
                is_due(action)
                or (self.step == self.step_range.stop and action.name in self._untried_actions)
            )
        # What is due and not pending was done before the interruption. What falls due by a pending
        # action, such as the end of the run by early stopping, was not.
        done = {action.name for action in self._actions if is_due(action)} - set(pending)
        return lambda action: action.name in pending or (action.name not in done and is_due(action))

    def _run_due_action(self, action: BoundAction, due_point: DuePoint) -> None:
        """Run an action of a due point. One that fails without having emitted a record is pending,
        and so is everything behind it: the run that resumes does them, so that its records come in
        the same order."""
        if action.closes_window and not due_point.window_is_closed:
            due_point.window_is_closed = True
            self._close_window()
        if action.stage == "save":
            self.dispatcher.flush(wait=True)
            self._loop_state = LoopState.SAVING
            self._pending_actions = due_point.list_remaining(action)
            if not self._should_train():
                self.result = self._build_result()
        self._num_records_before_action = self.dispatcher.num_records
        # An evaluation in the middle of an action takes minutes, and a signal or an error of its
        # data ends it. Until then the action, and the hooks that it calls, may have changed what
        # any plugin holds.
        if action.scheduled.action is not None:
            # Records from before the action are no part of it.
            if self._do_records_change_host_states:
                self.dispatcher.flush(wait=True)
            self._before_action = copy_host(
                self.engine.plugins, self.step, self.shared, self.metrics
            )
        self._signals.is_in_action = True
        try:
            self._run_action(action)
        except Exception:
            if self.dispatcher.num_records == self._num_records_before_action:
                self._pending_actions = (action.name, *due_point.list_remaining(action))
                self._loop_state = LoopState.INTERRUPTED
            raise
        finally:
            self._signals.is_in_action = False
        self._before_action = None
        self._scheduler.mark_done(action, self.step)
        self._untried_actions.discard(action.name)

    def _note_interruption(self, action: BoundAction, interruption: Exception) -> None:
        """Stop, because an action was given up between two batches.

        An evaluation is not given up once its action has emitted a record, but a fit within it is:
        the action is neither done nor can it be done again from here. The run goes on from the
        newest checkpoint, which is as exact, and takes these steps again.
        """
        if not self._scheduler.agreed:
            self._scheduler.poll_requests(self.step)
        self.stop_reason = next(iter(self._scheduler.stop_reasons), str(interruption))
        if self._loop_state is LoopState.INTERRUPTED:
            return
        self._loop_state = LoopState.BROKEN
        self._pending_actions = (action.name,)
        message = (
            f"{interruption}, after {action.name} had emitted records: nothing is saved at step "
            f"{self.step}, and the run resumes from the previous checkpoint"
        )
        self.run.notify("fulgurite", message)

    def _run_action(self, action: BoundAction) -> None:
        """Call an action, and do what it returns."""
        function = action.scheduled.action
        if function is None:
            return
        if action.is_engine_action:
            function(self.run)
            return
        where = f"action {action.scheduled.name}"
        with (
            self._timings.time(action.name),
            plugin_error_context(action.plugin, where, self.step),
        ):
            # What an action does by the clock is telemetry, whatever it says itself: only the
            # engine knows the trigger.
            self.is_exact = is_exact(action.trigger)
            try:
                answer = function(self.run)
            finally:
                self.is_exact = True
            check_has_run(where, answer)
            self._apply_answer(action, answer)

    def _apply_answer(self, action: BoundAction, answer: Any) -> None:
        if isinstance(answer, StopTraining):
            # Several plugins may want to stop at one step: each has its say.
            reasons = [self._action_stop_reason, answer.reason]
            self._action_stop_reason = "; ".join(reason for reason in reasons if reason)
            self.stop_reason = self._action_stop_reason
            self.step_range = replace(self.step_range, stop=self.step)
        elif isinstance(answer, ReplaceState):
            state = self.state()
            new_state = _cast_numbers(answer.state, state)
            check_same_structure(state, new_state, f"the action {action.name}")
            # What was counted and measured is the run's, also when it goes back to earlier weights.
            new_state = new_state.replace(step=state.step, metric_window=state.metric_window)
            self._flat = self.program.layout.flatten_on_host(new_state)
            self._state = None
        elif answer is not None:
            raise PluginError(
                "an action returns None, fg.StopTraining(reason) or fg.ReplaceState(state), "
                f"not {answer!r}"
            )

    def _close_window(self) -> None:
        """End the metric window at this step, and hand its values on as soon as they are
        computed."""
        step = self.step
        stream = self._scheduler.log_stream
        self._state = None
        self._flat, values = self.program.close_window(self._flat)

        def finish() -> Record | None:
            previous = self.metrics.get("train", {})
            metrics = self.program.read_window(values, previous)
            if metrics is None:
                return None
            metrics = self.dispatcher.select_writable("train", metrics)
            self.metrics["train"] = previous | metrics
            if "skipped_steps" in metrics:
                self._skipped.note(step, int(metrics["skipped_steps"]))
            return Record("scalars", "train", step, metrics, stream)

        steps_per_second = self._rate(step, monotonic())
        if steps_per_second is not None:
            self.run.log_scalars(
                "train", {"steps_per_second": steps_per_second}, stream="telemetry"
            )
        self.dispatcher.enqueue(jax.tree.leaves(values), finish)


def _cast_numbers(new_state: TrainState, state: TrainState) -> TrainState:
    """Return a state in which Python numbers, such as a new learning rate, are arrays like those
    that they replace."""
    if jax.tree.structure(new_state) != jax.tree.structure(state):
        return new_state

    def cast(new: Any, old: Any) -> Any:
        is_number = isinstance(new, int | float) and isinstance(old, jax.Array)
        return jnp.asarray(new, old.dtype) if is_number else new

    return jax.tree.map(cast, new_state, state)
