"""What a population of trials leaves, and each trial's part of it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fulgurite.errors import CheckpointError
from fulgurite_runs import loads

from fulgurite_sweeps.executors import Job

VARIABLE = "FULGURITE_SWEEP_POPULATION"
"""The environment variable in which the executor tells a population what it is."""
FILE = "members.json"
"""In the run directory of a population: how each member ended."""
RECORDS = "records.jsonl"
_OF_EACH = ("learning_rate/", "precision/loss_scale")
"""How the names begin of what plugins log as an array with a number of each member, or as one
number that each member has."""
REFUSED = 2
"""The exit code of the check of trials that cannot be members of one population."""


@dataclass(frozen=True)
class PopulationSettings:
    """What a population is told.

    Attributes:
        program: the file of the trials' program.
        numbers: of the trials.
        overrides: of each trial, strings `path=value`.
        is_exact: whether its members run one after the other.
    """

    program: str
    numbers: list[int]
    overrides: list[list[str]]
    is_exact: bool


def take_record(
    record: dict[str, Any], index: int, configuration: dict[str, Any] | None
) -> dict[str, Any]:
    """Return a member's part of a record of the population, as a run of its own would write it.

    Args:
        record: a line of `records.jsonl`.
        index: of the member.
        configuration: of the trial, which is its record of the kind `config`.
    """
    if record["kind"] == "config":
        return record | {"values": configuration or {}}
    return record | {"values": take_values(record["values"], index)}


def take_values(values: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a member's part of the values that a population logs. What is of all members together
    is left out.

    Args:
        values: by name: `loss[2]` is of the third member, `loss` and `loss/std` of all. An array of
            all members is told by its name, since a metric such as `recall` is an array, too.
        index: of the member.
    """
    ending = f"[{index}]"
    part = {}
    for name, value in values.items():
        if name.startswith(_OF_EACH):
            part[name] = value[index] if np.ndim(value) > 0 else value
        elif name.endswith(ending):
            part[name.removesuffix(ending)] = value
    return part


def find_population(job: Job) -> PopulationSettings | None:
    """Return what the population trains in which a trial was; None if it was in none.

    Args:
        job: the trial.

    Raises:
        CheckpointError: it was another trial of the same number, or a file cannot be read.
    """
    for path in sorted(job.run_dir.parent.glob("population-*.json")):
        try:
            settings = PopulationSettings(**json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}. Delete it and {path.with_suffix('')}: its "
                "trials are trained again"
            ) from error
        if job.number not in settings.numbers:
            continue
        overrides = settings.overrides[settings.numbers.index(job.number)]
        if overrides != list(job.overrides):
            raise CheckpointError(
                f"{path.with_suffix('')} has trained a trial-{job.number} with "
                f"{' '.join(overrides)}, and this one has {' '.join(job.overrides)}: runs of an "
                "earlier sweep are in this directory, choose another one"
            )
        return settings
    return None


def get_folder(job: Job, numbers: Sequence[int]) -> Path:
    """Return the run directory of a population.

    Args:
        job: one of its trials.
        numbers: of all of them.
    """
    return job.run_dir.with_name(f"population-{format_numbers(numbers)}")


def read_results(folder: Path, size: int) -> list[dict[str, Any]]:
    """Return how each member of a population has ended.

    Args:
        folder: the run directory of the population.
        size: how many members it has.

    Raises:
        CheckpointError: the file is not there, or is damaged.
    """
    path = folder / FILE
    try:
        results: Any = loads(path.read_bytes())
        if not isinstance(results, list) or len(results) != size:
            raise ValueError(f"it has no list of {size} results")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as the ends of the members of a population: {error}. Delete "
            f"{folder}: its trials are trained again"
        ) from error
    return results


def format_numbers(numbers: Sequence[int]) -> str:
    """Return numbers of trials as a short name: `0-3` for 0, 1, 2, 3, and `0-1+5` for 0, 1, 5."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return "+".join("-".join(map(str, ends)) for ends in ranges)
