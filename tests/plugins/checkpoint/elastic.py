"""Trains to a step, the state sharded over so many simulated devices, from what is there on; prints
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
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from trained import Net, regression  # noqa: E402


class Plain(Net):
    """`Net` without Adam, which makes steps out of the rounding in gradients that are zero."""

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e-2, momentum=0.9)


class Sharded:
    """Splits the first axis of what can be split over all devices."""

    @fg.hookimpl
    def mesh(self) -> jax.sharding.Mesh:
        return jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @fg.hookimpl
    def state_sharding(self, state: fg.TrainState, mesh: jax.sharding.Mesh) -> object:
        def place(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
            split = leaf.ndim > 0 and leaf.shape[0] % devices == 0
            return NamedSharding(mesh, PartitionSpec(*["data"] * split))

        return jax.tree.map(
            lambda leaf: place(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else None, state
        )


warnings.simplefilter("ignore")
engine = fg.Engine(
    steps=steps, seed=3, run_dir=run, plugins=[Sharded(), Checkpointer(99)], autoload=False
)
result = engine.fit(eqx.nn.make_with_state(Plain), regression(), resume="auto")
assert int(result.state.step) == steps
if devices > 1:
    assert len(result.module.first.weight.sharding.device_set) == devices
print(json.dumps(result.module.first.weight.tolist()))
