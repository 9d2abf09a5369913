"""The places of values that must be set."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Required:
    """The place of a value that must be set before the configuration is resolved.

    Example:
        from fulgurite_config import L, Required

        config = L(data=Required("the folder of the pictures"))

    Attributes:
        description: what belongs there.
    """

    description: str = ""


REQUIRED: Any = Required()
"""A value that must be set before the configuration is resolved."""


def find_required(value: Any) -> Required | None:
    """Return the first place of a value that must be set: a value itself, or one in its lists and
    dictionaries."""
    if isinstance(value, Required):
        return value
    items: Any = ()
    if isinstance(value, list | tuple):
        items = value
    elif isinstance(value, dict):
        items = value.values()
    return next(filter(None, map(find_required, items)), None)
