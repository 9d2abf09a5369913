"""What the engine costs on eight simulated devices, against a loop written by hand with the same
shardings.

The loop by hand is `jax.jit` over the partitioned Equinox tree, donated, with `in_shardings` and
`out_shardings`; batches are NumPy arrays, with which that is fastest. It computes the loss and the
accuracy that the engine does, and reads those of a finished step every 50 steps; whether anything
is finite it does not look at. Otherwise everything is as in `overhead.py`, whose arms these are.
The ratios are those of `engine.fit` over it, for data parallel and fully sharded training;
`unchecked` does not look at it either, which leaves what the host does.
"""

from collections import deque
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_sharding import FSDP, DataParallel, ShardBySize, Sharding
from harness import Spread, arguments, ratio, show, write
from jax.sharding import NamedSharding, PartitionSpec
from overhead import IN_FLIGHT, Arm, engine_arm, hand_arm, measure_workload
from workloads import OPTIMIZER, WORKLOADS, Batch, Workload, compute_loss

DEVICES = 8
# A weight of (128, 128) is divided.
LAYOUTS = {"data_parallel": DataParallel(), "fsdp": FSDP(min_size=2**12)}


def sharded_arm(workload: Workload, arrays: Batch, model: Any, sharding: Sharding) -> Arm:
    """The loop by hand."""
    mesh = sharding.device_mesh
    sizes = sharding.parameters or ShardBySize("data", 2**62)

    def on_mesh(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, sizes.extend(PartitionSpec(), leaf.shape, mesh))

    def update(params: Any, opt_state: Any, key: Any, i: Any, batch: Batch) -> Any:
        def loss(params: Any) -> Any:
            return compute_loss(eqx.combine(params, static), batch)

        (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        accuracy = jnp.mean(logits.argmax(-1) == batch["label"])
        return optax.apply_updates(params, updates), opt_state, value, accuracy

    params, static = eqx.partition(model, eqx.is_array)
    carry = params, OPTIMIZER.init(params)
    places, whole = jax.tree.map(on_mesh, carry), NamedSharding(mesh, PartitionSpec())
    step = jax.jit(
        update,
        donate_argnums=(0, 1),
        in_shardings=(*places, whole, whole, NamedSharding(mesh, PartitionSpec("data"))),
        out_shardings=(*places, whole, whole),
    )

    newest: deque[Any] = deque(maxlen=IN_FLIGHT)
    logged: list[list[float]] = []

    def advance(carry: Any, key: Any, i: int, batch: Batch) -> tuple[Any, Any]:
        params, opt_state, *metrics = step(*carry, key, i, batch)
        newest.append(metrics)
        if i % 50 == 0:
            logged.append([float(metric) for metric in newest[0]])
        return (params, opt_state), metrics[0]

    return hand_arm(workload, arrays, jax.device_put(carry, places), advance)


def main() -> None:
    """Measures, prints, writes."""
    parser = arguments(__doc__, repeats=7)
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=["mlp_small", "mlp_784"])
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    ratios: dict[str, Spread] = {}
    for name in options.models:
        workload = WORKLOADS[name]
        arrays, model = workload.arrays(), workload.model(key=jax.random.key(0))
        for layout, sharding in LAYOUTS.items():
            engine = fg.Engine(steps=1, plugins=[sharding], autoload=False)
            fused = fg.Engine(steps=1, steps_per_execution=16, plugins=[sharding], autoload=False)
            unchecked = fg.Engine(
                steps=1, on_nonfinite="ignore", plugins=[sharding], autoload=False
            )
            arms = {
                "by hand": sharded_arm(workload, arrays, model, sharding),
                "fit": engine_arm(workload, arrays, model, engine),
                "fused": engine_arm(workload, arrays, model, fused),
                "unchecked": engine_arm(workload, arrays, model, unchecked),
            }
            losses = {
                arm: trainer.train(trainer.start(), 32, False) for arm, trainer in arms.items()
            }
            if not np.allclose(list(losses.values()), losses["by hand"], rtol=1e-3):
                raise SystemExit(f"the arms do not train alike; losses after 32 steps: {losses}")
            seconds = measure_workload(workload, arms, options.repeats)
            rows = {
                arm: Spread.of([1e6 * value for value in values]) for arm, values in seconds.items()
            }
            show(f"{name}, {layout}: microseconds a step", rows)
            results = {
                f"{name}/{layout}/{arm}": ratio(seconds, arm, "by hand")
                for arm in arms
                if arm != "by hand"
            }
            show("ratio to the loop by hand", results)
            ratios |= results
    if options.json:
        write(options.json, ratios)


if __name__ == "__main__":
    main()
