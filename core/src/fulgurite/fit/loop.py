"""The training loop: undisturbed steps up to the nearest thing that is due, then what is due, in
order."""

from collections import deque
from dataclasses import replace
from functools import partial
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

import jax

from fulgurite.data.iterator import BatchItem, BatchIterator
from fulgurite.errors import CheckpointError, DataError, PluginError, StateError
from fulgurite.evaluation import Interrupted
from fulgurite.execution.compiled_step import StepResults
from fulgurite.execution.program import Program
from fulgurite.fit.records import Record, RecordDispatcher
from fulgurite.fit.run import FitResult, ReplaceState, Run, StopTraining
from fulgurite.fit.scheduler import Scheduler
from fulgurite.fit.signals import StopRequests
from fulgurite.fit.tasks import BoundAction
from fulgurite.media import MEDIA_ACTION
from fulgurite.placing import replicate
from fulgurite.plugins.manager import plugin_error_context
from fulgurite.runs import RunDirectory, Snapshot
from fulgurite.timing import Rate
from fulgurite.training.state import TrainState, check_same_structure
from fulgurite.tree.typecheck import shape_signature
from fulgurite.triggers import StepRange, is_exact

if TYPE_CHECKING:
    from fulgurite.engine import Engine

# Dispatches at once: enough that the device never waits for the host (2 cost a small step 10 % more
# than 4), and no more, because each holds its batch, and jax 0.10.2 on CPU was seen to deadlock
# with many of them where several processes have several devices each.
IN_FLIGHT = 4


