"""What four members of a population cost, compared with one run.

All arms train a perceptron with `Engine.fit`, in turns, compiled before the timed region: `small` is
64-16-10 on batches of 16, where most of a step is not arithmetic, and `large` 64-64-64-10 on batches
of 64, where four members are four times the arithmetic.

    one      the default Engine
    four     a population of four members
    eight    a population of eight members
    exact    four members, one after the other

The ratios are over `one`: `small.four` is to be 2.0 at most; on two quiet cores it was 1.84 to 1.98.
"""

from collections.abc import Callable
from functools import partial
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
WORKLOADS = {"small": (16, 1, 16), "large": (64, 2, 64)}
"""Width, number of hidden layers, and batch size."""
RATIOS = {name: (name, "one") for name in ("four", "eight", "exact")}


class Classifier(fg.Module):
    """A small classifier."""

    net: eqx.nn.MLP

    def __init__(self, width: int, depth: int, *, key: Any) -> None:
        self.net = eqx.nn.MLP(64, 10, width, depth, key=key)

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
        make_model: of one member.
        data: the batches.
    """

    def __init__(
        self, population: Population | None, make_model: Callable[..., Any], data: fg.ArrayData
    ) -> None:
        plugins = [] if population is None else [population]
        model = make_model if population is None else population.stack(make_model)
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
    ratios: dict[str, Spread] = {}
    for name, (width, depth, batch_size) in WORKLOADS.items():
        data = fg.ArrayData(arrays, batch_size, shuffle=True)
        model = partial(Classifier, width, depth)
        arms = {
            "one": Arm(None, model, data),
            "four": Arm(Population(seeds=range(4)), model, data),
            "eight": Arm(Population(seeds=range(8)), model, data),
            "exact": Arm(Population(seeds=range(4), exact=True), model, data),
        }
        microseconds = interleaved(arms, options.repeats)
        show(f"{name}: µs a step", {arm: Spread.of(values) for arm, values in microseconds.items()})
        results = {f"{name}.{arm}": ratio(microseconds, *pair) for arm, pair in RATIOS.items()}
        show(f"{name}: ratios", results)
        ratios |= results
    if options.json:
        write(options.json, ratios)


if __name__ == "__main__":
    main()
