"""How a sweep is driven."""

from dataclasses import dataclass

import optuna

from fulgurite_sweeps.objectives import Constraint


@dataclass(frozen=True)
class Plan:
    """How a sweep is driven.

    Attributes:
        num_trials: how many there are in all, those of earlier starts included.
        sampler: what chooses values: the name of a sampler, or one of Optuna.
        pruner: the name of a pruner, or None.
        seed: of the sampler.
        num_retries: how often a trial is started again whose process was killed.
        constraints: what the metrics of a trial must fulfil.
        only: the number of the only trial that this driver runs; None for any.
        should_wait: whether the driver waits for the trials of living drivers when it has nothing
            left to start, to take over those whose driver dies.
    """

    num_trials: int
    sampler: str | optuna.samplers.BaseSampler = "tpe"
    pruner: str | None = None
    seed: int = 0
    num_retries: int = 3
    constraints: tuple[Constraint, ...] = ()
    only: int | None = None
    should_wait: bool = True
