"""The plugins of one engine: registered, checked and ordered.

pluggy marks, registers and checks the implementations. It gives all of them the same arguments,
cannot chain them and does not say who failed, so `plugins.hooks` calls and combines them, see
`callers`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from inspect import signature
from types import MappingProxyType, ModuleType
from typing import Any

import pluggy

from fulgurite._src.plugins.callers import HookCaller, HookCallers
from fulgurite._src.plugins.markers import PROJECT, Combine, find_hookspecs
from fulgurite._src.plugins.ordering import sort_topologically
from fulgurite._src.plugins.plugin import get_options
from fulgurite._src.plugins.selection import RegisteredPlugin, resolve_plugins
from fulgurite._src.plugins.usage import check_fit_state, reserve
from fulgurite._src.timing import Timings
from fulgurite.errors import ConfigurationError, PluginError, did_you_mean

_MARK = f"{PROJECT}_impl"
_NOT_A_CALL = (
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
)
_NOT_BY_NAME = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
)
_UNSUPPORTED_OPTIONS = ("wrapper", "hookwrapper", "tryfirst", "trylast")
_AUTOLOAD_KINDS = {"event", "logger"}
# Streams are the one thing that every program needs by name; its `default` has the bits that core
# alone gives.
_AUTOLOAD_ANYTHING = "fulgurite-rng"


class PluginManager:
    """Select, register and order plugins at construction; every mistake is an error there.

    Example:
        from fulgurite.plugins import PluginManager, hookspecs

        plugins = PluginManager([fg.LambdaPlugin()], hookspecs=hookspecs, autoload=False)
        list(plugins.plugins)

    Attributes:
        plugins: the active plugins by name, in the order in which they are called.
        hooks: by which each hook is called, `plugins.hooks.on_save.call(...)`.
        timings: where the time of host hooks is booked; each fit begins a new one.
        messages: about plugins that failed to load without having been asked for, and about
            entries without effect.

    Args:
        plugins: instances, names of installed plugins (`"wandb"`), a name with its arguments
            (`{"wandb": {...}}`), and names to leave out (`"-progress"`).
        hookspecs: a module or class that specifies the hooks.
        autoload: whether installed plugins that ask for it are active without being named.
    """

    def __init__(
        self, plugins: Iterable[Any] = (), *, hookspecs: Any, autoload: bool = True
    ) -> None:
        if isinstance(plugins, str | dict) or not isinstance(plugins, Iterable):
            raise ConfigurationError(
                f"plugins is a list such as ['wandb', Checkpointer(every=100)], not {plugins!r}"
            )
        self.timings = Timings()
        self.hooks = HookCallers()
        self._pluggy = pluggy.PluginManager(PROJECT)
        self.add_hookspecs(hookspecs)
        registered, self.messages = resolve_plugins(plugins, autoload=autoload)
        for namespace in _find_own_hookspecs(registered):
            self.add_hookspecs(namespace)
        functions = {plugin.name: self._register(plugin) for plugin in registered}
        ordered = sort_topologically(registered)
        self.plugins = MappingProxyType({plugin.name: plugin for plugin in ordered})
        for plugin in ordered:
            for hook, function in functions[plugin.name].items():
                self.hooks[hook].add(plugin, function)
        for plugin in ordered:
            if not functions[plugin.name] and not _has_marked_member(plugin.plugin):
                self.messages.append(
                    f"plugin {plugin.name!r} ({type(plugin.plugin).__name__}) has no hook, so that "
                    "it does nothing: mark its methods with @fg.hookimpl"
                )
        self._hook_names = {name: set(hooks) for name, hooks in functions.items()}
        # Of two checkpointers neither would know what the other has. Several plugins may implement
        # any other exclusive hook, if one of them answers.
        for hook in self.hooks.values():
            metadata = hook.metadata
            if metadata.kind == "persistence" and metadata.combine is Combine.EXCLUSIVE:
                hook.check_one_owner()

    def add_hookspecs(self, namespace: Any) -> None:
        """Add the hooks that a module or class specifies.

        A plugin brings its own specifications in the class attribute `hookspecs`.
        """
        hooks = find_hookspecs(namespace)
        where = getattr(namespace, "__name__", repr(namespace))
        if not hooks:
            raise PluginError(
                f"{where} specifies no hook: mark functions of a module or class with "
                "@fg.hookspec(kind)"
            )
        for name in sorted(hooks):
            if name in self.hooks:
                raise PluginError(
                    f"{where} specifies the hook {name!r}, which already exists; rename it"
                )
            if hasattr(HookCallers, name):
                raise PluginError(
                    f"{where} specifies the hook {name!r}, which plugins.hooks.{name} would not "
                    "find: it is a method of dictionaries. Rename it"
                )
        self._pluggy.add_hookspecs(namespace)
        for name, metadata in hooks.items():
            self.hooks.add(HookCaller(name, self._get_argnames(name), metadata, self._time))

    def get_hook_names(self, plugin: RegisteredPlugin) -> set[str]:
        """Return the names of the hooks that a plugin implements."""
        return self._hook_names[plugin.name]

    def reserve(self, what: str, run_dir: object) -> AbstractContextManager[None]:
        """Return a context in which nothing else uses this engine or one of its plugin instances,
        and which begins with nothing left in them of an earlier fit, see `PerFit`.

        Args:
            what: what uses them, such as `the fit of 100 steps`, for the error of another user.
            run_dir: of the engine, or None.

        Raises:
            PluginError: on entry: something else uses one of them.
        """
        return reserve(self, self.plugins, what, run_dir)

    def _time(self, name: str) -> AbstractContextManager[None]:
        return self.timings.time(name)

    def _register(self, plugin: RegisteredPlugin) -> dict[str, Callable[..., Any]]:
        """Register a plugin, and return its implementations by hook."""
        where = f"plugin {plugin.name!r} ({type(plugin.plugin).__name__})"
        check_fit_state(plugin.plugin)
        functions = {
            hook: _make_function(method, options)
            for hook, method, options in self._find_hookimpls(plugin, where)
        }
        # Not the plugin itself: pluggy compares by `==` and would trip over dataclasses that hold
        # arrays.
        proxy = ModuleType(plugin.name)
        vars(proxy).update(functions)
        try:
            self._pluggy.register(proxy, name=plugin.name)
        except pluggy.PluginValidationError as error:
            raise PluginError(f"{where}: {error}") from error
        except ValueError as error:
            kind = type(plugin.plugin).__name__
            remedy = "give each its own `instance`"
            if isinstance(getattr(type(plugin.plugin), "instance", None), property):
                # As of an `Evaluator`, whose instance is its name.
                remedy = f"the arguments that name a {kind} must differ"
            raise PluginError(f"two plugins are called {plugin.name!r}: {remedy}") from error
        return functions

    def _find_hookimpls(
        self, plugin: RegisteredPlugin, where: str
    ) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
        """Yield hook, bound method and options of each method that carries `@hookimpl`, looked up
        on the class, after checking it."""
        plugin_class = type(plugin.plugin)
        hooks: set[str] = set()
        for name in dir(plugin_class):
            member = getattr(plugin_class, name, None)
            options = _get_hookimpl_options(inspect.getattr_static(plugin_class, name))
            options = options or _get_hookimpl_options(member)
            if options is None:
                if name in self.hooks and inspect.isroutine(member):
                    raise PluginError(
                        f"{where} has a method named like the hook {name!r}: mark it with "
                        "@fg.hookimpl"
                    )
                continue
            hook = options["specname"] or name
            if hook not in self.hooks and options["optionalhook"]:
                continue
            if hook in hooks:
                raise PluginError(
                    f"{where} implements {hook!r} twice; a plugin has one implementation of a hook"
                )
            hooks.add(hook)
            if not callable(member):
                raise PluginError(
                    f"{where} marks {name!r}, which is not a method: make it one that the hook can "
                    "call"
                )
            method = getattr(plugin.plugin, name)
            self._check_hookimpl(hook, name, method, options, where)
            self._check_autoload(hook, plugin, where)
            yield hook, method, options

    def _check_hookimpl(
        self,
        hook: str,
        name: str,
        method: Callable[..., Any],
        options: dict[str, Any],
        where: str,
    ) -> None:
        """Check one implementation against the specification of its hook."""
        if hook not in self.hooks:
            raise PluginError(
                f"{where} implements {hook!r}, which is not a hook. "
                f"{did_you_mean(hook, self.hooks)}"
            )
        for option in _UNSUPPORTED_OPTIONS:
            if options[option]:
                raise PluginError(
                    f"{where} marks {name!r} with {option}, which is not supported: order plugins "
                    "by the class attributes `before` and `after`"
                )
        if any(is_kind(method) for is_kind in _NOT_A_CALL):
            raise PluginError(
                f"{where}: {name!r} does nothing when called: a hook is a plain function, not a "
                "generator and not async"
            )
        known = self._get_argnames(hook)
        arguments = f"{', '.join(known)}, by name" if known else "nothing"
        for parameter in signature(method).parameters.values():
            if parameter.name not in known or parameter.kind in _NOT_BY_NAME:
                raise PluginError(
                    f"{where} takes {parameter.name!r} in {name!r}; the hook gives: {arguments}"
                )

    def _get_argnames(self, hook: str) -> tuple[str, ...]:
        """Return the arguments that a hook gives."""
        return self._pluggy.hook.__dict__[hook].spec.argnames

    def _check_autoload(self, hook: str, plugin: RegisteredPlugin, where: str) -> None:
        """Check that a plugin which nobody listed cannot change a number."""
        if plugin.activation != "autoload":
            return
        if plugin.distribution.split()[0] == _AUTOLOAD_ANYTHING:
            return
        kind = self.hooks[hook].metadata.kind
        if kind not in _AUTOLOAD_KINDS:
            raise PluginError(
                f"{where} is autoloaded and implements the {kind} hook {hook!r}: an autoloaded "
                f"plugin may have event and logger hooks only. '-{plugin.name}' leaves it out"
            )


def _find_own_hookspecs(plugins: list[RegisteredPlugin]) -> list[Any]:
    """Return the specifications that plugins bring, each once."""
    namespaces = [plugin.options.hookspecs for plugin in plugins]
    return list({id(space): space for space in namespaces if space is not None}.values())


def _has_marked_member(plugin: Any) -> bool:
    """Return whether a plugin brings hooks, or has implementations of hooks, be it of some that are
    not there."""
    if get_options(plugin).hookspecs is not None:
        return True
    members = (inspect.getattr_static(type(plugin), name) for name in dir(type(plugin)))
    return any(_get_hookimpl_options(member) is not None for member in members)


def _get_hookimpl_options(member: Any) -> dict[str, Any] | None:
    """Return what `@hookimpl` noted on a member of a class, or on what further decorators wrap."""
    member = getattr(member, "fget", member)
    member = inspect.unwrap(member, stop=lambda function: hasattr(function, _MARK))
    return getattr(member, _MARK, None)


def _make_function(method: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Return the method as a marked function: pluggy skips anything else, such as methods of
    Equinox modules, and reads the names of arguments from the signature."""

    def function(**arguments: Any) -> Any:
        return method(**arguments)

    vars(function).update({_MARK: options, "__signature__": signature(method)})
    return function
