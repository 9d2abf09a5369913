"""Checks of what loggers are given."""

from collections.abc import Collection
from typing import Any

from fulgurite.errors import ConfigurationError


def check_names(value: Any, label: str) -> None:
    """Raise a `ConfigurationError` unless `value` is a collection of strings.

    A string in its place would be taken apart: its letters would be the names, and `*` a pattern
    for everything.

    Args:
        value: the argument.
        label: how the message calls it, such as ``"ConsoleLogger: hide"``.
    """
    is_collection = isinstance(value, Collection) and not isinstance(value, str | bytes)
    if not is_collection or not all(isinstance(name, str) for name in value):
        raise ConfigurationError(f"{label} is {value!r}; give a tuple of names")
