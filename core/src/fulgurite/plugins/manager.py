"""The plugins of one engine: selected, registered, ordered, called and blamed."""

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from inspect import signature
from types import MappingProxyType, ModuleType
from typing import Any

import jax
import pluggy

import fulgurite.hookspecs as hooks
import fulgurite.plugins.selection as discovery
from fulgurite.errors import (
    ConfigurationError,
    FulguriteError,
    PluginError,
    did_you_mean,
    error_context,
)
from fulgurite.plugins.ordering import sort_topologically
from fulgurite.plugins.selection import InstalledPlugin
from fulgurite.timing import Timings

_MARK = f"{hooks.PROJECT}_impl"
_ANSWER_LATER = (
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
)
_NOT_BY_NAME = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
)
_ORDER = ("provides", "requires", "after", "before")
_AUTOLOAD_KINDS = {"event", "sink"}
# Streams are the one thing that every program needs by name; its `default` has the bits that core
# alone gives.
_AUTOLOAD_ANYTHING = "fulgurite-rng"


@dataclass(frozen=True, eq=False)
class RegisteredPlugin:
    """A plugin under its name, the key of its state, streams, accounts and manifest entry; `rule`
    is why it is active."""

    name: str
    plugin: Any
    activation: str
    order: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @functools.cached_property
    def distribution(self) -> str:
        """Name and version of the distribution that brought the plugin's class."""
        return discovery.distribution_of(type(self.plugin))

    @property
    def aliases(self) -> set[str]:
        """What `after`, `before` and `requires` may call it."""
        return {self.name, self.name.partition(":")[0], *self.order.get("provides", ())}


@dataclass(frozen=True)
class HookImpl:
    """One plugin's implementation of one hook: called with keyword arguments, of which it takes
    what it names."""

    plugin: RegisteredPlugin
    hook: str
    function: Callable[..., Any]
    argnames: tuple[str, ...]
    returns: str | None

    def __call__(self, step: int | None = None, /, **arguments: Any) -> Any:
        with plugin_error_context(self.plugin, f"hook {self.hook}", step):
            answer = self.function(**{name: arguments[name] for name in self.argnames})
            if (
                self.returns
                and answer is not None
                and self.returns not in {cls.__name__ for cls in type(answer).__mro__}
            ):
                raise PluginError(
                    f"hook {self.hook} gives a {self.returns} or None, not {answer!r}"
                )
            return answer


