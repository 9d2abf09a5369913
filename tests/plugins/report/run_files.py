"""Directories of runs, written line by line without any code of ours."""

import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HOSTILE = (
    "</script><script>document.title='hacked'</script><img src=x onerror=\"document.title='x'\">"
)


def write_run(
    path: Path,
    *,
    records: Iterable[tuple[str, int, dict[str, Any]]] = (),
    telemetry: Iterable[dict[str, Any]] = (),
    manifest: dict[str, Any] | None = None,
    state: str = "complete",
    attempt: int = 1,
) -> Path:
    """Write a run, and return its directory.

    Args:
        path: the directory.
        records: source, step and values.
        telemetry: whole records.
        manifest: of the attempt.
        state: `complete`, `running`, `stopped` or `killed`.
        attempt: its number.
    """
    (path / "attempts").mkdir(parents=True, exist_ok=True)
    (path / "attempts" / str(attempt)).write_text(json.dumps(manifest or make_manifest()))
    with open(path / "records.jsonl", "a") as file:
        for source, step, values in records:
            line = {"kind": "scalars", "source": source, "step": step, "values": values}
            file.write(json.dumps(line) + "\n")
    with open(path / "telemetry.jsonl", "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in telemetry)
    owner = {
        "host": platform.node(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid": os.getpid() if state == "running" else 2**31 - 2,
        "started": 0.0,
        "attempt": attempt,
        "ended": state in ("complete", "stopped"),
    }
    (path / "lock").write_text(json.dumps(owner).ljust(1024))
    (path / "COMPLETE").unlink(missing_ok=True)
    if state == "complete":
        (path / "COMPLETE").touch()
    return path


def make_manifest(**arguments: Any) -> dict[str, Any]:
    """Return a manifest of a program with such arguments."""
    return {
        "configuration": arguments,
        "settings": {"steps": 100, "epochs": None, "seed": 0},
        "plugins": [],
        "versions": {"python": "3.11.7", "jax": "0.10.2"},
        "program": {"file": "train.py"},
        "devices": {"kind": "cpu", "count": 1},
        "model": ["Net(", "  weight=f32[3]", ")"],
    }


def make_telemetry(
    step: int, wall_time: float, values: dict[str, Any], *, kind: str = "scalars", attempt: int = 1
) -> dict[str, Any]:
    """Return a record of telemetry of the source `train`."""
    return {
        "attempt": attempt,
        "kind": kind,
        "source": "train",
        "step": step,
        "values": values,
        "wall_time": wall_time,
    }
