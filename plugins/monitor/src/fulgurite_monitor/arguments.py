"""Checks of the arguments of monitors."""

import threading
from typing import Any

from fulgurite.errors import ConfigurationError


def check_seconds(value: Any, label: str) -> None:
    """Raise an error unless a value is a number of seconds that a thread can wait for.

    Args:
        value: the argument.
        label: what it is called, for the error.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= threading.TIMEOUT_MAX:
        raise ConfigurationError(f"{label} is {value!r}; give seconds above 0, and not infinity")


def check_rate(value: Any, label: str) -> None:
    """Raise an error unless a value is a positive number.

    Args:
        value: the argument.
        label: what it is called, for the error.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value > 0:
        raise ConfigurationError(f"{label} is {value!r}; give a positive number")
