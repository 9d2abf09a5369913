"""The plugins of one engine: selected, registered, ordered, called and blamed."""

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions, version
from types import MappingProxyType
from typing import Any

import pluggy

from fulgurite import discovery, hooks
from fulgurite.accounts import Accounts
from fulgurite.errors import ConfigurationError, FulguriteError, PluginError, did_you_mean
from fulgurite.ordering import ordered

AUTOLOAD_KINDS = {"event", "sink"}
AUTOLOAD_EXCEPTION = "rng"


@dataclass(frozen=True, eq=False)
class Registered:
    """A plugin under its name, the key of its state, streams, accounts and manifest entry.

    pluggy compares plugins by `==` and trips over dataclasses that hold arrays; this stands for one by identity.
    """

    name: str
    plugin: Any
    rule: str
    order: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @functools.cached_property
    def distribution(self) -> str:
        """Name and version of the distribution that brought the plugin's class."""
        package = type(self.plugin).__module__.partition(".")[0]
        names = packages_distributions().get(package)
        return f"{names[0]} {version(names[0])}" if names else f"module {type(self.plugin).__module__}"

    @property
    def known_as(self) -> set[str]:
        """What `after`, `before`, `requires` and `-name` may call it."""
        return {self.name, self.name.partition(":")[0], *self.order.get("provides", ())}


@dataclass(frozen=True)
class Implementation:
    """One plugin's implementation of one hook: called with keyword arguments, of which it takes what it names."""

    plugin: Registered
    hook: str
    function: Callable[..., Any]
    takes: tuple[str, ...]

    def __call__(self, step: int | None = None, **arguments: Any) -> Any:
        with blame(self.plugin, f"hook {self.hook}", step):
            return self.function(**{name: arguments[name] for name in self.takes})


