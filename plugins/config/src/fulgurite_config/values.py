"""Texts and constants as values of an annotation."""

import ast
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal, Union, get_args, get_origin

from fulgurite_config.errors import ConfigError
from fulgurite_config.expressions import format_path

CONSTANTS = {"null": None, "true": True, "false": False}
MAX_CHARACTERS = 10_000
BRACKETS = ("(", "[", "{")
QUOTES = ("'", '"')
SECRET = "a text that is a secret"
"""The kind of such types as pydantic's SecretStr."""
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
        if text.startswith(BRACKETS + QUOTES):
            # Not the text, which may be a secret that is quoted wrongly.
            raise ConfigError(
                f"what begins with {text[0]} must be a value of Python: quote texts in it"
            ) from None
        return text
    is_plain = isinstance(value, bool | int | float | str | list | tuple | dict | None)
    return value if is_plain else text


def read_value(text: str, annotation: Any, path: Sequence[Key]) -> Any:
    """Return a text as a value of an annotation.

    A `str` is the text as it stands, without quotes around all of it. A list or tuple needs no
    brackets, and members of an Enum are written by their names.

    Args:
        text: as on the command line.
        annotation: the type of the argument; what is not known takes any constant.
        path: of the argument, for the error.

    Raises:
        ConfigError: it is no value of that type.
    """
    with suppress(ValueError):
        return _read(text, annotation)
    try:
        parse_value(text)
    except ConfigError as error:
        raise ConfigError(f"{format_path(path)}: {error}") from None
    raise ConfigError(f"{format_path(path)}={text} is not {format_type(annotation)}")


def fit_value(value: Any, annotation: Any, path: Sequence[Key]) -> Any:
    """Return a constant, as JSON holds it, as a value of an annotation: a list as a tuple, a text
    as a path or as the member of an Enum that has this name.

    Args:
        value: the constant.
        annotation: the type of the argument; what is not known takes any value.
        path: of the argument, for the error.

    Raises:
        ConfigError: it is no value of that type.
    """
    with suppress(ValueError):
        return _fit(value, annotation)
    raise ConfigError(f"{format_path(path)}={value} is not {format_type(annotation)}")


