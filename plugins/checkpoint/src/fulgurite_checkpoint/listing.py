"""Runs and checkpoints as tables."""

import csv
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fulgurite.errors import CheckpointError
from fulgurite.plugins import as_printable
from fulgurite_runs import Owner, RunDirectory, as_float, format_commit, get_arguments

from fulgurite_checkpoint import format
from fulgurite_checkpoint.files import DamagedError, get_size, iter_files, resolve_root
from fulgurite_checkpoint.format import Commit, Entry, Verify

Columns = dict[str, Callable[[Any], str]]


@dataclass(frozen=True)
class RunRow:
    """A run and how it is.

    Attributes:
        run: its directory.
        state: `complete`; `running`; `stopped`, before its planned end; `killed`, if it never
            recorded that it ended; `new`, if it never began; or `unreadable`.
        heartbeat: seconds since the last one, if it runs.
        attempts: how often it was started.
        step: that of the newest complete checkpoint.
        best: its metric, the best value of it, at which step, and whether that is the largest
            (`max`) or the smallest (`min`); None without a metric.
        commit: the commit of the program that its newest attempt ran, and whether files had
            changed since; empty if it was in no git repository.
        note: who runs it, or what is wrong.
        arguments: of the program, by name.
        metrics: measured at the newest complete checkpoint, as `SOURCE/NAME`.
        telemetry: which of the metrics are telemetry.
    """

    run: str
    state: str
    heartbeat: float | None = None
    attempts: int = 0
    step: int | None = None
    best: tuple[str, float, int, str] | None = None
    commit: str = ""
    note: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    telemetry: list[str] = field(default_factory=list)

    def get_value(self, name: str) -> Any:
        """Return the argument or metric of this name, or the field; None if there is none. Of the
        best checkpoint it is the metric."""
        if name in self.arguments:
            return self.arguments[name]
        if name == "best" and self.best is not None:
            return self.best[1]
        return self.metrics.get(name, getattr(self, name, None))


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint of a run.

    Attributes:
        step: its step.
        bytes: its size.
        saved: when it was saved, in seconds since 1970.
        metrics: those measured at its step, as `SOURCE/NAME`.
        marks: `latest` and `best`.
        damage: what is wrong with it, or None.
    """

    step: int
    bytes: int
    saved: float | None
    metrics: dict[str, float]
    marks: tuple[str, ...]
    damage: str | None


def list_runs(directory: Path) -> list[RunRow]:
    """Return the runs in a directory, by name, and before them the directory itself, if it is
    one."""
    if not directory.is_dir():
        raise CheckpointError(f"there is no directory {directory}: check the path")
    rows = [_describe_path(path) for path in (directory, *sorted(directory.iterdir()))]
    return [row for row in rows if row is not None]


def _describe_path(path: Path) -> RunRow | None:
    """Return the row of what may be a run; None if it is none."""
    try:
        return _describe_run(path) if _is_run(path) else None
    except (CheckpointError, OSError) as error:
        return RunRow(path.name, "unreadable", note=str(error))


def list_checkpoints(run: str, verify: Verify = "size") -> list[CheckpointRow]:
    """Return the checkpoints of a run, oldest first, damaged ones included.

    Args:
        run: its directory.
        verify: how files are compared with their hashes.
    """
    root = resolve_root(run)
    if not root.is_dir():
        raise CheckpointError(f"there is no run in {root}: check the path")
    if not _is_run(root):
        raise CheckpointError(f"{root} is not a run: give the directory that holds checkpoints/")
    entries = format.list_entries(root)
    best = _find_best(entries)
    latest_step = max((entry.step for entry in entries if entry.commit), default=None)
    rows = []
    for entry in entries:
        marks = []
        if entry.step == latest_step:
            marks.append("latest")
        if best is not None and entry.step == best[2]:
            marks.append("best")
        rows.append(_describe_checkpoint(entry, verify, tuple(marks)))
    return rows


def print_json(rows: Sequence[Any]) -> None:
    """Print rows, which are dataclasses, as JSON."""
    print(json.dumps([asdict(row) for row in rows], indent=2))


def print_csv(rows: Sequence[Any], columns: Columns) -> None:
    """Print rows as comma-separated values; the arguments are those of `print_table`."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(map(as_printable, columns))
    for row in rows:
        cells = [format_cell(row) for format_cell in columns.values()]
        writer.writerow([as_printable(cell) for cell in cells])


def print_table(rows: Sequence[Any], columns: Columns) -> None:
    """Print rows, for people.

    Args:
        rows: dataclasses.
        columns: functions that format a cell of a row, by the column's title.
    """
    table = [list(columns)]
    for row in rows:
        table.append([format_cell(row) for format_cell in columns.values()])
    # A line break would begin a line that looks like another row.
    lines = [[as_printable(cell).replace("\n", "\\n") for cell in cells] for cells in table]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join(cells).rstrip())


def format_number(value: float | None) -> str:
    """Return a number with six digits, and an empty string for None."""
    return "" if value is None else f"{value:.6g}"


