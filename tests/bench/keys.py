"""What a step whose losses and metrics are wired by keys costs.

All arms train a network of 784-256-256-10 with `Engine.fit`, in turns, compiled before the timed
region.

    by_hand   the module computes its loss, its accuracy and its mean logit itself
    keys      the same by `Losses` and `Metrics`
    layer     the same, and the mean norm of a hidden layer, `interms.net.layers[0]`
    returned  by hand, with that norm: the model is taken apart for it

The ratios are keys and layer over by_hand, and `tapped`, layer over returned.
"""

from functools import partial
from time import perf_counter
from typing import Any

import equinox as eqx
import fulgurite as fg
import fulgurite_losses
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_keys import Losses, Metrics, SoftmaxCrossEntropy, keyed
from fulgurite_metrics import Norm
from harness import Spread, arguments, interleaved, ratio, show, write
from workloads import copy_arrays

STEPS = 300
RATIOS = {
    "keys": ("keys", "by_hand"),
    "layer": ("layer", "by_hand"),
    "tapped": ("layer", "returned"),
}


class ByKeys(fg.Module):
    """A network that returns its logits."""

    net: eqx.nn.MLP

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        """Return predictions."""
        return fg.Output(preds={"logits": jax.vmap(self.net)(batch["image"])})

    def configure_optimizers(self) -> optax.GradientTransformation:
        """Return the optimizer."""
        return optax.adam(1e-3)


class ByHand(ByKeys):
    """The same, with loss and metrics."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        """Return loss, metrics and predictions."""
        logits = jax.vmap(self.net)(batch["image"])
        return self._measure(logits, batch)

    def _measure(self, logits: Any, batch: Any, **further: Any) -> fg.Output:
        loss = fulgurite_losses.softmax_cross_entropy(logits, batch["label"])
        metrics = {
            "metrics/accuracy": fg.metrics.Accuracy.from_logits(logits, batch["label"]),
            "metrics/logit": fg.metrics.Mean.from_values(logits),
        }
        return fg.Output(losses={"ce": loss}, metrics={**metrics, **further})


class Returned(ByHand):
    """The same, with the norm of a hidden layer."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        """Return loss, metrics and predictions."""
        first, *others = self.net.layers
        hidden = jax.vmap(first)(batch["image"])
        value = hidden
        for layer in others:
            value = jax.vmap(layer)(jax.nn.relu(value))
        norm = fg.metrics.Mean.from_values(jnp.linalg.norm(hidden, axis=-1))
        return self._measure(value, batch, **{"metrics/hidden": norm})


def build_arms() -> dict[str, tuple[fg.Module, fg.Engine]]:
    """Return the module and the engine of each arm."""
    losses = Losses(ce=SoftmaxCrossEntropy("preds.logits", "batch.label"))
    measures: Any = {
        "accuracy": keyed(fg.metrics.Accuracy.from_logits, "preds.logits", "batch.label"),
        "logit": keyed(fg.metrics.Mean.from_values, "preds.logits"),
    }
    hidden: Any = {"hidden": keyed(Norm.from_vectors, "interms.net.layers[0]")}
    net = eqx.nn.MLP(784, 10, 256, 2, key=jax.random.key(0))
    make_engine = partial(fg.Engine, steps=1, autoload=False)
    return {
        "by_hand": (ByHand(net), make_engine()),
        "keys": (ByKeys(net), make_engine(plugins=[losses, Metrics(**measures)])),
        "layer": (ByKeys(net), make_engine(plugins=[losses, Metrics(**measures, **hidden)])),
        "returned": (Returned(net), make_engine()),
    }


def measure_step(engine: fg.Engine, state: Any, data: fg.ArrayData, steps: int) -> float:
    """Return the seconds of a step.

    Args:
        engine: of the arm.
        state: to begin from; it is copied.
        data: to train on.
        steps: how many are taken.
    """
    state = copy_arrays(state)
    before = perf_counter()
    result = engine.fit(data=data, state=state, steps=steps)
    jax.block_until_ready(eqx.filter(result.module, eqx.is_array))
    return (perf_counter() - before) / steps


def main() -> None:
    """Run the arms, print the tables and write the file."""
    options = arguments(__doc__, repeats=11).parse_args()
    rng = np.random.default_rng(0)
    data = fg.ArrayData(
        {
            "image": rng.normal(size=(2048, 784)).astype(np.float32),
            "label": rng.integers(0, 10, 2048),
        },
        64,
        shuffle=True,
    )
    arms = {}
    for name, (module, engine) in build_arms().items():
        state = engine.init_state(module, data)
        arms[name] = partial(measure_step, engine, state, data, STEPS)
        measure_step(engine, state, data, STEPS)
    seconds = interleaved(arms, options.repeats)
    show("µs a step", {arm: Spread.of([1e6 * value for value in seconds[arm]]) for arm in seconds})
    ratios = {label: ratio(seconds, arm, base) for label, (arm, base) in RATIOS.items()}
    show("ratios", ratios)
    if options.json:
        write(options.json, ratios)


if __name__ == "__main__":
    main()
