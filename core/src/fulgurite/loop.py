"""The training loop: undisturbed steps up to the nearest thing that is due, then what is due, in order."""

from collections import deque
from dataclasses import replace
from functools import partial
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

import jax

from fulgurite.accounts import Rate
from fulgurite.agenda import Agenda
from fulgurite.annotations import shapes_of
from fulgurite.compile import Results
from fulgurite.errors import CheckpointError, DataError, PluginError, StateError
from fulgurite.evaluation import Interrupted
from fulgurite.feed import Feed, Item
from fulgurite.media import SHOW
from fulgurite.placing import replicated
from fulgurite.plugins import blame
from fulgurite.program import Program
from fulgurite.records import Emitter, Record
from fulgurite.run import Replace, Result, Run, Stop
from fulgurite.runs import RunDirectory, Snapshot
from fulgurite.signals import StopRequests
from fulgurite.state import TrainState, check_same_structure
from fulgurite.tasks import Task
from fulgurite.triggers import Span, is_exact

if TYPE_CHECKING:
    from fulgurite.engine import Engine

# Dispatches at once: enough that the device never waits for the host (2 cost a small step 10 % more than 4), and no
# more, because each holds its batch, and jax 0.10.2 on CPU was seen to deadlock with many of them where several
# processes have several devices each.
IN_FLIGHT = 4


