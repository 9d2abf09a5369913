"""A program that exports a model whose predictions are divided over two devices."""

import sys
from typing import Any

import fulgurite as fg
import jax
import numpy as np
from fulgurite_export import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH = Mesh(np.array(jax.devices()), ("device",))


class Divided(fg.Module):
    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        sharding = NamedSharding(MESH, PartitionSpec("device"))
        return jax.lax.with_sharding_constraint(2 * batch, sharding)


export(Divided(), sys.argv[1], np.zeros((2, 3), np.float32), batch=None)
