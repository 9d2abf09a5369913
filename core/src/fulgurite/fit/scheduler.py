"""When the tasks of a loop are due: their armed triggers, the clock, and requests to stop, agreed
by all processes."""

import math
from collections.abc import Callable, Sequence
from time import monotonic

import numpy as np

from fulgurite.consensus import LOCAL, ProcessSync
from fulgurite.fit.records import RecordStream
from fulgurite.fit.signals import StopRequests
from fulgurite.fit.tasks import BoundAction
from fulgurite.triggers import StepRange, TriggerState, is_exact


class Scheduler:
    """The triggers of `tasks`, armed at `step`. `flags` makes of a bool for each task the argument
    of a step.

    Attributes:
        due: the flags of the newest step that `next_due` gave.
        nothing_due: those of any other step.
        agreed: what all processes wish, until it is acted on.
    """

    def __init__(
        self,
        tasks: Sequence[BoundAction],
        step: int,
        flags: Callable[[Sequence[bool]], np.ndarray],
        consensus: ProcessSync,
        signals: StopRequests,
    ) -> None:
        self.agreed: frozenset[str] = frozenset()
        self.due = self.nothing_due = flags([False] * len(tasks))
        self._tasks, self._flags, self._consensus, self._signals = tasks, flags, consensus, signals
        self._armed = {task.name: TriggerState(task.trigger, step, monotonic()) for task in tasks}
        self._clocks = {
            name: armed for name, armed in self._armed.items() if armed.deadline() is not None
        }
        self._now = -math.inf

    @property
    def log_stream(self) -> RecordStream:
        """Which stream the metric window belongs to: it is exact if everything that closes it
        is."""
        return (
            "exact"
            if all(is_exact(task.trigger) for task in self._tasks if task.closes_window)
            else "telemetry"
        )

    @property
    def warnings(self) -> list[str]:
        """What is not exact though it logs or evaluates."""
        return [
            f"{task.name} runs by the clock or by process: what it logs is telemetry, not exact"
            for task in self._tasks
            if task.scheduled.stage in ("log", "evaluate") and not is_exact(task.trigger)
        ]

    def next_due(self, after: int, span: StepRange) -> float:
        """The nearest step later than `after` at which anything is due by a step rule; sets the
        flags for it."""
        nexts = [self._armed[task.name].next_step(after, span) for task in self._tasks]
        end = span.stop if span.stop is not None and span.stop > after else None
        target = min((step for step in (*nexts, end) if step is not None), default=math.inf)
        self.due = self._flags([step == target for step in nexts])
        return target

    def poll_requests(self, step: int) -> bool:
        """Whether a clock or a request to stop wants attention, agreed by all processes."""
        if not self._clocks and self._signals.requested is None and self._consensus is LOCAL:
            return False
        self._now = monotonic()
        wishes = {
            f"task:{name}"
            for name, armed in self._clocks.items()
            if (armed.deadline() or math.inf) <= self._now
        }
        if self._signals.requested:
            wishes.add(f"stop:{self._signals.requested}")
        # What was agreed on holds until it is acted on, however often an evaluation asks in
        # between.
        self.agreed |= self._consensus.reduce_requests(step, frozenset(wishes))
        return bool(self.agreed)

    @property
    def should_stop_soon(self) -> bool:
        """Whether the next dispatch need not be filled: this process is to stop, and there is no
        other one."""
        return self._signals.requested is not None and self._consensus is LOCAL

    @property
    def stop_reasons(self) -> list[str]:
        """Why to stop, as agreed."""
        return sorted(
            wish.removeprefix("stop:") for wish in self.agreed if wish.startswith("stop:")
        )

    def is_due(self, task: BoundAction, step: int, span: StepRange) -> bool:
        """Whether a task runs at `step`, by its step rule or by what was agreed on."""
        armed, now = self._armed[task.name], -math.inf
        if f"task:{task.name}" in self.agreed:
            # Where processes agreed, the clock of this one may be a little late.
            now = max(self._now, armed.deadline() or self._now)
        return armed.is_due(step, span, now)

    def mark_done(self, task: BoundAction, step: int) -> None:
        """Notes that a task ran at `step`; its clock starts again."""
        self._armed[task.name].mark_done(step, monotonic())
