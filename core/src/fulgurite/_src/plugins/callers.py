"""How hooks are called: one `HookCaller` per hook, with a method for each way of combining answers.

`plugins.hooks.transform_batch.fold("batch", batch, step, ctx=ctx)` calls every implementation of
`transform_batch`. What a hook has as `combine` in its specification decides by which method it is
called:

| `Combine` | method |
|---|---|
| `ALL` | `call`, or `enter_contexts` where the answers are context managers |
| `EACH` | `each` |
| `EXCLUSIVE` | `ask` |
| `BY_NAME` | `collect_by_name` |
| `MERGE` | `merge` |
| `FOLD` | `fold` |
| `CHAIN` | `chain` |
| `WRAP` | `wrap` |
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from inspect import signature
from typing import Any, get_args

import jax
import optax

from fulgurite._src.plugins.implementations import Accept, HookImpl, TimeContext
from fulgurite._src.plugins.markers import Combine, HookMetadata
from fulgurite._src.plugins.selection import RegisteredPlugin
from fulgurite.errors import PluginError, did_you_mean

Answers = list[tuple[RegisteredPlugin, Any]]
"""Pairs of a plugin and its answer, in the order in which the plugins are called."""
PerPlugin = Callable[[RegisteredPlugin], Mapping[str, Any] | None]
"""Returns the arguments that one plugin gets in addition to those of all; None leaves it out."""

_METHODS = {
    Combine.ALL: "call",
    Combine.EACH: "each",
    Combine.EXCLUSIVE: "ask",
    Combine.BY_NAME: "collect_by_name",
    Combine.MERGE: "merge",
    Combine.FOLD: "fold",
    Combine.CHAIN: "chain",
    Combine.WRAP: "wrap",
}


class HookCaller:
    """Call the implementations of one hook, and combine their answers as its specification says.

    A method takes the number of completed updates, which notes on errors name, and the arguments of
    the hook by name. Those that differ from plugin to plugin are what `per_plugin(plugin)` returns,
    as a dictionary; for None the plugin is not called. `accept(plugin, answer)`, where there is
    one, checks or converts each answer before they are combined.

    A method that does not belong to the hook's `combine` raises a `PluginError`, and so does an
    argument that the hook does not have, or one that an implementation takes and nobody gave.

    Example:
        class Diary:
            @fg.hookimpl
            def on_save(self, step):
                print("saved at", step)


        on_save = fg.Engine(plugins=[Diary()]).plugins.hooks.on_save
        on_save.call(10, run=None, step=10)
        print([plugin.name for plugin in on_save.plugins])  # ['diary']

    Attributes:
        name: of the hook.
        metadata: what its specification says.

    Args:
        name: of the hook.
        argnames: the names of its arguments.
        metadata: what its specification says.
        time: books the time of a call on the host.
    """

    def __init__(
        self, name: str, argnames: Sequence[str], metadata: HookMetadata, time: TimeContext
    ) -> None:
        self.name = name
        self.metadata = metadata
        self._argnames = argnames
        self._implementations: tuple[HookImpl, ...] = ()
        # A traced hook runs only while the step is traced, and that time counts as compiling. A
        # context lasts for a whole fit, whose parts are timed themselves.
        is_timed = metadata.kind != "traced" and metadata.returns is not AbstractContextManager
        self._time = time if is_timed else nullcontext

    def add(self, plugin: RegisteredPlugin, function: Callable[..., Any]) -> None:
        """Add the implementation of a plugin, to be called after those that are there.

        Args:
            plugin: whose it is.
            function: takes some of the hook's arguments, by name.
        """
        argnames = tuple(signature(function).parameters)
        implementation = HookImpl(plugin, self.name, function, argnames, self.metadata, self._time)
        self._implementations = (*self._implementations, implementation)

    @property
    def implementations(self) -> tuple[HookImpl, ...]:
        """The implementations in the order in which they are called, for callers that handle the
        failure of each, and for `transform_module`, which a module may apply to several models
        within it. Of several processes only the first has loggers."""
        if self.metadata.kind == "logger" and jax.process_index() > 0:
            return ()
        return self._implementations

    @property
    def plugins(self) -> tuple[RegisteredPlugin, ...]:
        """The plugins that implement the hook, in the order in which they are called."""
        return tuple(implementation.plugin for implementation in self.implementations)

    def call(self, step: int | None = None, /, **arguments: Any) -> Answers:
        """Call every implementation with the same arguments; return each plugin with its answer."""
        self._check_combine(Combine.ALL)
        return self._collect_answers(step, arguments)

    def enter_contexts(
        self, stack: ExitStack, step: int | None = None, /, **arguments: Any
    ) -> None:
        """Enter the context managers that the implementations return; `stack` leaves them."""
        self._check_combine(Combine.ALL)
        for implementation in self.implementations:
            self._check_arguments(implementation, arguments)
            implementation.enter(stack, step, arguments)

    def each(
        self,
        step: int | None = None,
        /,
        *,
        per_plugin: PerPlugin | None = None,
        accept: Accept | None = None,
        **arguments: Any,
    ) -> Answers:
        """Call every implementation with arguments of its own; return each plugin with its
        answer."""
        self._check_combine(Combine.EACH)
        return self._collect_answers(step, arguments, per_plugin, accept)

    def ask(
        self, step: int | None = None, /, **arguments: Any
    ) -> tuple[RegisteredPlugin, Any] | None:
        """Return the one answer that is not None, after the plugin that gave it; None if there is
        none.

        Raises:
            PluginError: two plugins answer; it names both.
        """
        self._check_combine(Combine.EXCLUSIVE)
        answers = self._collect_answers(step, arguments)
        answers = [(plugin, answer) for plugin, answer in answers if answer is not None]
        self._check_exclusive([plugin for plugin, _ in answers], "each gave one")
        return answers[0] if answers else None

    def get_owner(self) -> RegisteredPlugin | None:
        """Return the one plugin that implements an exclusive hook, or None.

        Raises:
            PluginError: two plugins implement it, whatever they would answer; it names both.
        """
        self.check_one_owner()
        plugins = self.plugins
        return plugins[0] if plugins else None

    def check_one_owner(self) -> None:
        """Raise a `PluginError` that names both if two plugins implement an exclusive hook."""
        self._check_combine(Combine.EXCLUSIVE)
        self._check_exclusive(self.plugins, "each implement it")

    def collect_by_name(self, step: int | None = None, /, **arguments: Any) -> dict[str, Any]:
        """Return the items of all answers, which are lists, by their `name`.

        Raises:
            PluginError: two plugins give different items of one name; it names both.
        """
        self._check_combine(Combine.BY_NAME)
        answers = self._collect_answers(step, arguments, accept=self._accept_named_items)
        items = [(plugin, item) for plugin, answer in answers for item in answer or ()]
        named_items = [(plugin, {item.name: item}) for plugin, item in _drop_shared(items)]
        item_classes = get_args(self.metadata.returns)
        what = item_classes[0].__name__ if item_classes else f"{self.name} item"
        return _merge_by_name(named_items, what)

    def merge(
        self,
        step: int | None = None,
        /,
        *,
        what: str = "",
        per_plugin: PerPlugin | None = None,
        accept: Accept | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Return the entries of all answers, which are dictionaries; `what` names an entry in
        errors.

        Raises:
            PluginError: two plugins give the same name; it names both.
        """
        self._check_combine(Combine.MERGE)
        answers = self._collect_answers(step, arguments, per_plugin, accept)
        return _merge_by_name(answers, what or f"{self.name} entry")

    def fold(
        self,
        name: str,
        value: Any,
        step: int | None = None,
        /,
        *,
        per_plugin: PerPlugin | None = None,
        accept: Accept | None = None,
        **arguments: Any,
    ) -> Any:
        """Return a value as the implementations change it: each gets, as its argument `name`, what
        the one before it returned. After an answer of None the value stays as it was."""
        self._check_combine(Combine.FOLD)
        for implementation, own_arguments in self._iter_calls(per_plugin):
            all_arguments = {**arguments, **own_arguments, name: value}
            self._check_arguments(implementation, all_arguments)
            answer = implementation.call(step, all_arguments, accept)
            if answer is not None:
                value = answer
        return value

    def chain(
        self,
        step: int | None = None,
        /,
        *,
        per_plugin: PerPlugin | None = None,
        **arguments: Any,
    ) -> optax.GradientTransformation:
        """Return the transformations of gradients one after the other. None stands for the
        identity, so that the structure of the optimizer's state depends on the plugins alone."""
        self._check_combine(Combine.CHAIN)
        answers = self._collect_answers(step, arguments, per_plugin)
        transforms = [transform or optax.identity() for _, transform in answers]
        return optax.chain(optax.identity(), *transforms)

    def wrap(
        self,
        innermost: Callable[..., Any],
        step: int | None = None,
        /,
        *,
        per_plugin: PerPlugin | None = None,
        accept: Accept | None = None,
    ) -> Callable[..., Any]:
        """Return a function that is called as `innermost` is, with the implementations around it,
        the first one outermost: each gets the next one as its argument `call`, and the arguments of
        `innermost` by their names."""
        self._check_combine(Combine.WRAP)
        parameters = signature(innermost)

        def put_around(implementation: HookImpl, call: Callable[..., Any]) -> Callable[..., Any]:
            def call_implementation(*values: Any, **named_values: Any) -> Any:
                arguments = parameters.bind(*values, **named_values).arguments
                own_arguments = {} if per_plugin is None else per_plugin(implementation.plugin)
                if own_arguments is None:
                    return call(*values, **named_values)
                all_arguments = {**arguments, **own_arguments, "call": call}
                self._check_arguments(implementation, all_arguments)
                return implementation.call(step, all_arguments, accept)

            return call_implementation

        call = innermost
        for implementation in reversed(self.implementations):
            call = put_around(implementation, call)
        return call

    def _accept_named_items(self, plugin: RegisteredPlugin, items: Any) -> Any:
        for item in items or ():
            if not isinstance(getattr(item, "name", None), str):
                raise PluginError(
                    f"hook {self.name}: {item!r} has no name: return a list of objects whose "
                    "attribute `name` is a string"
                )
        return items

    def _collect_answers(
        self,
        step: int | None,
        arguments: Mapping[str, Any],
        per_plugin: PerPlugin | None = None,
        accept: Accept | None = None,
    ) -> Answers:
        answers = []
        for implementation, own_arguments in self._iter_calls(per_plugin):
            all_arguments = {**arguments, **own_arguments}
            self._check_arguments(implementation, all_arguments)
            answer = implementation.call(step, all_arguments, accept)
            answers.append((implementation.plugin, answer))
        return answers

    def _iter_calls(
        self, per_plugin: PerPlugin | None
    ) -> Iterator[tuple[HookImpl, Mapping[str, Any]]]:
        """Yield each implementation that is to be called, with the arguments of its plugin's."""
        for implementation in self.implementations:
            own_arguments = {} if per_plugin is None else per_plugin(implementation.plugin)
            if own_arguments is not None:
                yield implementation, own_arguments

    def _check_arguments(self, implementation: HookImpl, arguments: Mapping[str, Any]) -> None:
        """Raise a PluginError for a mistake of whoever calls the hook, before a plugin is called
        that would get the blame."""
        unknown = [name for name in arguments if name not in self._argnames]
        missing = [name for name in implementation.argnames if name not in arguments]
        if unknown or missing:
            who = f"which plugin {implementation.plugin.name!r} takes"
            mistake = f"with {unknown[0]!r}" if unknown else f"without {missing[0]!r}, {who}"
            raise PluginError(
                f"hook {self.name} was called {mistake}; its arguments are: "
                f"{', '.join(self._argnames) or 'none'}"
            )

    def _check_combine(self, combine: Combine) -> None:
        if self.metadata.combine is not combine:
            raise PluginError(
                f"hook {self.name} combines answers by Combine.{self.metadata.combine.name}, not "
                f"by Combine.{combine.name}: call it by "
                f"plugins.hooks.{self.name}.{_METHODS[self.metadata.combine]}(...)"
            )

    def _check_exclusive(self, plugins: Iterable[RegisteredPlugin], clash: str) -> None:
        names = [repr(plugin.name) for plugin in plugins]
        if len(names) > 1:
            raise PluginError(
                f"hook {self.name} takes one answer, but {' and '.join(names)} {clash}: "
                "leave all but one of them out"
            )


