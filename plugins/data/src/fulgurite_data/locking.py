"""One process after the other, on one machine."""

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hold_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder within the block; wait while another process holds it.

    The kernel frees it with the process, however that ends. The folder is made where it is missing.

    Args:
        folder: what is locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Opened for writing, which network file systems need for a lock of one alone.
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that prepares {folder}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