def format_size(count: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        # What rounds to 1000 has the next unit.
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _format_heartbeat(row: RunRow) -> str:
    return "" if row.heartbeat is None else f"{row.heartbeat:.0f} s ago"


def _format_best(row: RunRow) -> str:
    if row.best is None:
        return ""
    metric, value, step, mode = row.best
    kind = {"min": "smallest", "max": "largest"}.get(mode, f"by {mode}:")
    return f"{kind} {metric} {format_number(value)} at {step}"


def _format_wall_time(row: CheckpointRow) -> str:
    if row.saved is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.saved))


def _format_metrics(row: CheckpointRow) -> str:
    """Return the first few metrics, those of evaluations if there are any; JSON has them all."""
    evaluated = {
        name: value for name, value in row.metrics.items() if not name.startswith("train/")
    }
    shown = evaluated or row.metrics
    cells = [f"{name} {format_number(value)}" for name, value in list(shown.items())[:3]]
    if len(shown) > 3:
        cells.append("...")
    return "  ".join(cells)


def _format_marks(row: CheckpointRow) -> str:
    marks = list(row.marks)
    if row.damage is not None:
        marks.append(f"damaged: {row.damage}")
    return ", ".join(marks)


RUN_COLUMNS: Columns = {
    "run": lambda row: row.run,
    "state": lambda row: row.state,
    "heartbeat": _format_heartbeat,
    "attempts": lambda row: str(row.attempts),
    "step": lambda row: "" if row.step is None else str(row.step),
    "best": _format_best,
    "commit": lambda row: row.commit,
    "note": lambda row: row.note,
}
CHECKPOINT_COLUMNS: Columns = {
    "step": lambda row: str(row.step),
    "size": lambda row: format_size(row.bytes),
    "saved": _format_wall_time,
    "metrics": _format_metrics,
    "": _format_marks,
}


def _is_run(path: Path) -> bool:
    return any((path / name).is_dir() for name in ("attempts", "checkpoints"))


def _describe_run(path: Path) -> RunRow:
    directory = RunDirectory(path)
    entries = format.list_entries(path)
    attempts = directory.num_attempts
    owner_and_heartbeat = _read_owner(directory)
    state = "new"
    heartbeat = None
    notes = []
    commits = [entry.commit for entry in entries if entry.commit]
    manifest: dict[str, Any] = {}
    try:
        manifest = directory.read_manifest() if attempts else {}
    except CheckpointError as error:
        notes.append(str(error))
    if owner_and_heartbeat is not None:
        owner, last_heartbeat = owner_and_heartbeat
        age = max(time.time() - last_heartbeat, 0.0)
        if owner.is_running(last_heartbeat):
            state = "running"
            heartbeat = age
            notes.append(f"process {owner.pid} on {owner.host}")
        else:
            state = "stopped" if owner.ended else "killed"
    if directory.is_complete:
        state = "complete"
    damaged_steps = [str(entry.step) for entry in entries if entry.damage]
    if damaged_steps:
        notes.append(f"damaged: {', '.join(damaged_steps)}")
    return RunRow(
        run=path.name,
        state=state,
        heartbeat=heartbeat,
        attempts=attempts,
        step=max((commit.step for commit in commits), default=None),
        best=_find_best(entries),
        commit=_get_commit(manifest),
        note="; ".join(notes),
        arguments=get_arguments(manifest),
        metrics=_flatten_metrics(commits[-1]) if commits else {},
        telemetry=commits[-1].telemetry if commits else [],
    )


def _read_owner(directory: RunDirectory) -> tuple[Owner, float] | None:
    lock = directory.path / "lock"
    if lock.is_file() and not os.access(lock, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(lock))
    return directory.read_owner()


def _get_commit(manifest: dict[str, Any]) -> str:
    program = manifest.get("program")
    return format_commit(program) if isinstance(program, dict) else ""


def _flatten_metrics(commit: Commit) -> dict[str, float]:
    """Return the numbers among the metrics of a checkpoint, as `SOURCE/NAME`."""
    return {
        f"{source}/{name}": as_float(value)
        for source, values in commit.metrics.items()
        for name, value in values.items()
        if isinstance(value, int | float)
    }


def _find_best(entries: list[Entry]) -> tuple[str, float, int, str] | None:
    """Return the metric by which the run chooses the best, its best value, at which step, and
    whether that is the largest or the smallest, or what comparison says so."""
    commits = [entry.commit for entry in entries if entry.commit and entry.commit.monitor]
    if not commits or commits[-1].monitor is None:
        return None
    metric, mode = commits[-1].monitor
    best = format.find_best([entry for entry in entries if entry.commit], metric, mode)
    value = None if best is None else best.get_metric(metric)
    if best is None or value is None:
        return None
    return metric, value, best.step, mode or commits[-1].better or ""


def _describe_checkpoint(entry: Entry, verify: Verify, marks: tuple[str, ...]) -> CheckpointRow:
    damage = entry.damage
    size = 0
    try:
        size = sum(get_size(file) for _, file in iter_files(entry.path))
        if entry.commit is not None:
            format.verify_files(entry.path, entry.commit, verify)
    except (DamagedError, OSError) as error:
        damage = str(error)
    metrics = {} if entry.commit is None else _flatten_metrics(entry.commit)
    saved = None if entry.commit is None else entry.commit.wall_time
    return CheckpointRow(entry.step, size, saved, metrics, marks, damage)
