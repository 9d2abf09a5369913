"""A plugin's sharding strategy, whose errors name the plugin."""

from collections.abc import Callable
from typing import Any

from fulgurite._src.plugins.implementations import plugin_error_context
from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.plugins.selection import RegisteredPlugin
from fulgurite._src.sharding import ShardingStrategy, SingleDevice
from fulgurite.errors import ConfigurationError


def _make_method(name: str) -> Callable[..., Any]:
    def method(self: "PluginShardingStrategy", *args: Any, **kwargs: Any) -> Any:
        # Only the call. What a caller does in a context that it returns is not the plugin's, and
        # what an iterator raises is mostly the error of the data that it reads.
        with plugin_error_context(self._plugin, f"hook sharding_strategy, {name}", None):
            return getattr(self.strategy, name)(*args, **kwargs)

    return method


# All methods of the interface, so that one that is added to it cannot be forgotten here.
_METHODS = {name: _make_method(name) for name in ShardingStrategy.__abstractmethods__}
_CallsStrategy: Any = type("_CallsStrategy", (ShardingStrategy,), _METHODS)


class PluginShardingStrategy(_CallsStrategy):
    """Calls another strategy, and notes on its exceptions which plugin and method raised them.

    A hook notes that by itself, but its answer is an object whose methods are called long after.

    Args:
        plugin: the plugin that answered the hook `sharding_strategy`.
        strategy: its answer.
    """

    def __init__(self, plugin: RegisteredPlugin, strategy: ShardingStrategy) -> None:
        self.strategy = strategy
        self.mesh = strategy.mesh
        self.sync = strategy.sync
        self.replicated = strategy.replicated
        self.batch_sharding = strategy.batch_sharding
        self._plugin = plugin

    @property
    def name(self) -> str:
        return f"{self.strategy.name} of plugin {self._plugin.name!r}"

    def raise_on_any_process(self, failure: Exception | None) -> None:
        # No note: it raises the failure of something else.
        self.strategy.raise_on_any_process(failure)


def choose_sharding(plugins: PluginManager, device: Any) -> ShardingStrategy:
    """Return the strategy of a plugin, or that of one device.

    Args:
        plugins: of the engine.
        device: the one to compute on, as the engine's argument says it, or None.

    Raises:
        ConfigurationError: both say which devices to compute on.
    """
    strategy = plugins.hooks.sharding_strategy.ask()
    if strategy is None:
        return SingleDevice()
    if device is not None:
        raise ConfigurationError(
            f"Engine: device is {device!r}, but plugin {strategy[0].name!r} says which devices "
            "to compute on: give only one of them"
        )
    return PluginShardingStrategy(*strategy)
