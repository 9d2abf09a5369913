"""The options that a plugin may have: declared, read and checked here alone."""

import functools
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from inspect import getattr_static, isroutine
from numbers import Integral
from typing import Any

from fulgurite.errors import PluginError, check_positive_int

_VOWELS = "aeiou"


class Plugin:
    """An optional base class of plugins, which declares the options that a plugin may set.

    Any object with methods marked by `@fg.hookimpl` is a plugin. One that derives from this class
    knows its registered name, and a type checker knows its options; it may be a dataclass or an
    `eqx.Module`. Set an option in the body of the class or in an instance. An attribute of any
    plugin that looks like a misspelt option is an error.

    Example:
        class Count(fg.Plugin):
            after = ("precision",)
            kept_on_skip = True

            @fg.hookimpl
            def init_plugin_state(self):
                return jnp.int32(0)

            @fg.hookimpl
            def after_update(self, module, plugin_state):
                return module, plugin_state + 1


        count = Count()
        result = fg.Engine(steps=3, plugins=[count]).fit(model, data)
        print(result.state.plugin_states[count.registered_name])  # 3

    Attributes:
        plugin_name: the name of the class's plugins. Empty for that of their entry point, or else
            the class's name in snake case.
        instance: a string that tells several plugins of a class apart; they are named
            `NAME:INSTANCE`. None to number them. It may be a property.
        provides: names that other plugins may use for this one in their `requires`, `after` and
            `before`.
        requires: the names of plugins that must be active, and come before this one.
        after: the names of plugins that come before this one, if they are active.
        before: the names of plugins that come after this one, if they are active.
        kept_on_skip: whether `after_update` of a step that is skipped, because something was not
            finite, still changes this plugin's state.
        required: of a logger, whether its failure ends the run.
        state_version: the version of what `get_host_state` returns.
        changes_results: whether it changes numbers of a run on purpose, for `check_plugin` of
            `fulgurite_testing`.
        hookspecs: a module or class that specifies further hooks, which the plugin calls.
    """

    plugin_name: str = ""
    # Any, not `str | None`: a type checker lets a property, a field or a constant override it.
    instance: Any = None
    provides: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    kept_on_skip: bool = False
    required: bool = False
    state_version: int = 1
    changes_results: bool = False
    hookspecs: Any = None

    @property
    def registered_name(self) -> str:
        """The name under which the engine has the plugin: the key of its plugin state, of its host
        state and of its timings. In a hook or an action it is that of the engine that calls it.

        Raises:
            PluginError: elsewhere: no engine has it yet, or several have it under different names.
        """
        for plugin, name in _called.get():
            if plugin is self:
                return name
        names = _find_names(self)
        if len(names) > 1:
            gc.collect()  # an engine that nobody has is not another one
            names = _find_names(self)
        class_name = type(self).__name__
        if not names:
            raise PluginError(
                f"{class_name} is not registered yet: read its name in a hook or an action"
            )
        if len(names) > 1:
            raise PluginError(
                f"{class_name} is {' and '.join(map(repr, names))} in different engines: read its "
                "name in a hook or an action, or give each of several such plugins its own "
                "`instance`"
            )
        return names[0]


_REGISTERED_NAME = Plugin.registered_name
OPTIONS = tuple(Plugin.__annotations__)
_ORDER_OPTIONS = [
    option for option, kind in Plugin.__annotations__.items() if kind == tuple[str, ...]
]
_FLAGS = [option for option, kind in Plugin.__annotations__.items() if kind is bool]

_managers: weakref.WeakSet[Any] = weakref.WeakSet()
"""The managers of plugins of the engines that are built."""
_called: ContextVar[tuple[tuple[Any, str], ...]] = ContextVar("called", default=())
"""The plugins that are called at the moment, the innermost first, each with the name that the
engine that calls it has for it."""


class _OptionsOf(Plugin):
    """A copy of the options of a plugin that does not derive from `Plugin`."""

    def __init__(self, plugin: Any) -> None:
        for option in OPTIONS:
            if hasattr(plugin, option):
                setattr(self, option, getattr(plugin, option))


def get_options(plugin: Any) -> Plugin:
    """Return an object that has the options of a plugin, whatever its class, as attributes."""
    return plugin if isinstance(plugin, Plugin) else _OptionsOf(plugin)


