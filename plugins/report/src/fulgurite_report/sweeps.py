"""Sweeps, as the files say that `fulgurite sweep` leaves beside the runs of its trials."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulgurite_report.errors import ReportError
from fulgurite_report.lines import read_json
from fulgurite_report.text import as_printable, format_number, format_value

FILE = "sweep.json"


@dataclass(frozen=True)
class Axis:
    """What a sweep searches, or what it looks for, as a line from 0 at its bottom to 1.

    Attributes:
        name: of it.
        low: the number at the bottom.
        high: the number at the top, which may be smaller.
        log: whether the line is logarithmic.
        choices: the values that it has instead of numbers, from the bottom.
    """

    name: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    choices: tuple[str, ...] = ()

    def find_place(self, value: Any) -> float | None:
        """Return where a value is; None for one that is not on the line."""
        if self.choices:
            if value not in self.choices:
                return None
            return self._place_choice(self.choices.index(value))
        number = as_number(value)
        if number is None or (self.log and number <= 0):
            return None
        low, high, place = self.low, self.high, number
        if self.log:
            low, high, place = math.log(low), math.log(high), math.log(number)
        if low == high:
            return 0.5
        share = (place - low) / (high - low)
        return share if -0.001 <= share <= 1.001 else None

    def list_marks(self) -> list[tuple[float, str]]:
        """Return what is written beside the line: where, and what."""
        if self.choices:
            return [(self._place_choice(index), name) for index, name in enumerate(self.choices)]
        return [(0.0, format_number(self.low)), (1.0, format_number(self.high))]

    def _place_choice(self, index: int) -> float:
        return 0.5 if len(self.choices) == 1 else index / (len(self.choices) - 1)


@dataclass(frozen=True)
class Trial:
    """A trial of a sweep.

    Attributes:
        run: the name of its run directory.
        state: `waiting`, `running`, `complete`, `pruned` or `fail`.
        params: its values, by the names of axes.
        values: of the objectives, None for one that is not finite; empty if it has none.
        violations: the constraints that it violates.
    """

    run: str
    state: str
    params: Mapping[str, Any]
    values: tuple[float | None, ...]
    violations: tuple[str, ...]

    def get_value(self, index: int) -> float | None:
        """Return the value of an objective; None if it has none, or one that is not finite.

        Args:
            index: of the objective.
        """
        return self.values[index] if index < len(self.values) else None

    def describe(self, metrics: list[str]) -> str:
        """Return it in one line.

        Args:
            metrics: the names of the objectives.
        """
        params = [f"{name}={format_value(value)}" for name, value in self.params.items()]
        values = [
            f"{metric} {format_number(value)}"
            for metric, value in zip(metrics, self.values, strict=False)
        ]
        violations = [f"violates {name}" for name in self.violations]
        return as_printable(
            f"{self.run}, {self.state}: {', '.join([*values, *params, *violations])}"
        )


@dataclass(frozen=True)
class Sweep:
    """A sweep.

    Attributes:
        folder: its directory.
        axes: what is searched.
        objectives: the metrics, and whether smaller values of each are better.
        trials: all so far.
        best: the name of the best run, or None.
        front: the names of the runs than which none is better by all objectives.
        command: what trains the best one again alone.
        importances: how much each argument decides whether a trial is good, as parts of 1.
    """

    folder: Path
    axes: list[Axis]
    objectives: list[tuple[str, bool]]
    trials: list[Trial]
    best: str | None
    front: list[str]
    command: str
    importances: dict[str, float]

    @property
    def metrics(self) -> list[str]:
        """The names of the objectives."""
        return [metric for metric, _ in self.objectives]


def is_sweep(folder: Path) -> bool:
    """Return whether a directory is that of a sweep."""
    return (folder / FILE).is_file()


def read_sweep(folder: Path) -> Sweep:
    """Return what the file in the directory of a sweep says.

    Args:
        folder: the directory.

    Raises:
        ReportError: it says nothing that can be shown.
    """
    content = read_json(folder / FILE)
    try:
        return Sweep(
            folder=folder,
            axes=[_read_axis(entry) for entry in content["axes"]],
            objectives=[
                (str(metric), direction == "minimize")
                for metric, direction in content["objectives"]
            ],
            trials=[_read_trial(entry) for entry in content["trials"]],
            best=None if content["best"] is None else str(content["best"]),
            front=[str(name) for name in content["front"]],
            command=str(content["command"]),
            importances={
                str(name): number
                for name, value in content["importances"].items()
                if (number := as_number(value)) is not None and 0 <= number <= 1
            },
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ReportError(
            f"{folder / FILE} cannot be read: {type(error).__name__}: {error}; start the sweep "
            "again, and it is written again"
        ) from error


def _read_axis(entry: dict[str, Any]) -> Axis:
    name = str(entry["name"])
    if "choices" in entry:
        return Axis(name, choices=tuple(str(choice) for choice in entry["choices"]))
    low, high, log = float(entry["low"]), float(entry["high"]), bool(entry["log"])
    if not math.isfinite(low) or not low <= high < math.inf or (log and low <= 0):
        raise ValueError(f"{name} is searched from {low} to {high}")
    return Axis(name, low, high, log)


def _read_trial(entry: dict[str, Any]) -> Trial:
    return Trial(
        run=str(entry["run"]),
        state=str(entry["state"]),
        params=dict(entry["params"]),
        values=tuple(as_number(value) for value in entry["values"] or ()),
        violations=tuple(str(name) for name in entry["violations"]),
    )


def as_number(value: Any) -> float | None:
    """Return a value of JSON as a finite number; None if it is not one."""
    if type(value) not in (int, float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
