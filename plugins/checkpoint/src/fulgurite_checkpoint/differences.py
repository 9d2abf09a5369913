"""What differs between a checkpoint and the run that resumes from it, by their manifests."""

import difflib
from typing import Any

import fulgurite as fg
from fulgurite_runs import (
    describe_origins,
    dumps,
    get_arguments,
    get_program_hyperparameters,
    takes_program,
)

_MAX_MODEL_LINES = 8
# The length of a run may change, and no number depends on what writes the files.
_HARMLESS = {"steps", "epochs", "orbax-checkpoint"}


def describe_differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return what makes a resumed run differ from an uninterrupted one, as far as manifests show.

    Args:
        saved: the manifest in the checkpoint.
        current: the manifest of the run.
    """
    rows = [
        f"the argument {change}"
        for change in list_changes(get_arguments(saved), get_arguments(current))
    ]
    for section in ("settings", "versions", "devices"):
        rows += list_changes(saved.get(section) or {}, current.get(section) or {})
    saved_plugins = {plugin["name"]: plugin for plugin in saved["plugins"]}
    for plugin in current["plugins"]:
        saved_plugin = saved_plugins.get(plugin["name"])
        if plugin["decisive"] and saved_plugin is not None:
            changes = list_changes(
                saved_plugin["settings"] | {"version": saved_plugin["version"]},
                plugin["settings"] | {"version": plugin["version"]},
            )
            rows += [f"{plugin['name']}: {change}" for change in changes]
    diff = difflib.unified_diff(saved.get("model", []), current["model"], lineterm="", n=0)
    changed_lines = [
        " ".join(line.split()) for line in diff if not line.startswith(("---", "+++", "@@"))
    ]
    if changed_lines:
        rows.append(f"the model: {' '.join(changed_lines[:_MAX_MODEL_LINES])}")
    return rows


def describe_hyperparameter_changes(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return which numbers of the optimizers have changed in the program, and what becomes of those
    that the optimizer's state holds.

    Args:
        saved: the manifest in the checkpoint; those of earlier versions tell nothing.
        current: the manifest of the run that resumes.
    """
    before = get_program_hyperparameters(saved)
    now = get_program_hyperparameters(current)
    if not before:
        return []
    entries = current["hyperparameters"]["state"]
    rows = []
    has_kept = False
    for name in sorted({*before, *now}):
        old = before.get(name)
        new = now.get(name)
        value = entries.get(name, {"value": new})["value"]
        if dumps(old) == dumps(new):
            continue
        if dumps(value) == dumps(new):
            rows.append(f"{name} was {old!r} and is {new!r}")
        else:
            has_kept = True
            rows.append(
                f"{name} stays {value!r}, as in the checkpoint; in the program it was {old!r} and "
                f"is {new!r}"
            )
    if has_kept:
        rows.append(
            "to take what the program has, resume with CheckpointRef(..., "
            "hyperparameters='program'), on the command line --hyperparameters program"
        )
    return rows


def report_hyperparameters(run: fg.Run) -> None:
    """Say which hyperparameters are those of the checkpoint, if any are in the optimizer's
    state.

    Args:
        run: the run that resumes.
    """
    origins = describe_origins(run.manifest)
    if not origins:
        return
    source = "the program, as resume says" if takes_program(run.resume) else "the checkpoint"
    run.notify(
        "checkpoints",
        f"hyperparameters from {source}: {origins}; all others are those of the program",
    )


def list_changes(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return which values differ between two dictionaries, except those that change no number.

    Args:
        saved: the values by name.
        current: the others.
    """
    names = sorted({*saved, *current} - _HARMLESS)
    return [
        f"{name} was {saved.get(name)!r} and is {current.get(name)!r}"
        for name in names
        if dumps(saved.get(name)) != dumps(current.get(name))
    ]
