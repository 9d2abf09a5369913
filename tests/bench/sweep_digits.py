"""The program that `sweep.py` starts: the digits of the examples, with an evaluator."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import fulgurite as fg
from fulgurite_averaging import EMA, Average
from fulgurite_cli import Experiment
from fulgurite_evaluators import Evaluator

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from digits import Classifier, load_arrays  # pyright: ignore[reportMissingImports]


def experiment(
    width: int = 128, lr: float = 1e-3, steps: int = 1000, every: int = 100, copy: int = 0
) -> Experiment:
    """Train the perceptron of the example; `copy` changes nothing, so that nothing is compiled again
    for another one."""
    return build(width, lr, steps, every)


def build(
    width: int, lr: float, steps: int, every: int, *, is_averaged: bool = False, **options: Any
) -> Experiment:
    """Return the experiment.

    Args:
        width: of the perceptron.
        lr: the learning rate.
        steps: of the run.
        every: how many steps are between two evaluations.
        is_averaged: whether a moving average of the weights is evaluated.
        options: further ones of the engine; `plugins` are added.
    """
    train, test = load_arrays()
    view = "averaged" if is_averaged else "current"
    evaluator = Evaluator("test", fg.ArrayData(test, batch_size=120), every=every, module_view=view)
    plugins = ["rng", evaluator, "jsonl", *options.pop("plugins", [])]
    if is_averaged:
        plugins.append(Average(EMA(half_life=50)))
    return Experiment(
        engine=fg.Engine(steps=steps, log_every=every, plugins=plugins, **options),
        model=partial(Classifier, width, lr),
        data=fg.ArrayData(train, batch_size=64, shuffle=True, remainder="drop"),
    )
