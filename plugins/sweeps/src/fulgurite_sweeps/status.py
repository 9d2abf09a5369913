"""How a sweep stands: a table of its trials, the best, and the command that trains it alone."""

import os
import shlex
from collections import Counter
from collections.abc import Sequence

from fulgurite.plugins import as_printable

from fulgurite_sweeps.journal import SETTINGS, SweepDirectory
from fulgurite_sweeps.objectives import Objective
from fulgurite_sweeps.space import Space
from fulgurite_sweeps.sweep import START, Trial, find_best, read_trials


def describe_sweep(directory: str | os.PathLike[str]) -> str:
    """Return how a sweep stands, also while it runs elsewhere.

    Args:
        directory: of the sweep.

    Raises:
        ConfigurationError: there is none.
    """
    folder = SweepDirectory(directory)
    journal = folder.load()
    attributes = journal.study.user_attrs
    objectives = [Objective(*entry) for entry in attributes[SETTINGS]["list of objectives"]]
    trials = read_trials(folder, journal)
    counts = Counter(trial.state for trial in trials)
    summary = ", ".join(f"{count} {state}" for state, count in counts.items()) or "no trials yet"
    parts = [f"{folder.path}: {summary}"]
    if trials:
        parts.append(_format_table(trials, objectives))
    parts += [f"trial-{trial.number} failed: {trial.error}" for trial in trials if trial.error]
    best = find_best(trials, objectives)
    if best is not None:
        command = _format_command(best, attributes[SETTINGS], attributes[START])
        parts.append(f"the best is {best.name}; to train it again alone:\n  {command}")
    return as_printable("\n".join(parts))


def _format_command(trial: Trial, settings: dict[str, object], start: dict[str, object]) -> str:
    """Return the command that trains the run of a trial again in another directory.

    Args:
        trial: of the sweep.
        settings: what the sweep was begun with.
        start: how its newest driver starts trials.
    """
    axes, fixed = settings["search space"], settings["list of fixed arguments"]
    options, program = start["fit_options"], start["program"]
    assert isinstance(axes, dict) and isinstance(fixed, list) and isinstance(options, list)
    space = Space.parse([*fixed, *(f"{name}={text}" for name, text in axes.items())])
    overrides = space.build_overrides(trial.params)
    run_dir = f"{trial.run_dir.parent.name}-{trial.name}"
    command = ["fulgurite", "fit", str(program), *overrides, "--run", run_dir, *options]
    return shlex.join(map(str, command))


def _format_table(trials: Sequence[Trial], objectives: Sequence[Objective]) -> str:
    """Return a line for each trial.

    Args:
        trials: at least one.
        objectives: of the sweep.
    """
    names = list(dict.fromkeys(name for trial in trials for name in trial.params))
    metrics = [objective.metric for objective in objectives]
    rows = [["trial", "state", "step", *names, *metrics]]
    for trial in trials:
        values = [trial.metrics.get(metric) for metric in metrics]
        cells = [trial.params.get(name) for name in names]
        rows.append(
            [
                trial.name,
                trial.state,
                *(_format_cell(cell) for cell in (trial.step, *cells, *values)),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _format_cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