class PluginManager:
    """Selects, registers and orders plugins at construction; every mistake is an error there.

    Args:
        plugins: instances, names of installed plugins (`"wandb"`), a name with its arguments
            (`{"wandb": {...}}`), and names to leave out (`"-progress"`).
        autoload: whether installed plugins that ask for it are active without being named.
    """

    def __init__(self, plugins: Iterable[Any] = (), *, autoload: bool = True) -> None:
        if isinstance(plugins, str | dict) or not isinstance(plugins, Iterable):
            raise ConfigurationError(
                f"plugins is a list such as ['wandb', Checkpointer()], not {plugins!r}"
            )
        self.timings = Timings()
        self.notices: list[str] = []
        self.kinds: dict[str, str] = {}
        self._pluggy = pluggy.PluginManager(hooks.PROJECT)
        self.add_hookspecs(hooks)
        chosen = self._resolve_plugins(list(plugins), autoload)
        brought = [getattr(type(one.plugin), "hookspecs", None) for one in chosen]
        for namespace in {id(one): one for one in brought if one is not None}.values():
            self.add_hookspecs(namespace)
        for one in chosen:
            self._register(one)
        self.plugins = MappingProxyType({one.name: one for one in sort_topologically(chosen)})
        self._implementations = {name: self._order_impls(name) for name in self.kinds}

    def add_hookspecs(self, namespace: Any) -> None:
        """Adds the hooks that `namespace` (a module or class) specifies; call those by
        `call(name)`.

        A plugin brings its own specifications in the class attribute `hookspecs`.
        """
        marked: dict[str, Any] = {name: getattr(namespace, name, None) for name in dir(namespace)}
        found = {
            name: one.fulgurite_kind
            for name, one in marked.items()
            if hasattr(one, "fulgurite_kind")
        }
        where = getattr(namespace, "__name__", repr(namespace))
        if not found:
            raise PluginError(
                f"{where} specifies no hook: mark functions of a module or class with @fg.hookspec(kind)"
            )
        if clash := sorted(found.keys() & self.kinds):
            raise PluginError(
                f"{where} specifies the hook {clash[0]!r}, which already exists; rename it"
            )
        self._pluggy.add_hookspecs(namespace)
        self.kinds |= found

    def implementations(self, hook: str) -> tuple[HookImpl, ...]:
        """The implementations of `hook` in the order in which they are called. Of several processes
        only the first has sinks."""
        if self.kinds.get(hook) == "sink" and jax.process_index() > 0:
            return ()
        return self._implementations.get(hook, ())

    def hooks_of(self, plugin: RegisteredPlugin) -> set[str]:
        """The names of the hooks that a plugin implements."""
        return {
            hook
            for hook, found in self._implementations.items()
            if any(one.plugin is plugin for one in found)
        }

    def call(
        self, hook: str, step: int | None = None, /, **arguments: Any
    ) -> list[tuple[RegisteredPlugin, Any]]:
        """Calls every implementation of a host hook; each one's time is booked to `PLUGIN.HOOK`."""
        answers = []
        for implementation in self.implementations(hook):
            with self.timings.time(f"{implementation.plugin.name}.{hook}"):
                answers.append((implementation.plugin, implementation(step, **arguments)))
        return answers

    def call_exclusive(self, hook: str, **arguments: Any) -> Any:
        """The one answer to an exclusive hook that is not None, or None; two are an error that
        names them."""
        answers = [
            (plugin.name, value)
            for plugin, value in self.call(hook, **arguments)
            if value is not None
        ]
        if len(answers) > 1:
            names = " and ".join(repr(name) for name, _ in answers)
            raise PluginError(
                f"hook {hook} takes one answer, but {names} each gave one: leave all but one of them out"
            )
        return answers[0][1] if answers else None

    def get_single_impl(self, hook: str) -> HookImpl | None:
        """The one implementation of an exclusive hook, or None; two are an error that names
        them."""
        found = self.implementations(hook)
        if len(found) > 1:
            names = " and ".join(repr(one.plugin.name) for one in found)
            raise PluginError(
                f"hook {hook} can be done by one plugin, but {names} each do it: leave all but one out"
            )
        return found[0] if found else None

    def collect_list(self, hook: str, kind: type) -> list[tuple[RegisteredPlugin, Any]]:
        """The objects in the lists that a hook gives, each with its plugin; another kind of object
        is an error."""
        found = [(plugin, one) for plugin, answer in self.call(hook) for one in answer or ()]
        for plugin, one in found:
            if not isinstance(one, kind):
                raise PluginError(
                    f"plugin {plugin.name!r}, hook {hook}: give a list of {kind.__name__}, not {one!r}"
                )
        return found

    def collect_by_name(self, hook: str, what: str, kind: type) -> dict[str, Any]:
        """What is `listed`, by its `name`; a name twice is an error that names both plugins."""
        return merge_by_name(
            [(plugin, {one.name: one}) for plugin, one in self.collect_list(hook, kind)], what
        )

    def _resolve_plugins(self, wanted: list[Any], autoload: bool) -> list[RegisteredPlugin]:
        available, environment = discovery.find_installed(), discovery.selection_from_environment()
        given = {_parse_entry(one)[0] or _base_name(one, available) for one in wanted}
        wanted += [name for name in dict.fromkeys(environment) if name not in given]
        removed = {one[1:] for one in wanted if isinstance(one, str) and one.startswith("-")}
        chosen: list[RegisteredPlugin] = []
        asked: set[str] = set()
        for one in wanted:
            if isinstance(one, str) and one.startswith("-"):
                continue
            name, arguments = _parse_entry(one)
            base = name or _base_name(one, available)
            if name in asked:
                raise PluginError(
                    f"plugin {name!r} is listed twice; pass instances to have several"
                )
            asked.add(base)
            if base not in removed:
                plugin = (
                    one
                    if name is None
                    else _instantiate(name, discovery.find(name, available), arguments)
                )
                chosen.append(
                    _registered(plugin, base, "given" if name is None else "named", chosen)
                )
        for name in removed - asked - set(available):
            if "Did you mean" in (hint := did_you_mean(name, asked | set(available))):
                raise PluginError(
                    f"'-{name}' leaves out a plugin that is neither installed nor listed. {hint}"
                )
        for name in discovery.autoload_names(available) if autoload else ():
            if name not in removed | asked:
                found = discovery.find(name, available)
                try:
                    plugin = _instantiate(name, found, {})
                    chosen.append(_registered(plugin, name, "autoload", chosen))
                except PluginError as error:  # nobody asked for it: the others load, and the run says so at its start
                    self.notices.append(str(error))
                    warnings.warn(str(error), stacklevel=4)
        return chosen

    def _register(self, registered: RegisteredPlugin) -> None:
        where = f"plugin {registered.name!r} ({type(registered.plugin).__name__})"
        # Not the plugin itself: pluggy compares by `==` and would trip over dataclasses that hold
        # arrays.
        methods = ModuleType(registered.name)
        vars(methods).update(self._find_hookimpls(registered, where))
        try:
            self._pluggy.register(methods, name=registered.name)
        except pluggy.PluginValidationError as error:
            raise PluginError(f"{where}: {error}") from error
        except ValueError as error:
            raise PluginError(
                f"two plugins are called {registered.name!r}: give each its own `instance`"
            ) from error

    def _find_hookimpls(
        self, registered: RegisteredPlugin, where: str
    ) -> dict[str, Callable[..., Any]]:
        """The methods that carry `@hookimpl`, looked up on the class, bound, after checking names
        and options."""
        found, cls = {}, type(registered.plugin)
        free = (
            registered.activation != "autoload"
            or registered.distribution.split()[0] == _AUTOLOAD_ANYTHING
        )
        for name in dir(cls):
            member = getattr(cls, name, None)
            options = _options(inspect.getattr_static(cls, name)) or _options(member)
            if options is None:
                if name in self.kinds and inspect.isroutine(member):
                    raise PluginError(
                        f"{where} has a method called like the hook {name!r}: mark it with @fg.hookimpl"
                    )
                continue
            if not callable(member):
                raise PluginError(
                    f"{where} marks {name!r}, which is no method: make it one that the hook can call"
                )
            hook, method = options["specname"] or name, getattr(registered.plugin, name)
            if hook not in self.kinds:
                if options["optionalhook"]:
                    continue
                raise PluginError(
                    f"{where} implements {hook!r}, which is no hook. {did_you_mean(hook, self.kinds)}"
                )
            if unsupported := [
                key for key in ("wrapper", "hookwrapper", "tryfirst", "trylast") if options[key]
            ]:
                fix = "order plugins by the class attributes `before` and `after`"
                raise PluginError(
                    f"{where} marks {name!r} with {unsupported[0]}, which is not supported: {fix}"
                )
            known = self._pluggy.hook.__dict__[hook].spec.argnames
            if any(is_kind(method) for is_kind in _ANSWER_LATER):
                raise PluginError(
                    f"{where}: {name!r} does nothing when called: a hook is no generator and not async"
                )
            parameters = signature(method).parameters.values()
            if unknown := [
                one.name for one in parameters if one.name not in known or one.kind in _NOT_BY_NAME
            ]:
                given = f"{', '.join(known) or 'nothing'}{', by name' * bool(known)}"
                raise PluginError(
                    f"{where} takes {unknown[0]!r} in {name!r}; the hook gives: {given}"
                )
            if not free and self.kinds[hook] not in _AUTOLOAD_KINDS:
                gap = f"{where} is autoloaded and implements the {self.kinds[hook]} hook {hook!r}"
                why = "an autoloaded plugin may have event and sink hooks only"
                raise PluginError(f"{gap}: {why}. '-{registered.name}' leaves it out")
            if hook in found:
                raise PluginError(
                    f"{where} implements {hook!r} twice; a plugin has one implementation of a hook"
                )
            found[hook] = _function(method, options)
        return found

    def _order_impls(self, hook: str) -> tuple[HookImpl, ...]:
        caller = self._pluggy.hook.__dict__[hook]
        functions = {one.plugin_name: one.function for one in caller.get_hookimpls()}
        gives = caller.spec.function.fulgurite_gives
        return tuple(
            HookImpl(
                one, hook, functions[name], tuple(signature(functions[name]).parameters), gives
            )
            for name, one in self.plugins.items()
            if name in functions
        )