class Loop:
    """One fit of `engine` from `state`, which it consumes; `resumed` is what a resumed fit goes on from.

    The origin of `span` is earlier than `state.step` in a resumed fit. With `epochs` the end follows from the epochs'
    ends, as far as they are known. `resident` are the arrays on the device that indexed batches are gathered from.
    `directory` is where the run's attempt number `attempt` writes, if anywhere.
    """

    def __init__(
        self,
        engine: "Engine",
        program: Program,
        feed: Feed,
        state: TrainState,
        span: Span,
        *,
        epochs: int | None,
        fuse: int,
        resident: Any,
        signals: StopRequests,
        resumed: Snapshot | None,
        directory: RunDirectory | None,
        attempt: int,
        manifest: dict[str, Any],
    ) -> None:
        self.engine, self.program, self.span = engine, program, span
        self.step = int(state.step)
        self.manifest = manifest
        self._directory = directory
        self.emitter = Emitter(engine.plugins, attempt, silent=engine.dev_run is not None)
        self.metrics: dict[str, dict[str, Any]] = dict(resumed.metrics) if resumed else {}
        self.stopped: str | None = None
        self.between_steps, self.exact = False, True
        self.run = program.run = Run(self)
        self._tasks, self._consensus, self._accounts = engine.tasks, engine.consensus, engine.plugins.accounts
        self.feed, self._batches, self._resident = feed, iter(feed), replicated(resident, engine.mesh)
        self._held: Item | None = None
        self._compiled = program.compiled(fuse)
        self._flat = program.layout.split(state)
        self._state: TrainState | None = None
        self.resumed, self._epochs, self._signals = resumed, epochs, signals
        self._position = resumed.position if resumed else None
        self._pending = resumed.pending if resumed else ()
        self._epoch_ended = "epoch_end" in self._pending
        self._in_flight: deque[Any] = deque()
        self._agenda = Agenda(self._tasks, self.step, program.flags, self._consensus, signals)
        # Within a dispatch and between two actions of one step there is no state that another run could go on from.
        self._torn, self._broken, self._early, self._save_wanted = True, False, False, False
        self._newest: tuple[Results | None, Any] = None, None
        self._emitted, self._rate = 0, Rate()

    def run_to_end(self) -> Result:
        """Trains, and tells the plugins how it ended."""
        try:
            self._fit()
            result = self._result()
            self._event("on_fit_end", result=result)
            return result
        except BaseException as error:
            self.between_steps, self._broken, self._early = True, self._torn, False
            hooks = self.engine.plugins.implementations("on_exception")
            told = [partial(hook, self.step, run=self.run, exception=error) for hook in hooks]
            for call in (partial(self.emitter.flush, wait=True), *told, partial(self.emitter.close, self.step)):
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
                health = self.program.health(self._flat)
            self.program.check_finite(health)
            self._state = self.program.layout.join(self._flat)
        return self._state

    def snapshot(self) -> Snapshot:
        """Everything needed to go on from here; a `StateError` where an exception has left nothing to go on from."""
        if self._broken:
            raise StateError("an action failed half done: there is no state here from which a run could resume exactly")
        self.emitter.flush(wait=True)
        host = {
            plugin.name: {"version": getattr(plugin.plugin, "state_version", 1), "state": state}
            for plugin, state in self.engine.plugins.call("host_state", self.step)
        }
        return Snapshot(self.state(), self.span, self._position, self._pending, host, dict(self.metrics))

    def save(self) -> None:
        """Asks the checkpointer to save, if there is one and this is no trial; `early` in a step, at its end, because
        what is still due would be neither in the checkpoint nor done by the run that goes on from it."""
        self._save_wanted = self._early
        if not self._early and self.engine.plugins.implementations("save") and self.engine.dev_run is None:
            if self._directory:
                self._consensus.decide(self._directory.check_held)
            self._event("save")

    def request_stop(self, reason: str) -> None:
        """Notes that this process wishes to stop."""
        self._signals.requested = self._signals.requested or reason

    def evaluate(self, name: str) -> dict[str, Any]:
        """Runs the evaluation `name`; emits and returns its metrics, none if it failed and is not required."""
        state, account = self.state(), f"evaluate.{name}"
        shown: list[dict[str, Any]] = []
        if account in self.emitter.failed:
            return {}
        try:
            with self._accounts.time(account):
                metrics = self.engine.evaluated(name, state, self._stop_wanted, shown.append)
        except Interrupted:
            raise
        except Exception as error:
            error.add_note(f"evaluator {name!r}, step {self.step}")
            if name not in self.engine.evaluators or self.engine.evaluators[name].required:
                raise
            self.metrics.pop(name, None)
            self.emitter.leave_out(account, f"evaluator {name!r} failed and runs no more", error, self.step)
            return {}
        self.metrics[name] = metrics
        stream = "exact" if self.exact and self.engine.evaluators[name].exact else "telemetry"
        self.emitter.later([], partial(Record, "scalars", name, self.step, dict(metrics), stream))
        for media in shown:
            self.run.emit("media", name, media, stream=stream)
        self._event("on_evaluate_end", name=name, metrics=dict(metrics))
        return dict(metrics)

    def show(self) -> None:
        """Emits the media of the newest step, if it was known beforehand that they are shown."""
        results, due = self._newest
        if results is None or not due[self.program.step.tasks.index(SHOW)]:
            return
        if media := self._compiled.media(results):
            step, flat = self.step, self._flat

            def finish() -> Record:
                self.program.check_finite(self.program.health(flat))
                return Record("media", "train", step, jax.device_get(media))

            self.emitter.later([*jax.tree.leaves(media), *flat.packed], finish)

    def _fit(self) -> None:
        self._notices = [*self.engine.plugins.notices, *self._agenda.notices]
        if self.resumed is not None:
            self._event("on_restore", step=self.step)
        self.emitter.open(self.run)
        self.run.emit("config", "fulgurite", self.manifest, stream="telemetry")
        for notice in self._notices:
            self.run.emit("text", "fulgurite", {"notice": notice}, stream="telemetry")
        self._event("on_fit_start")
        if self.resumed is None or self._pending:
            self._due_point(only=self._pending)
        while self.stopped is None and (self.span.end is None or self.step < self.span.end):
            first = self.step
            self._stretch()
            self._due_point()
            self._accounts.stretch(self.step - first)
        self.state()
        self.emitter.flush(wait=True)
        self.save()
        self.emitter.close(self.step)
        if (directory := self._directory) and self.step == self.span.end and not self._pending:
            self._consensus.decide(lambda: self._mark_complete(directory))

    def _mark_complete(self, directory: RunDirectory) -> None:
        try:
            directory.mark_complete()
        except CheckpointError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            # What was trained is worth more than the mark.
            self.emitter.leave_out("fulgurite", "the run is not marked as complete", error, self.step)

    def _result(self) -> Result:
        state, emitter = self.state(), self.emitter
        kept = emitter.history, self.metrics, self._accounts, self.stopped, emitter.failed, self._notices
        return Result(state.module, state.model_state, state, *kept)

    def _event(self, hook: str, **arguments: Any) -> None:
        outer, self.between_steps = self.between_steps, True
        self.engine.plugins.call(hook, self.step, run=self.run, **arguments)
        self.between_steps = outer

    # --- steps --------------------------------------------------------------------------------------------------

    def _stretch(self) -> None:
        """Steps until something is due, by a step, by the clock, at the end of an epoch, or because of a stop
        request."""
        accounts, agenda, first = self._accounts, self._agenda, self.step
        compiled = accounts.seconds["compile"]
        data = dispatch = wait = 0.0
        if self._state is not None:
            self.program.layout.consume(self._state)
            self._state = None
        self.program.enter(self.step, self.span)
        target = agenda.next_due(self.step, self.span)
        while True:
            asked = perf_counter()
            self._torn = False
            items = self._take(target)
            self._torn = True
            taken = perf_counter()
            self.program.step.done = self.step
            self.step += len(items)
            self._position = items[-1].position
            if items[-1].epoch_end:
                self._end_epoch()
                target = agenda.next_due(self.step - 1, self.span)
            elif self._epochs is not None and self.step == self.span.end:
                # The last epoch is longer than the one from which its end was guessed.
                self.span = replace(self.span, end=self.step + 1)
                target = agenda.next_due(self.step - 1, self.span)
            due = agenda.due if self.step == target else agenda.nothing_due
            if len(self._in_flight) == IN_FLIGHT:
                self._in_flight.popleft().block_until_ready()
            free = perf_counter()
            self._flat, results = self._compiled(self._flat, [item.batch for item in items], due, self._resident)
            sent = perf_counter()
            self._in_flight.append(self._flat.packed[0])
            data, wait, dispatch = data + taken - asked, wait + free - taken, dispatch + sent - free
            self.emitter.flush(wait=False)
            if items[-1].epoch_end or self.step >= target or agenda.called(self.step):
                break
        dispatch -= accounts.seconds["compile"] - compiled
        for name, seconds in (("data", data), ("dispatch", dispatch), ("wait", wait)):
            accounts.add(name, seconds, self.step - first)
        self._epoch_ended = items[-1].epoch_end
        self._newest = results, due

    def _take(self, target: float) -> list[Item]:
        """The batches of the next dispatch: as many as fit before `target`, all of the same shapes, of one epoch."""
        items = [self._held or self._next_batch(self.step)]
        self._held = None
        room = min(self._compiled.fuse, target - self.step)
        while len(items) < room and not items[-1].epoch_end and not self._agenda.stopping:
            item = self._next_batch(self.step + len(items))
            if shapes_of(item.batch) != shapes_of(items[0].batch):
                self._held = item
                break
            items.append(item)
        return items

    def _next_batch(self, step: int) -> Item:
        try:
            item = next(self._batches, None)
        except Exception as error:
            error.add_note(f"while the data source made the batch for step {step + 1}")
            raise
        if item is None:
            wanted = "" if self.span.end is None else f" of {self.span.end}"
            fix = "pass what can be iterated over again, such as fg.ArrayData or a list, or ask for fewer steps"
            raise DataError(f"data ended after {step} steps{wanted}. An iterator can be used up once: {fix}")
        return item

    def _end_epoch(self) -> None:
        """The epoch that ends at the present step is known, and with it the end of a run counted in epochs."""
        ends, end = (*self.span.epoch_ends, self.step), self.span.end
        if self._epochs is not None:
            length = self.step - (ends[-2] if len(ends) > 1 else self.span.origin)
            end = self.step + max(self._epochs - len(ends), 0) * length
        self.span = replace(self.span, epoch_ends=ends, end=end)

    # --- what is due --------------------------------------------------------------------------------------------

    def _stop_wanted(self) -> bool:
        """Whether an evaluation is to be given up between two batches, because training is to stop.

        Not once its action has emitted a record: the resumed run does the whole action again and would emit it twice.
        """
        if self.emitter.emitted > self._emitted:
            return False
        return self._agenda.called(self.step) and bool(self._agenda.reasons)

    def _due_point(self, only: tuple[str, ...] = ()) -> None:
        """Runs what is due, or `only` what a resumed run still has to do at this step.

        What is due is looked up anew after each action: a stop request makes everything due that waits for the end.
        """
        self.between_steps, self._torn, self._early, self._pending, done = True, True, True, (), set()
        self.emitter.flush(wait=True)
        agenda = self._agenda
        if not agenda.agreed:
            agenda.called(self.step)
        while True:
            due = (
                task
                for task in self._tasks
                if task.name not in done and (task.name in only if only else agenda.is_due(task, self.step, self.span))
            )
            task = next(due, None)
            if self._epoch_ended and (task is None or task.scheduled.phase == "save"):
                self._epoch_ended = False
                self._event("on_epoch_end", epoch=len(self.span.epoch_ends) - 1)
                continue
            if task is None:
                break
            if task.closes_window and not any(one.closes_window for one in self._tasks if one.name in done):
                self._close_window()
            done.add(task.name)
            if task.scheduled.phase == "save":
                self.emitter.flush(wait=True)
                self._early, self._pending = False, tuple(one.name for one in due)
            self._emitted = self.emitter.emitted
            try:
                self._perform(task)
            except Exception as error:
                if self.emitter.emitted == self._emitted:
                    # The rest is done by the run that resumes, so that its records come in the same order.
                    rest = *self._pending, *(one.name for one in due), *["epoch_end"] * self._epoch_ended
                    self._pending = (task.name, *rest)
                    self._torn = False
                if not isinstance(error, Interrupted):
                    raise
                break
            agenda.done(task, self.step)
        self.stopped = self.stopped or next(iter(agenda.reasons), None)
        agenda.agreed, self.between_steps, self._early = frozenset(), False, False
        if self._save_wanted:
            self.save()

    def _perform(self, task: Task) -> None:
        if task.scheduled.action is None:
            return
        with self._accounts.time(task.name), blame(task.plugin, f"action {task.scheduled.name}", self.step):
            self.exact = is_exact(task.trigger)
            try:
                answer = task.scheduled.action(self.run)
            finally:
                self.exact = True
            if isinstance(answer, Stop):
                self.stopped = self.stopped or answer.reason
                self.span = replace(self.span, end=self.step)
            elif isinstance(answer, Replace):
                state = self.state()
                check_same_structure(state, answer.state, f"the action {task.name}")
                # What was counted and measured is the run's, also when it goes back to earlier weights.
                answered = answer.state.replace(step=state.step, window=state.window)
                self._flat, self._state = self.program.layout.split(answered), None
            elif answer is not None:
                raise PluginError(f"an action returns None, fg.Stop(reason) or fg.Replace(state), not {answer!r}")

    def _close_window(self) -> None:
        """Ends the metric window at this step and hands its values on as soon as they are computed."""
        step, stream, self._state = self.step, self._agenda.log_stream, None
        self._flat, values = self.program.close(self._flat)

        def finish() -> Record | None:
            told = self.metrics.get("train", {})
            if (metrics := self.program.closing(values, told)) is None:
                return None
            self.metrics["train"] = told | metrics
            return Record("scalars", "train", step, metrics, stream)

        if (rate := self._rate(step, monotonic())) is not None:
            self.run.emit("scalars", "train", {"steps_per_second": rate}, stream="telemetry")
        self.emitter.later(jax.tree.leaves(values), finish)
