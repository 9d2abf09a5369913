"""Sweeps that learn from their trials, end bad ones early, and survive their driver."""

__tracebackhide__ = True

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulgurite_sweeps.agents import AgentSweep
    from fulgurite_sweeps.base_sweep import BaseSweep
    from fulgurite_sweeps.executors import Executor, Job, LocalExecutor, RunningJob
    from fulgurite_sweeps.objectives import Constraint, Objective
    from fulgurite_sweeps.population_executor import PopulationExecutor
    from fulgurite_sweeps.ray_executor import RayExecutor
    from fulgurite_sweeps.results import TrialResult, read_result
    from fulgurite_sweeps.space import Space
    from fulgurite_sweeps.status import describe_sweep
    from fulgurite_sweeps.sweep import Sweep
    from fulgurite_sweeps.trial import SweepTrial, TrialSettings
    from fulgurite_sweeps.trials import Trial, list_trials

__all__ = [  # noqa: RUF022 - by subject
    # Run a sweep, and read one.
    "AgentSweep",
    "BaseSweep",
    "Constraint",
    "Objective",
    "Space",
    "Sweep",
    "Trial",
    "describe_sweep",
    "list_trials",
    # Where trials run.
    "Executor",
    "Job",
    "LocalExecutor",
    "PopulationExecutor",
    "RayExecutor",
    "RunningJob",
    # What is in each trial, and what it leaves.
    "SweepTrial",
    "TrialResult",
    "TrialSettings",
    "read_result",
]

# Imported when they are first used: a trial without a pruner does not wait for Optuna.
_MODULES = {
    "AgentSweep": "agents",
    "BaseSweep": "base_sweep",
    "Constraint": "objectives",
    "Executor": "executors",
    "Job": "executors",
    "LocalExecutor": "executors",
    "Objective": "objectives",
    "PopulationExecutor": "population_executor",
    "RayExecutor": "ray_executor",
    "RunningJob": "executors",
    "Space": "space",
    "Sweep": "sweep",
    "SweepTrial": "trial",
    "Trial": "trials",
    "TrialResult": "results",
    "TrialSettings": "trial",
    "describe_sweep": "status",
    "list_trials": "trials",
    "read_result": "results",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fulgurite_sweeps.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
