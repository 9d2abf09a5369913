"""The order of plugins and of their actions: topological by `before`, `after`, `requires`, ties by
registration."""

from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from typing import Protocol, TypeVar

from fulgurite.errors import PluginError, did_you_mean


class Orderable(Protocol):
    """A plugin or an action, as far as its order goes."""

    @property
    def name(self) -> str:
        """Its name, unique among those to order."""
        ...

    @property
    def aliases(self) -> set[str]:
        """What others may call it."""
        ...

    @property
    def order(self) -> dict[str, tuple[str, ...]]:
        """The names in its `requires`, `after` and `before`."""
        ...


T = TypeVar("T", bound=Orderable)


def sort_topologically(items: Iterable[T], what: str = "plugin") -> list[T]:
    """Return the plugins (or actions), each after those that it names in `after` and `requires` and
    before those in `before`.

    Names are plugin names, with or without instance, or capabilities that plugins provide; `*`
    stands for all others.
    `requires` must be met by an active plugin; `after` and `before` say nothing about plugins that
    are not active.

    Args:
        items: in the order of registration, which decides ties.
        what: what they are, for errors.

    Raises:
        PluginError: a cycle, which it names, or a requirement that is not met.
    """
    items = list(items)
    predecessors: dict[str, set[str]] = {item.name: set() for item in items}
    for item in items:
        others = [other for other in items if other is not item]
        _check_requirements(item, others, what)
        for other in others:
            if {*other.aliases, "*"} & {*item.order["after"], *item.order["requires"]}:
                predecessors[item.name].add(other.name)
            if {*other.aliases, "*"} & {*item.order["before"]}:
                predecessors[other.name].add(item.name)
    sorter = TopologicalSorter(predecessors)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = " -> ".join(reversed(error.args[1]))
        raise PluginError(
            f"{what}s cannot be ordered, each wants to come before the next: {cycle}. "
            "Change `before` or `after` of one of them"
        ) from error
    by_name = {item.name: item for item in items}
    registration_order = list(by_name)
    ready: list[str] = []
    result = []
    while sorter.is_active():
        ready += sorter.get_ready()
        first = min(ready, key=registration_order.index)
        ready.remove(first)
        result.append(by_name[first])
        sorter.done(first)
    return result


def _check_requirements(item: Orderable, others: list[T], what: str) -> None:
    names = set().union(*(other.aliases for other in others))
    for requirement in item.order["requires"]:
        if requirement not in names:
            raise PluginError(
                f"{what} {item.name!r} requires {requirement!r}, but no active {what} has or "
                f"provides that name. {did_you_mean(requirement, names)}"
            )
