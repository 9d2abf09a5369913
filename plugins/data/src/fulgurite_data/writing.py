"""Files that are there as a whole, or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def write_whole(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write to, which has its name once the block has ended without an error.

    Several processes may do so at once, as those of one run that start together: each writes a file
    of its own, and the last one stays.

    Args:
        path: of the file.
    """
    # Not by the number of the process, which those of two machines may share.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
