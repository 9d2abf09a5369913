"""The scheduled actions of an engine, in the order in which they run at one step."""

from dataclasses import dataclass

from fulgurite.errors import PluginError
from fulgurite.fit.run import STAGES, ScheduledAction
from fulgurite.plugins.manager import PluginManager, RegisteredPlugin
from fulgurite.plugins.ordering import sort_topologically
from fulgurite.triggers import Trigger, as_trigger


@dataclass(frozen=True, eq=False)
class BoundAction:
    """A scheduled action with its owner, under its full name `PLUGIN.NAME`; the engine's own is
    `log`."""

    name: str
    plugin: RegisteredPlugin
    scheduled: ScheduledAction

    @property
    def aliases(self) -> set[str]:
        """What `after` and `before` may call it."""
        return {self.name, self.scheduled.name}

    @property
    def order(self) -> dict[str, tuple[str, ...]]:
        """What it says of others."""
        return {"requires": (), "after": self.scheduled.after, "before": self.scheduled.before}

    @property
    def trigger(self) -> Trigger:
        """When it runs."""
        return as_trigger(self.scheduled.trigger)

    @property
    def closes_window(self) -> bool:
        """Whether it ends the metric window."""
        return self.scheduled.stage == "log"


def collect_actions(plugins: PluginManager, log: Trigger | None) -> list[BoundAction]:
    """All tasks, by phase and, within one, by `after` and `before`, ties by plugin; `log` is the
    engine's own trigger."""
    owner = RegisteredPlugin("fulgurite", plugins, "core")
    found = (
        [BoundAction("log", owner, ScheduledAction("log", log, None, "log"))]
        if log is not None
        else []
    )
    found += [
        BoundAction(f"{plugin.name}.{one.name}", plugin, one)
        for plugin, one in plugins.collect_list("register_actions", ScheduledAction)
    ]
    names = [task.name for task in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise PluginError(
            f"two scheduled actions are called {twice[0]!r}; give each a name of its own"
        )
    phases = ([task for task in found if task.scheduled.stage == phase] for phase in STAGES)
    return [task for tasks in phases for task in sort_topologically(tasks, "action")]
