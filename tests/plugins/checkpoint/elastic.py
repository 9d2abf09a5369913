"""Trains to a step, the state sharded over that many simulated devices, from what is there on; prints
weights."""

import json
import os
import sys
import warnings

run, devices, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.environ["JAX_NUM_CPU_DEVICES"] = f"{devices}"

import equinox as eqx  # noqa: E402
import fulgurite as fg  # noqa: E402
import jax  # noqa: E402
import optax  # noqa: E402
from fulgurite_checkpoint import Checkpointer  # noqa: E402
from fulgurite_sharding import MeshStrategy  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from trained import Net, regression  # noqa: E402


class Plain(Net):
    """`Net` without Adam, which makes steps out of the rounding in gradients that are zero."""

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e-2, momentum=0.9)


class FirstAxis(MeshStrategy):
    """Splits the first axis of what can be split over all devices."""

    def get_state_shardings(self, state: fg.TrainState) -> object:
        def get_sharding(leaf: object) -> NamedSharding | None:
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return None
            is_split = leaf.ndim > 0 and leaf.shape[0] % devices == 0
            return NamedSharding(self.mesh, PartitionSpec("data") if is_split else PartitionSpec())

        return jax.tree.map(get_sharding, state)


class Sharded:
    """Trains on all devices."""

    @fg.hookimpl
    def sharding_strategy(self) -> fg.ShardingStrategy:
        axis_types = (jax.sharding.AxisType.Auto,)
        return FirstAxis(jax.make_mesh((devices,), ("data",), axis_types=axis_types))


warnings.simplefilter("ignore")
engine = fg.Engine(
    steps=steps, seed=3, run_dir=run, plugins=[Sharded(), Checkpointer(99)], autoload=False
)
result = engine.fit(eqx.nn.make_with_state(Plain), regression(), resume="auto")
assert int(result.state.step) == steps
if devices > 1:
    assert len(result.module.first.weight.sharding.device_set) == devices
print(json.dumps(result.module.first.weight.tolist()))
