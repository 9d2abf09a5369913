"""Values as the text that reads back as them."""

from collections.abc import Iterable
from enum import Enum
from pathlib import PurePath
from typing import Any

from fulgurite_config.errors import ConfigError
from fulgurite_config.grammar import BRACKETS, QUOTES
from fulgurite_config.numbers import parse_float, parse_int
from fulgurite_config.values import NONE

_CONSTANTS = (*NONE, "true", "false")


def format_value(value: Any) -> str:
    """Return a value as `read_value` reads it, by its annotation, and as a shell is given it: a
    string stands in quotes only if it would be read as something else.

    Args:
        value: a constant, a member of an Enum, a path, or a list, tuple or dictionary of these.
            Any other value is shown as Python shows it.
    """
    if isinstance(value, str) and not isinstance(value, Enum):
        return _format_word(value)
    return _format_word(str(value)) if isinstance(value, PurePath) else format_item(value)


def format_item(value: Any) -> str:
    """Return a value as `format_value` does, with each string in quotes."""
    if isinstance(value, Enum):
        # Whatever type its argument may have besides, a name is read as the member first, but for
        # that of None.
        is_plain = value.name.isidentifier() and value.name.lower() not in NONE
        return value.name if is_plain else str.__repr__(value.name)
    if isinstance(value, PurePath | str):
        return str.__repr__(str(value))
    if isinstance(value, float):
        return float.__repr__(value)  # NumPy's repr is not a literal
    if isinstance(value, list):
        return f"[{_join(value)}]"
    if isinstance(value, tuple):
        return f"({_join(value)}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        pairs = (f"{format_item(key)}: {format_item(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    return repr(value)


def _join(items: Iterable[Any]) -> str:
    return ", ".join(map(format_item, items))


def _format_word(text: str) -> str:
    return text if _is_word(text) else str.__repr__(text)


def _is_word(text: str) -> bool:
    """Return whether a string is one without quotes too, whatever type its argument has."""
    if not text or text != text.strip() or not text.isprintable():
        return False
    # What comes after # is a comment where values are shown.
    if text.startswith(BRACKETS + QUOTES) or "," in text or " #" in text:
        return False
    return text.lower() not in _CONSTANTS and not (
        _is_number(text, parse_int) or _is_number(text, parse_float)
    )


def _is_number(text: str, parse: Any) -> bool:
    try:
        parse(text)
    except ConfigError:
        return True
    except ValueError:
        return False
    return True
