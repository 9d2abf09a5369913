"""Texts and constants as values of an annotation."""

import ast
import types
from collections.abc import Sequence
from typing import Any, Literal, Union, get_args, get_origin

from fulgurite_config.errors import ConfigError
from fulgurite_config.expressions import format_path

CONSTANTS = {"null": None, "true": True, "false": False}
MAX_CHARACTERS = 10_000
Key = str | int


def parse_value(text: str) -> Any:
    """Return a text as the Python constant that it writes, or as text if it is none.

    Raises:
        ConfigError: it begins as a list, tuple, dictionary or quoted text, and is none.
    """
    if text in CONSTANTS:
        return CONSTANTS[text]
    if len(text) > MAX_CHARACTERS:
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        if text[:1] in ("[", "(", "{", "'", '"'):
            # Not the text, which may be a secret that is quoted wrongly.
            raise ConfigError(
                f"what begins with {text[0]} must be a value of Python: quote texts in it"
            ) from None
        return text
    is_plain = isinstance(value, bool | int | float | str | list | tuple | dict | None)
    return value if is_plain else text


def fit_value(value: Any, text: str, annotation: Any, path: Sequence[Key]) -> Any:
    """Return a constant as a value of an annotation.

    Args:
        value: the constant.
        text: the same as it was written.
        annotation: the type of the argument; what is not known takes any value.
        path: of the argument, for the error.

    Raises:
        ConfigError: it is no value of that type.
    """
    members = flatten_union(annotation)
    known = (bool, int, float, str, type(None))
    choices = [choice for member in members for choice in _get_choices(member)]
    if not all(member in known or get_origin(member) is Literal for member in members):
        return value
    if any(type(value) is type(choice) and value == choice for choice in choices):
        return value
    if type(value) in members:
        return value
    if float in members and type(value) is int:
        return float(value)
    if text in choices or (str in members and not isinstance(value, list | tuple | dict)):
        return text
    names = " | ".join(getattr(member, "__name__", str(member)) for member in members)
    if choices:
        names = ", ".join(map(repr, choices))
    raise ConfigError(f"{format_path(path)}={text} is not {names.replace('NoneType', 'None')}")


def flatten_union(annotation: Any) -> list[Any]:
    """Return the members of a union, of any other annotation itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [leaf for member in get_args(annotation) for leaf in flatten_union(member)]
    return [annotation]


def _get_choices(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()
