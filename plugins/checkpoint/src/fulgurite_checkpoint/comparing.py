"""Runs compared: which rows of a table, in which order, and what differs between two runs."""

import math
import operator
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fulgurite.errors import CheckpointError, ConfigurationError, did_you_mean
from fulgurite_runs import RunDirectory, dumps, get_arguments, get_hyperparameters, read_origin

from fulgurite_checkpoint.listing import Columns, RunRow, format_number, list_runs
from fulgurite_checkpoint.validation import check_list, check_object, check_text

_CONDITION = re.compile(r"(?P<name>[^=<>!]+)(?P<operator>>=|<=|!=|==|=|<|>)(?P<value>.*)")
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_SECTIONS = ("settings", "versions", "devices", "program")
_MAX_MODEL_LINES = 20


def select_runs(rows: Sequence[RunRow], conditions: Sequence[str]) -> list[RunRow]:
    """Return the runs for which all conditions hold.

    Args:
        rows: the runs.
        conditions: `NAME=VALUE`, with `==`, `!=`, `<`, `<=`, `>` or `>=` as well. The name is that
            of an argument, of a metric, or of a column; a run without it is left out.

    Raises:
        ConfigurationError: a condition is written otherwise, no run knows the name, or it asks
            whether a string is larger or smaller.
    """
    selected = list(rows)
    for condition in conditions:
        match = _CONDITION.fullmatch(condition)
        if match is None:
            raise ConfigurationError(
                f"{condition!r} is not a condition: write NAME=VALUE, or with !=, <, <=, > or >="
            )
        name = match["name"].strip()
        check_name(rows, name)
        holds = _OPERATORS[match["operator"]]
        value = match["value"].strip()
        if match["operator"][0] in "<>" and _parse_number(value) is None:
            raise ConfigurationError(
                f"{condition!r}: {value!r} is not a number, and only numbers are larger or smaller"
            )
        selected = [row for row in selected if _is_true(holds, row.get_value(name), value)]
    return selected


def sort_runs(rows: Sequence[RunRow], name: str) -> list[RunRow]:
    """Return runs by an argument, a metric or a column, the largest first if the name begins with
    `-`; those without it come last."""
    is_reversed = name.startswith("-")
    name = name.removeprefix("-")
    check_name(rows, name)
    known = [row for row in rows if _is_known(row.get_value(name))]
    unknown = [row for row in rows if not _is_known(row.get_value(name))]

    def get_key(row: RunRow) -> tuple[bool, Any]:
        value = row.get_value(name)
        is_number = isinstance(value, int | float)
        return (not is_number, value if is_number else str(value))

    return sorted(known, key=get_key, reverse=is_reversed) + unknown


def check_name(rows: Sequence[RunRow], name: str) -> None:
    """Raise `ConfigurationError` if no run has an argument, metric or column of this name."""
    names = {key for row in rows for key in (*row.arguments, *row.metrics)}
    names |= set(RunRow.__dataclass_fields__)
    if rows and name not in names:
        raise ConfigurationError(
            f"no run has an argument or a metric {name!r}. {did_you_mean(name, names)}"
        )


def build_columns(columns: Columns, rows: Sequence[RunRow], names: Sequence[str]) -> Columns:
    """Return the columns of a table of runs: the usual ones, then the arguments that differ between
    these runs, and what was asked for.

    Args:
        columns: the usual ones; those that are empty in every row are left out.
        rows: the runs.
        names: further arguments or metrics.
    """
    shown = {
        title: format_cell
        for title, format_cell in columns.items()
        if title in ("run", "state", "step") or any(format_cell(row) for row in rows)
    }
    arguments = {name: None for row in rows for name in row.arguments}
    differing = [
        name for name in arguments if len({dumps(row.get_value(name)) for row in rows}) > 1
    ]
    for name in dict.fromkeys([*differing, *names]):
        shown.setdefault(name, lambda row, name=name: _format_value(row.get_value(name)))
    return shown


