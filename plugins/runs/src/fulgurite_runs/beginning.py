"""When an attempt of a run began: its process, where the fit is the first one there."""

import os
import sys
import threading
import time
from weakref import WeakKeyDictionary

import fulgurite as fg

_BEGINNINGS: "WeakKeyDictionary[fg.Timings, float]" = WeakKeyDictionary()
_has_trained = threading.Event()
"""Whether a fit has begun in this process: the time before the first one is part of its start."""


def find_beginning(timings: fg.Timings) -> float:
    """Return when an attempt began, in seconds since 1970: with its process, imports included, if
    its fit is the first one there; otherwise with the fit. So it is where a user sits at a prompt,
    and where the system does not say when a process began.

    Args:
        timings: of the fit, which everybody who asks during it has.
    """
    if timings not in _BEGINNINGS:
        age = None
        if not _has_trained.is_set() and not _is_interactive():
            age = _measure_process_age()
        _has_trained.set()
        _BEGINNINGS[timings] = time.time() - max(timings.total, age or 0.0)
    return _BEGINNINGS[timings]


def _is_interactive() -> bool:
    """Return whether the process waits for a user between two fits."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def _measure_process_age() -> float | None:
    """Return the seconds since this process began; None where Linux does not tell."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        since_boot = ticks / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    except (OSError, ValueError, IndexError, AttributeError):
        return None
