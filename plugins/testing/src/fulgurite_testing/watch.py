"""A plugin whose host hooks and actions are called by a function that observes them."""

import functools
import inspect
import types
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

Wrapper = Callable[[str, Callable[[], Any]], Any]
"""`wrapper(name, call)` returns what `call()` returns; `name` is that of a hook, or
`action NAME`."""


def watch(
    plugin: Any, hooks: Collection[str], wrapper: Wrapper, stages: Collection[str] = ()
) -> Any:
    """Return the plugin, with hooks and actions that are called by `wrapper` from now on.

    Its class is replaced by a subclass, so that everything else stays.

    Args:
        plugin: an instance; it is changed.
        hooks: the names of the hooks.
        wrapper: calls them.
        stages: the stages of the actions.
    """
    cls = type(plugin)
    members: dict[str, Any] = {
        "__slots__": (),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if not inspect.isfunction(method) or not hasattr(method, "fulgurite_impl"):
            continue
        hook = getattr(method, "fulgurite_impl")["specname"] or name  # noqa: B009
        if hook in hooks:
            members[name] = _wrap_hook(hook, method, wrapper)
        if hook == "register_actions":
            members[name] = _wrap_actions(method, wrapper, stages)
    subclass = types.new_class(
        cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(members)
    )
    object.__setattr__(plugin, "__class__", subclass)
    return plugin


def _wrap_hook(hook: str, method: Callable[..., Any], wrapper: Wrapper) -> Callable[..., Any]:
    @functools.wraps(method)
    def call_hook(*args: Any, **kwargs: Any) -> Any:
        return wrapper(hook, functools.partial(method, *args, **kwargs))

    return call_hook


def _wrap_actions(
    method: Callable[..., Any], wrapper: Wrapper, stages: Collection[str]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def register_actions(*args: Any, **kwargs: Any) -> Any:
        actions = []
        for scheduled in method(*args, **kwargs) or ():
            if scheduled.action is not None and scheduled.stage in stages:
                action = functools.partial(_call_action, scheduled.name, scheduled.action, wrapper)
                actions.append(replace(scheduled, action=action))
            else:
                actions.append(scheduled)
        return actions

    return register_actions


def _call_action(name: str, action: Callable[[Any], Any], wrapper: Wrapper, run: Any) -> Any:
    return wrapper(f"action {name}", functools.partial(action, run))
