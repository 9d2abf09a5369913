"""The checkpoints of a run, as far as their `COMMIT` tells."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulgurite_report.lines import read_json

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,11})")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        step: the number of completed updates.
        path: its directory.
        wall_time: when it was saved, in seconds since 1970; None if that is not known.
        attempt: which start of the run saved it; None if that is not known.
        metrics: measured at its step, as `SOURCE/NAME`.
        monitor: the metric by which the run chooses the best, and `min` or `max`; or None.
        timings: seconds by name, over all attempts.
    """

    step: int
    path: Path
    wall_time: float | None
    attempt: int | None
    metrics: dict[str, float]
    monitor: tuple[str, str] | None
    timings: dict[str, float]

    def measure_size(self) -> int:
        """Return how many bytes its files have; 0 if it was removed meanwhile."""
        try:
            return sum(
                file.lstat().st_size
                for file in self.path.rglob("*")
                if file.is_file() and not file.is_symlink()
            )
        except OSError:
            return 0


def list_checkpoints(run: Path, known: Sequence[Checkpoint] = ()) -> list[Checkpoint]:
    """Return the complete checkpoints of a run, oldest first.

    Args:
        run: its directory.
        known: checkpoints that were read before, and are not read again.
    """
    folder = run / "checkpoints"
    try:
        names = [] if folder.is_symlink() else os.listdir(folder)
    except OSError:
        return []
    by_step = {checkpoint.step: checkpoint for checkpoint in known}
    checkpoints = []
    for name in names:
        match = _STEP.fullmatch(name)
        if match is None:
            continue
        step = int(match[1])
        commit = folder / name / "COMMIT"
        if step in by_step and commit.exists():
            checkpoints.append(by_step[step])
        elif not (folder / name).is_symlink() and commit.is_file():
            checkpoints.append(_describe(step, folder / name, read_json(commit)))
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def _describe(step: int, path: Path, commit: dict[str, Any]) -> Checkpoint:
    metrics = {
        f"{source}/{name}": float(value)
        for source, values in _as_dict(commit.get("metrics")).items()
        for name, value in _as_dict(values).items()
        if isinstance(value, int | float) and abs(value) < 2**1023
    }
    monitor = commit.get("monitor")
    is_monitor = (
        isinstance(monitor, list)
        and len(monitor) == 2
        and isinstance(monitor[0], str)
        and monitor[1] in ("min", "max")
    )
    timings = {
        name: float(seconds)
        for name, seconds in _as_dict(commit.get("timings")).items()
        if isinstance(seconds, float) and 0 <= seconds < 1e15
    }
    wall_time = commit.get("wall_time")
    attempt = commit.get("attempt")
    return Checkpoint(
        step,
        path,
        wall_time if isinstance(wall_time, float) else None,
        attempt if isinstance(attempt, int) else None,
        metrics,
        (monitor[0], monitor[1]) if is_monitor and isinstance(monitor, list) else None,
        timings,
    )


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
