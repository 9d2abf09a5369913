"""How a sweep stands: a table of its trials, the best, and the command that trains it alone."""

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from fulgurite.plugins import as_printable

from fulgurite_sweeps.attributes import AXES, SETTINGS, START
from fulgurite_sweeps.journal import Journal, SweepDirectory
from fulgurite_sweeps.objectives import Constraint, Objective
from fulgurite_sweeps.progress import add_progress
from fulgurite_sweeps.space import Space
from fulgurite_sweeps.trials import Trial, find_best, find_front, read_trials


class Standing(NamedTuple):
    """How a sweep stands.

    Attributes:
        space: what is searched.
        objectives: what is looked for.
        metrics: those of the objectives, and those of the constraints.
        trials: all so far.
        best: the best complete trial by the first objective; None if there is none.
        front: the trials than which none is better by all objectives.
        command: what trains the best trial again alone; empty if there is none.
    """

    space: Space
    objectives: list[Objective]
    metrics: list[str]
    trials: list[Trial]
    best: Trial | None
    front: list[Trial]
    command: str


def read_standing(directory: SweepDirectory, journal: Journal) -> Standing:
    """Return how a sweep stands.

    Args:
        directory: of the sweep.
        journal: its memory.
    """
    settings = journal.study.user_attrs[SETTINGS]
    space = Space.read(settings[AXES], settings["list of fixed arguments"])
    objectives = [Objective(*entry) for entry in settings["list of objectives"]]
    constraints = map(Constraint.parse, settings["list of constraints"])
    metrics = dict.fromkeys(goal.metric for goal in (*objectives, *constraints))
    trials = read_trials(directory, journal)
    best = find_best(trials, objectives)
    command = ""
    if best is not None:
        start = journal.get_trial(best.number).user_attrs[START]
        command = _format_command(best, space, start)
    front = find_front(trials, objectives)
    return Standing(space, objectives, list(metrics), trials, best, front, command)


def describe_sweep(directory: str | os.PathLike[str]) -> str:
    """Return how a sweep stands, also while it runs elsewhere.

    Args:
        directory: of the sweep.

    Raises:
        ConfigurationError: there is none.
    """
    folder = SweepDirectory(directory)
    standing = read_standing(folder, folder.load())
    trials, objectives = standing.trials, standing.objectives
    parts = [f"{folder.path}: {count_states(trials)}"]
    if trials:
        parts.append(_format_table(standing))
    parts += [f"{trial.name} failed: {trial.error}" for trial in trials if trial.error]
    parts += [
        f"{trial.name} violates {' and '.join(trial.violations)}"
        for trial in trials
        if trial.violations
    ]
    if len(objectives) > 1 and standing.front:
        names = ", ".join(trial.name for trial in standing.front)
        parts.append(f"no trial is better by all metrics than: {names}")
    if standing.best is not None:
        parts.append(
            f"the best is {standing.best.name}; to train it again alone:\n  {standing.command}"
        )
    return as_printable("\n".join(parts))


def count_states(trials: Sequence[Trial]) -> str:
    """Return how many trials have which state."""
    counts = Counter(trial.state for trial in trials)
    return ", ".join(f"{count} {state}" for state, count in counts.items()) or "no trials yet"


def build_rows(standing: Standing, trials: Sequence[Trial]) -> list[list[str]]:
    """Return the cells of a table: the names of the columns, and a row for each trial.

    Args:
        standing: of the sweep.
        trials: of it, those that are shown.
    """
    chosen = (name for trial in trials for name in trial.params)  # by an agent
    names = list(standing.space.axes) or list(dict.fromkeys(chosen))
    rows = [["trial", "state", "step", *names, *standing.metrics]]
    for trial in trials:
        state = f"{trial.state}, violates" if trial.violations else trial.state
        values = [trial.params.get(name) for name in names]
        values += [trial.metrics.get(metric) for metric in standing.metrics]
        rows.append([trial.name, state, *(_format_cell(value) for value in (trial.step, *values))])
    return rows


def _format_command(trial: Trial, space: Space, start: dict[str, Any]) -> str:
    """Return the command that trains the run of a trial again in another directory.

    Args:
        trial: of the sweep.
        space: what is searched.
        start: with which program and options it was started.
    """
    overrides = space.build_overrides(trial.params)
    if not space.axes:  # an agent has chosen the point
        overrides += [f"{name}={value}" for name, value in trial.params.items()]
    run_dir = f"{trial.run_dir.parent.name}-{trial.name}"
    command = ["fulgurite", "fit", start["program"], *overrides, "--run", run_dir]
    return shlex.join(map(str, [*command, *start["fit_options"]]))


def _format_table(standing: Standing) -> str:
    """Return a line for each trial."""
    metrics = set(standing.metrics)
    trials = [add_progress(trial, metrics) for trial in standing.trials]
    rows = build_rows(standing, trials)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _format_cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