def compare_runs(first: Path, second: Path) -> list[tuple[str, str, str]]:
    """Return what differs between two runs: name, and the value of each.

    These are the arguments of the program, the run that one was forked from, the settings of the
    engine and of plugins, versions, devices, the program with its commit, the model, and the
    metrics at the newest checkpoints, except for telemetry, which differs between any two runs.

    Args:
        first: the directory of a run.
        second: that of the other.
    """
    runs = (first, second)
    manifests = [RunDirectory(path).read_manifest() for path in runs]
    rows = _list_differences("", *map(get_arguments, manifests))
    rows += _list_differences("origin.", *map(read_origin, runs))
    for section in _SECTIONS:
        values = [_as_dict(manifest.get(section)) for manifest in manifests]
        rows += _list_differences(f"{section}.", *values)
    # Manifests of earlier versions do not tell.
    hyperparameters = list(map(get_hyperparameters, manifests))
    if all(hyperparameters):
        rows += _list_differences("hyperparameters.", *hyperparameters)
    plugins = list(map(_get_plugins, manifests, runs))
    for name in sorted({*plugins[0], *plugins[1]}):
        if name in plugins[0] and name in plugins[1]:
            settings = [side[name] for side in plugins]
            rows += _list_differences(f"plugins.{name}.", *settings)
        else:
            first_side, second_side = ("active" if name in side else "" for side in plugins)
            rows.append((f"plugins.{name}", first_side, second_side))
    rows += _compare_models(*map(_get_model, manifests, runs))
    run_rows = [list_runs(path)[0] for path in runs]
    metrics = [
        {name: value for name, value in row.metrics.items() if name not in row.telemetry}
        for row in run_rows
    ]
    rows += _list_differences("", *metrics)
    return rows


def _get_plugins(manifest: dict[str, Any], run: Path) -> dict[str, dict[str, Any]]:
    """Return the settings and versions of plugins by name; raise `CheckpointError` if the manifest
    of a run has something else there."""
    try:
        return {
            check_text(plugin["name"], "name"): {
                **check_object(plugin["settings"], "settings"),
                "version": plugin["version"],
            }
            for plugin in check_list(manifest.get("plugins", []), "plugins")
        }
    except (LookupError, TypeError, ValueError) as error:
        raise _make_manifest_error(run, "plugins", error) from error


def _get_model(manifest: dict[str, Any], run: Path) -> list[str]:
    """Return the lines of the model; raise `CheckpointError` if the manifest of a run has something
    else there."""
    try:
        return [
            check_text(line, "model") for line in check_list(manifest.get("model", []), "model")
        ]
    except ValueError as error:
        raise _make_manifest_error(run, "model", error) from error


def _make_manifest_error(run: Path, section: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{run} cannot be compared: its newest manifest, in {run / 'attempts'}, describes no "
        f"{section}: {type(error).__name__}: {error}"
    )


def _compare_models(first: list[str], second: list[str]) -> list[tuple[str, str, str]]:
    """Return the lines of the models that differ, side by side where there are equally many."""
    if len(first) != len(second):
        return [("model", f"{len(first)} lines", f"{len(second)} lines")]
    rows = [
        ("model", ours.strip(), theirs.strip())
        for ours, theirs in zip(first, second, strict=True)
        if ours != theirs
    ]
    return rows[:_MAX_MODEL_LINES]


def _list_differences(
    prefix: str, first: dict[str, Any], second: dict[str, Any]
) -> list[tuple[str, str, str]]:
    return [
        (f"{prefix}{name}", *_format_pair(first.get(name), second.get(name)))
        for name in dict.fromkeys([*first, *second])
        if dumps(first.get(name)) != dumps(second.get(name))
    ]


def _format_pair(first: Any, second: Any) -> tuple[str, str]:
    """Return two values that differ, with all their digits where the usual ones are alike."""
    texts = _format_value(first), _format_value(second)
    return texts if texts[0] != texts[1] else (dumps(first), dumps(second))


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _is_true(holds: Callable[[Any, Any], bool], value: Any, text: str) -> bool:
    """Return whether a condition holds for a value; numbers are compared as numbers."""
    if not _is_known(value):
        return False
    number = _parse_number(text)
    if number is not None and isinstance(value, int | float) and not isinstance(value, bool):
        return holds(value, number)
    # A string is equal to another one or not; it is neither larger nor smaller than a number.
    return holds in (operator.eq, operator.ne) and holds(str(value), text)


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _format_value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return format_number(value)
    return value if isinstance(value, str) else dumps(value)
