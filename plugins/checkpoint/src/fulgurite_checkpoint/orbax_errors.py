"""What Orbax prints of a save that failed, and that we report in one line.

On a full disk it logs a traceback for each of its threads, and TensorStore prints one for each
array that it writes after the loop that awaited it was closed: 700 lines for a model of one array.
All of them are the one exception that the save raises.
"""

import asyncio.base_events
import logging
import sys
import traceback
from typing import Any


def mute_failed_saves() -> None:
    """Print nothing, from here on, of what Orbax and TensorStore say about a save that failed.

    Called before a save begins: the first of it comes before the save raises.
    """
    logger = logging.getLogger("absl")
    if not any(isinstance(former, _ThreadErrorFilter) for former in logger.filters):
        logger.addFilter(_ThreadErrorFilter())
    if not isinstance(sys.unraisablehook, _LateWriteHook):
        sys.unraisablehook = _LateWriteHook(sys.unraisablehook)


class _ThreadErrorFilter(logging.Filter):
    """Turns errors of Orbax's threads, which the save raises, into messages for debugging."""

    def filter(self, record: logging.LogRecord) -> bool:
        if "_SignalingThread.run()" not in str(record.msg):
            return True
        record.levelno = logging.DEBUG
        record.levelname = "DEBUG"
        return logging.getLogger("absl").isEnabledFor(logging.DEBUG)


class _LateWriteHook:
    """A `sys.unraisablehook` that leaves out writes that end after their event loop was closed: no
    Python code calls it then, and nobody waits."""

    def __init__(self, former: Any) -> None:
        self._former = former

    def __call__(self, unraisable: Any) -> None:
        frames = traceback.extract_tb(unraisable.exc_traceback)
        is_late_write = (
            isinstance(unraisable.exc_value, RuntimeError)
            and len(frames) > 0
            and frames[0].name == "call_soon_threadsafe"
            and frames[0].filename == asyncio.base_events.__file__
        )
        if not is_late_write:
            self._former(unraisable)
