"""What the parts of an engine are handed, so that none of them calls the engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Key

from fulgurite._src.model.context import Context
from fulgurite._src.model.output import Output
from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.rng import RngStream, RngStreams
from fulgurite._src.sharding import ShardingStrategy
from fulgurite._src.timing import Timings
from fulgurite._src.training.compilations import Compilations
from fulgurite._src.training.forward import Step, forward
from fulgurite._src.training.settings import Settings
from fulgurite._src.training.state import ModelInit, TrainState
from fulgurite._src.training.update import UpdateRule

CustomTrainStep = Callable[[TrainState, Any, Context, UpdateRule], tuple[TrainState, Output]]
"""`Engine.train_step` of a subclass: `(state, batch, ctx, update_rule)` gives the new state and the
output."""


@dataclass(frozen=True, eq=False)
class Services:
    """What programs, compiled steps and evaluations use of their engine.

    Attributes:
        plugins: whose hooks are called.
        rng_streams: the random streams, of which each state has keys of its own.
        sharding: where arrays lie on the devices, and how several processes agree.
        settings: the arguments of the engine.
        due_names: what `ctx.is_due` knows, in the order of the flags that a step receives:
            the scheduled actions as `PLUGIN.NAME`, and `log` last.
        custom_train_step: what a subclass of `Engine` does for an update; None for the update rule
            alone.
        compilations: who is told of new executables, and how many there may be.
    """

    plugins: PluginManager
    rng_streams: tuple[RngStream, ...]
    sharding: ShardingStrategy
    settings: Settings
    due_names: tuple[str, ...]
    custom_train_step: CustomTrainStep | None
    compilations: Compilations

    @property
    def timings(self) -> Timings:
        """Where the wall time of the present fit goes; each fit begins a new one."""
        return self.plugins.timings

    def make_rng_streams(self, key: Key[Array, ""]) -> RngStreams:
        """Return the random streams over a root key."""
        return RngStreams(key, self.rng_streams)

    def make_params_key(self, model_init: ModelInit, key: Key[Array, ""]) -> Key[Array, ""]:
        """Return the key for what is made with a module.

        Args:
            model_init: a model that is there already is transformed with the root key itself.
            key: the root key.
        """
        if model_init.model is not None:
            return key
        return self.make_rng_streams(key).key("params", "init")

    def forward(
        self, module: Any, batch: Any, ctx: Context, step: Step = "training_step"
    ) -> Output:
        """Run a module's step with all loss terms; the arguments are those of `Engine.forward`."""
        return forward(self.plugins, self.sharding, step, module, batch, ctx)
