"""Which plugins are active: those listed, those of the environment, those that load themselves."""

import functools
import os
import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points, packages_distributions, version
from pathlib import Path
from typing import Any

from fulgurite._src.plugins.plugin import (
    Plugin,
    check_options,
    get_options,
    get_order,
)
from fulgurite.errors import (
    ConfigurationError,
    FulguriteError,
    PluginError,
    check_name,
    did_you_mean,
)

GROUP = "fulgurite.plugins"
AUTOLOAD = "fulgurite.autoload"
# For an error alone: what of ours brings which plugins.
_KNOWN_DISTRIBUTIONS = {
    "averaging": ("average", "lookahead"),
    "checkpoint": ("checkpoints",),
    "evaluators": ("evaluator", "predictions"),
    "logging": (
        "batch_pictures",
        "compilations",
        "console",
        "csv",
        "environment",
        "jsonl",
        "learning_rate",
        "media",
        "norms",
        "null",
        "python",
    ),
    "monitor": ("alert", "devices", "goodput", "throughput"),
    "optimizers": (
        "gradient_accumulation",
        "gradient_clip",
        "multi_optimizer",
        "reduce_on_plateau",
    ),
    "precision": ("precision",),
    "pretrained": ("pretrained",),
    "profiler": ("profile", "programs"),
    "progress": ("progress",),
    "replay": (
        "capture",
        "checked",
        "pin_programs",
        "replay_hint",
        "self_check",
        "state_digest",
    ),
    "rng": ("rng",),
    "sharding": ("data_parallel", "fsdp", "sharding", "tensor_parallel"),
    "stopping": ("early_stopping", "spike_detection", "time_limit"),
    "sweeps": ("sweep_members", "sweep_population", "sweep_trial"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}


@dataclass(frozen=True, eq=False)
class RegisteredPlugin:
    """A plugin under its name.

    Example:
        for name, plugin in engine.plugins.plugins.items():
            print(name, plugin)

    Attributes:
        name: `NAME` or `NAME:INSTANCE`, the key of its state, streams, timings and manifest entry.
        plugin: the instance.
        activation: why it is active: `given`, `named`, `autoload`, or `core` for the engine's own.
        order: the names in its `provides`, `requires`, `after` and `before`.
    """

    name: str
    plugin: Any
    activation: str
    order: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @functools.cached_property
    def options(self) -> Plugin:
        """Its options, as attributes: `plugin.options.kept_on_skip`."""
        return get_options(self.plugin)

    @functools.cached_property
    def distribution(self) -> str:
        """Name and version of the distribution that brought the plugin's class."""
        return get_distribution(type(self.plugin))

    @property
    def aliases(self) -> set[str]:
        """What `after`, `before` and `requires` may call it."""
        return {self.name, self.name.partition(":")[0], *self.order.get("provides", ())}


@dataclass(frozen=True)
class InstalledPlugin:
    """A plugin that a distribution offers under a name.

    Example:
        from fulgurite.plugins import find_installed_plugins

        for name, offers in find_installed_plugins().items():
            print(name, [plugin.distribution for plugin in offers])
    """

    entry: EntryPoint
    autoload: bool

    @property
    def distribution(self) -> str:
        """Name and version, such as `fulgurite-wandb 0.1`."""
        if self.entry.dist is None:
            return "unknown distribution"
        return f"{self.entry.dist.name} {self.entry.dist.version}"

    @property
    def names(self) -> tuple[str, str]:
        """The module and the attribute that the entry point says, even if they cannot be such."""
        module, _, attribute = self.entry.value.partition("[")[0].partition(":")
        return module.strip(), attribute.strip()

    def load(self) -> Any:
        """Import the plugin's class; a failure names plugin and distribution."""
        name = self.entry.name
        try:
            plugin_class = self.entry.load()
            if not callable(plugin_class):
                raise TypeError("an entry point names a class, or a function that makes a plugin")
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"plugin {name!r} ({self.distribution}) cannot be imported from "
                f"{self.entry.value!r}: {type(error).__name__}: {error}. Fix or uninstall that "
                f"distribution, or leave it out with '-{name}'."
            ) from error
        return plugin_class


InstalledPlugins = Mapping[str, Sequence[InstalledPlugin]]


