"""Files that are replaced all at once: who reads one has the old or the new, never a part."""

import os
import secrets
from pathlib import Path

from fulgurite_runs.directory import sync_folder


def replace_file(path: Path, text: str) -> None:
    """Write a file durably, all at once: a process that is killed leaves the file as it was, and a
    power cut the old one or the new. Several processes may do it at a time.

    Args:
        path: of the file.
        text: what it is to hold.

    Raises:
        OSError: it cannot be written; then it is as it was.
    """
    # Not by the number of the process, which another container has, too.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
