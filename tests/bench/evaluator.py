"""What an evaluator due every 100 steps costs the steps between its evaluations.

Both arms train the same small perceptron on the same batches. `evaluator` evaluates it every 100
steps on 1,024 further examples. The time that the accounts book to the evaluation itself is taken
off; everything else counts: what is due, the wait for the steps in flight, the records.

    steps_between    the steps of a fit with an evaluator over those of a fit without
    whole            the same with the time of the evaluations
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import optax
from fulgurite_evaluators import Evaluator
from harness import Spread, arguments, interleaved, ratio, show, write

STEPS = 2_000


class Classifier(fg.Module):
    """A perceptron of 64-128-128-10."""

    net: eqx.nn.MLP

    def __init__(self, *, key: Any) -> None:
        self.net = eqx.nn.MLP(64, 10, 128, 2, key=key)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        logits = jax.vmap(self.net)(batch["image"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return fg.Output(
            loss, metrics={"accuracy": fg.metrics.Accuracy.from_logits(logits, batch["label"])}
        )

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


def data(examples: int, batch_size: int, **options: Any) -> fg.ArrayData:
    """Images and labels by chance."""
    rng = np.random.default_rng(examples)
    image = rng.normal(size=(examples, 64)).astype(np.float32)
    return fg.ArrayData(
        {"image": image, "label": rng.integers(0, 10, examples).astype(np.int32)},
        batch_size,
        **options,
    )


@dataclass(eq=False)
class Clock:
    """Seconds between the start and the end of a fit, without what comes before its first step."""

    seconds: float = 0.0

    @fg.hookimpl
    def on_fit_start(self) -> None:
        self._began = perf_counter()

    @fg.hookimpl
    def on_fit_end(self) -> None:
        self.seconds = perf_counter() - self._began


def arm(*plugins: Any) -> Callable[[], tuple[float, float]]:
    """Trains and gives seconds a step, without evaluations and with them."""
    clock, train = Clock(), data(4096, 64, shuffle=True, remainder="drop")
    engine = fg.Engine(steps=STEPS, plugins=[clock, *plugins], autoload=False)
    engine.fit(Classifier, train, steps=200)

    def seconds() -> tuple[float, float]:
        result = engine.fit(Classifier, train)
        return (
            clock.seconds - result.timings.seconds["evaluate.test"]
        ) / STEPS, clock.seconds / STEPS

    return seconds


def main() -> None:
    """Runs both arms and prints the ratios."""
    options = arguments(__doc__, repeats=15).parse_args()
    arms = {"none": arm(), "evaluator": arm(Evaluator("test", data(1024, 256), every=100))}
    whole: dict[str, list[float]] = {name: [] for name in arms}

    def measure(name: str) -> float:
        between, all_of_it = arms[name]()
        whole[name].append(all_of_it)
        return between

    seconds = interleaved({name: partial(measure, name) for name in arms}, options.repeats)
    ratios = {
        "steps_between": ratio(seconds, "evaluator", "none"),
        "whole": ratio(whole, "evaluator", "none"),
    }
    times = {name: Spread.of([value * 1e6 for value in values]) for name, values in seconds.items()}
    show("µs a step, without evaluations", times)
    show("ratios", ratios)
    if options.json:
        write(options.json, ratios, microseconds=times)


if __name__ == "__main__":
    main()
