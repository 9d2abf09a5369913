"""How much a configuration may compute, so that a small file makes no work without end."""

import re
import string
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

from fulgurite_config.errors import ConfigError

MAX_VALUES = 1_000_000
MAX_LENGTH = 10_000
MAX_BITS = 4_096
CHARACTERS = 8
"""So many characters of a string count as one value, as they are as large."""


class Budget:
    """Counts the values that a configuration stands for, those that are computed and compared
    included. A few references can stand for lists without end.

    Example:
        from fulgurite_config import Budget, ValueReader

        budget = Budget()
        readers = [ValueReader(budget=budget), ValueReader(budget=budget)]
    """

    def __init__(self) -> None:
        self._num_left = MAX_VALUES

    def spend(self, amount: int = 1) -> None:
        """Count values.

        Raises:
            ConfigError: there are too many.
        """
        self._num_left -= amount
        if self._num_left < 0:
            raise ConfigError(f"the configuration stands for more than {MAX_VALUES:_} values")

    def spend_on(self, value: Any) -> None:
        """Count a value and all that is in it, what is in it twice as two."""
        waiting = [value]
        while waiting:
            value = waiting.pop()
            self.spend()
            if isinstance(value, str | PurePath):
                self.spend(len(str(value)) // CHARACTERS)
                continue
            children = _get_content(value)
            self.spend(len(children))
            waiting += children

    def spend_on_call(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Count what a function does beyond one step for each value that it gets.

        Raises:
            ConfigError: it is too much.
        """
        sizes = [len(value) if hasattr(value, "__len__") else 0 for value in arguments]
        if function is sum and sizes:  # of lists, it copies all before for each
            self.spend(
                sizes[0] * sum(len(_get_content(item)) for item in _get_content(arguments[0]))
            )
        if function is str.join and len(sizes) == 2:
            self.spend(sizes[0] * sizes[1] // CHARACTERS)
        if function is str.format and sizes and isinstance(arguments[0], str):
            _check_template(arguments[0])


def _get_content(value: Any) -> list[Any]:
    """Return what is directly in a value of a configuration, resolved or not."""
    if hasattr(type(value), "__config_get__"):  # a node: its module imports this one
        state = value._config_state
        return [*state.positional, *state.keywords.values(), state.aux]
    if hasattr(type(value), "_config_operands"):  # an expression
        return list(value._config_operands)
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, SimpleNamespace):
        return list(vars(value).values())
    return [*value.args, *value.keywords.values()] if isinstance(value, partial) else []


def _check_template(template: str) -> None:
    """Raise a `ConfigError` if a template says how wide a value is to be, and that is much."""
    try:
        specs = [spec or "" for _, _, spec, _ in string.Formatter().parse(template)]
    except ValueError:  # which the function itself says
        return
    for spec in specs:
        if "{" in spec or any(int(number[:9]) > MAX_LENGTH for number in re.findall(r"\d+", spec)):
            raise ConfigError(f"a format makes more than {MAX_LENGTH} characters, or may do so")


def check_operands(symbol: str, values: Sequence[Any]) -> None:
    """Raise a `ConfigError` if an operation would need much time or memory."""
    if symbol == "*":
        lengths = [len(value) for value in values if hasattr(value, "__len__")]
        counts = [value for value in values if isinstance(value, int)]
        if lengths and counts and lengths[0] * counts[0] > MAX_LENGTH:
            raise ConfigError(f"a reference makes more than {MAX_LENGTH} items")
    if symbol == "%" and isinstance(values[0], str):
        raise ConfigError("% formats no string here: join strings with + or apply(str.join, ...)")
    if symbol == "**" and all(isinstance(value, int) for value in values):
        base, exponent = values
        if base.bit_length() * abs(exponent) > MAX_BITS:
            raise ConfigError(f"{base} ** {exponent} has more than {MAX_BITS} bits")


def check_result(value: Any) -> None:
    """Raise a `ConfigError` if a computed value is too large for a configuration."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ConfigError(f"a reference makes a number of more than {MAX_BITS} bits")
    content = str(value) if isinstance(value, PurePath) else value
    if isinstance(content, str | list | tuple | dict) and len(content) > MAX_LENGTH:
        raise ConfigError(f"a reference makes more than {MAX_LENGTH} items")
