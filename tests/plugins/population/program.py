"""A program that trains a population, or its model alone."""

import fulgurite as fg
from fulgurite_checkpoint import Checkpointer
from fulgurite_cli import Experiment
from fulgurite_evaluators import Evaluator
from fulgurite_population import Population
from populations import NUMBERS, Point


def experiment(steps: int = 3, alone: bool = False) -> Experiment:
    """Trains points."""
    plugins = [Checkpointer(every=1), Evaluator("test", NUMBERS[:1], every=3)]
    if alone:
        return Experiment(fg.Engine(steps=steps, plugins=plugins), Point, NUMBERS)
    population = Population(seeds=(5, 6), vary={"learning_rate": [0.1, 0.2]})
    engine = fg.Engine(steps=steps, plugins=[population, *plugins])
    return Experiment(engine, population.stack(Point), NUMBERS)
