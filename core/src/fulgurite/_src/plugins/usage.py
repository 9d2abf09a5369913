"""An instance of a plugin serves one fit at a time, and what it keeps for that fit begins with it.

Both follow from one context, which encloses everything that calls the hooks of a fit: it marks the
instances as in use, and drops what an earlier fit has left in them, whether that one ended, failed,
or failed to start.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar, overload

from fulgurite._src.identity import ByIdentity
from fulgurite._src.plugins.selection import RegisteredPlugin
from fulgurite.errors import PluginError

T = TypeVar("T")


class PerFit(Generic[T]):
    """An attribute of a plugin that begins afresh with each fit, before any hook of it is called.

    It holds what the plugin keeps on the host while it trains: counts, open files, threads. Nothing
    of an earlier fit is left in it, nor of one that could not start. After a fit it stays as it is
    until the next one begins. A plugin that is a frozen dataclass sets it by `object.__setattr__`,
    or holds a mutable object in it.

    Example:
        class CountEpochs:
            count = fg.PerFit(int)

            @fg.hookimpl
            def on_epoch_end(self):
                self.count += 1


        counter = CountEpochs()
        for seed in range(2):
            fg.Engine(epochs=3, seed=seed, plugins=[counter]).fit(model, data)
            print(counter.count)  # 3, twice

    Args:
        make: returns the value at the beginning of a fit; it is called at the first use.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, plugin: None, owner: type) -> Self: ...

    @overload
    def __get__(self, plugin: object, owner: type) -> T: ...

    def __get__(self, plugin: object | None, owner: type) -> Self | T:
        if plugin is None:
            return self
        values = vars(plugin)
        if self._name not in values:
            # Several threads of a plugin get the same object.
            values.setdefault(self._name, self._make())
        return values[self._name]

    def __set__(self, plugin: object, value: T) -> None:
        vars(plugin)[self._name] = value

    def drop(self, plugin: object) -> None:
        """Forget the value of a plugin."""
        vars(plugin).pop(self._name, None)


@dataclass(frozen=True, eq=False)
class _User:
    """What uses plugins at the moment.

    Attributes:
        what: it is, such as `the fit of 100 steps`.
        run_dir: of its engine.
        thread: the name of the thread that it runs in.
    """

    what: str
    run_dir: object
    thread: str

    def __str__(self) -> str:
        place = "no run_dir" if self.run_dir is None else f"run_dir {str(self.run_dir)!r}"
        return f"{self.what} ({place}, thread {self.thread!r})"


_users: dict[ByIdentity, _User] = {}
"""By the identity of an engine's plugin manager or of a plugin, which may be equal to others and
need not be hashable."""
_lock = threading.Lock()


@contextmanager
def reserve(
    manager: Any,
    plugins: Mapping[str, RegisteredPlugin],
    what: str,
    run_dir: object,
) -> Iterator[None]:
    """Mark an engine and its plugins as in use, each with nothing left of an earlier fit.

    Args:
        manager: of the engine, for which it stands.
        plugins: its plugins by name.
        what: what uses them, such as `the fit of 100 steps`.
        run_dir: of the engine.

    Raises:
        PluginError: something else uses the engine or one of the plugins.
    """
    user = _User(what, run_dir, threading.current_thread().name)
    try:
        with _lock:
            _check_unused(manager, plugins, user)
            _users[ByIdentity(manager)] = user
            for entry in plugins.values():
                _users[ByIdentity(entry.plugin)] = user
        for entry in plugins.values():
            _drop_fit_state(entry.plugin)
        yield
    finally:
        with _lock:
            for key in [key for key, other in _users.items() if other is user]:
                del _users[key]


def _check_unused(manager: Any, plugins: Mapping[str, RegisteredPlugin], user: _User) -> None:
    other = _users.get(ByIdentity(manager))
    if other is not None:
        raise PluginError(
            f"the engine is in use by {other}, so {user} cannot use it at the same time: their "
            "records and what its plugins hold would mix. Build another engine, with plugins of "
            "its own"
        )
    for name, entry in plugins.items():
        other = _users.get(ByIdentity(entry.plugin))
        if other is not None:
            raise PluginError(
                f"plugin {name!r} ({entry.distribution}): this instance is in use by {other}, so "
                f"{user} cannot use it at the same time: what it holds would mix. Give each engine "
                f"an instance of its own, {type(entry.plugin).__name__}(...)"
            )


def check_fit_state(plugin: Any) -> None:
    """Raise `PluginError` if a plugin has per-fit attributes and no place to keep them."""
    has_attributes = any(True for _ in _iter_fit_attributes(plugin))
    if has_attributes and not hasattr(plugin, "__dict__"):
        raise PluginError(
            f"{type(plugin).__name__} has an fg.PerFit, and __slots__ in the place of a "
            "dictionary of attributes: leave out slots=True, or derive it from fg.Plugin"
        )


def _drop_fit_state(plugin: Any) -> None:
    for attribute in _iter_fit_attributes(plugin):
        attribute.drop(plugin)


def _iter_fit_attributes(plugin: Any) -> Iterator[PerFit[Any]]:
    for plugin_class in type(plugin).__mro__:
        for attribute in vars(plugin_class).values():
            if isinstance(attribute, PerFit):
                yield attribute