@functools.cache  # reading it again takes most of the time of an `Engine`
def find_installed_plugins() -> dict[str, list[InstalledPlugin]]:
    """Return everything installed, by name; more than one entry is a conflict for whoever asks for
    that name."""
    entries = entry_points()
    autoloaded = {(entry.name, entry.dist) for entry in entries.select(group=AUTOLOAD)}
    plugins: dict[str, list[InstalledPlugin]] = {}
    for entry in entries.select(group=GROUP):
        plugin = InstalledPlugin(entry, (entry.name, entry.dist) in autoloaded)
        plugins.setdefault(entry.name, []).append(plugin)
    return plugins


def find_plugin(name: str, installed: InstalledPlugins) -> InstalledPlugin:
    """Return the one installed plugin of a name.

    Args:
        name: as an entry point gives it, such as `wandb`.
        installed: what `find_installed_plugins` returned.

    Raises:
        PluginError: no distribution offers it, or several do.
    """
    if name not in installed:
        hint = did_you_mean(name, installed)
        for folder, names in _KNOWN_DISTRIBUTIONS.items():
            if name in names:
                hint = f"fulgurite-{folder} brings it, in a clone: pip install ./plugins/{folder}"
        raise PluginError(f"no plugin {name!r} is installed. {hint}")
    if len(installed[name]) > 1:
        claims = " and ".join(plugin.distribution for plugin in installed[name])
        raise PluginError(
            f"the plugin name {name!r} is claimed by {claims}: uninstall one, or pass an instance"
        )
    return installed[name][0]


def autoload_names(installed: InstalledPlugins) -> list[str]:
    """Return what is active without being asked for, as far as FULGURITE_AUTOLOAD lets it: `0` for
    nothing, or an allow-list `a,b`."""
    names = sorted(
        name for name, plugins in installed.items() if any(plugin.autoload for plugin in plugins)
    )
    allowed = os.environ.get("FULGURITE_AUTOLOAD", "1")
    if allowed == "1":
        return names
    allowed_names = [name.strip() for name in allowed.split(",")]
    return [name for name in names if name in allowed_names]


def selection_from_environment() -> list[str]:
    """Return what FULGURITE_PLUGINS adds (`name`) and takes away (`-name`)."""
    names = os.environ.get("FULGURITE_PLUGINS", "").split(",")
    return [name.strip() for name in names if name.strip()]


def resolve_plugins(
    requested: Iterable[Any], *, autoload: bool
) -> tuple[list[RegisteredPlugin], list[str]]:
    """Return the active plugins, and messages about those that failed without having been asked
    for and about names to leave out that nothing has.

    Args:
        requested: instances, names, names with arguments, and names to leave out (`"-name"`).
        autoload: whether installed plugins that ask for it are active without being named.

    Raises:
        PluginError: a plugin that was asked for is missing, is claimed twice or fails.
        ConfigurationError: something in `requested` is not a plugin.
    """
    installed = find_installed_plugins()
    entries = [_parse_entry(entry, installed) for entry in requested]
    known = {entry.base_name for entry in entries}
    for name in dict.fromkeys(selection_from_environment()):
        if name not in known:
            entries.append(_parse_entry(name, installed))
    removed = {entry.base_name[1:] for entry in entries if entry.is_removal}
    plugins: list[RegisteredPlugin] = []
    names: set[str] = set()
    for entry in entries:
        if entry.is_removal:
            continue
        if entry.is_named and entry.base_name in names:
            raise PluginError(
                f"plugin {entry.base_name!r} is listed twice; pass instances to have several"
            )
        names.add(entry.base_name)
        if entry.base_name not in removed:
            plugins.append(_register_entry(entry, installed, plugins))
    messages = _check_removals(removed, names, installed)
    for name in autoload_names(installed) if autoload else ():
        if name in removed | names:
            continue
        source = find_plugin(name, installed)
        try:
            plugin = _instantiate(name, source, {})
            plugins.append(_register(plugin, name, "autoload", plugins))
        except PluginError as error:
            # Nobody asked for it: the others load, and the run says so at its start.
            messages.append(str(error))
            warnings.warn(str(error), stacklevel=5)
    return plugins, messages


@functools.cache
def get_distribution(plugin_class: type) -> str:
    """Return name and version of the distribution that a class comes from, else its module."""
    package = plugin_class.__module__.partition(".")[0]
    for plugins in find_installed_plugins().values():
        for plugin in plugins:
            if plugin.names[0].partition(".")[0] == package:
                return plugin.distribution
    names = _read_packages().get(package) if _has_metadata(package) else None
    if not names:
        return f"module {plugin_class.__module__}"
    return f"{names[0]} {version(names[0])}"


@functools.cache  # reads the metadata of everything installed: 0.2 s and more
def _read_packages() -> Mapping[str, list[str]]:
    return packages_distributions()