class Loop:
    """One fit of `engine` from `state`, which it consumes; `resumed` is what a resumed fit goes on
    from.

    The origin of `span` is earlier than `state.step` in a resumed fit. With `epochs` the end
    follows from the epochs' ends, as far as they are known. `resident` are the arrays on the device
    that indexed batches are gathered from. `directory` is where the run's attempt number `attempt`
    writes, if anywhere.
    """

    def __init__(
        self,
        engine: "Engine",
        program: Program,
        feed: BatchIterator,
        state: TrainState,
        span: StepRange,
        *,
        epochs: int | None,
        steps_per_execution: int,
        resident: Any,
        signals: StopRequests,
        resumed: Snapshot | None,
        directory: RunDirectory | None,
        attempt: int,
        manifest: dict[str, Any],
    ) -> None:
        self.engine, self.program, self.step_range = engine, program, span
        self.step = int(state.step)
        self.manifest = manifest
        self._directory = directory
        self.emitter = RecordDispatcher(
            engine.plugins, attempt, silent=engine.fast_dev_run is not None
        )
        self.metrics: dict[str, dict[str, Any]] = dict(resumed.metrics) if resumed else {}
        self.stop_reason: str | None = None
        self.between_steps, self.exact = False, True
        self.run = program.run = Run(self)
        self._tasks, self._consensus, self._accounts = (
            engine.tasks,
            engine.consensus,
            engine.plugins.timings,
        )
        self.data_iterator, self._batches, self._resident = (
            feed,
            iter(feed),
            replicate(resident, engine.mesh),
        )
        self._pending_item: BatchItem | None = None
        self._compiled = program.compiled(steps_per_execution)
        self._flat = program.layout.flatten(state)
        self._state: TrainState | None = None
        self.resumed, self._epochs, self._signals = resumed, epochs, signals
        self._position = resumed.data_position if resumed else None
        self._pending = resumed.pending_actions if resumed else ()
        self._epoch_ended = "epoch_end" in self._pending
        self._in_flight: deque[Any] = deque()
        self._agenda = Scheduler(self._tasks, self.step, program.flags, self._consensus, signals)
        # Within a dispatch and between two actions of one step there is no state that another run
        # could go on from.
        self._torn, self._broken, self._early, self._save_wanted = True, False, False, False
        self._newest: tuple[StepResults | None, Any] = None, None
        self._emitted, self._rate = 0, Rate()

    def run_to_end(self) -> FitResult:
        """Trains, and tells the plugins how it ended."""
        try:
            self._fit()
            result = self._build_result()
            self._event("on_fit_end", result=result)
            return result
        except BaseException as error:
            self.between_steps, self._broken, self._early = True, self._torn, False
            hooks = self.engine.plugins.implementations("on_exception")
            told = [partial(hook, self.step, run=self.run, exception=error) for hook in hooks]
            for call in (
                partial(self.emitter.flush, wait=True),
                *told,
                partial(self.emitter.close, self.step),
            ):
                try:
                    call()
                except Exception as further:
                    if (type(further), str(further)) == (type(error), str(error)):
                        continue
                    notes = "; ".join(getattr(further, "__notes__", []))
                    error.add_note(f"and then {type(further).__name__}: {further} ({notes})")
            raise
        finally:
            self.between_steps, self.program.run = False, None

    def state(self) -> TrainState:
        """The state after the newest step; raises if it is not finite."""
        if self._state is None:
            with self._accounts.time("wait"):
                health = self.program.read_nonfinite(self._flat)
            self.program.check_finite(health)
            self._state = self.program.layout.unflatten(self._flat)
        return self._state

    def snapshot(self) -> Snapshot:
        """Everything needed to go on from here; a `StateError` where an exception has left nothing
        to go on from."""
        if self._broken:
            raise StateError(
                "an action failed half done: there is no state here from which a run could resume exactly"
            )
        self.emitter.flush(wait=True)
        host = {
            plugin.name: {"version": getattr(plugin.plugin, "state_version", 1), "state": state}
            for plugin, state in self.engine.plugins.call("get_host_state", self.step)
        }
        return Snapshot(
            self.state(), self.step_range, self._position, self._pending, host, dict(self.metrics)
        )

    def save(self) -> None:
        """Asks the checkpointer to save, if there is one and this is no trial; `early` in a step,
        at its end, because what is still due would be neither in the checkpoint nor done by the run
        that goes on from it."""
        self._save_wanted = self._early
        if (
            not self._early
            and self.engine.plugins.implementations("save_checkpoint")
            and self.engine.fast_dev_run is None
        ):
            if self._directory:
                self._consensus.broadcast(self._directory.assert_locked)
            self._event("save_checkpoint")

    def request_stop(self, reason: str) -> None:
        """Notes that this process wishes to stop."""
        self._signals.requested = self._signals.requested or reason

    def evaluate(self, name: str) -> dict[str, Any]:
        """Runs the evaluation `name`; emits and returns its metrics, none if it failed and is not
        required."""
        state, account = self.state(), f"evaluate.{name}"
        shown: list[dict[str, Any]] = []
        if account in self.emitter.failures:
            return {}
        try:
            with self._accounts.time(account):
                metrics = self.engine.run_evaluator(name, state, self._stop_wanted, shown.append)
        except Interrupted:
            raise
        except Exception as error:
            error.add_note(f"evaluator {name!r}, step {self.step}")
            if name not in self.engine.evaluators or self.engine.evaluators[name].raise_on_error:
                raise
            self.metrics.pop(name, None)
            self.emitter.disable(
                account, f"evaluator {name!r} failed and runs no more", error, self.step
            )
            return {}
        self.metrics[name] = metrics
        stream = "exact" if self.exact and self.engine.evaluators[name].exact else "telemetry"
        self.emitter.enqueue([], partial(Record, "scalars", name, self.step, dict(metrics), stream))
        for media in shown:
            self.run.log_media(name, media, stream=stream)
        self._event("on_evaluate_end", name=name, metrics=dict(metrics))
        return dict(metrics)

    def show(self) -> None:
        """Emits the media of the newest step, if it was known beforehand that they are shown."""
        results, due = self._newest
        if results is None or not due[self.program.step.tasks.index(MEDIA_ACTION)]:
            return
        if media := self._compiled.media(results):
            step, flat = self.step, self._flat

            def finish() -> Record:
                self.program.check_finite(self.program.read_nonfinite(flat))
                return Record("media", "train", step, jax.device_get(media))

            self.emitter.enqueue([*jax.tree.leaves(media), *flat.packed], finish)

    def _fit(self) -> None:
        self._notices = [*self.engine.plugins.notices, *self._agenda.warnings]
        if self.resumed is not None:
            self._event("on_restore", step=self.step)
        self.emitter.open(self.run)
        self.run.log_config("fulgurite", self.manifest, stream="telemetry")
        for notice in self._notices:
            self.run.log_text("fulgurite", {"notice": notice}, stream="telemetry")
        self._event("on_fit_start")
        if self.resumed is None or self._pending:
            self._run_due_actions(only=self._pending)
        while self.stop_reason is None and (
            self.step_range.stop is None or self.step < self.step_range.stop
        ):
            first = self.step
            self._run_until_due()
            self._run_due_actions()
            self._accounts.stretch(self.step - first)
        self.state()
        self.emitter.flush(wait=True)
        self.save()
        self.emitter.close(self.step)
        if (
            (directory := self._directory)
            and self.step == self.step_range.stop
            and not self._pending
        ):
            self._consensus.broadcast(lambda: self._mark_complete(directory))

    def _mark_complete(self, directory: RunDirectory) -> None:
        try:
            directory.mark_complete()
        except CheckpointError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            # What was trained is worth more than the mark.
            self.emitter.disable("fulgurite", "the run is not marked as complete", error, self.step)

    def _build_result(self) -> FitResult:
        state, emitter = self.state(), self.emitter
        kept = (
            emitter.history,
            self.metrics,
            self._accounts,
            self.stop_reason,
            emitter.failures,
            self._notices,
        )
        return FitResult(state.module, state.model_state, state, *kept)

    def _event(self, hook: str, **arguments: Any) -> None:
        outer, self.between_steps = self.between_steps, True
        self.engine.plugins.call(hook, self.step, run=self.run, **arguments)
        self.between_steps = outer

    # --- steps --------------------------------------------------------------------------------------------------

    def _run_until_due(self) -> None:
        """Steps until something is due, by a step, by the clock, at the end of an epoch, or because
        of a stop request."""
        accounts, agenda, first = self._accounts, self._agenda, self.step
        compiled = accounts.seconds["compile"]
        data = dispatch = wait = 0.0
        if self._state is not None:
            self.program.layout.delete_copied(self._state)
            self._state = None
        self.program.select_update_rule(self.step, self.step_range)
        target = agenda.next_due(self.step, self.step_range)
        while True:
            asked = perf_counter()
            self._torn = False
            items = self._collect_batches(target)
            self._torn = True
            taken = perf_counter()
            self.program.step.steps_done = self.step
            self.step += len(items)
            self._position = items[-1].position
            if items[-1].epoch_end:
                self._end_epoch()
                target = agenda.next_due(self.step - 1, self.step_range)
            elif self._epochs is not None and self.step == self.step_range.stop:
                # The last epoch is longer than the one from which its end was guessed.
                self.step_range = replace(self.step_range, stop=self.step + 1)
                target = agenda.next_due(self.step - 1, self.step_range)
            due = agenda.due if self.step == target else agenda.nothing_due
            if len(self._in_flight) == IN_FLIGHT:
                self._in_flight.popleft().block_until_ready()
            free = perf_counter()
            self._flat, results = self._compiled(
                self._flat, [item.batch for item in items], due, self._resident
            )
            sent = perf_counter()
            self._in_flight.append(self._flat.packed[0])
            data, wait, dispatch = data + taken - asked, wait + free - taken, dispatch + sent - free
            self.emitter.flush(wait=False)
            if items[-1].epoch_end or self.step >= target or agenda.poll_requests(self.step):
                break
        dispatch -= accounts.seconds["compile"] - compiled
        for name, seconds in (("data", data), ("dispatch", dispatch), ("wait", wait)):
            accounts.add(name, seconds, self.step - first)
        self._epoch_ended = items[-1].epoch_end
        self._newest = results, due

    def _collect_batches(self, target: float) -> list[BatchItem]:
        """The batches of the next dispatch: as many as fit before `target`, all of the same shapes,
        of one epoch."""
        items = [self._pending_item or self._next_batch(self.step)]
        self._pending_item = None
        room = min(self._compiled.steps_per_execution, target - self.step)
        while len(items) < room and not items[-1].epoch_end and not self._agenda.should_stop_soon:
            item = self._next_batch(self.step + len(items))
            if shape_signature(item.batch) != shape_signature(items[0].batch):
                self._pending_item = item
                break
            items.append(item)
        return items

    def _next_batch(self, step: int) -> BatchItem:
        try:
            item = next(self._batches, None)
        except Exception as error:
            error.add_note(f"while the data source made the batch for step {step + 1}")
            raise
        if item is None:
            wanted = "" if self.step_range.stop is None else f" of {self.step_range.stop}"
            fix = "pass what can be iterated over again, such as fg.ArrayData or a list, or ask for fewer steps"
            raise DataError(
                f"data ended after {step} steps{wanted}. An iterator can be used up once: {fix}"
            )
        return item

    def _end_epoch(self) -> None:
        """The epoch that ends at the present step is known, and with it the end of a run counted in
        epochs."""
        ends, end = (*self.step_range.epoch_ends, self.step), self.step_range.stop
        if self._epochs is not None:
            length = self.step - (ends[-2] if len(ends) > 1 else self.step_range.start)
            end = self.step + max(self._epochs - len(ends), 0) * length
        self.step_range = replace(self.step_range, epoch_ends=ends, stop=end)

    # --- what is due
    # --------------------------------------------------------------------------------------------

    def _stop_wanted(self) -> bool:
        """Whether an evaluation is to be given up between two batches, because training is to stop.

        Not once its action has emitted a record: the resumed run does the whole action again and
            would emit it twice.
        """
        if self.emitter.num_records > self._emitted:
            return False
        return self._agenda.poll_requests(self.step) and bool(self._agenda.stop_reasons)

    def _run_due_actions(self, only: tuple[str, ...] = ()) -> None:
        """Runs what is due, or `only` what a resumed run still has to do at this step.

        What is due is looked up anew after each action: a stop request makes everything due that
        waits for the end.
        """
        self.between_steps, self._torn, self._early, self._pending, done = (
            True,
            True,
            True,
            (),
            set(),
        )
        self.emitter.flush(wait=True)
        agenda = self._agenda
        if not agenda.agreed:
            agenda.poll_requests(self.step)
        while True:
            due = (
                task
                for task in self._tasks
                if task.name not in done
                and (task.name in only if only else agenda.is_due(task, self.step, self.step_range))
            )
            task = next(due, None)
            if self._epoch_ended and (task is None or task.scheduled.stage == "save"):
                self._epoch_ended = False
                self._event("on_epoch_end", epoch=len(self.step_range.epoch_ends) - 1)
                continue
            if task is None:
                break
            if task.closes_window and not any(
                one.closes_window for one in self._tasks if one.name in done
            ):
                self._close_window()
            done.add(task.name)
            if task.scheduled.stage == "save":
                self.emitter.flush(wait=True)
                self._early, self._pending = False, tuple(one.name for one in due)
            self._emitted = self.emitter.num_records
            try:
                self._run_action(task)
            except Exception as error:
                if self.emitter.num_records == self._emitted:
                    # The rest is done by the run that resumes, so that its records come in the same
                    # order.
                    rest = (
                        *self._pending,
                        *(one.name for one in due),
                        *["epoch_end"] * self._epoch_ended,
                    )
                    self._pending = (task.name, *rest)
                    self._torn = False
                if not isinstance(error, Interrupted):
                    raise
                break
            agenda.mark_done(task, self.step)
        self.stop_reason = self.stop_reason or next(iter(agenda.stop_reasons), None)
        agenda.agreed, self.between_steps, self._early = frozenset(), False, False
        if self._save_wanted:
            self.save()

    def _run_action(self, task: BoundAction) -> None:
        if task.scheduled.action is None:
            return
        with (
            self._accounts.time(task.name),
            plugin_error_context(task.plugin, f"action {task.scheduled.name}", self.step),
        ):
            self.exact = is_exact(task.trigger)
            try:
                answer = task.scheduled.action(self.run)
            finally:
                self.exact = True
            if isinstance(answer, StopTraining):
                self.stop_reason = self.stop_reason or answer.reason
                self.step_range = replace(self.step_range, stop=self.step)
            elif isinstance(answer, ReplaceState):
                state = self.state()
                check_same_structure(state, answer.state, f"the action {task.name}")
                # What was counted and measured is the run's, also when it goes back to earlier
                # weights.
                answered = answer.state.replace(step=state.step, metric_window=state.metric_window)
                self._flat, self._state = self.program.layout.flatten(answered), None
            elif answer is not None:
                raise PluginError(
                    f"an action returns None, fg.StopTraining(reason) or fg.ReplaceState(state), not {answer!r}"
                )

    def _close_window(self) -> None:
        """Ends the metric window at this step and hands its values on as soon as they are
        computed."""
        step, stream, self._state = self.step, self._agenda.log_stream, None
        self._flat, values = self.program.close(self._flat)

        def finish() -> Record | None:
            told = self.metrics.get("train", {})
            if (metrics := self.program.read_window(values, told)) is None:
                return None
            self.metrics["train"] = told | metrics
            return Record("scalars", "train", step, metrics, stream)

        if (rate := self._rate(step, monotonic())) is not None:
            self.run.log_scalars("train", {"steps_per_second": rate}, stream="telemetry")
        self.emitter.enqueue(jax.tree.leaves(values), finish)
