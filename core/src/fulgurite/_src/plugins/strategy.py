"""A plugin's sharding strategy, whose errors name the plugin."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from jax.sharding import NamedSharding
from jaxtyping import PyTree

from fulgurite._src.plugins.implementations import plugin_error_context
from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.plugins.selection import RegisteredPlugin
from fulgurite._src.sharding import ProcessShard, ShardingStrategy, SingleDevice
from fulgurite.errors import ConfigurationError


class PluginShardingStrategy(ShardingStrategy):
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

    def check_processes(self) -> None:
        with self._error_context("check_processes"):
            self.strategy.check_processes()

    def mesh_context(self) -> AbstractContextManager[Any]:
        # Only making it: what the caller does in the context is not the plugin's.
        with self._error_context("mesh_context"):
            return self.strategy.mesh_context()

    def shard_state(self, spec: PyTree) -> PyTree[NamedSharding | None] | None:
        with self._error_context("shard_state"):
            return self.strategy.shard_state(spec)

    def shard_batch(self, batch: PyTree, *, is_stacked: bool = False) -> PyTree:
        with self._error_context("shard_batch"):
            return self.strategy.shard_batch(batch, is_stacked=is_stacked)

    def get_batch_spec(self, batch: PyTree, *, is_stacked: bool = False) -> PyTree:
        with self._error_context("get_batch_spec"):
            return self.strategy.get_batch_spec(batch, is_stacked=is_stacked)

    def shard_eval_batch(self, batch: PyTree) -> PyTree:
        with self._error_context("shard_eval_batch"):
            return self.strategy.shard_eval_batch(batch)

    def constrain_params(self, module: PyTree) -> PyTree:
        with self._error_context("constrain_params"):
            return self.strategy.constrain_params(module)

    def constrain_output(self, output: PyTree) -> PyTree:
        with self._error_context("constrain_output"):
            return self.strategy.constrain_output(output)

    def replicate(self, tree: PyTree) -> PyTree:
        with self._error_context("replicate"):
            return self.strategy.replicate(tree)

    def put_on_mesh(self, tree: PyTree) -> PyTree:
        with self._error_context("put_on_mesh"):
            return self.strategy.put_on_mesh(tree)

    def process_shard(self, get_batch_spec: Callable[[], PyTree | None]) -> ProcessShard:
        with self._error_context("process_shard"):
            return self.strategy.process_shard(get_batch_spec)

    def align_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        # Only the call: what the iterator raises is mostly the error of the data that it reads.
        with self._error_context("align_batches"):
            return self.strategy.align_batches(batches)

    def check_batch(self, batch: PyTree, where: str) -> None:
        with self._error_context("check_batch"):
            self.strategy.check_batch(batch, where)

    def check_same(self, name: str, get_facts: Callable[[], dict[str, Any]], batch: PyTree) -> None:
        with self._error_context("check_same"):
            self.strategy.check_same(name, get_facts, batch)

    def raise_on_any_process(self, failure: Exception | None) -> None:
        # No note: it raises the failure of something else.
        self.strategy.raise_on_any_process(failure)

    def describe(self, batch: PyTree) -> str:
        with self._error_context("describe"):
            return self.strategy.describe(batch)

    def _error_context(self, method: str) -> AbstractContextManager[None]:
        return plugin_error_context(self._plugin, f"hook sharding_strategy, {method}", None)


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
