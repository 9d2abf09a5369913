"""The order of plugins and of their actions: topological by `before`, `after`, `requires`, ties by
registration."""

from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, TypeVar

from fulgurite.errors import PluginError, did_you_mean

if TYPE_CHECKING:
    from fulgurite.fit.scheduler import BoundAction
    from fulgurite.plugins.manager import RegisteredPlugin

T = TypeVar("T", "RegisteredPlugin", "BoundAction")


def sort_topologically(plugins: Iterable[T], what: str = "plugin") -> list[T]:
    """The plugins (or actions), each after those that it names in `after` and `requires` and before
    those in `before`.

    Names are plugin names, with or without instance, or capabilities that plugins provide.
    `requires` must be met by an active plugin; `after` and `before` say nothing about plugins that
    are not active. A cycle is an error that names it.
    """
    plugins = list(plugins)
    earlier: dict[str, set[str]] = {plugin.name: set() for plugin in plugins}
    for plugin in plugins:
        others = [other for other in plugins if other is not plugin]
        for need in plugin.order["requires"]:
            if not any(need in other.aliases for other in others):
                hint = did_you_mean(need, set().union(*(other.aliases for other in others)))
                gap = f"{what} {plugin.name!r} requires {need!r}, but no active {what} has or provides that name"
                raise PluginError(f"{gap}. {hint}")
        for other in others:
            if other.aliases & {*plugin.order["after"], *plugin.order["requires"]}:
                earlier[plugin.name].add(other.name)
            if other.aliases & {*plugin.order["before"]}:
                earlier[other.name].add(plugin.name)
    sorter = TopologicalSorter(earlier)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = f"each wants to come before the next: {' -> '.join(reversed(error.args[1]))}"
        raise PluginError(
            f"{what}s cannot be ordered, {cycle}. Change `before` or `after` of one of them"
        ) from error
    by_name, waiting, result = {plugin.name: plugin for plugin in plugins}, [], []
    while sorter.is_active():
        waiting += sorter.get_ready()
        first = min(waiting, key=list(by_name).index)
        waiting.remove(first)
        result.append(by_name[first])
        sorter.done(first)
    return result