def _has_metadata(package: str) -> bool:
    """Return whether there is metadata beside a package. A program that defines plugins itself is
    mostly elsewhere."""
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None:
        return True
    path = Path(file)
    folder = path.parent.parent if path.stem == "__init__" else path.parent
    return any(folder.glob("*.dist-info")) or any(folder.glob("*.egg-info"))


@dataclass(frozen=True)
class _Entry:
    """One entry of a list of plugins.

    Attributes:
        base_name: the plugin's name without its instance; `-NAME` for one to leave out.
        plugin: the instance; None for a name.
        arguments: of a name.
    """

    base_name: str
    plugin: Any
    arguments: dict[str, Any]

    @property
    def is_named(self) -> bool:
        """Whether the plugin is asked for by name."""
        return self.plugin is None

    @property
    def is_removal(self) -> bool:
        """Whether the plugin is to be left out."""
        return self.is_named and self.base_name.startswith("-")


def _parse_entry(entry: Any, installed: InstalledPlugins) -> _Entry:
    if isinstance(entry, str):
        return _Entry(entry, None, {})
    if isinstance(entry, dict):
        if len(entry) != 1 or not isinstance(next(iter(entry.values())), dict):
            raise ConfigurationError(
                f"write a plugin with arguments as {{'name': {{'argument': value}}}}, not {entry!r}"
            )
        name, arguments = next(iter(entry.items()))
        return _Entry(name, None, arguments)
    if isinstance(entry, type):
        raise ConfigurationError(
            f"{entry.__name__} is a class: pass an instance, {entry.__name__}(...)"
        )
    if type(entry).__module__ == "builtins":
        raise ConfigurationError(
            f"a plugin is an instance with hooks, a name or {{name: {{}}}}, not {entry!r}"
        )
    return _Entry(_get_base_name(entry, installed), entry, {})


def _register_entry(
    entry: _Entry, installed: InstalledPlugins, others: list[RegisteredPlugin]
) -> RegisteredPlugin:
    if not entry.is_named:
        return _register(entry.plugin, entry.base_name, "given", others)
    plugin = _instantiate(entry.base_name, find_plugin(entry.base_name, installed), entry.arguments)
    return _register(plugin, entry.base_name, "named", others)


def _check_removals(removed: set[str], names: set[str], installed: InstalledPlugins) -> list[str]:
    """Refuse to leave out a plugin whose name looks like a misspelt one, and return messages about
    other names that nothing has."""
    ours = {name for names in _KNOWN_DISTRIBUTIONS.values() for name in names}
    known = names | set(installed) | ours
    messages = []
    for name in sorted(removed - known):
        hint = did_you_mean(name, known)
        if "Did you mean" in hint:
            raise PluginError(
                f"'-{name}' leaves out a plugin that is neither installed nor listed. {hint}"
            )
        messages.append(f"'-{name}' has no effect: no plugin of that name is installed or listed")
    return messages


def _instantiate(name: str, installed: InstalledPlugin, arguments: dict[str, Any]) -> Any:
    plugin_class = installed.load()
    try:
        return plugin_class(**arguments)
    except FulguriteError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"plugin {name!r} ({installed.distribution}) cannot be made with arguments "
            f"{arguments}: {type(error).__name__}: {error}"
        ) from error


def _get_base_name(plugin: Any, installed: InstalledPlugins) -> str:
    """Return the class attribute `plugin_name`, else its entry point's name, else the class's name
    in snake case."""
    plugin_class = type(plugin)
    plugin_name = get_options(plugin).plugin_name
    if plugin_name:
        return plugin_name
    for name, entries in installed.items():
        for entry in entries:
            module, attribute = entry.names
            if attribute == plugin_class.__qualname__ and plugin_class.__module__.startswith(
                module
            ):
                return name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plugin_class.__name__).lower()


def _register(
    plugin: Any, base_name: str, activation: str, others: list[RegisteredPlugin]
) -> RegisteredPlugin:
    """Return a plugin under a name that none of the others has."""
    if any(other.plugin is plugin for other in others):
        raise PluginError(f"the same instance of plugin {base_name!r} is given twice")
    check_options(plugin)
    instance = get_options(plugin).instance
    taken = {other.name for other in others}
    if instance is None and base_name in taken:
        instance = 2
        while f"{base_name}:{instance}" in taken:
            instance += 1
    name = base_name if instance is None else f"{base_name}:{instance}"
    check_name(name, f"{type(plugin).__name__}: the plugin's name", error=PluginError)
    return RegisteredPlugin(name, plugin, activation, get_order(plugin))