def flatten_union(annotation: Any) -> list[Any]:
    """Return the members of a union, of any other annotation itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [leaf for member in get_args(annotation) for leaf in flatten_union(member)]
    return [annotation]


def is_known_type(annotation: Any) -> bool:
    """Return whether each type in an annotation is one that texts are read as."""
    return all(
        member is Any or _find_kind(member) is not None for member in flatten_union(annotation)
    )


def format_type(annotation: Any) -> str:
    """Return a type as help and errors show it: what may be written."""
    return " | ".join(_format_member(member) for member in flatten_union(annotation))


def _format_member(annotation: Any) -> str:
    kind = _find_kind(annotation)
    if kind is Literal:
        return " | ".join(map(repr, get_args(annotation)))
    if kind is Enum:
        return " | ".join(annotation.__members__)
    if annotation is type(None):
        return "None"
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


def _find_kind(annotation: Any) -> Any:
    """Return what stands for an annotation, without unions, in the tables below: itself, its
    origin or a class above it; None if it is not known."""
    kind = get_origin(annotation) or annotation
    if kind in (Literal, type(None), bool, int, float, str, tuple, list, dict):
        return kind
    if not isinstance(kind, type):
        return None
    if issubclass(kind, Enum):
        return Enum
    if issubclass(kind, PurePath):
        return PurePath
    return SECRET if hasattr(kind, "get_secret_value") else None


def _sort_members(annotation: Any, is_in_brackets: bool) -> list[tuple[Any, Any]]:
    """Return the members of a union and their kinds, those first that take the fewest values.

    Args:
        annotation: the union, or another annotation.
        is_in_brackets: whether a list is more likely than a text.
    """
    ranks = {Literal: 0, type(None): 1, Enum: 2, bool: 3, int: 4, float: 5}
    ranks |= {SECRET: 7, str: 7, PurePath: 7}
    other_rank = 6 if is_in_brackets else 8
    pairs = [(member, _find_kind(member)) for member in flatten_union(annotation)]
    return sorted(pairs, key=lambda pair: ranks.get(pair[1], other_rank))


def _read(text: str, annotation: Any) -> Any:
    """Return a text as a value of an annotation, or raise a `ValueError`."""
    for member, kind in _sort_members(annotation, text.startswith(BRACKETS)):
        with suppress(ValueError, LookupError, OverflowError):
            return _READERS[kind](text, member)
    raise ValueError(text)


def _fit(value: Any, annotation: Any) -> Any:
    """Return a constant as a value of an annotation, or raise a `ValueError`."""
    for member, kind in _sort_members(annotation, isinstance(value, list | tuple | dict)):
        with suppress(ValueError, LookupError, OverflowError):
            return _FITTERS[kind](value, member)
    raise ValueError(value)


def _unquote(text: str) -> str:
    """Return a text without the quotes around it; as it is if there are none."""
    value = text
    if text.startswith(QUOTES):
        with suppress(ConfigError):
            value = parse_value(text)
    return value if isinstance(value, str) else text


def _read_int(text: str) -> int:
    with suppress(ValueError):
        return int(text)
    return int(text, 0)  # 0xff


def _read_float(text: str) -> float:
    with suppress(ValueError):
        return float(text)
    return float(_read_int(text))


def _read_choice(text: str, annotation: Any) -> Any:
    choices = {str(choice): choice for choice in reversed(get_args(annotation))}
    return choices[_unquote(text)]


def _read_items(text: str, annotation: Any) -> Any:
    stripped = text.strip()
    parts = split_commas(stripped)
    if len(parts) == 1 and (stripped[0], stripped[-1]) in (("(", ")"), ("[", "]")):
        parts = split_commas(stripped[1:-1])
    return _make_sequence(_read, parts, annotation)


def _read_dict(text: str, annotation: Any) -> Any:
    return _fit_dict(parse_value(text), annotation)


def _make_sequence(
    convert: Callable[[Any, Any], Any], items: Sequence[Any], annotation: Any
) -> Any:
    """Return a list or tuple of an annotation.

    Args:
        convert: returns an item as a value of its annotation.
        items: what the items are made of.
        annotation: `list`, `list[int]`, `tuple`, `tuple[int, ...]` or `tuple[int, float]`.
    """
    kind = get_origin(annotation) or annotation
    item_types = get_args(annotation) or (None, ...)
    if kind is list or item_types[1:] == (...,):
        item_types = (item_types[0],) * len(items)
    return kind(convert(item, item_type) for item, item_type in zip(items, item_types, strict=True))


def _fit_exactly(value: Any, annotation: Any) -> Any:
    if type(value) is not annotation:
        raise ValueError(value)
    return value


def _fit_float(value: Any, annotation: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(value)
    return float(value)


def _fit_choice(value: Any, annotation: Any) -> Any:
    for choice in get_args(annotation):
        if type(value) is type(choice) and value == choice:
            return value
    raise ValueError(value)


def _fit_member(value: Any, annotation: Any) -> Any:
    return value if isinstance(value, annotation) else annotation.__members__[value]


def _fit_text(value: Any, annotation: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def _fit_path(value: Any, annotation: Any) -> Any:
    if not isinstance(value, str | PurePath):
        raise ValueError(value)
    return annotation(value)


def _fit_items(value: Any, annotation: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError(value)
    return _make_sequence(_fit, value, annotation)


def _fit_dict(value: Any, annotation: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(value)
    key_type, value_type = get_args(annotation) or (None, None)
    return {_fit_key(key, key_type): _fit(item, value_type) for key, item in value.items()}


def _fit_key(key: Any, annotation: Any) -> Any:
    """Return a key of a dictionary, which JSON makes a text of, as a value of an annotation."""
    try:
        return _fit(key, annotation)
    except ValueError:
        return _read(key, annotation) if isinstance(key, str) else _fit(key, annotation)


_READERS: dict[Any, Callable[[str, Any], Any]] = {
    Literal: _read_choice,
    type(None): lambda text, _: {"none": None, "null": None}[text.lower()],
    bool: lambda text, _: {"true": True, "false": False}[text.lower()],
    int: lambda text, _: _read_int(text),
    float: lambda text, _: _read_float(text),
    Enum: lambda text, annotation: annotation.__members__[_unquote(text)],
    str: lambda text, _: _unquote(text),
    PurePath: lambda text, annotation: annotation(_unquote(text)),
    SECRET: lambda text, _: text,
    tuple: _read_items,
    list: _read_items,
    dict: _read_dict,
    None: lambda text, _: parse_value(text),
}
_FITTERS: dict[Any, Callable[[Any, Any], Any]] = {
    Literal: _fit_choice,
    type(None): _fit_exactly,
    bool: _fit_exactly,
    int: _fit_exactly,
    float: _fit_float,
    Enum: _fit_member,
    str: _fit_text,
    PurePath: _fit_path,
    SECRET: _fit_text,
    tuple: _fit_items,
    list: _fit_items,
    dict: _fit_dict,
    None: lambda value, _: value,
}


def split_commas(text: str) -> list[str]:
    """Return the parts of a text between commas that stand in no brackets or quotes."""
    parts = [""]
    depth = 0
    quote = ""
    for character in text:
        if quote or character in "'\"":
            quote = "" if character == quote else quote or character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if character == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
