"""What Orbax prints of a save or a load that failed, and that we report in one line.

On a full disk it logs a traceback for each of its threads, and TensorStore prints one for each
transfer that ends after the loop that awaited it was closed: 700 lines for a model of one array.
Where a checkpoint is deleted while it is read, asyncio logs the error of every array but the first:
350 lines for 60 arrays. All of them are the one exception that the save or the load raises.
"""

import asyncio.base_events
import logging
import sys
import traceback
from collections.abc import Callable
from typing import Any


def mute_failed_transfers() -> None:
    """Print nothing from here on of what Orbax, TensorStore and asyncio say about a save or a load
    that failed.

    Called before it begins: the first of it comes before the exception is raised.
    """
    _add_filter("absl", _is_of_orbax_thread)
    _add_filter("asyncio", _is_of_orbax_task)
    if not isinstance(sys.unraisablehook, _LateTransferHook):
        sys.unraisablehook = _LateTransferHook(sys.unraisablehook)


def _add_filter(name: str, is_reported: Callable[[str], bool]) -> None:
    """Add a filter to a logger, unless it has one."""
    logger = logging.getLogger(name)
    if not any(isinstance(former, _ErrorFilter) for former in logger.filters):
        logger.addFilter(_ErrorFilter(name, is_reported))


def _is_of_orbax_thread(message: str) -> bool:
    return "_SignalingThread.run()" in message


def _is_of_orbax_task(message: str) -> bool:
    return message.startswith("Task exception was never retrieved") and "/orbax/" in message


class _ErrorFilter(logging.Filter):
    """Turns errors of Orbax's threads and tasks into messages for debugging.

    Args:
        name: of the logger.
        is_reported: whether a message is of an error that the save or the load raises.
    """

    def __init__(self, name: str, is_reported: Callable[[str], bool]) -> None:
        super().__init__(name)
        self._is_reported = is_reported

    def filter(self, record: logging.LogRecord) -> bool:
        if not self._is_reported(str(record.msg)):
            return True
        record.levelno = logging.DEBUG
        record.levelname = "DEBUG"
        return logging.getLogger(self.name).isEnabledFor(logging.DEBUG)


class _LateTransferHook:
    """A `sys.unraisablehook` that leaves out transfers that end after their event loop was closed:
    no Python code calls it then, and nobody waits. Orbax takes the loop of uvloop where that is
    installed."""

    def __init__(self, former: Any) -> None:
        self._former = former

    def __call__(self, unraisable: Any) -> None:
        frames = traceback.extract_tb(unraisable.exc_traceback)
        is_late_transfer = (
            isinstance(unraisable.exc_value, RuntimeError)
            and len(frames) > 0
            and frames[0].name.endswith("call_soon_threadsafe")
            and frames[0].filename in (asyncio.base_events.__file__, "uvloop/loop.pyx")
        )
        if not is_late_transfer:
            self._former(unraisable)
