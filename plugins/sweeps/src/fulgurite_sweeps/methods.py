"""Samplers and pruners of Optuna by name, with arguments: `tpe(n_startup_trials=5)`, `asha`."""

import hashlib
import inspect
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

import optuna
from fulgurite.errors import ConfigurationError, did_you_mean

from fulgurite_sweeps.calls import Call, parse_call
from fulgurite_sweeps.cma_es import CmaEsSampler
from fulgurite_sweeps.space import Space

GRID = "grid"
"""The sampler that is none: all points of a grid are put in line, in their order."""
SAMPLERS: dict[str, Any] = {
    "tpe": optuna.samplers.TPESampler,
    "random": optuna.samplers.RandomSampler,
    "qmc": optuna.samplers.QMCSampler,
    "cmaes": CmaEsSampler,
    "nsgaii": optuna.samplers.NSGAIISampler,
}
PRUNERS: dict[str, Any] = {
    "asha": optuna.pruners.SuccessiveHalvingPruner,
    "median": optuna.pruners.MedianPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
}


def make_sampler(text: str, seed: int, number: int) -> optuna.samplers.BaseSampler:
    """Return a sampler for one trial.

    A driver that is started again must not draw what an earlier one has drawn, so the random
    numbers of each trial depend on its number, and on nothing else that a process remembers. The
    points of `qmc` are those of one sequence, whose seed is that of the sweep: Optuna keeps in the
    journal how many of them were given out. For `grid`, which puts its points in line, it is what
    draws the values that another point in line leaves out.

    Args:
        text: such as `tpe` or `tpe(n_startup_trials=5)`.
        seed: of the sweep.
        number: of the trial.

    Raises:
        ConfigurationError: there is no such sampler, or it has no such argument.
    """
    call = _read_call(text, {**SAMPLERS, GRID: None}, "sampler")
    digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
    options: dict[str, Any] = {"seed": int.from_bytes(digest[:4], "little")}
    if call.name == GRID:
        return optuna.samplers.RandomSampler(**options)
    if call.name == "qmc":
        # Sobol's generator has 32 bits; Python and the command line take any integer.
        independent_sampler = optuna.samplers.RandomSampler(**options)
        options = {"seed": seed % (1 << 32), "independent_sampler": independent_sampler}
    return _make(SAMPLERS[call.name], call, options, text)


def check_search(
    sampler: str | optuna.samplers.BaseSampler,
    pruner: str | None,
    space: Space,
    num_objectives: int,
) -> None:
    """Raise an error if a search cannot be made, before its first trial.

    Args:
        sampler: the name of a sampler, or one of Optuna.
        pruner: the name of a pruner, or None.
        space: what is searched.
        num_objectives: how many metrics are looked for.

    Raises:
        ConfigurationError: there is no such sampler or pruner, or it does not fit.
    """
    if isinstance(sampler, str):
        make_sampler(sampler, 0, 0)
        _check_space(sampler.partition("(")[0], space, num_objectives)
    make_pruner(pruner)
    if pruner is not None and num_objectives > 1:
        raise ConfigurationError(
            f"{pruner} compares trials by one metric, and this sweep has {num_objectives}: leave "
            "the pruner out, or all metrics but one"
        )


def _check_space(name: str, space: Space, num_objectives: int) -> None:
    """Raise an error if a sampler cannot search a space.

    Args:
        name: of the sampler.
        space: what is searched.
        num_objectives: how many metrics are looked for.
    """
    axes = space.axes.values()
    if name == "qmc" and any(axis.condition is not None for axis in axes):
        raise ConfigurationError(
            "qmc fills a space in which all trials have the same arguments, and in this one some "
            "depend on others: choose the sampler tpe or random"
        )
    if name != "cmaes":
        return
    if num_objectives > 1:
        raise ConfigurationError(
            f"cmaes looks for one metric, and this sweep has {num_objectives}: choose the sampler "
            "tpe or nsgaii"
        )
    numbers = [axis for axis in axes if not axis.overrides and axis.condition is None]
    if len(numbers) < 2:
        raise ConfigurationError(
            "cmaes searches several numbers together, and this space has "
            f"{len(numbers)} that no condition rules out: choose the sampler tpe"
        )


def make_pruner(text: str | None) -> optuna.pruners.BasePruner:
    """Return a pruner; one that prunes nothing for None.

    Args:
        text: such as `asha` or `asha(min_resource=200)`, in steps.

    Raises:
        ConfigurationError: there is no such pruner, or it has no such argument.
    """
    if text is None:
        return optuna.pruners.NopPruner()
    call = _read_call(text, PRUNERS, "pruner")
    return _make(PRUNERS[call.name], call, {}, text)


def _read_call(text: str, known: Mapping[str, Any], kind: str) -> Call:
    call = parse_call(text) or Call(text, [], {})
    if call.name not in known:
        raise ConfigurationError(f"there is no {kind} {call.name!r}. {did_you_mean(text, known)}")
    if known[call.name] is None and text != call.name:
        raise ConfigurationError(f"the {kind} {call.name} has no arguments: write {call.name}")
    if call.arguments:
        raise ConfigurationError(f"{text!r} is not a {kind}: write NAME or NAME(key=value)")
    return call


def _make(make: Any, call: Call, options: dict[str, Any], text: str) -> Any:
    """Return a sampler or a pruner of Optuna.

    Args:
        make: its class.
        call: its name and the arguments that a user gives it.
        options: those that we give it.
        text: what the user wrote, for errors.
    """
    known = inspect.signature(make).parameters.keys() - options.keys()
    for key, value in call.keywords.items():
        if key == "seed" and key in options:
            raise ConfigurationError(
                f"{text!r}: the seed is that of the sweep, by which each trial has one of its own: "
                f"give --seed {value}, in Python seed={value}"
            )
        if key not in known:
            raise ConfigurationError(
                f"{call.name} has no argument {key!r}. {did_you_mean(key, known)}"
            )
    arguments = options | {key: _read_value(value) for key, value in call.keywords.items()}
    try:
        with warnings.catch_warnings():
            # The user has asked for it by name.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return make(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{text!r} cannot be used: {error}") from error


def _read_value(text: str) -> Any:
    """Return a value as JSON writes it, `True` and `None` as Python does; else a string."""
    lower = re.sub(r"^none$", "null", text.lower())
    try:
        return json.loads(lower if lower in ("true", "false", "null") else text)
    except ValueError:
        return text