class PluginManager:
    """Selects, registers and orders plugins at construction; every mistake is an error there.

    Arguments:
        plugins: instances, names of installed plugins (`"wandb"`), a name with its arguments (`{"wandb": {...}}`), and
            names to leave out (`"-progress"`).
        autoload: whether installed plugins that ask for it are active without being named.
    """

    def __init__(self, plugins: Iterable[Any] = (), *, autoload: bool = True) -> None:
        self.accounts = Accounts()
        self.notices: list[str] = []
        self._pluggy = pluggy.PluginManager(hooks.PROJECT)
        self._kinds: dict[str, str] = {}
        self.add_hookspecs(hooks)
        chosen = self._select(list(plugins), autoload)
        for registered in chosen:
            if specs := getattr(type(registered.plugin), "hookspecs", None):
                self.add_hookspecs(specs)
        for registered in chosen:
            self._register(registered)
        self.plugins = MappingProxyType({one.name: one for one in ordered(chosen)})
        self._implementations = {name: self._sorted(name) for name in self._kinds}

    def add_hookspecs(self, namespace: Any) -> None:
        """Adds the hooks that `namespace` (a module or class) specifies; call those by `implementations(name)`.

        A plugin brings its own specifications in the class attribute `hookspecs`.
        """
        self._pluggy.add_hookspecs(namespace)
        for name in dir(namespace):
            if hasattr(function := getattr(namespace, name), f"{hooks.PROJECT}_spec"):
                self._kinds[name] = getattr(function, "fulgurite_kind", "event")

    @property
    def kinds(self) -> dict[str, str]:
        """Every hook there is and its kind."""
        return dict(self._kinds)

    def implementations(self, hook: str) -> tuple[Implementation, ...]:
        """The implementations of `hook` in the order in which they are called."""
        return self._implementations[hook]

    def call(self, hook: str, step: int | None = None, **arguments: Any) -> list[tuple[Registered, Any]]:
        """Calls every implementation of a host hook; each one's time is booked to `PLUGIN.HOOK`."""
        answers = []
        for implementation in self._implementations[hook]:
            with self.accounts.time(f"{implementation.plugin.name}.{hook}"):
                answers.append((implementation.plugin, implementation(step, **arguments)))
        return answers

    def exclusive(self, hook: str, **arguments: Any) -> Any:
        """The one answer to an exclusive hook that is not None, or None; two are an error that names them."""
        answers = [(plugin.name, value) for plugin, value in self.call(hook, **arguments) if value is not None]
        if len(answers) > 1:
            names = " and ".join(repr(name) for name, _ in answers)
            raise PluginError(f"hook {hook} takes one answer, but {names} each gave one: leave all but one of them out")
        return answers[0][1] if answers else None

    def the_one(self, hook: str) -> Implementation | None:
        """The one implementation of an exclusive hook, or None; two are an error that names them."""
        found = self._implementations[hook]
        if len(found) > 1:
            names = " and ".join(repr(one.plugin.name) for one in found)
            raise PluginError(f"hook {hook} can be done by one plugin, but {names} each do it: leave all but one out")
        return found[0] if found else None

    def merged(self, hook: str, what: str, **arguments: Any) -> dict[str, Any]:
        """The dictionaries that the implementations give, in one; a name twice is an error that names both."""
        return merge(((plugin, answer or {}) for plugin, answer in self.call(hook, **arguments)), what)

    def _select(self, wanted: list[Any], autoload: bool) -> list[Registered]:
        environment = discovery.selection_from_environment()
        wanted += [name for name in environment if not name.startswith("-") and name not in wanted]
        removed = {name[1:] for name in [*wanted, *environment] if isinstance(name, str) and name.startswith("-")}
        wanted = [one for one in wanted if not (isinstance(one, str) and one.startswith("-"))]
        available = discovery.installed()
        chosen: list[Registered] = []
        asked: set[str] = set()
        for one in wanted:
            name, arguments = _named(one)
            if name is None:
                base = _base_name(one, available)
                asked.add(base)
                if base not in removed:
                    chosen.append(_registered(one, base, "given to the engine", chosen))
            else:
                if name in asked:
                    raise PluginError(f"plugin {name!r} is asked for twice; pass instances to have several")
                asked.add(name)
                if name not in removed:
                    chosen.append(_registered(_built(discovery.find(name, available), arguments), name, "named", chosen))
        discovery.check_removals(removed, asked | set(available))
        for found in discovery.autoloaded(available) if autoload else []:
            if found.name in removed | asked:
                continue
            try:
                plugin = _built(found, {})
            except PluginError as error:
                # Nobody asked for it by name: the others load, and the run says so at its start.
                self.notices.append(str(error))
                warnings.warn(str(error), stacklevel=4)
                continue
            chosen.append(_registered(plugin, found.name, "autoload", chosen))
        return chosen

    def _register(self, registered: Registered) -> None:
        proxy = _Proxy(registered, self._marked(registered))
        try:
            self._pluggy.register(proxy, name=registered.name)
        except pluggy.PluginValidationError as error:
            raise PluginError(f"plugin {registered.name!r} ({registered.distribution}): {error}") from error
        except ValueError as error:
            raise PluginError(
                f"two plugins are called {registered.name!r}: give each an attribute `instance` of its own"
            ) from error

    def _marked(self, registered: Registered) -> dict[str, Callable[..., Any]]:
        """The bound methods that carry `@hookimpl`, looked up on the class, after checking names and options."""
        found, cls, where = {}, type(registered.plugin), f"plugin {registered.name!r} ({type(registered.plugin).__name__})"
        for name in dir(cls):
            options = getattr(inspect.getattr_static(cls, name), f"{hooks.PROJECT}_impl", None)
            if options is None:
                if name in self._kinds and inspect.isfunction(getattr(cls, name)):
                    raise PluginError(f"{where} has a method called like the hook {name!r}: mark it with @fg.hookimpl")
                continue
            hook = options["specname"] or name
            if hook not in self._kinds:
                raise PluginError(f"{where} implements {hook!r}, which is no hook. {did_you_mean(hook, self._kinds)}")
            if set_options := [key for key in ("wrapper", "hookwrapper", "tryfirst", "trylast") if options[key]]:
                raise PluginError(
                    f"{where} marks {name!r} with {set_options[0]}, which is not supported: order plugins by the class "
                    "attributes `before` and `after`"
                )
            takes = inspect.signature(getattr(registered.plugin, name)).parameters
            known = self._pluggy.hook.__dict__[hook].spec.argnames
            if unknown := [argument for argument in takes if argument not in known]:
                raise PluginError(
                    f"{where} takes {unknown[0]!r} in {name!r}; the hook gives: {', '.join(known) or 'nothing'}"
                )
            if (kind := self._kinds[hook]) not in AUTOLOAD_KINDS and registered.rule == "autoload":
                if registered.name != AUTOLOAD_EXCEPTION:
                    raise PluginError(
                        f"{where} is autoloaded and implements the {kind} hook {hook!r}. What is installed must not change "
                        "a result: its package may autoload event and sink hooks only"
                    )
            found[hook] = getattr(registered.plugin, name)
        return found

    def _sorted(self, hook: str) -> tuple[Implementation, ...]:
        place = {name: index for index, name in enumerate(self.plugins)}
        found = [
            Implementation(impl.plugin.registered, hook, impl.function, tuple(impl.argnames))
            for impl in self._pluggy.hook.__dict__[hook].get_hookimpls()
        ]
        return tuple(sorted(found, key=lambda one: place[one.plugin.name]))


