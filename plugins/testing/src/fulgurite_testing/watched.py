"""A plugin whose host hooks and actions run inside of something that watches them."""

import functools
import inspect
import types
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

Around = Callable[[str, Callable[[], Any]], Any]
"""`around(name, call)` gives what `call()` gives; `name` is that of a hook, or `action NAME`."""


def watch(plugin: Any, hooks: Collection[str], around: Around, phases: Collection[str] = ()) -> Any:
    """`plugin`, whose implementations of `hooks`, and whose actions of `phases`, are called by
    `around` from now on.

    Its class becomes a subclass of what it was, so that everything else of it stays.
    """
    cls = type(plugin)
    members = {name: inspect.getattr_static(cls, name) for name in dir(cls)}
    marked = {
        name: (getattr(member, "fulgurite_impl")["specname"] or name, member)  # noqa: B009
        for name, member in members.items()
        if inspect.isfunction(member) and hasattr(member, "fulgurite_impl")
    }
    wrapped = {
        name: _around(hook, method, around)
        for name, (hook, method) in marked.items()
        if hook in hooks
    }
    for name, (hook, method) in marked.items():
        if hook == "register_actions":
            wrapped[name] = _scheduled(method, around, phases)
    members = {
        "__slots__": (),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        **wrapped,
    }
    object.__setattr__(
        plugin,
        "__class__",
        types.new_class(cls.__name__, (cls,), exec_body=lambda space: space.update(members)),
    )
    return plugin


def _around(hook: str, method: Callable[..., Any], around: Around) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*given: Any, **named: Any) -> Any:
        return around(hook, functools.partial(method, *given, **named))

    return call


def _scheduled(
    method: Callable[..., Any], around: Around, phases: Collection[str]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def schedule(*given: Any, **named: Any) -> Any:
        return [
            replace(one, action=functools.partial(_act, one.name, one.action, around))
            if one.action is not None and one.stage in phases
            else one
            for one in method(*given, **named) or ()
        ]

    return schedule


def _act(name: str, action: Callable[[Any], Any], around: Around, run: Any) -> Any:
    return around(f"action {name}", functools.partial(action, run))
