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

ActionWrapper = Callable[[str, Callable[[Any], Any], Any], Any]
"""`wrapper(name, action, run)` returns what `action(run)` returns."""


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

    def call_action(name: str, action: Callable[[Any], Any], run: Any) -> Any:
        return wrapper(f"action {name}", functools.partial(action, run))

    def wrap(hook: str, method: Callable[..., Any]) -> Callable[..., Any] | None:
        if hook == "register_actions":
            return _wrap_actions(method, call_action, stages)
        return _wrap_hook(hook, method, wrapper) if hook in hooks else None

    return _replace_methods(plugin, wrap)


def watch_actions(plugin: Any, wrapper: ActionWrapper, stages: Collection[str]) -> Any:
    """Return the plugin, with actions that are called by `wrapper` from now on.

    Args:
        plugin: an instance; it is changed as by `watch`.
        wrapper: calls the actions.
        stages: the stages of the actions.
    """

    def wrap(hook: str, method: Callable[..., Any]) -> Callable[..., Any] | None:
        return _wrap_actions(method, wrapper, stages) if hook == "register_actions" else None

    return _replace_methods(plugin, wrap)


def _replace_methods(
    plugin: Any, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any] | None]
) -> Any:
    """Return the plugin, whose class is now a subclass with other implementations of hooks.

    Args:
        plugin: an instance; it is changed.
        wrap: returns what replaces the implementation of a hook, or None to leave it.
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
        wrapped = wrap(hook, method)
        if wrapped is not None:
            members[name] = wrapped
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
    method: Callable[..., Any], wrapper: ActionWrapper, stages: Collection[str]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def register_actions(*args: Any, **kwargs: Any) -> Any:
        actions = []
        for scheduled in method(*args, **kwargs) or ():
            if scheduled.action is not None and scheduled.stage in stages:
                action = functools.partial(wrapper, scheduled.name, scheduled.action)
                actions.append(replace(scheduled, action=action))
            else:
                actions.append(scheduled)
        return actions

    return register_actions