class _Proxy:
    """What pluggy sees of a plugin: compared by identity, with its marked methods only."""

    def __init__(self, registered: Registered, methods: dict[str, Callable[..., Any]]) -> None:
        self.registered = registered
        self.__dict__.update(methods)


@contextmanager
def blame(plugin: Registered, what: str, step: int | None) -> Iterator[None]:
    """Adds to an exception which plugin raised it, where it came from, in which hook, at which step."""
    try:
        yield
    except BaseException as error:
        at = "" if step is None else f", step {step}"
        error.add_note(f"plugin {plugin.name!r} ({plugin.distribution}), {what}{at}")
        raise


def merge(answers: Iterable[tuple[Registered, dict[str, Any]]], what: str) -> dict[str, Any]:
    """One dictionary of several plugins' answers; a name that two give is an error that names both."""
    owners: dict[str, Registered] = {}
    merged: dict[str, Any] = {}
    for plugin, answer in answers:
        for name, value in answer.items():
            if name in merged:
                raise PluginError(f"the {what} {name!r} comes from both {owners[name].name!r} and {plugin.name!r}")
            owners[name], merged[name] = plugin, value
    return merged


def _named(one: Any) -> tuple[str | None, dict[str, Any]]:
    if isinstance(one, str):
        return one, {}
    if isinstance(one, dict):
        if len(one) != 1 or not isinstance(next(iter(one.values())), dict):
            raise ConfigurationError(f"a plugin with arguments is written {{'name': {{'argument': value}}}}, not {one!r}")
        return next(iter(one.items()))
    if isinstance(one, type):
        raise ConfigurationError(f"{one.__name__} is a class: pass an instance, {one.__name__}(...)")
    return None, {}


def _built(found: discovery.Installed, arguments: dict[str, Any]) -> Any:
    cls = found.load()
    try:
        return cls(**arguments)
    except Exception as error:
        if isinstance(error, FulguriteError):
            raise
        raise PluginError(
            f"plugin {found.name!r} ({found.distribution}) cannot be made with arguments {arguments}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _base_name(plugin: Any, available: dict[str, list[discovery.Installed]]) -> str:
    """The class attribute `plugin_name`, else its entry point's name, else the class's name in snake case."""
    cls = type(plugin)
    if isinstance(name := getattr(cls, "plugin_name", None), str):
        return name
    target = f"{cls.__module__}:{cls.__qualname__}"
    for name, entries in available.items():
        if any(one.entry.value in (target, f"{target.partition('.')[0].partition(':')[0]}:{cls.__qualname__}") for one in entries):
            return name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()


def _registered(plugin: Any, base: str, rule: str, others: list[Registered]) -> Registered:
    if any(one.plugin is plugin for one in others):
        raise PluginError(f"the same instance of plugin {base!r} is given twice")
    instance = getattr(plugin, "instance", None)
    name, taken = f"{base}:{instance}" if instance is not None else base, {one.name for one in others}
    if instance is None and name in taken:
        name = next(f"{base}:{n}" for n in range(2, len(others) + 3) if f"{base}:{n}" not in taken)
    order = {key: _names(plugin, key) for key in ("provides", "requires", "after", "before")}
    return Registered(name, plugin, rule, order)


def _names(plugin: Any, key: str) -> tuple[str, ...]:
    value = getattr(plugin, key, ())
    if isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise PluginError(f"{type(plugin).__name__}.{key} must be a tuple of names, not {value!r}")
    return tuple(value)
