"""What a report shows of a sweep, as a file in its directory: a report reads no journal."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from fulgurite_runs import dumps, replace_file
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState

from fulgurite_sweeps.journal import Journal, SweepDirectory
from fulgurite_sweeps.status import Standing, read_standing
from fulgurite_sweeps.trials import Trial

_FEWEST_TRIALS = 10
"""Of how many complete trials, at least, it can be told what they depend on."""
_WIDE = 100
"""How many times the smallest of numbers that an agent has chosen the largest is, at least, if they
are shown on a logarithmic scale."""
_BEST_TRIALS = 5
"""How many of them are the good ones, at least: what Optuna's documentation asks for."""


def write_summary(directory: SweepDirectory, journal: Journal) -> None:
    """Write how a sweep stands, all at once.

    Args:
        directory: of the sweep.
        journal: its memory.
    """
    text = dumps(describe(read_standing(directory, journal), journal))
    replace_file(directory.summary, text)


def describe(standing: Standing, journal: Journal) -> dict[str, Any]:
    """Return how a sweep stands, as JSON.

    Args:
        standing: of the sweep.
        journal: its memory.
    """
    distributions = standing.space.distributions or _find_distributions(standing.trials)
    return {
        "objectives": [list(objective) for objective in standing.objectives],
        "axes": [_describe_axis(name, value) for name, value in distributions.items()],
        "trials": [_describe_trial(trial, distributions) for trial in standing.trials],
        "best": None if standing.best is None else standing.best.name,
        "front": [trial.name for trial in standing.front],
        "command": standing.command,
        "importances": find_importances(journal.study),
    }


def _find_distributions(trials: Sequence[Trial]) -> dict[str, BaseDistribution]:
    """Return between which values an agent has chosen: numbers, or choices.

    Args:
        trials: of the sweep, whose values are strings.
    """
    names = dict.fromkeys(name for trial in trials for name in trial.params)
    return {
        name: _find_distribution([trial.params[name] for trial in trials if name in trial.params])
        for name in names
    }


def _find_distribution(texts: Sequence[str]) -> BaseDistribution:
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        return CategoricalDistribution(tuple(dict.fromkeys(texts)))
    if not all(map(math.isfinite, numbers)):
        return CategoricalDistribution(tuple(dict.fromkeys(texts)))
    low, high = min(numbers), max(numbers)
    return FloatDistribution(low, high, log=0 < _WIDE * low <= high)


def _describe_axis(name: str, distribution: BaseDistribution) -> dict[str, Any]:
    if isinstance(distribution, FloatDistribution | IntDistribution):
        low, high = distribution.low, distribution.high
        return {"name": name, "low": low, "high": high, "log": distribution.log}
    assert isinstance(distribution, CategoricalDistribution)
    return {"name": name, "choices": list(distribution.choices)}


def _describe_trial(trial: Trial, distributions: Mapping[str, BaseDistribution]) -> dict[str, Any]:
    """Return a trial as JSON.

    Args:
        trial: of the sweep.
        distributions: what is searched.
    """
    return {
        "run": trial.name,
        "state": trial.state,
        "params": {
            name: float(value) if isinstance(distributions.get(name), FloatDistribution) else value
            for name, value in trial.params.items()
        },
        "values": trial.values,
        "step": trial.step,
        "error": trial.error,
        "violations": list(trial.violations),
    }


def find_importances(study: optuna.Study) -> dict[str, float]:
    """Return how much each argument decides whether a trial is one of the best, as parts of 1, by
    Optuna's PED-ANOVA; nothing while few trials are complete.

    Args:
        study: the trials.
    """
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < _FEWEST_TRIALS:
        return {}
    quantile = max(0.1, _BEST_TRIALS / len(complete))
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=quantile)
    with warnings.catch_warnings():
        # Of arguments that few trials have, and of results that are all the same.
        warnings.simplefilter("ignore", UserWarning)
        return optuna.importance.get_param_importances(study, evaluator=evaluator)
