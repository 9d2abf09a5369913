"""Members over devices: each device holds and trains some of them."""

from typing import Any

import jax
import numpy as np
from fulgurite_sharding import MeshStrategy
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree


class MemberStrategy(MeshStrategy):
    """Divides the members of a population among devices; batches are whole on each.

    Args:
        size: the number of members, a multiple of that of the devices.
        devices: to divide them among.
    """

    def __init__(self, size: int, devices: list[Any]) -> None:
        super().__init__(Mesh(np.array(devices), ("members",)))
        self.size = size
        self.divided = NamedSharding(self.mesh, PartitionSpec("members"))

    def get_state_shardings(self, state: Any) -> PyTree[NamedSharding | None]:
        """Return a sharding by members for all that members have of their own: module, model state,
        optimizer state, and states of plugins such as averages of the weights."""
        shardings = jax.tree.map(self._choose_replicated, state)
        fields = ("module", "model_state", "opt_state", "plugin_states")
        divided = {name: jax.tree.map(self._choose, getattr(state, name)) for name in fields}
        return shardings.replace(**divided)

    def get_batch_shardings(self, batch: PyTree) -> PyTree[NamedSharding]:
        """Return that batches are whole on each device."""
        return jax.tree.map(lambda _: self.replicated, batch)

    def _choose_replicated(self, leaf: Any) -> NamedSharding | None:
        return self.replicated if isinstance(leaf, jax.ShapeDtypeStruct) else None

    def _choose(self, leaf: Any) -> NamedSharding | None:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return None
        is_divided = leaf.shape[:1] == (self.size,)
        return self.divided if is_divided else self.replicated
