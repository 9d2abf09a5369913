"""Runs and checkpoints as tables."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fulgurite.errors import CheckpointError
from fulgurite_runs import RunDirectory
from fulgurite_runs.lock import DEAD

from fulgurite_checkpoint import format
from fulgurite_checkpoint.format import Damaged, Entry, Verify

Columns = dict[str, Callable[[Any], str]]


@dataclass(frozen=True)
class RunRow:
    """A run and how it is.

    Attributes:
        run: its directory.
        state: `complete`; `running`; `stopped`, before its planned end; `killed`, if it did not say
            that it ended; `new`, if it never began; or `unreadable`.
        heartbeat: seconds since the last one, if it runs.
        attempts: how often it was started.
        step: that of the newest complete checkpoint.
        best: the best value of its metric, if it has one, and at which step.
        note: who runs it, or what is wrong.
    """

    run: str
    state: str
    heartbeat: float | None = None
    attempts: int = 0
    step: int | None = None
    best: tuple[str, float, int] | None = None
    note: str = ""


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint: its step, size in bytes, when it was saved (seconds since 1970), the metrics
    measured at that step, what is special about it, and what is wrong with it."""

    step: int
    bytes: int
    saved: float | None
    metrics: dict[str, float]
    marks: tuple[str, ...]
    damage: str | None


def list_runs(directory: Path) -> list[RunRow]:
    """The runs in a directory, by name; the directory itself, if it is one."""
    if not directory.is_dir():
        raise CheckpointError(f"there is no directory {directory}")
    found = [directory] if _is_run(directory) else sorted(filter(_is_run, directory.iterdir()))
    return [_run(path) for path in found]


def list_checkpoints(run: str, verify: Verify = "size") -> list[CheckpointRow]:
    """The checkpoints of a run, oldest first, damaged ones included."""
    root = format.resolve_root(run)
    if not root.is_dir():
        raise CheckpointError(f"there is no run in {root}: check the path")
    if not _is_run(root):
        raise CheckpointError(f"{root} is no run: give the directory that holds checkpoints/")
    found = format.list_entries(root)
    best = _best(found)
    latest = max((entry.step for entry in found if entry.commit), default=None)
    return [_checkpoint(entry, verify, latest, best and best[2]) for entry in found]


def print_table(rows: Sequence[Any], columns: Columns, as_json: bool) -> int:
    """Prints rows as a table, or as JSON; gives 0."""
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    lines = [list(columns)] + [
        [strip_control_characters(show(row)) for show in columns.values()] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )
    return 0


def strip_control_characters(text: str) -> str:
    """A text from a file, with nothing in it that a terminal would obey."""
    return "".join(
        character if character.isprintable() or character == "\n" else "�" for character in text
    )


def format_number(value: float | None) -> str:
    """A number in short, nothing for None."""
    return "" if value is None else f"{value:.6g}"


def format_size(count: float) -> str:
    """Bytes in short."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


RUN_COLUMNS: Columns = {
    "run": lambda row: row.run,
    "state": lambda row: row.state,
    "heartbeat": lambda row: "" if row.heartbeat is None else f"{row.heartbeat:.0f} s ago",
    "attempts": lambda row: str(row.attempts),
    "step": lambda row: format_number(row.step),
    "best": lambda row: (
        "" if row.best is None else f"{row.best[0]} {format_number(row.best[1])} at {row.best[2]}"
    ),
    "note": lambda row: row.note,
}
CHECKPOINT_COLUMNS: Columns = {
    "step": lambda row: str(row.step),
    "size": lambda row: format_size(row.bytes),
    "saved": lambda row: (
        "" if row.saved is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.saved))
    ),
    "metrics": lambda row: _shorten_metrics(row.metrics),
    "": lambda row: ", ".join([*row.marks, *([f"damaged: {row.damage}"] if row.damage else [])]),
}


def _shorten_metrics(metrics: dict[str, float]) -> str:
    """The first few, those of evaluations if there are any; JSON has them all."""
    evaluated = {
        name: value for name, value in metrics.items() if not name.startswith("train/")
    } or metrics
    few = [f"{name} {format_number(value)}" for name, value in list(evaluated.items())[:3]]
    return "  ".join(few + ["..."] * (len(evaluated) > 3))


def _is_run(path: Path) -> bool:
    return any((path / name).is_dir() for name in ("attempts", "checkpoints"))


def _run(path: Path) -> RunRow:
    directory = RunDirectory(path)
    try:
        found = format.list_entries(path)
        attempts, owned = directory.num_attempts, directory.read_owner()
    except CheckpointError as error:
        return RunRow(path.name, "unreadable", note=str(error))
    state, heartbeat, note = "new", None, ""
    if owned is not None:
        owner, beat = owned
        age = max(time.time() - beat, 0.0)
        running = owner.is_running and (owner.is_local or age < DEAD)
        state = "running" if running else "stopped" if owner.ended else "killed"
        heartbeat, note = (age, f"process {owner.pid} on {owner.host}") if running else (None, "")
    if directory.is_complete:
        state = "complete"
    damaged = [entry.step for entry in found if entry.damage]
    note = "; ".join(
        filter(None, [note, f"damaged: {', '.join(map(str, damaged))}" if damaged else ""])
    )
    steps = [entry.step for entry in found if entry.commit]
    return RunRow(
        path.name, state, heartbeat, attempts, max(steps, default=None), _best(found), note
    )


def _best(found: list[Entry]) -> tuple[str, float, int] | None:
    """The metric by which the run chooses the best, its value and its step."""
    chosen = [entry.commit.best for entry in found if entry.commit and entry.commit.best]
    if (
        not chosen
        or (entry := format.find_best([one for one in found if one.commit], *chosen[-1])) is None
    ):
        return None
    value = entry.value(chosen[-1][0])
    return None if value is None else (chosen[-1][0], value, entry.step)


def _checkpoint(
    entry: Entry, verify: Verify, latest: int | None, best: int | None
) -> CheckpointRow:
    damage, count = entry.damage, 0
    try:
        count = sum(format.get_size(file) for _, file in format.files(entry.path))
        if entry.commit is not None:
            format.verify(entry.path, entry.commit, verify)
    except (Damaged, OSError) as error:
        damage = str(error)
    metrics = {
        f"{source}/{name}": float(value)
        for source, values in (entry.commit.metrics if entry.commit else {}).items()
        for name, value in values.items()
        if isinstance(value, int | float)
    }
    marks = []
    if entry.step == latest:
        marks.append("latest")
    if entry.step == best:
        marks.append("best")
    return CheckpointRow(
        entry.step, count, entry.commit and entry.commit.wall, metrics, tuple(marks), damage
    )
