"""What decides which examples a pipeline gives, in few words."""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

_MAX_LINE = 100
_MAX_LINES = 8
"""Of these many characters: with the numbers of epoch and batch, a position has less than 1 kB."""


def describe_function(function: Callable[..., Any]) -> str:
    """Return the name of a function, as far as it has one that stays the same."""
    if isinstance(function, partial):
        return f"partial({describe_function(function.func)})"
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name.rpartition("<locals>.")[2]


def shorten_identity(stages: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lines of stages in less than 1 kB; what is left out counts by its hash.

    Args:
        stages: of a pipeline, from the source on.
    """
    lines = [line if len(line) <= _MAX_LINE else _abbreviate(line) for line in stages]
    if len(lines) > _MAX_LINES:
        middle = lines[_MAX_LINES // 2 : -(_MAX_LINES // 2 - 1)]
        text = f"{len(middle)} stages {hash_text(chr(10).join(middle))}"
        lines = [*lines[: _MAX_LINES // 2], text, *lines[-(_MAX_LINES // 2 - 1) :]]
    return tuple(lines)


def hash_text(text: str) -> str:
    """Return eight characters that differ for other texts."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _abbreviate(line: str) -> str:
    return f"{line[: _MAX_LINE - 12]}... {hash_text(line)}"
