"""CMA-ES, whose state is computed from the results of a sweep. Optuna's `CmaEsSampler` keeps it in
the journal as a pickle, which would run whatever somebody wrote there."""

import math
from typing import Any

import numpy as np
import optuna
from fulgurite.errors import ConfigurationError
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from fulgurite_sweeps.attributes import ABANDONED

_SIGMA = 1 / 6
"""The first standard deviation, as a part of each axis; that of Optuna's `CmaEsSampler`."""
_RANKED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


class CmaEsSampler(optuna.samplers.BaseSampler):
    """Draws numbers by CMA-ES (Hansen, "The CMA Evolution Strategy: A Tutorial", 2016), and all
    else at random: choices, and what is searched under a condition only.

    The trials that have ended are generations in the order of their numbers, with those that were
    put in line. One that was pruned or failed is worse than all complete ones of its generation.

    Args:
        seed: of the random numbers of one trial.
        popsize: how many trials make a generation; None for `4 + floor(3 ln n)` of n axes.
        sigma0: the first standard deviation, as a part of each axis.

    Raises:
        ConfigurationError: the package cmaes is not installed, or `popsize` is less than 4.
    """

    def __init__(self, seed: int, popsize: int | None = None, sigma0: float = _SIGMA) -> None:
        try:
            import cmaes
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                "the sampler cmaes needs the package cmaes: pip install 'fulgurite-sweeps[cmaes]'"
            ) from error
        if popsize is not None and (type(popsize) is not int or popsize < 4):
            raise ConfigurationError(
                f"cmaes: popsize is {popsize}; a generation has a number of trials, at least four"
            )
        if type(sigma0) not in (int, float) or not 0 < sigma0 < math.inf:
            raise ConfigurationError(
                f"cmaes: sigma0 is {sigma0}; it must be a positive number, a part of each axis"
            )
        self._make_state = cmaes.CMA
        self._seed = seed
        self._popsize = popsize
        self._sigma = sigma0
        self._random = optuna.samplers.RandomSampler(seed=seed)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the numbers that all trials so far have.

        Args:
            study: the sweep.
            trial: the one that is asked for.
        """
        spaces = [ended.distributions for ended in _list_ended(study)]
        first = spaces[0] if spaces else {}
        return {
            name: distribution
            for name, distribution in first.items()
            if isinstance(distribution, FloatDistribution | IntDistribution)
            and not distribution.single()
            and all(space.get(name) == distribution for space in spaces)
        }

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """Return values of these numbers.

        Args:
            study: the sweep.
            trial: the one that is asked for.
            search_space: what `infer_relative_search_space` returned.
        """
        if not search_space:
            return {}  # before the first trial has ended
        if len(search_space) == 1:
            raise ConfigurationError(
                f"cmaes searches several numbers together, and {next(iter(search_space))} is the "
                "only one that all trials have: choose the sampler tpe"
            )
        state = self._make_state(
            mean=np.full(len(search_space), 0.5),
            sigma=self._sigma,
            bounds=np.tile([0.0, 1.0], (len(search_space), 1)),
            n_max_resampling=10 * len(search_space),
            seed=self._seed,
            population_size=self._popsize,
        )
        sign = 1 if study.direction == optuna.study.StudyDirection.MINIMIZE else -1
        ended = _list_ended(study)
        size = state.population_size
        for start in range(0, len(ended) - size + 1, size):
            state.tell(
                [
                    (_encode(past.params, search_space), _get_rank(past, sign))
                    for past in ended[start : start + size]
                ]
            )
        return _decode(state.ask(), search_space)

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Return a random value.

        Args:
            study: the sweep.
            trial: the one that is asked for.
            param_name: of the value.
            param_distribution: what it may be.
        """
        return self._random.sample_independent(study, trial, param_name, param_distribution)


def _list_ended(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials that count, by number; those whose driver was killed as it asked do not."""
    trials = study.get_trials(deepcopy=False, states=_RANKED)
    return [trial for trial in trials if trial.params and ABANDONED not in trial.user_attrs]


def _get_rank(trial: FrozenTrial, sign: int) -> float:
    """Return by what trials are compared, of which CMA-ES uses only the order.

    Args:
        trial: one that has ended.
        sign: -1 if larger values are better.
    """
    return sign * trial.values[0] if trial.state == TrialState.COMPLETE else math.inf


def _find_limits(distribution: FloatDistribution | IntDistribution) -> tuple[float, float]:
    """Return between which numbers an axis is a line. Those of a step are in the middle of their
    part of it, so that the outer ones are as likely as the others."""
    half = (distribution.step or 0) / 2
    low, high = distribution.low - half, distribution.high + half
    return (math.log(low), math.log(high)) if distribution.log else (low, high)


def _encode(params: dict[str, Any], space: dict[str, BaseDistribution]) -> np.ndarray:
    """Return values as numbers from 0 to 1.

    Args:
        params: of a trial, by name.
        space: the axes.
    """
    point = []
    for name, distribution in space.items():
        assert isinstance(distribution, FloatDistribution | IntDistribution)
        low, high = _find_limits(distribution)
        value = math.log(params[name]) if distribution.log else params[name]
        point.append((value - low) / (high - low))
    return np.asarray(point)


def _decode(point: np.ndarray, space: dict[str, BaseDistribution]) -> dict[str, Any]:
    """Return the values of numbers from 0 to 1.

    Args:
        point: the numbers.
        space: the axes.
    """
    values: dict[str, Any] = {}
    for part, (name, distribution) in zip(point, space.items(), strict=True):
        assert isinstance(distribution, FloatDistribution | IntDistribution)
        low, high = _find_limits(distribution)
        value = float(low + part * (high - low))
        value = math.exp(value) if distribution.log else value
        step = distribution.step
        if step is not None:
            value = distribution.low + step * round((value - distribution.low) / step)
        values[name] = min(max(value, distribution.low), distribution.high)
        if isinstance(distribution, IntDistribution):
            values[name] = int(values[name])
    return values
