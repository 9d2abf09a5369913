"""Whether a run is running, by its lock file, which `fulgurite_runs.Lock` writes."""

import os
import platform
import time
from pathlib import Path
from typing import Any

from fulgurite_report.lines import read_json

DEAD = 60.0
"""Seconds without a heartbeat after which an owner on another machine counts as dead."""
_CLOCK_PRECISION = 2.0


def find_state(run: Path) -> tuple[str, float | None]:
    """Return the state of a run, as `fulgurite runs` says it, and the time of its last heartbeat in
    seconds since 1970, or None."""
    lock = run / "lock"
    owner = read_json(lock)
    try:
        heartbeat = lock.stat().st_mtime
    except OSError:
        heartbeat = None
    if _is_file(run / "COMPLETE"):
        return "complete", heartbeat
    if not _is_owner(owner) or heartbeat is None:
        return "new", None
    if _is_running(owner, heartbeat):
        return "running", heartbeat
    return ("stopped" if owner["ended"] else "killed"), heartbeat


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _is_owner(owner: dict[str, Any]) -> bool:
    types = {"host": str, "boot": str, "pid": int, "ended": bool}
    return (
        all(type(owner.get(name)) is expected for name, expected in types.items())
        and isinstance(owner.get("started"), int | float)
        and 0 < owner["pid"] < 2**31
    )


def _is_running(owner: dict[str, Any], heartbeat: float) -> bool:
    """Return whether the process of an owner may still be there, as far as this machine can tell:
    the rules are those of `fulgurite_runs.Owner`."""
    if owner["ended"]:
        return False
    is_silent = time.time() - heartbeat > DEAD
    if (owner["host"], owner["boot"]) != (platform.node(), _read_boot_id()):
        return not is_silent
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is there, and somebody else's
    began = _read_start(owner["pid"])
    return not is_silent or began is None or began <= owner["started"] + _CLOCK_PRECISION


def _read_start(pid: int) -> float | None:
    """Return when a process of this machine began, in seconds since 1970; None if that is not
    known here."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        lines = Path("/proc/stat").read_text().splitlines()
        boot = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
        return boot + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _read_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""  # not Linux: machines differ by name only
