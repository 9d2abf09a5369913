"""The plugins of one engine: registered, ordered, called, and named in errors.

pluggy marks, registers and checks the implementations. It gives all of them the same arguments,
cannot chain them and does not say who failed, so the manager reads the sorted implementations once
and calls and combines them itself, as the metadata of each hook says.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from types import MappingProxyType, ModuleType
from typing import Any, get_args

import jax
import pluggy

from fulgurite._src.plugins.answers import check_answer, note_answer
from fulgurite._src.plugins.markers import PROJECT, Combine, HookMetadata, find_hookspecs
from fulgurite._src.plugins.ordering import sort_topologically
from fulgurite._src.plugins.selection import RegisteredPlugin, resolve_plugins
from fulgurite._src.plugins.usage import reserve
from fulgurite._src.timing import Timings
from fulgurite.errors import (
    ConfigurationError,
    PluginError,
    did_you_mean,
    error_context,
    exit_as_error,
)

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


@dataclass(frozen=True)
class HookImpl:
    """One plugin's implementation of one hook.

    Attributes:
        plugin: whose it is.
        hook: the name of the hook.
        function: the bound method.
        argnames: the arguments that it takes, of those that the hook gives.
        metadata: what is known of the hook.
    """

    plugin: RegisteredPlugin
    hook: str
    function: Callable[..., Any]
    argnames: tuple[str, ...]
    metadata: HookMetadata

    def __call__(self, step: int | None = None, /, **arguments: Any) -> Any:
        """Call it with those of the arguments that it takes; `step` is for notes on errors."""
        with plugin_error_context(self.plugin, f"hook {self.hook}", step):
            answer = self.function(**{name: arguments[name] for name in self.argnames})
            is_traced = self.metadata.kind in ("build", "traced")
            check_answer(self.hook, self.metadata.returns, answer, is_traced=is_traced)
            note_answer(f"plugin {self.plugin.name!r}, hook {self.hook}", answer)
            return answer


class PluginManager:
    """Select, register and order plugins at construction; every mistake is an error there.

    Attributes:
        plugins: the active plugins by name, in the order in which they are called.
        hooks: what is known of each hook, by name.
        timings: where the time of host hooks is booked; each fit begins a new one.
        messages: about plugins that failed to load without having been asked for.

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
        self.hooks: dict[str, HookMetadata] = {}
        self._pluggy = pluggy.PluginManager(PROJECT)
        self.add_hookspecs(hookspecs)
        registered, self.messages = resolve_plugins(plugins, autoload=autoload)
        for namespace in _find_own_hookspecs(registered):
            self.add_hookspecs(namespace)
        for plugin in registered:
            self._register(plugin)
        ordered = sort_topologically(registered)
        self.plugins = MappingProxyType({plugin.name: plugin for plugin in ordered})
        self._implementations = {name: self._order_impls(name) for name in self.hooks}

    def add_hookspecs(self, namespace: Any) -> None:
        """Add the hooks that a module or class specifies; call those by `call(name)`.

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
        self._pluggy.add_hookspecs(namespace)
        self.hooks.update(hooks)

    def implementations(self, hook: str) -> tuple[HookImpl, ...]:
        """Return the implementations of `hook` in the order in which they are called. Of several
        processes only the first has loggers."""
        metadata = self.hooks.get(hook)
        if metadata is not None and metadata.kind == "logger" and jax.process_index() > 0:
            return ()
        return self._implementations.get(hook, ())

    def get_hooks_of(self, plugin: RegisteredPlugin) -> set[str]:
        """Return the names of the hooks that a plugin implements."""
        return {
            hook
            for hook, implementations in self._implementations.items()
            if any(implementation.plugin is plugin for implementation in implementations)
        }

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

    def call(
        self, hook: str, step: int | None = None, /, **arguments: Any
    ) -> list[tuple[RegisteredPlugin, Any]]:
        """Call every implementation of a host hook, and return each answer with its plugin; the
        time is booked to `PLUGIN.HOOK`."""
        answers = []
        for implementation in self.implementations(hook):
            with self.timings.time(f"{implementation.plugin.name}.{hook}"):
                answer = implementation(step, **arguments)
            answers.append((implementation.plugin, answer))
        return answers

    def enter_contexts(
        self, hook: str, stack: ExitStack, step: int | None = None, /, **arguments: Any
    ) -> None:
        """Enter the context managers that the implementations of a hook return.

        Args:
            hook: its name.
            stack: which leaves them.
            step: for notes on errors.
            arguments: of the hook.
        """
        for implementation in self.implementations(hook):
            context = implementation(step, **arguments)
            if context is not None:
                stack.enter_context(_PluginContext(implementation, context, step))

    def ask(self, hook: str, /, **arguments: Any) -> Any:
        """Call every implementation of a build hook, and combine the answers as the hook says.

        Returns:
            For `Combine.EXCLUSIVE` the one answer that is not None, or None; for `BY_NAME` and
            `MERGE` a dictionary; for `ALL` a list of pairs of a plugin and an item of its list.

        Raises:
            PluginError: two plugins answer where one may, or give the same name.
        """
        combine = self.hooks[hook].combine
        if combine is Combine.EXCLUSIVE:
            single = self.ask_exclusive(hook, **arguments)
            return None if single is None else single[1]
        answers = self._collect_answers(hook, arguments)
        if combine is Combine.MERGE:
            return merge_by_name(answers, f"{hook} entry")
        items = [(plugin, item) for plugin, answer in answers for item in answer]
        if combine is Combine.BY_NAME:
            (item_class,) = get_args(self.hooks[hook].returns)
            named_items = [(plugin, {item.name: item}) for plugin, item in _drop_shared(items)]
            return merge_by_name(named_items, item_class.__name__)
        return items

    def ask_exclusive(self, hook: str, /, **arguments: Any) -> tuple[RegisteredPlugin, Any] | None:
        """Return the one answer to a build hook that is not None, and the plugin that gave it.

        Raises:
            PluginError: two plugins answer; it names both.
        """
        answers = self._collect_answers(hook, arguments)
        self._check_exclusive(hook, [plugin for plugin, _ in answers])
        return answers[0] if answers else None

    def get_single_impl(self, hook: str) -> HookImpl | None:
        """Return the one implementation of an exclusive hook, or None; two are an error that names
        them."""
        implementations = self.implementations(hook)
        self._check_exclusive(hook, [impl.plugin for impl in implementations])
        return implementations[0] if implementations else None

    def _collect_answers(
        self, hook: str, arguments: dict[str, Any]
    ) -> list[tuple[RegisteredPlugin, Any]]:
        """Call every implementation of a hook, and return the answers that are not None."""
        answers = self.call(hook, **arguments)
        return [(plugin, answer) for plugin, answer in answers if answer is not None]

    def _check_exclusive(self, hook: str, plugins: list[RegisteredPlugin]) -> None:
        if len(plugins) > 1:
            names = " and ".join(repr(plugin.name) for plugin in plugins)
            raise PluginError(
                f"hook {hook} takes one answer, but {names} each gave one: leave all but one of "
                "them out"
            )

    def _register(self, plugin: RegisteredPlugin) -> None:
        where = f"plugin {plugin.name!r} ({type(plugin.plugin).__name__})"
        # Not the plugin itself: pluggy compares by `==` and would trip over dataclasses that hold
        # arrays.
        proxy = ModuleType(plugin.name)
        for hook, method, options in self._find_hookimpls(plugin, where):
            vars(proxy)[hook] = _make_function(method, options)
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

    def _find_hookimpls(
        self, plugin: RegisteredPlugin, where: str
    ) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
        """Yield hook, bound method and options of each method that carries `@hookimpl`, looked up
        on the class, after checking it."""
        plugin_class = type(plugin.plugin)
        hooks: set[str] = set()
        for name in dir(plugin_class):
            member = getattr(plugin_class, name, None)
            options = _get_options(inspect.getattr_static(plugin_class, name))
            options = options or _get_options(member)
            if options is None:
                if name in self.hooks and inspect.isroutine(member):
                    raise PluginError(
                        f"{where} has a method called like the hook {name!r}: mark it with "
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
        known = self._pluggy.hook.__dict__[hook].spec.argnames
        arguments = f"{', '.join(known)}, by name" if known else "nothing"
        for parameter in signature(method).parameters.values():
            if parameter.name not in known or parameter.kind in _NOT_BY_NAME:
                raise PluginError(
                    f"{where} takes {parameter.name!r} in {name!r}; the hook gives: {arguments}"
                )

    def _check_autoload(self, hook: str, plugin: RegisteredPlugin, where: str) -> None:
        """Check that a plugin which nobody listed cannot change a number."""
        if plugin.activation != "autoload":
            return
        if plugin.distribution.split()[0] == _AUTOLOAD_ANYTHING:
            return
        kind = self.hooks[hook].kind
        if kind not in _AUTOLOAD_KINDS:
            raise PluginError(
                f"{where} is autoloaded and implements the {kind} hook {hook!r}: an autoloaded "
                f"plugin may have event and logger hooks only. '-{plugin.name}' leaves it out"
            )

    def _order_impls(self, hook: str) -> tuple[HookImpl, ...]:
        caller = self._pluggy.hook.__dict__[hook]
        functions = {impl.plugin_name: impl.function for impl in caller.get_hookimpls()}
        metadata = self.hooks[hook]
        implementations = []
        for name, plugin in self.plugins.items():
            if name in functions:
                function = functions[name]
                argnames = tuple(signature(function).parameters)
                implementations.append(HookImpl(plugin, hook, function, argnames, metadata))
        return tuple(implementations)


@contextmanager
def plugin_error_context(plugin: RegisteredPlugin, what: str, step: int | None) -> Iterator[None]:
    """Add to an exception which plugin raised it. A `sys.exit` in it is an error.

    Args:
        plugin: who is called.
        what: the hook or action.
        step: the number of completed updates, where there is one.
    """
    where = "" if step is None else f", step {step}"
    with (
        error_context(lambda: f"plugin {plugin.name!r} ({plugin.distribution}), {what}{where}"),
        exit_as_error(PluginError, f"plugin {plugin.name!r}"),
    ):
        yield


def _drop_shared(
    items: list[tuple[RegisteredPlugin, Any]],
) -> list[tuple[RegisteredPlugin, Any]]:
    """Return the items without those that another plugin before has given.

    By identity: what several plugins share on purpose, such as the stream of several instances of
    one plugin, is a single object.
    """
    owners: dict[int, RegisteredPlugin] = {}
    return [
        (plugin, item) for plugin, item in items if owners.setdefault(id(item), plugin) is plugin
    ]


def merge_by_name(
    answers: Iterable[tuple[RegisteredPlugin, dict[str, Any] | None]], what: str
) -> dict[str, Any]:
    """Return one dictionary of several plugins' answers.

    Args:
        answers: a dictionary, or None, of each plugin.
        what: what the dictionaries hold, for errors.

    Raises:
        PluginError: two plugins give the same name; it names both.
    """
    owners: dict[str, RegisteredPlugin] = {}
    merged: dict[str, Any] = {}
    for plugin, answer in answers:
        for name, value in (answer or {}).items():
            if not isinstance(name, str):
                raise PluginError(
                    f"plugin {plugin.name!r} gave {name!r} as the name of a {what}: "
                    "names are strings"
                )
            if name in merged:
                raise PluginError(
                    f"the {what} {name!r} comes from both {owners[name].name!r} and {plugin.name!r}"
                )
            owners[name] = plugin
            merged[name] = value
    return merged


def _find_own_hookspecs(plugins: list[RegisteredPlugin]) -> list[Any]:
    """Return the specifications that plugins bring, each once."""
    namespaces = [plugin.options.hookspecs for plugin in plugins]
    return list({id(space): space for space in namespaces if space is not None}.values())


def _get_options(member: Any) -> dict[str, Any] | None:
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


class _PluginContext(AbstractContextManager[None, bool | None]):
    """A context that a plugin returned: an error of its end names the plugin.

    Args:
        hook: which returned it.
        context: the context.
        step: the number of completed updates.
    """

    def __init__(
        self, hook: HookImpl, context: AbstractContextManager[Any], step: int | None = None
    ) -> None:
        self._hook = hook
        self._context = context
        self._step = step

    def __enter__(self) -> None:
        with self._name_plugin():
            self._context.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool | None:
        try:
            return self._context.__exit__(kind, error, traceback)
        except BaseException as further:
            # What the block raised is not the plugin's.
            if further is not error:
                with self._name_plugin():
                    raise
            raise

    def _name_plugin(self) -> AbstractContextManager[None]:
        return plugin_error_context(self._hook.plugin, f"hook {self._hook.hook}", self._step)