def _options(member: Any) -> dict[str, Any] | None:
    """What `@hookimpl` noted on a member of a class, or on what further decorators wrap."""
    member = inspect.unwrap(getattr(member, "fget", member), stop=lambda one: hasattr(one, _MARK))
    return getattr(member, _MARK, None)


def _function(method: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """The method as a marked function: pluggy passes over anything else, such as methods of Equinox
    modules."""

    def function(**arguments: Any) -> Any:
        return method(**arguments)

    vars(function).update({_MARK: options, "__signature__": signature(method)})
    return function


def plugin_error_context(
    plugin: RegisteredPlugin, what: str, step: int | None
) -> AbstractContextManager[None]:
    """Adds to an exception which plugin raised it, where it came from, in which hook, at which
    step."""
    at = "" if step is None else f", step {step}"
    return error_context(lambda: f"plugin {plugin.name!r} ({plugin.distribution}), {what}{at}")


def merge_by_name(
    answers: Iterable[tuple[RegisteredPlugin, dict[str, Any]]], what: str
) -> dict[str, Any]:
    """One dictionary of several plugins' answers; a name that two give is an error that names
    both."""
    owners: dict[str, RegisteredPlugin] = {}
    merged: dict[str, Any] = {}
    for plugin, answer in answers:
        for name, value in (answer or {}).items():
            if not isinstance(name, str):
                raise PluginError(
                    f"plugin {plugin.name!r} gave {name!r} as the name of a {what}; names are texts"
                )
            if name in merged:
                raise PluginError(
                    f"the {what} {name!r} comes from both {owners[name].name!r} and {plugin.name!r}"
                )
            owners[name], merged[name] = plugin, value
    return merged


def _parse_entry(one: Any) -> tuple[str | None, dict[str, Any]]:
    if isinstance(one, str):
        return one, {}
    if isinstance(one, dict):
        if len(one) != 1 or not isinstance(next(iter(one.values())), dict):
            raise ConfigurationError(
                f"write a plugin with arguments as {{'name': {{'argument': value}}}}, not {one!r}"
            )
        return next(iter(one.items()))
    if isinstance(one, type):
        raise ConfigurationError(
            f"{one.__name__} is a class: pass an instance, {one.__name__}(...)"
        )
    if type(one).__module__ == "builtins":
        raise ConfigurationError(
            f"a plugin is an instance with hooks, a name or {{name: {{}}}}, not {one!r}"
        )
    return None, {}


def _instantiate(name: str, found: InstalledPlugin, arguments: dict[str, Any]) -> Any:
    cls = found.load()
    try:
        return cls(**arguments)
    except FulguriteError:
        raise
    except Exception as error:
        reason = f"cannot be made with arguments {arguments}: {type(error).__name__}: {error}"
        raise PluginError(f"plugin {name!r} ({found.distribution}) {reason}") from error


def _base_name(plugin: Any, available: dict[str, list[InstalledPlugin]]) -> str:
    """The class attribute `plugin_name`, else its entry point's name, else the class's name in
    snake case."""
    cls = type(plugin)
    if isinstance(name := getattr(cls, "plugin_name", None), str):
        return name
    for name, entries in available.items():
        for module, attribute in (one.names for one in entries):
            if attribute == cls.__qualname__ and cls.__module__.startswith(module):
                return name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()


def _registered(
    plugin: Any, base: str, rule: str, others: list[RegisteredPlugin]
) -> RegisteredPlugin:
    if any(one.plugin is plugin for one in others):
        raise PluginError(f"the same instance of plugin {base!r} is given twice")
    order = {key: getattr(plugin, key, ()) for key in _ORDER}
    for key, value in order.items():
        if not isinstance(value, tuple) or not all(isinstance(name, str) for name in value):
            raise PluginError(
                f"{type(plugin).__name__}.{key} must be a tuple of names, not {value!r}"
            )
    instance, taken = getattr(plugin, "instance", None), {one.name for one in others}
    if instance is None and base in taken:
        instance = next(
            number for number in range(2, len(others) + 3) if f"{base}:{number}" not in taken
        )
    return RegisteredPlugin(base if instance is None else f"{base}:{instance}", plugin, rule, order)
