"""Conditions on logged values, as `train/loss > 10`."""

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import fulgurite as fg
from fulgurite.errors import ConfigurationError

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
_CONDITION = re.compile(r"\s*(\S+/\S+)\s*(>=|<=|==|!=|>|<)\s*(\S+)\s*")


class Comparison:
    """A logged value compared with a number. A value that was not logged yet fulfils nothing; NaN
    fulfils `!=` alone.

    Attributes:
        name: of the value, `SOURCE/NAME`.

    Args:
        text: such as `train/loss > 10`.

    Raises:
        ConfigurationError: the string has another form.
    """

    def __init__(self, text: str) -> None:
        match = _CONDITION.fullmatch(text)
        limit = None if match is None else _parse_number(match[3])
        if match is None or limit is None:
            raise ConfigurationError(
                f"Alert: when is {text!r}; write SOURCE/NAME, one of {', '.join(_OPERATORS)}, and "
                "a number: 'train/loss > 10'"
            )
        if math.isnan(limit):
            raise ConfigurationError(
                f"Alert: when is {text!r}, and no number compares with NaN; give a function, such "
                "as lambda values: math.isnan(values.get('train/loss', 0))"
            )
        self.name = match[1]
        self._compare = _OPERATORS[match[2]]
        self._limit = limit

    def select(self, record: fg.Record) -> dict[str, Any]:
        """Return what a record says of the value, by its name; nothing if it is not in it."""
        prefix = f"{record.source}/"
        key = self.name.removeprefix(prefix)
        is_in_record = self.name.startswith(prefix) and key in record.values
        return {self.name: record.values[key]} if is_in_record else {}

    def __call__(self, values: Mapping[str, Any]) -> bool:
        """Return whether it is fulfilled.

        Args:
            values: the newest, by name.
        """
        value = values.get(self.name)
        return value is not None and self._compare(value, self._limit)


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