class HookCallers(Mapping[str, HookCaller]):
    """The callers of all hooks, as attributes or by name: `hooks.on_save` is `hooks["on_save"]`.

    A hook that a plugin specifies is there if that plugin is active: `"on_announcement" in hooks`.
    """

    def __init__(self) -> None:
        self._callers: dict[str, HookCaller] = {}

    def add(self, caller: HookCaller) -> None:
        """Add the caller of one more hook."""
        self._callers[caller.name] = caller

    def __getitem__(self, name: str) -> HookCaller:
        return self._callers[name]

    def __getattr__(self, name: str) -> HookCaller:
        callers = vars(self).get("_callers", {})  # which a copy does not have at first
        if name not in callers:
            raise AttributeError(f"there is no hook {name!r}. {did_you_mean(name, callers)}")
        return callers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._callers)

    def __len__(self) -> int:
        return len(self._callers)


def _drop_shared(items: Answers) -> Answers:
    """Return the items without those that another plugin before has given.

    By identity: what several plugins share on purpose, such as the stream of several instances of
    one plugin, is a single object.
    """
    owners: dict[int, RegisteredPlugin] = {}
    return [
        (plugin, item) for plugin, item in items if owners.setdefault(id(item), plugin) is plugin
    ]


def _merge_by_name(answers: Answers, what: str) -> dict[str, Any]:
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