def check_options(plugin: Any) -> None:
    """Raise a PluginError for an option of the wrong type, and for an attribute that looks like a
    misspelt option."""
    class_name = type(plugin).__name__
    options = get_options(plugin)
    for option in _ORDER_OPTIONS:
        names = getattr(options, option)
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise PluginError(f"{class_name}.{option} must be a tuple of names, not {names!r}")
    for option in _FLAGS:
        flag = getattr(options, option)
        if not isinstance(flag, bool):
            raise PluginError(f"{class_name}.{option} must be True or False, not {flag!r}")
    _check_names(plugin, options)
    check_positive_int(options.state_version, f"{class_name}.state_version", error=PluginError)
    for name in dir(plugin):
        option = _find_misspelt_option(name)
        if option is not None and not isroutine(getattr_static(type(plugin), name, None)):
            raise PluginError(
                f"{class_name} has an attribute {name!r}, which is not an option of plugins. Did "
                f"you mean {option!r}? If not, give it a name that cannot be taken for it"
            )


def _check_names(plugin: Any, options: Plugin) -> None:
    """Raise a PluginError for a `plugin_name` or `instance` that cannot be part of a name, and for
    an attribute that stands in the place of the name that the engine gives."""
    class_name = type(plugin).__name__
    name = options.plugin_name
    # A colon begins the instance, and a dash in a list of plugins leaves one out.
    if name and (not isinstance(name, str) or name.startswith("-") or ":" in name):
        raise PluginError(
            f"{class_name}.plugin_name is {name!r}; it must be a string without ':' that does not "
            "begin with '-'. What tells plugins of a class apart is their `instance`"
        )
    instance = options.instance
    is_valid = isinstance(instance, str | Integral) and not isinstance(instance, bool)
    if instance is not None and (not is_valid or instance == ""):
        raise PluginError(
            f"{class_name}.instance is {instance!r}; it must be a string that is not empty, or "
            "None to number the plugins of the class"
        )
    if getattr_static(plugin, "registered_name", _REGISTERED_NAME) is not _REGISTERED_NAME:
        raise PluginError(
            f"{class_name} has an attribute 'registered_name', which is the name that the engine "
            "gives. Did you mean 'plugin_name'?"
        )


def get_order(plugin: Any) -> dict[str, tuple[str, ...]]:
    """Return the names in `provides`, `requires`, `after` and `before` of a plugin."""
    options = get_options(plugin)
    return {option: getattr(options, option) for option in _ORDER_OPTIONS}


def note_engine(manager: Any) -> None:
    """Have the plugins of a manager know their names outside of hooks, too, as long as it lives."""
    _managers.add(manager)


@contextmanager
def name_context(plugin: Any, name: str) -> Iterator[None]:
    """Have a plugin know its name within the block.

    Args:
        plugin: it is called in the block.
        name: under which the engine that calls it has it.
    """
    token = _called.set(((plugin, name), *_called.get()))
    try:
        yield
    finally:
        _called.reset(token)


def _find_names(plugin: Any) -> list[str]:
    """Return the names under which engines have a plugin, each once."""
    entries = [entry for manager in list(_managers) for entry in manager.plugins.values()]
    return sorted({entry.name for entry in entries if entry.plugin is plugin})


def _iter_misspellings(word: str) -> Iterator[str]:
    """Yield what a typing mistake makes of a word: a letter left out or doubled, two neighbours
    exchanged, one vowel for another.

    Other letters than that are mostly another word, such as `instances`, `provider` or `rafter`.
    """
    for index, letter in enumerate(word):
        head, tail = word[:index], word[index + 1 :]
        yield head + tail
        yield head + letter + letter + tail
        yield head + tail[:1] + letter + tail[1:]
        if letter in _VOWELS:
            yield from (head + vowel + tail for vowel in _VOWELS)


def _join_words(name: str) -> str:
    """Return a name without what its style adds: `keptOnSkip`, `KEPT_ON_SKIP` and `kept_on_skip`
    are one."""
    return name.replace("_", "").lower()


_OPTION_OF = {
    misspelling: option
    for option in OPTIONS
    for misspelling in (*_iter_misspellings(_join_words(option)), _join_words(option))
}
"""Each option by what looks like it."""


@functools.cache  # each engine asks for the same names
def _find_misspelt_option(name: str) -> str | None:
    """Return the option that the name of an attribute looks like, unless it is one."""
    if name in OPTIONS or name.startswith("_"):
        return None
    # Nobody has another reason for a name that is like one of three words.
    long_options = [option for option in OPTIONS if option.count("_") > 1]
    loose_matches = get_close_matches(name, long_options, 1, cutoff=0.85)
    return _OPTION_OF.get(_join_words(name), *loose_matches)
