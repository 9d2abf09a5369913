"""What a program does before its fit begins, for the user who waits. Nothing heavy is imported
here."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic

DELAY = 0.1
"""What is over within these seconds is not worth a line."""
FIRST_INTERVAL, LONGEST_INTERVAL = 2.0, 120.0


@contextmanager
def show_activity(text: str) -> Iterator[None]:
    """Say on standard error what takes long within the block: once it has lasted a moment, and then
    with its seconds at growing intervals.

    The lines are plain in a terminal too: what the program prints meanwhile stands between them.

    Args:
        text: what is going on, such as `importing train.py`.
    """
    # Each of several processes would say the same.
    if sys.stderr is None or os.environ.get("FULGURITE_DISTRIBUTED"):
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(
        target=_tell_until, args=(text, ended), name="fulgurite activity", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _tell_until(text: str, ended: threading.Event) -> None:
    start = monotonic()
    if ended.wait(DELAY):
        return
    _tell(text)
    interval = FIRST_INTERVAL
    while not ended.wait(interval):
        _tell(f"{text} {monotonic() - start:.0f} s")
        interval = min(2 * interval, LONGEST_INTERVAL)


def _tell(text: str) -> None:
    with suppress(OSError, ValueError):  # what reads it may be gone, or it is closed
        print(text, file=sys.stderr, flush=True)
