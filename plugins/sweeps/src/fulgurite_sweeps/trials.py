"""The trials of a sweep, as its journal knows them, and which of them are the best."""

import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from fulgurite_sweeps.attributes import ABANDONED, ERROR, FIXED, METRICS, POINT, STEP
from fulgurite_sweeps.journal import Journal, SweepDirectory
from fulgurite_sweeps.objectives import Objective


@dataclass(frozen=True)
class Trial:
    """A trial of a sweep, as the journal knows it.

    Example:
        from fulgurite_sweeps import list_trials


        def print_trials(directory: str) -> None:
            for trial in list_trials(directory):
                print(trial.name, trial.state, trial.values)

    Attributes:
        number: from 0, in the order in which they were asked for.
        state: `waiting`, `running`, `complete`, `pruned` or `fail`; `stopped` if it was cut off and
            no driver has taken it over yet.
        params: the values by the names of what is searched.
        values: of the objectives, if it is complete.
        metrics: the newest value of each metric that is a number, once it has ended.
        step: its last step, once it has ended.
        error: why it failed, or None.
        run_dir: its run directory.
        violations: the constraints that it violates, and by how much.
    """

    number: int
    state: str
    params: dict[str, Any]
    values: list[float] | None
    metrics: dict[str, float]
    step: int | None
    error: str | None
    run_dir: Path
    violations: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What its run directory is called."""
        return self.run_dir.name


def list_trials(directory: str | os.PathLike[str]) -> list[Trial]:
    """Return the trials of a sweep, also while it runs elsewhere.

    Args:
        directory: of the sweep.

    Raises:
        ConfigurationError: there is none.
    """
    folder = SweepDirectory(directory)
    return read_trials(folder, folder.load())


def find_best(trials: Sequence[Trial], objectives: Sequence[Objective]) -> Trial | None:
    """Return the best complete trial by the first objective; None if there is none, or none that
    violates no constraint.

    Args:
        trials: of a sweep.
        objectives: of it.
    """
    losses = _list_losses(trials, objectives)
    if not losses:
        return None
    best, _ = min(losses, key=lambda pair: pair[1][0])
    return best


def find_front(trials: Sequence[Trial], objectives: Sequence[Objective]) -> list[Trial]:
    """Return the complete trials that none dominates and that violate no constraint.

    Args:
        trials: of a sweep.
        objectives: of it.
    """
    losses = _list_losses(trials, objectives)
    return [
        trial
        for trial, values in losses
        if not any(other != values and all(map(operator.le, other, values)) for _, other in losses)
    ]


def _list_losses(
    trials: Sequence[Trial], objectives: Sequence[Objective]
) -> list[tuple[Trial, list[float]]]:
    """Return the trials that may be the best, with their values, of which smaller ones are better.

    Args:
        trials: of a sweep.
        objectives: of it.
    """
    signs = [1 if direction == "minimize" else -1 for _, direction in objectives]
    return [
        (trial, [sign * value for sign, value in zip(signs, trial.values, strict=True)])
        for trial in trials
        if trial.state == "complete" and trial.values and not trial.violations
    ]


def read_trials(directory: SweepDirectory, journal: Journal) -> list[Trial]:
    """Return the trials in a journal.

    Args:
        directory: of the sweep.
        journal: its memory.
    """
    return [
        _describe_trial(directory, trial)
        for trial in journal.study.get_trials(deepcopy=False)
        if ABANDONED not in trial.user_attrs
    ]


def _describe_trial(directory: SweepDirectory, trial: FrozenTrial) -> Trial:
    is_complete = trial.state == TrialState.COMPLETE
    state = trial.state.name.lower()
    if trial.state == TrialState.RUNNING and not directory.is_in_use(trial.number):
        state = "stopped"
    metrics = trial.user_attrs.get(METRICS, {})
    return Trial(
        number=trial.number,
        state=state,
        params=trial.params or trial.user_attrs.get(POINT) or trial.system_attrs.get(FIXED, {}),
        values=trial.values if is_complete else None,
        metrics={name: float(value) for name, value in metrics.items()},
        step=trial.user_attrs.get(STEP),
        error=trial.user_attrs.get(ERROR),
        run_dir=directory.get_run(trial.number).path,
        violations={name: excess for name, excess in trial.constraints.items() if excess > 0},
    )
