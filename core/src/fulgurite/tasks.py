"""The scheduled actions of an engine, in the order in which they run at one step."""

from dataclasses import dataclass

from fulgurite.errors import PluginError
from fulgurite.ordering import ordered
from fulgurite.plugins import PluginManager, Registered
from fulgurite.run import PHASES, Scheduled
from fulgurite.triggers import Trigger, as_trigger


@dataclass(frozen=True, eq=False)
class Task:
    """A scheduled action with its owner, under its full name `PLUGIN.NAME`; the engine's own is `log`."""

    name: str
    plugin: Registered
    scheduled: Scheduled

    @property
    def known_as(self) -> set[str]:
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
        return self.scheduled.phase == "log"


def collect(plugins: PluginManager, log: Trigger | None) -> list[Task]:
    """All tasks, by phase and, within one, by `after` and `before`, ties by plugin; `log` is the engine's own
    trigger."""
    owner = Registered("fulgurite", plugins, "core")
    found = [Task("log", owner, Scheduled("log", log, None, "log"))] if log is not None else []
    found += [Task(f"{plugin.name}.{one.name}", plugin, one) for plugin, one in plugins.listed("schedule", Scheduled)]
    names = [task.name for task in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise PluginError(f"two scheduled actions are called {twice[0]!r}; give each a name of its own")
    phases = ([task for task in found if task.scheduled.phase == phase] for phase in PHASES)
    return [task for tasks in phases for task in ordered(tasks, "action")]
