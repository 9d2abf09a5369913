"""What a population of trials leaves, and each trial's part of it."""

from dataclasses import dataclass
from typing import Any

VARIABLE = "FULGURITE_SWEEP_POPULATION"
"""The environment variable in which the executor tells a population what it is."""
FILE = "members.json"
"""In the run directory of a population: how each member ended."""
RECORDS = "records.jsonl"
REFUSED = 2
"""The exit code of the check of trials that cannot be members of one population."""


@dataclass(frozen=True)
class PopulationSettings:
    """What a population is told.

    Attributes:
        program: the file of the trials' program.
        overrides: of each trial, strings `path=value`.
        is_exact: whether its members run one after the other.
    """

    program: str
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
        values: by name: `loss[2]` is of the third member, `loss` and `loss/std` of all. A list
            holds a value for each.
        index: of the member.
    """
    ending = f"[{index}]"
    part = {}
    for name, value in values.items():
        if isinstance(value, list):
            part[name] = value[index]
        elif name.endswith(ending):
            part[name.removesuffix(ending)] = value
    return part
