"""The training loop: undisturbed steps up to the nearest thing that is due, then what is due, in order."""

import math
from collections import deque
from dataclasses import replace
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fulgurite.compile import CompiledStep
from fulgurite.consensus import LOCAL
from fulgurite.errors import DataError, NonFiniteError, PluginError
from fulgurite.evaluation import Interrupted
from fulgurite.feed import Feed, Item
from fulgurite.layout import Flat
from fulgurite.plugins import blame
from fulgurite.program import Program
from fulgurite.records import Emitter, Record
from fulgurite.run import Replace, Result, Run, Stop
from fulgurite.runs import Snapshot
from fulgurite.signals import StopRequests
from fulgurite.state import check_same_structure
from fulgurite.tasks import Task
from fulgurite.triggers import Armed, Span, is_exact

if TYPE_CHECKING:
    from fulgurite.engine import Engine
    from fulgurite.state import TrainState

# Two steps in flight keep the device busy. jax 0.10.2 on CPU, with several devices in each of several processes, was
# seen to deadlock with many; and every one of them holds its batch.
IN_FLIGHT = 2


class Loop:
    """One fit.

    Arguments:
        engine: whose fit it is.
        program: the compiled step and what belongs to it.
        feed: the batches.
        resident: the arrays on the device that indexed batches are gathered from, or None.
        state: to begin from; consumed.
        span: of the fit; its origin is earlier than `state.step` in a fit that was resumed.
        epochs: the number of epochs to run, or None where `span.end` says when to end.
        signals: requests to stop from outside.
        resumed: what a resumed fit goes on from.
    """

    def __init__(
        self,
        engine: "Engine",
        program: Program,
        feed: Feed,
        resident: Any,
        state: "TrainState",
        span: Span,
        *,
        epochs: int | None,
        fuse: int,
        signals: StopRequests,
        resumed: Snapshot | None = None,
    ) -> None:
        self.engine = engine
        self.program = program
        self.span = span
        self.emitter = Emitter(engine.plugins, silent=engine.dev_run is not None)
        self.step = int(state.step)
        self.metrics: dict[str, dict[str, Any]] = dict(resumed.metrics) if resumed else {}
        self.stopped: str | None = None
        self.notices: list[str] = []
        self.between_steps = False
        self.run = Run(self)
        self._resident = resident
        self._batches = iter(feed)
        self._held: Item | None = None
        self._position = resumed.position if resumed else None
        self._compiled: CompiledStep = program.compiled(fuse)
        self._flat: Flat = program.layout.split(state)
        self._resumed = resumed
        self._pending: tuple[str, ...] = resumed.pending if resumed else ()
        self._epochs = epochs
        self._signals = signals
        self._consensus = engine.consensus
        self._in_flight: deque[jax.Array] = deque()
        self._accounts = engine.plugins.accounts
        self._tasks = engine.tasks
        program.run = self.run
        self._armed: dict[str, Armed] = {}
        self._agreed: frozenset[str] = frozenset()
        self._state: TrainState | None = None

    def fit(self) -> None:
        """Trains to the end of the span, or until something stops it."""
        self._armed = {task.name: task.trigger.start(self.step, monotonic()) for task in self._tasks}
        self._announce()
        self.event("on_fit_start")
        if self._resumed is None:
            self._due_point()
        elif self._pending:
            self._due_point(only=self._pending)
        while self.stopped is None and (self.span.end is None or self.step < self.span.end):
            self._stretch()
            self._due_point()
        self._check_health()
        self.emitter.flush(wait=True)
        self.save()

    def result(self) -> Result:
        """What is left of the fit."""
        state = self.state()
        return Result(
            state.module,
            state.model_state,
            state,
            self.emitter.history,
            self.metrics,
            self._accounts,
            self.stopped,
            self.emitter.failed,
            self.notices,
        )

    def event(self, hook: str, **arguments: Any) -> None:
        """Calls an event hook of every plugin."""
        outer, self.between_steps = self.between_steps, True
        self.engine.plugins.call(hook, self.step, run=self.run, **arguments)
        self.between_steps = outer

    def state(self) -> "TrainState":
        """The state after the newest step; raises if it is not finite."""
        if self._state is None:
            self._check_health()
            self._state = self.program.layout.join(self._flat)
        return self._state

    def snapshot(self) -> Snapshot:
        """Everything needed to go on from here."""
        host = {
            plugin.name: {"version": getattr(plugin.plugin, "state_version", 1), "state": state}
            for plugin, state in self.engine.plugins.call("host_state", self.step)
        }
        return Snapshot(self.state(), self.span, self._position, self._pending, host, dict(self.metrics))

    def save(self) -> None:
        """Asks the checkpointer to save, if there is one and this is no trial run."""
        saver = self.engine.plugins.the_one("save")
        if saver is not None and self.engine.dev_run is None:
            outer, self.between_steps = self.between_steps, True
            with self._accounts.time(f"{saver.plugin.name}.save"):
                saver(self.step, run=self.run)
            self.between_steps = outer

    def evaluate(self, name: str) -> dict[str, Any]:
        """Runs the evaluation `name`; emits and returns its metrics."""
        spec = self.engine.evaluator(name)
        with self._accounts.time(f"evaluate.{name}"):
            metrics = self.engine.evaluated(spec, self.state(), self._stop_wanted)
        self.metrics[name] = metrics
        self.emitter.emit(Record("scalars", name, self.step, metrics, "exact" if spec.exact else "telemetry"))
        self.event("on_evaluate_end", name=name, metrics=metrics)
        return metrics

    # --- steps --------------------------------------------------------------------------------------------------

    def _stretch(self) -> None:
        """Steps until something is due, by a step, by the clock, at the end of an epoch, or because of a stop request."""
        accounts, first, compiled = self._accounts, self.step, self._accounts.seconds["compile"]
        data = dispatch = wait = others = 0.0
        self._state = None
        target = self._next_due()
        while True:
            asked = perf_counter()
            items = self._take(target)
            taken = perf_counter()
            self._position = items[-1].position
            self.program.step.at = self.step + 1
            self.step += len(items)
            epoch_end = items[-1].epoch_end
            if epoch_end:
                self._end_epoch()
                target = self._next_due(after=self.step - 1)
            due = self._due_flags if self.step == target else self._nothing_due
            self._flat, _ = self._compiled(self._flat, [item.batch for item in items], due, self._resident)
            sent = perf_counter()
            self._in_flight.append(self._flat.packed[0])
            if len(self._in_flight) > IN_FLIGHT:
                self._in_flight.popleft().block_until_ready()
            waited = perf_counter()
            data, dispatch, wait = data + taken - asked, dispatch + sent - taken, wait + waited - sent
            if self.emitter.waiting:
                self.emitter.flush(wait=False)
                others += perf_counter() - waited
            if epoch_end or self.step >= target or self._called():
                break
        dispatch -= accounts.seconds["compile"] - compiled
        for name, seconds in (("data", data), ("dispatch", dispatch), ("wait", wait)):
            accounts.add(name, seconds, self.step - first)
        accounts.stretch(self.step - first, data + dispatch + wait)

    def _take(self, target: float) -> list[Item]:
        """The batches of the next dispatch: as many as fit before `target`, all of the same shapes, of one epoch."""
        items: list[Item] = []
        meeting = self._consensus.next_meeting(self.step)
        room = min(self._compiled.fuse, target - self.step, math.inf if meeting is None else meeting - self.step)
        while len(items) < room and not (items and items[-1].epoch_end):
            item = self._held or self._next_batch(self.step + len(items))
            self._held = None
            if items and _shapes(item.batch) != _shapes(items[0].batch):
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
            wanted = f" of {self.span.end}" if self.span.end is not None else ""
            raise DataError(
                f"data ended after {step} steps{wanted}. An iterator can be used up once: pass something that can be "
                "iterated over again, such as fg.ArrayData or a list, or ask for fewer steps"
            )
        return self.program.placed(item)

    def _end_epoch(self) -> None:
        """The epoch that ends at the present step is known, and with it the end of a run counted in epochs."""
        ends, end = (*self.span.epoch_ends, self.step), self.span.end
        if self._epochs is not None:
            length = self.step - (ends[-2] if len(ends) > 1 else self.span.origin)
            end = self.step + max(self._epochs - len(ends), 0) * length
        self.span = replace(self.span, epoch_ends=ends, end=end)

    # --- what is due --------------------------------------------------------------------------------------------

    def _next_due(self, after: int | None = None) -> float:
        """The nearest step at which anything is due by a step rule; sets the flags for it."""
        after = self.step if after is None else after
        nexts = [self._armed[task.name].next_step(after, self.span) for task in self._tasks]
        end = self.span.end if self.span.end is not None and self.span.end > after else None
        target = min((step for step in (*nexts, end) if step is not None), default=math.inf)
        self._due_flags = self.program.flags([step == target for step in nexts])
        self._nothing_due = self.program.flags([False] * len(nexts))
        return target

    def _called(self) -> bool:
        """Whether a clock or a request to stop wants attention, agreed by all processes."""
        now = monotonic()
        wishes = {f"task:{name}" for name, armed in self._armed.items() if (armed.deadline() or math.inf) <= now}
        if self._signals.requested:
            wishes.add(f"stop:{self._signals.requested}")
        if wishes or self._consensus is not LOCAL:
            self._agreed = self._consensus.agree(self.step, frozenset(wishes))
        return bool(self._agreed)

    def _stop_wanted(self) -> bool:
        """Whether training is to stop now, asked between the batches of an evaluation."""
        return any(wish.startswith("stop:") for wish in (self._called() and self._agreed) or ())

    def _due_point(self, only: tuple[str, ...] = ()) -> None:
        """Runs what is due, or `only` what a resumed run still has to do at this step.

        What is due is looked up anew after each action: a stop request makes everything due that waits for the end.
        """
        self.between_steps = True
        self.emitter.flush(wait=True)
        self._called()
        self._stop_on_request()
        self._pending, done, closed = (), set(), False
        while (task := self._first_due(done, only)) is not None:
            done.add(task.name)
            closed = closed or (task.scheduled.phase == "log" and self._close_window())
            try:
                self._perform(task)
            except Interrupted:
                # Everything from here on is done by the run that resumes, so that its records come in the same order.
                self._pending = (task.name, *self._names_due(done, only))
                break
            self._armed[task.name].done(self.step, monotonic())
        self._agreed = frozenset()
        self._stop_on_request()
        self.between_steps = False

    def _stop_on_request(self) -> None:
        for wish in sorted(self._agreed):
            if wish.startswith("stop:"):
                self.stopped = self.stopped or wish.removeprefix("stop:")

    def _first_due(self, done: set[str], only: tuple[str, ...]) -> Task | None:
        return next((task for task in self._tasks if task.name not in done and self._is_due(task, only)), None)

    def _names_due(self, done: set[str], only: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(task.name for task in self._tasks if task.name not in done and self._is_due(task, only))

    def _is_due(self, task: Task, only: tuple[str, ...]) -> bool:
        if only:
            return task.name in only
        by_clock = math.inf if f"task:{task.name}" in self._agreed else -math.inf
        return self._armed[task.name].due(self.step, self.span, by_clock)

    def _perform(self, task: Task) -> None:
        if task.scheduled.action is None:
            return
        with self._accounts.time(task.name), blame(task.plugin, f"action {task.scheduled.name}", self.step):
            answer = task.scheduled.action(self.run)
            if isinstance(answer, Stop):
                self.stopped = self.stopped or answer.reason
                self.span = replace(self.span, end=self.step)
            elif isinstance(answer, Replace):
                check_same_structure(self.state(), answer.state, f"plugin {task.plugin.name!r}, action {task.name},")
                self._flat, self._state = self.program.layout.split(answer.state), None
            elif answer is not None:
                raise PluginError(f"an action returns None, fg.Stop(reason) or fg.Replace(state), not {answer!r}")

    def _close_window(self) -> bool:
        """Ends the metric window at this step and hands its values on as soon as they are computed."""
        step = self.step
        self._flat, values = self.program.close(self._flat)
        self._state = None

        def finish() -> Record | None:
            metrics, health = self.program.closed(values)
            self.program.check_finite(health)
            if metrics is None:
                return None
            self.metrics["train"] = metrics
            return Record("scalars", "train", step, metrics, "exact" if self.engine.exact_log else "telemetry")

        self.emitter.later(list(values), finish)
        return True

    def _check_health(self) -> None:
        self.program.check_finite(self.program.health(self._flat))

    def _announce(self) -> None:
        self.notices = notices = list(self.engine.plugins.notices)
        for task in self._tasks:
            if task.scheduled.phase in ("log", "evaluate") and not is_exact(task.trigger):
                notices.append(f"{task.name} runs by the clock or by process: what it logs is telemetry, not exact")
        for notice in notices:
            self.run.emit("text", "fulgurite", {"notice": notice}, stream="telemetry")


def _shapes(batch: Any) -> Any:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(batch)]
