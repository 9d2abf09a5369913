"""What the parts of an engine need of each other, instead of the engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Key

from fulgurite._src.model.context import Context
from fulgurite._src.model.output import Output
from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.rng import RngStreams
from fulgurite._src.sharding import ShardingStrategy
from fulgurite._src.timing import Timings
from fulgurite._src.training.compilations import Compilations
from fulgurite._src.training.settings import Settings
from fulgurite._src.training.state import TrainState
from fulgurite._src.training.update import UpdateRule

ComputeUpdate = Callable[[TrainState, Any, Context, UpdateRule], tuple[TrainState, Output]]
"""`Engine.train_step`: `(state, batch, ctx, update_rule)` gives the new state and the output."""


@dataclass(frozen=True, eq=False)
class Services:
    """What programs, compiled steps and evaluations use of their engine.

    Attributes:
        plugins: whose hooks are called.
        make_rng_streams: the random streams over a root key.
        sharding: where arrays lie on the devices, and how several processes agree.
        settings: the arguments of the engine.
        due_names: what `ctx.is_due` knows, in the order of the flags that a step receives:
            the scheduled actions as `PLUGIN.NAME`, and `log` last.
        compute_update: `Engine.train_step`, the part of a step that a subclass may override.
        compilations: who is told of new executables, and how many there may be.
    """

    plugins: PluginManager
    make_rng_streams: Callable[[Key[Array, ""]], RngStreams]
    sharding: ShardingStrategy
    settings: Settings
    due_names: tuple[str, ...]
    compute_update: ComputeUpdate
    compilations: Compilations

    @property
    def timings(self) -> Timings:
        """Where the wall time of the present fit goes; each fit begins a new one."""
        return self.plugins.timings
