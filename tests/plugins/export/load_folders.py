"""A program that loads exported folders, the first of which is valid, with little memory for the others.

It reads a path a line, and prints `loaded` or the error.
"""

import os
import resource
import sys
from pathlib import Path

from fulgurite_export import load

LIMIT = 512 << 20
"""Bytes beyond those that the process has once it has loaded a folder."""


def load_folder(path: str) -> str:
    try:
        load(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    return "loaded"


first, *others = sys.stdin.read().splitlines()
print(load_folder(first))
num_pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack
limit = num_pages * os.sysconf("SC_PAGE_SIZE") + LIMIT
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
for path in others:
    print(load_folder(path))
