"""What runs are made of, and what of it differs between them."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from fulgurite_report.run import Run
from fulgurite_report.text import as_printable, format_value

_SECTIONS = ("settings", "versions", "devices", "program")
_MOST_MODEL_LINES = 8


class Argument(NamedTuple):
    """An argument of programs that differs between runs.

    Attributes:
        name: a short one: the last parts of its path that tell it from the others.
        paths: its path, and those of values that follow it.
        values: of each run.
    """

    name: str
    paths: list[str]
    values: list[str]


Rows = list[tuple[str, list[str]]]
"""Name, and a value for each run."""


def describe(run: Run) -> dict[str, Any]:
    """Return what the newest attempt of a run is made of, by name: the arguments of the program,
    and behind them settings, plugins, hyperparameters, versions, devices and the program."""
    manifest = run.manifest
    values = dict(get_arguments(manifest))
    for section in _SECTIONS:
        values |= _flatten(section, manifest.get(section))
    git = values.get("program.git")
    if isinstance(git, dict) and isinstance(git.get("commit"), str):
        values["program.git"] = git["commit"][:12] + (", changed" if git.get("dirty") else "")
    values |= {
        f"hyperparameters.{name}": value for name, value in _get_hyperparameters(manifest).items()
    }
    plugins = manifest.get("plugins")
    for plugin in plugins if isinstance(plugins, list) else []:
        if isinstance(plugin, dict) and isinstance(plugin.get("name"), str):
            prefix = f"plugins.{plugin['name']}"
            values |= _flatten(prefix, plugin.get("settings"))
            values[f"{prefix}.version"] = plugin.get("version")
    return values


def get_arguments(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the program by name; of a program that is a configuration, its
    values by path."""
    configuration = manifest.get("configuration")
    if not isinstance(configuration, dict):
        return {}
    values = configuration.get("values")
    if isinstance(configuration.get("config"), str) and isinstance(values, dict):
        return values
    return configuration


def list_differences(runs: Sequence[Run]) -> Rows:
    """Return what differs between runs, with the value of each. Runs that have not begun are not
    compared; the values of such a one are empty."""
    values_by_run = [describe(run) for run in runs]
    names = dict.fromkeys(name for values in values_by_run for name in values)
    rows: Rows = []
    for name in names:
        if _differs(runs, values_by_run, name):
            values = [format_value(values.get(name)) for values in values_by_run]
            rows.append((as_printable(name), values))
    return rows + _compare_models(runs)


def list_arguments_that_differ(runs: Sequence[Run]) -> list[Argument]:
    """Return the arguments of programs that differ between runs: first those that all of them have,
    and of these those of the shortest path.

    A value deep in a configuration is not listed beside an argument above it with which it changes,
    as the end of a schedule does with `steps`, to which it refers.
    """
    values_by_run = [get_arguments(run.manifest) for run in runs]
    names = dict.fromkeys(name for values in values_by_run for name in values)
    num_with = {name: sum(name in values for values in values_by_run) for name in names}
    different = [name for name in names if _differs(runs, values_by_run, name)]
    different.sort(key=lambda name: (-num_with[name], name.count(".")))
    leaders: dict[str, list[str]] = {}
    for name in different:
        leader = _find_leader(name, leaders, values_by_run)
        leaders.setdefault(leader, []).append(name)
    short_names = _shorten(list(leaders))
    return [
        Argument(
            as_printable(short_names[leader]),
            [as_printable(name) for name in followers],
            [format_value(values.get(leader)) for values in values_by_run],
        )
        for leader, followers in leaders.items()
    ]


def _find_leader(
    name: str, leaders: dict[str, list[str]], values_by_run: Sequence[dict[str, Any]]
) -> str:
    """Return the argument with a shorter path that has the same value in each run; the argument
    itself if there is none.

    Args:
        name: of the argument.
        leaders: those before it.
        values_by_run: the arguments of each run.
    """
    for leader in leaders:
        is_above = leader.count(".") < name.count(".")
        if is_above and all(values.get(leader) == values.get(name) for values in values_by_run):
            return leader
    return name


def _shorten(paths: Sequence[str]) -> dict[str, str]:
    """Return for each path as few of its last parts as tell it from the others."""
    ends = {path: path.split(".") for path in paths}
    lengths = dict.fromkeys(paths, 1)
    for _ in range(max((len(parts) for parts in ends.values()), default=0)):
        counts = Counter(".".join(ends[path][-lengths[path] :]) for path in paths)
        for path in paths:
            if counts[".".join(ends[path][-lengths[path] :])] > 1:
                lengths[path] += 1
    return {path: ".".join(ends[path][-lengths[path] :]) for path in paths}


def _differs(runs: Sequence[Run], values_by_run: Sequence[dict[str, Any]], name: str) -> bool:
    values = {
        json.dumps(values.get(name), sort_keys=True)
        for run, values in zip(runs, values_by_run, strict=True)
        if run.manifest
    }
    return len(values) > 1


def _compare_models(runs: Sequence[Run]) -> Rows:
    models = [_get_model(run.manifest) for run in runs if run.manifest]
    positions = [sum(bool(run.manifest) for run in runs[:index]) for index in range(len(runs))]

    def spread(texts: Sequence[str]) -> list[str]:
        return [
            as_printable(texts[position]) if run.manifest else ""
            for run, position in zip(runs, positions, strict=True)
        ]

    if len({len(lines) for lines in models}) > 1:
        return [("model", spread([f"{len(lines)} lines" for lines in models]))]
    rows: Rows = [
        ("model", spread([line.strip() for line in lines]))
        for lines in zip(*models, strict=True)
        if len(set(lines)) > 1
    ]
    return rows[:_MOST_MODEL_LINES]


def _get_model(manifest: dict[str, Any]) -> list[str]:
    lines = manifest.get("model")
    return [line for line in lines if isinstance(line, str)] if isinstance(lines, list) else []


def _get_hyperparameters(manifest: dict[str, Any]) -> dict[str, Any]:
    section = manifest.get("hyperparameters")
    if not isinstance(section, dict):
        return {}
    values = dict(section["program"]) if isinstance(section.get("program"), dict) else {}
    state = section.get("state")
    for path, entry in state.items() if isinstance(state, dict) else ():
        if isinstance(entry, dict) and "value" in entry:
            values[path] = entry["value"]
    return values


def _flatten(prefix: str, value: Any) -> dict[str, Any]:
    """Return the items of a dictionary under a prefix, one level deep, as `fulgurite compare` shows
    them; nothing for something else."""
    if not isinstance(value, dict):
        return {}
    return {f"{prefix}.{name}": item for name, item in value.items()}
