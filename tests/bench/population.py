"""What four members of a population cost, compared with one run.

All arms train a perceptron 64-64-64-10 on batches of 64 with `Engine.fit`, in turns, compiled before
the timed region.

    one      the default Engine
    four     a population of four members
    eight    a population of eight members
    exact    four members, one after the other

The ratios are over `one`: four is to be 2.0 at most.
"""

from time import perf_counter
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import optax
from fulgurite_population import Population
from harness import Spread, arguments, interleaved, ratio, show, write

STEPS = 500
RATIOS = {name: (name, "one") for name in ("four", "eight", "exact")}


class Classifier(fg.Module):
    """A small classifier."""

    net: eqx.nn.MLP

    def __init__(self, *, key: Any) -> None:
        self.net = eqx.nn.MLP(64, 10, 64, 2, key=key)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        """Return the loss and the accuracy."""
        logits = jax.vmap(self.net)(batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        accuracy = fg.metrics.Accuracy.from_logits(logits, batch["label"])
        return fg.Output(losses.mean(), metrics={"accuracy": accuracy})

    def configure_optimizers(self) -> optax.GradientTransformation:
        """Return the optimizer."""
        return optax.adam(1e-3)


class Arm:
    """One way to train, made once and timed many times.

    Args:
        population: of the members; None for a single run.
        data: the batches.
    """

    def __init__(self, population: Population | None, data: fg.ArrayData) -> None:
        plugins = [] if population is None else [population]
        model = Classifier if population is None else population.stack(Classifier)
        self.data = data
        self.engine = fg.Engine(steps=STEPS, plugins=plugins, autoload=False)
        self.state = self.engine.fit(model, data).state

    def __call__(self) -> float:
        """Train on; return the microseconds of a step."""
        began = perf_counter()
        self.state = self.engine.fit(data=self.data, state=self.state).state
        jax.block_until_ready(self.state.step)
        return (perf_counter() - began) / STEPS * 1e6


def main() -> None:
    """Run the arms, print the tables and write the file."""
    options = arguments(__doc__, repeats=11).parse_args()
    random = np.random.default_rng(0)
    arrays = {
        "image": random.normal(size=(4096, 64)).astype(np.float32),
        "label": random.integers(0, 10, 4096, np.int32),
    }
    data = fg.ArrayData(arrays, 64, shuffle=True)
    arms = {
        "one": Arm(None, data),
        "four": Arm(Population(seeds=range(4)), data),
        "eight": Arm(Population(seeds=range(8)), data),
        "exact": Arm(Population(seeds=range(4), exact=True), data),
    }
    microseconds = interleaved(arms, options.repeats)
    ratios = {name: ratio(microseconds, *pair) for name, pair in RATIOS.items()}
    show("µs a step", {name: Spread.of(values) for name, values in microseconds.items()})
    show("ratios", ratios)
    if options.json:
        write(options.json, ratios)


if __name__ == "__main__":
    main()
