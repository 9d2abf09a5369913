"""Triggers and actions for your own loop over `Engine.step`."""

import math
from collections.abc import Sequence
from time import monotonic
from typing import Any

from fulgurite._src.fit.actions import ScheduledAction
from fulgurite._src.fit.scheduler import BoundAction, order_actions
from fulgurite._src.plugins.selection import RegisteredPlugin
from fulgurite._src.tracebacks import hide_constructor_frames
from fulgurite._src.triggers import StepRange, TriggerState
from fulgurite.errors import ConfigurationError, error_context


@hide_constructor_frames
class ActionSchedule:
    """Runs actions when their triggers say, in your own loop.

    The triggers mean what they mean in `fit`, and the actions of a step run in the same order: by
    stage, then by `after` and `before`, then as they are listed. An action is any function; it is
    called with what `run` gets. Triggers by steps depend on the step alone, so a loop that resumes
    makes a new schedule; a trigger by the clock starts again.

    Example:
        def report(state, output):
            print(int(state.step), float(output.loss))


        schedule = fg.ActionSchedule(
            [
                fg.ScheduledAction("report", fg.Every(2) | fg.AtEnd(), report),
                fg.ScheduledAction("keep", fg.At(3), lambda state, output: state.step),
            ],
            steps=5,
        )
        engine = fg.Engine(steps=5)
        state = engine.init_state(model, data)
        for step, batch in enumerate(engine.iter_batches(data), 1):
            state, output = engine.step(state, batch)
            results = schedule.run(step, state, output)  # {"keep": ...} at step 3

    Attributes:
        step_range: the steps of the loop.

    Args:
        actions: what to run.
        steps: the step at which the loop ends, for triggers such as `AtEnd`; None if it is unknown.
        start_step: the updates that were made before the loop.
        epoch_ends: the steps at which epochs end, for `EveryEpoch`.
    """

    def __init__(
        self,
        actions: Sequence[ScheduledAction],
        *,
        steps: int | None = None,
        start_step: int = 0,
        epoch_ends: Sequence[int] = (),
    ) -> None:
        self.step_range = StepRange(start_step, steps, tuple(epoch_ends))
        self._actions: list[BoundAction] = []
        self._states: dict[str, TriggerState] = {}
        self.add(*actions)

    def add(self, *actions: ScheduledAction) -> None:
        """Add actions, which run from the next call of `run` on.

        A trigger by the clock starts now.

        Args:
            actions: with names of their own.
        """
        owner = RegisteredPlugin("schedule", self, "the program")
        for action in actions:
            if not isinstance(action, ScheduledAction) or action.action is None:
                raise ConfigurationError(
                    f"ActionSchedule: {action!r} is not an action: give "
                    "fg.ScheduledAction(name, trigger, function)"
                )
        added = [BoundAction(action.name, owner, action) for action in actions]
        # Another list: `run` may be going through this one.
        self._actions = order_actions([*self._actions, *added])
        now = monotonic()
        for action in added:
            self._states[action.name] = TriggerState(action.trigger, self.step_range.start, now)

    def run(self, step: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run the actions that are due at a step, and return what they returned, by name.

        Call it after each update, and once before the first one if an action is due `AtStart`. An
        exception says which action raised it, and at which step.

        Args:
            step: the number of updates so far, counted on the host: to read it from a state would
                wait for the device.
            args: for the actions.
            kwargs: for the actions.
        """
        results = {}
        for action in self._actions:
            state = self._states[action.name]
            now = monotonic() if state.deadline() is not None else -math.inf
            if not state.is_due(step, self.step_range, now):
                continue
            with error_context(lambda name=action.name: f"action {name!r}, step {step}"):
                assert action.scheduled.action is not None
                results[action.name] = action.scheduled.action(*args, **kwargs)
            state.mark_done(step, monotonic())
        return results
