"""A plugin from functions, for what needs ten lines."""

from collections.abc import Callable, Mapping
from typing import Any

from fulgurite._src.fit.actions import Action, ScheduledAction
from fulgurite._src.plugins.markers import hookimpl
from fulgurite._src.plugins.plugin import Plugin
from fulgurite._src.tracebacks import hide_internal_frames
from fulgurite._src.triggers import Trigger
from fulgurite.errors import check_callable, check_name


class LambdaPlugin(Plugin):
    """A plugin from functions: some hooks, and actions at intervals.

    Each object has a class of its own, because hooks are methods of a class.

    Example:
        def print_loss(run):
            print(run.step, run.metrics["train"]["loss"])


        plugin = fg.LambdaPlugin(
            on_fit_start=lambda run: print("begins at", run.step), every={100: print_loss}
        )
        engine = fg.Engine(steps=1000, plugins=[plugin])

    Args:
        name: of the plugin. Two of one name get the numbers of their places.
        every: functions that are called with the run, by interval in steps or by trigger, after
            the records of the step are written. What they return is that of an action.
        hooks: functions by the name of their hook; each takes those of its arguments, by name,
            that it needs.

    Raises:
        ConfigurationError: a hook or an action is not a function.
        PluginError: by the engine: there is no such hook, or it does not give such an argument.
    """

    @hide_internal_frames
    def __new__(
        cls,
        name: str = "lambda",
        *,
        every: Mapping[int | Trigger, Action] | None = None,
        **hooks: Callable[..., Any],
    ) -> "LambdaPlugin":
        check_name(name, "LambdaPlugin: name")
        members: dict[str, Any] = {"plugin_name": name}
        if every:
            actions = [
                ScheduledAction(f"action {number}", trigger, function, "act")
                for number, (trigger, function) in enumerate(every.items(), 1)
            ]
            hooks = {"register_actions": lambda: actions, **hooks}
        for hook, function in hooks.items():
            members[hook] = staticmethod(_mark_hookimpl(hook, function))
        return object.__new__(type(cls.__name__, (cls,), members))


def _mark_hookimpl(hook: str, function: Any) -> Callable[..., Any]:
    check_callable(function, f"LambdaPlugin: {hook}")
    return hookimpl(function)
