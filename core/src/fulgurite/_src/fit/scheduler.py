"""Which actions are due when: their triggers, the clock, and requests to stop, agreed by all
processes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any

import numpy as np

from fulgurite._src.fit.actions import STAGES, ActionStage, ScheduledAction
from fulgurite._src.fit.records import RecordStream
from fulgurite._src.fit.signals import StopRequests
from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.plugins.ordering import sort_topologically
from fulgurite._src.plugins.selection import RegisteredPlugin
from fulgurite._src.sharding import SINGLE_PROCESS, ProcessSync
from fulgurite._src.triggers import (
    EvenlySpaced,
    EveryEpoch,
    StepRange,
    Trigger,
    TriggerState,
    as_trigger,
    is_exact,
)
from fulgurite.errors import ConfigurationError, PluginError, did_you_mean

_OBSERVED_STEPS = 256
"""How many steps are looked at to know how often anything is due."""


@dataclass(frozen=True, eq=False)
class BoundAction:
    """A scheduled action with its owner.

    Example:
        for action in engine.actions:
            print(action.name, action.scheduled.trigger)

    Attributes:
        name: its full name, `PLUGIN.NAME`; the engine's own are `log` and `epoch_end`.
        plugin: who scheduled it.
        scheduled: what was scheduled.
        is_engine_action: whether it belongs to the engine and not to a plugin: it is not blamed or
            timed.
    """

    name: str
    plugin: RegisteredPlugin
    scheduled: ScheduledAction
    is_engine_action: bool = False

    @property
    def aliases(self) -> set[str]:
        """What `after` and `before` may call it."""
        return {self.name, self.scheduled.name}

    @property
    def order(self) -> dict[str, tuple[str, ...]]:
        """What it says of others."""
        return {"requires": (), "after": self.scheduled.after, "before": self.scheduled.before}

    @property
    def stage(self) -> ActionStage:
        """When it runs among the actions of one step."""
        return self.scheduled.stage

    @property
    def trigger(self) -> Trigger:
        """When it runs."""
        trigger = self.scheduled.trigger
        if isinstance(trigger, str):
            raise ConfigurationError(
                f"action {self.name!r} runs with the action {trigger!r}, which only an engine "
                "knows: give it a trigger"
            )
        return as_trigger(trigger)

    @property
    def closes_window(self) -> bool:
        """Whether it ends the metric window."""
        return self.stage == "log"


def collect_actions(plugins: PluginManager, log_trigger: Trigger | None) -> list[BoundAction]:
    """Return all actions: by stage and, within one, by `after` and `before`, ties by plugin.

    The engine's own are in the list of pending actions too, so a checkpoint may hold their names.

    Args:
        plugins: those of the engine.
        log_trigger: when the engine itself closes the metric window; None for never.
    """
    owner = RegisteredPlugin("fulgurite", plugins, "core")
    actions = []
    if log_trigger is not None:
        scheduled = ScheduledAction("log", log_trigger, None, "log")
        actions.append(BoundAction("log", owner, scheduled, is_engine_action=True))
    for plugin, plugin_actions in plugins.hooks.register_actions.call(log_trigger=log_trigger):
        for scheduled in plugin_actions or ():
            actions.append(BoundAction(f"{plugin.name}.{scheduled.name}", plugin, scheduled))
    # The last of its stage, unless an action asks to come after it: a checkpoint of the same step
    # holds what it did.
    scheduled = ScheduledAction("epoch_end", EveryEpoch(), partial(_call_on_epoch_end, plugins))
    actions.append(BoundAction("epoch_end", owner, scheduled, is_engine_action=True))
    return order_actions(_resolve_triggers(actions))


def _call_on_epoch_end(plugins: PluginManager, run: Any) -> None:
    epoch = len(run.step_range.epoch_ends) - 1
    plugins.hooks.on_epoch_end.call(run.step, run=run, epoch=epoch)


def _resolve_triggers(actions: Sequence[BoundAction]) -> list[BoundAction]:
    """Return actions of which those that run with another one have its trigger.

    Raises:
        ConfigurationError: there is no such action, or it runs with another one itself.
    """
    triggers = {
        action.name: action.scheduled.trigger
        for action in actions
        if not isinstance(action.scheduled.trigger, str)
    }
    resolved = []
    for action in actions:
        leader = action.scheduled.trigger
        if isinstance(leader, str):
            if leader not in triggers:
                raise ConfigurationError(
                    f"action {action.name!r} runs with the action {leader!r}, and no plugin "
                    f"schedules that one. {did_you_mean(leader, triggers)}"
                )
            action = replace(action, scheduled=replace(action.scheduled, trigger=triggers[leader]))
        resolved.append(action)
    return resolved


def order_actions(actions: Sequence[BoundAction]) -> list[BoundAction]:
    """Return actions by stage and, within one, by `after` and `before`, ties as they come.

    Raises:
        PluginError: two have the same name.
    """
    names = [action.name for action in actions]
    for name in names:
        if names.count(name) > 1:
            raise PluginError(
                f"two scheduled actions are called {name!r}; give each a name of its own"
            )
    ordered = []
    for stage in STAGES:
        of_stage = [action for action in actions if action.stage == stage]
        ordered += sort_topologically(of_stage, "action")
    return ordered


def find_interval(actions: Sequence[BoundAction], step: int, start: int) -> float:
    """Return the mean number of steps from one at which anything is due by a step rule to the
    next, near the beginning of a fit; the fit's end does not count, and neither do ends of epochs.

    Args:
        actions: of the engine.
        step: at which this process begins.
        start: at which the fit began.
    """
    without_end = StepRange(start)
    due_steps: set[int] = set()
    for action in actions:
        trigger = TriggerState(action.trigger, step, 0.0)
        due_step = trigger.next_step(start, without_end)
        while due_step is not None and due_step <= start + _OBSERVED_STEPS:
            due_steps.add(due_step)
            due_step = trigger.next_step(due_step, without_end)
        if 2 * len(due_steps) > _OBSERVED_STEPS:
            return 1.0
    return _OBSERVED_STEPS / len(due_steps) if due_steps else math.inf


class Scheduler:
    """The triggers of a fit's actions, from its first step on.

    Attributes:
        due_flags: what is due at the newest step that `next_due` gave, in the order of `due_names`.
        nothing_due: the flags of any other step.
        agreed: what all processes request, until it is acted on.

    Args:
        actions: in the order in which they run.
        step: the step at which the fit begins.
        due_names: the order of the flags that a step receives.
        sync: how several processes agree.
        signals: the signals that were received.
    """

    def __init__(
        self,
        actions: Sequence[BoundAction],
        step: int,
        due_names: Sequence[str],
        sync: ProcessSync,
        signals: StopRequests,
    ) -> None:
        self.agreed: frozenset[str] = frozenset()
        self._actions = list(actions)
        self._closing_names = {action.name for action in actions if action.closes_window}
        self._due_names = list(due_names)
        self._sync = sync
        self._signals = signals
        now = monotonic()
        self._states = {
            action.name: TriggerState(action.trigger, step, now) for action in self._actions
        }
        self._clocks = {
            name: state for name, state in self._states.items() if state.deadline() is not None
        }
        self._now = -math.inf
        self._unevenly_spaced: set[str] = set()
        self.nothing_due = self._make_flags(set())
        self.due_flags = self.nothing_due

    @property
    def log_stream(self) -> RecordStream:
        """The record stream of the metric window: exact if all triggers that close it are exact."""
        closing = [action for action in self._actions if action.closes_window]
        return "exact" if all(is_exact(action.trigger) for action in closing) else "telemetry"

    @property
    def warnings(self) -> list[str]:
        """Messages about actions that log or evaluate and are not exact."""
        return [
            f"{action.name} runs by the clock or by process: what it logs is telemetry, not exact"
            for action in self._actions
            if action.stage in ("log", "evaluate") and not is_exact(action.trigger)
        ]

    def describe_uneven_spacing(
        self, step: int, expected: StepRange, actual: StepRange
    ) -> list[str]:
        """Return a sentence about each action that is spaced evenly over a fit whose end has moved,
        and that by the new end would have run at other steps so far. It is told once of an action.

        Args:
            step: the present one, at which no action has run yet.
            expected: the step range so far.
            actual: the step range from now on.
        """
        if actual.stop == expected.stop:
            return []
        was = "was not known before the first epoch had ended"
        if expected.stop is not None:
            was = f"was expected at step {expected.stop} until an epoch had another length"
        sentences = []
        for name, (trigger, steps) in self._find_uneven_spacing(step, expected, actual).items():
            times = "once more" if len(steps) == 1 else f"{len(steps)} more times"
            sentences.append(
                f"{trigger!r} of {name} is not even over this fit, whose end {was}. It is step "
                f"{actual.stop} now; if it stays there, the action runs {times}, next at step "
                f"{steps[0]}. Give steps= for an end that is known"
            )
        return sentences

    def _find_uneven_spacing(
        self, step: int, expected: StepRange, actual: StepRange
    ) -> dict[str, tuple[EvenlySpaced, list[int]]]:
        """Return the actions that `describe_uneven_spacing` reports: by name their trigger, and
        the steps at which they run from now on."""
        uneven = {}
        for action in self._actions:
            for part in getattr(action.trigger, "parts", (action.trigger,)):
                if not isinstance(part, EvenlySpaced) or action.name in self._unevenly_spaced:
                    continue
                past = _list_steps(part, expected, expected.start, step - 1)
                if past != _list_steps(part, actual, actual.start, step - 1):
                    following = _list_steps(part, actual, step - 1, actual.stop or step)
                    uneven[action.name] = part, following
        self._unevenly_spaced |= uneven.keys()
        return uneven

    @property
    def should_stop_soon(self) -> bool:
        """Whether the next dispatch need not be full: this process is to stop, and it is alone."""
        return self._signals.requested is not None and self._sync is SINGLE_PROCESS

    @property
    def stop_reasons(self) -> list[str]:
        """The reasons to stop that all processes have agreed on."""
        stops = [request for request in self.agreed if request.startswith("stop:")]
        return sorted(stop.removeprefix("stop:") for stop in stops)

    def next_due(self, after: int, step_range: StepRange) -> float:
        """Return the nearest step later than `after` at which anything is due by a step rule, or
        infinity; set the flags for it.

        Args:
            after: a step.
            step_range: of the fit.
        """
        next_steps = {
            name: state.next_step(after, step_range) for name, state in self._states.items()
        }
        candidates = [step for step in next_steps.values() if step is not None]
        if step_range.stop is not None and step_range.stop > after:
            candidates.append(step_range.stop)
        target = min(candidates, default=math.inf)
        self.due_flags = self._make_flags(
            {name for name, step in next_steps.items() if step == target}
        )
        return target

    def poll_requests(self, step: int) -> bool:
        """Return whether a clock or a request to stop is due at `step`, agreed by all processes."""
        if not self._clocks and self._signals.requested is None and self._sync is SINGLE_PROCESS:
            return False
        self._now = monotonic()
        requests = {
            f"action:{name}"
            for name, state in self._clocks.items()
            if (state.deadline() or math.inf) <= self._now
        }
        if self._signals.requested:
            requests.add(f"stop:{self._signals.requested}")
        # What was agreed on holds until it is acted on, however often an evaluation asks in
        # between.
        self.agreed |= self._sync.reduce_requests(step, frozenset(requests))
        return bool(self.agreed)

    def forget_requests(self) -> None:
        """Clear the requests that were agreed on, after acting on them."""
        self.agreed = frozenset()

    def is_due(self, action: BoundAction, step: int, step_range: StepRange) -> bool:
        """Return whether an action runs at `step`, by its step rule or by an agreed request.

        Args:
            action: the action.
            step: the number of completed updates.
            step_range: of the fit.
        """
        state = self._states[action.name]
        now = -math.inf
        if f"action:{action.name}" in self.agreed:
            # Where processes agreed, the clock of this one may be a little late.
            now = max(self._now, state.deadline() or self._now)
        return state.is_due(step, step_range, now)

    def list_newly_due(self, step: int, before: StepRange, now: StepRange) -> list[str]:
        """Return the names of the actions that are due at a step in one range and not in another.

        Args:
            step: the number of completed updates.
            before: the range in which they were not due.
            now: the range in which they are.
        """
        return [
            action.name
            for action in self._actions
            if action.trigger.next(step - 1, now) == step
            and action.trigger.next(step - 1, before) != step
        ]

    def mark_done(self, action: BoundAction, step: int) -> None:
        """Note that an action ran at `step`; its clock starts again."""
        self._states[action.name].mark_done(step, monotonic())

    def _make_flags(self, due: set[str]) -> np.ndarray:
        """Return the flags of a step after which the actions `due` run; `log` says whether anything
        closes the metric window."""
        flags = [name in due for name in self._due_names]
        flags[self._due_names.index("log")] = bool(due & self._closing_names)
        return np.asarray(flags)


def _list_steps(trigger: Trigger, step_range: StepRange, after: int, last: int) -> list[int]:
    """Return the steps of a trigger in a range, later than `after` and up to `last`."""
    steps = []
    step = trigger.next(after, step_range)
    while step is not None and step <= last:
        steps.append(step)
        step = trigger.next(step, step_range)
    return steps
