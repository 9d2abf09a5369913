"""Plugins that look at a fit whose steps are executed again."""

from collections.abc import Callable

import fulgurite as fg

from fulgurite_replay.digests import schedule_digest

Observe = Callable[[fg.Run], None]
"""Looks at a running fit between two steps."""


class StoppedError(Exception):
    """Ends a fit at the step up to which it is observed. A request to stop would be heard one step
    later, and `StopTraining` would run what waits for the end of training."""


class Observer(fg.Plugin):
    """Looks at a fit at some steps, after all that is done there, and stops it at the last of them.

    Example:
        from fulgurite_replay import Observer

        observer = Observer({5: lambda run: print(run.state.module.linear.bias)})
        fg.Engine(steps=10, plugins=[observer]).fit(model, data)

    Args:
        observe_at: what is called, by step.
        stop: where the fit ends; by default it continues to its own end.
        saves: whether the state is saved there.
        look_at: what is called, by step, when `StateDigest` would digest the state.
    """

    plugin_name = "replay_observer"

    def __init__(
        self,
        observe_at: dict[int, Observe],
        stop: int | None = None,
        *,
        saves: bool = False,
        look_at: dict[int, Observe] | None = None,
    ) -> None:
        self.observe_at = observe_at
        self.look_at = look_at or {}
        self.stop = stop
        self.saves = saves
        self.records: list[fg.Record] = []

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Observe last, where the state is as the next step gets it."""
        steps = {*self.observe_at, *([] if self.stop is None else [self.stop])} - {0}
        if not steps:
            return []
        return [fg.ScheduledAction("observe", fg.At(*sorted(steps)), self._observe, stage="save")]

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Observe the step that the fit begins with: no action is due there."""
        self._observe(run)

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        """Keep the records that the run must have, too."""
        if record.stream == "exact":
            self.records.append(record)

    def make_part(self, stop: int) -> "Observer":
        """Return an observer of the steps up to one, which saves there. What is observed there is
        left to who continues from it. It keeps its records with those of this one."""
        before = {step: observe for step, observe in self.observe_at.items() if step < stop}
        part = Observer(before, stop, saves=True, look_at=self.look_at)
        part.records = self.records
        return part

    def _observe(self, run: fg.Run) -> None:
        observe = self.observe_at.get(run.step)
        if observe is not None:
            observe(run)
        if run.step != self.stop or run.step == run.step_range.stop:
            return  # at its own end a fit ends, and saves, by itself
        if self.saves:
            run.save()
        raise StoppedError


class Looker(fg.Plugin):
    """Looks at states in the place of the plugin that digests them, among all that may change them.

    Args:
        look_at: what is called, by step.
    """

    plugin_name = "replay_looker"

    def __init__(self, look_at: dict[int, Observe]) -> None:
        self._look_at = look_at

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Look when states are digested."""
        if not self._look_at:
            return []
        return [schedule_digest("look", fg.At(*sorted(self._look_at)), self._look)]

    def _look(self, run: fg.Run) -> None:
        self._look_at[run.step](run)
