"""Strings and constants as values of an annotation."""

import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal, NewType, Union, get_args, get_origin

from fulgurite_config.errors import ConfigError
from fulgurite_config.expressions import format_path
from fulgurite_config.grammar import (
    BRACKETS,
    QUOTES,
    GrammarError,
    Items,
    Malformed,
    Pairs,
    Quoted,
    Term,
    Word,
    check_characters,
    parse_term,
)
from fulgurite_config.numbers import parse_float, parse_int, parse_number

CONSTANTS = {"None": None, "null": None, "True": True, "true": True, "False": False, "false": False}
NONE = ("none", "null")
"""How None is written where the annotation says that it may be, in letters of any case."""
MAX_SHOWN = 200
"""How many characters of a value an error shows."""
SECRET = "a secret string"
"""The kind of such types as pydantic's SecretStr."""
Key = str | int


def parse_value(text: str) -> Any:
    """Return a string as the constant that it writes, or as a string if it is none.

    Raises:
        ConfigError: it begins with a bracket or a quote and is none, or it is a number that no
            `int` or `float` can hold.
    """
    check_characters(text)
    return _read_constant(parse_term(text))


def read_value(text: str, annotation: Any, path: Sequence[Key]) -> Any:
    """Return a string as a value of an annotation, by the grammar of `docs/command-line.md`.

    Args:
        text: as on the command line.
        annotation: the type of the argument; what is not known takes any constant.
        path: of the argument, for the error.

    Raises:
        ConfigError: it is not a value of that type.
    """
    try:
        check_characters(text)
        return _read(parse_term(text), annotation)
    except GrammarError as error:
        raise ConfigError(f"{format_path(path)}: {error}") from None
    except ValueError:
        shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
        raise ConfigError(f"{format_path(path)}={shown} is not {format_type(annotation)}") from None


def fit_value(value: Any, annotation: Any, path: Sequence[Key]) -> Any:
    """Return a constant, as JSON holds it, as a value of an annotation: a list as a tuple, a string
    as a path or as the member of an Enum that has this name.

    Args:
        value: the constant.
        annotation: the type of the argument; what is not known takes any value.
        path: of the argument, for the error.

    Raises:
        ConfigError: it is not a value of that type.
    """
    try:
        _check_all_characters(value)
        return _fit(value, annotation)
    except GrammarError as error:
        raise ConfigError(f"{format_path(path)}: {error}") from None
    except ValueError:
        raise ConfigError(f"{format_path(path)}={value} is not {format_type(annotation)}") from None


def _check_all_characters(value: Any) -> None:
    if isinstance(value, str):
        check_characters(value)
    elif isinstance(value, dict):
        _check_all_characters([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            _check_all_characters(item)


def flatten_union(annotation: Any) -> list[Any]:
    """Return the members of a union, of any other annotation itself; of a `NewType`, what it is
    made of."""
    while isinstance(annotation, NewType):
        annotation = annotation.__supertype__
    if get_origin(annotation) in (Union, types.UnionType):
        return [leaf for member in get_args(annotation) for leaf in flatten_union(member)]
    return [annotation]


def is_known_type(annotation: Any) -> bool:
    """Return whether each type in an annotation is one that strings are read as."""
    return all(
        member is Any or _find_kind(member) is not None for member in flatten_union(annotation)
    )


def format_type(annotation: Any) -> str:
    """Return a type as help and errors show it: what may be written."""
    return " | ".join(_format_member(member) for member in flatten_union(annotation))


def _format_member(annotation: Any) -> str:
    kind = _find_kind(annotation)
    if kind is Literal:
        choices = get_args(annotation)
        return " | ".join(
            choice.name if isinstance(choice, Enum) else repr(choice) for choice in choices
        )
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


def _sort_members(annotation: Any, form: Any) -> list[tuple[Any, Any]]:
    """Return the members of a union and their kinds, those first that take the fewest values.

    Args:
        annotation: the union, or another annotation.
        form: `list`, `tuple` or `dict`, which is more likely than a string then; `str` for what
            stands in quotes, which is a string if it can be one; None for any other.
    """
    order: list[Any] = [Literal, type(None), Enum, bool, int, float]
    strings = [SECRET, str, PurePath]
    pairs = [(member, _find_kind(member)) for member in flatten_union(annotation)]

    def rank(pair: tuple[Any, Any]) -> int:
        kind = pair[1]
        if kind is str and form is str:
            return -1
        if kind in order:
            return order.index(kind)
        if kind is form and form is not None:
            return len(order)
        is_likely = kind not in strings if form in (list, tuple, dict) else kind in strings
        return len(order) + (1 if is_likely else 2)

    return sorted(pairs, key=rank)


def _get_form(term: Term) -> Any:
    if isinstance(term, Items):
        return {"(": tuple, "[": list}.get(term.bracket)
    if isinstance(term, Pairs):
        return dict
    return str if isinstance(term, Quoted) else None


def _read(term: Term, annotation: Any) -> Any:
    """Return a term as a value of an annotation.

    Raises:
        GrammarError: it is written wrongly.
        ValueError: it is not a value of that type.
    """
    reasons: list[GrammarError] = []
    for member, kind in _sort_members(annotation, _get_form(term)):
        try:
            return _READERS[kind](term, member)
        except GrammarError as error:
            reasons.append(error)
        except (ValueError, LookupError):
            continue
    raise reasons[0] if reasons else ValueError(term.text)


def _fit(value: Any, annotation: Any) -> Any:
    """Return a constant as a value of an annotation, or raise a `ValueError`."""
    form = type(value) if isinstance(value, list | tuple | dict) else None
    for member, kind in _sort_members(annotation, form):
        with suppress(ValueError, LookupError, OverflowError):
            return _FITTERS[kind](value, member)
    raise ValueError(value)


def _get_string(term: Term) -> str:
    """Return a term as a string: what stands in quotes, or all of it as it stands."""
    return term.value if isinstance(term, Quoted) else term.text


def _get_word(term: Term) -> str:
    """Return a word, or raise a `ValueError`: what stands in quotes is a string."""
    if not isinstance(term, Word):
        raise ValueError(term.text)
    return term.text.strip()


def _read_choice(term: Term, annotation: Any) -> Any:
    named: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for choice in get_args(annotation):
        if isinstance(choice, Enum):
            named.setdefault(choice.name, choice)
        elif isinstance(choice, str):
            named[choice] = choice
        else:
            others[str(choice)] = choice
    return named[term.value] if isinstance(term, Quoted) else (named | others)[term.text]


def _read_items(term: Term, annotation: Any) -> Any:
    if isinstance(term, Malformed):
        raise term.error
    if isinstance(term, Pairs):
        raise ValueError(term.text)
    items: Sequence[Term] = [term]
    if isinstance(term, Items):
        items = term.items
    elif isinstance(term, Word):
        word = term.text.strip()
        items = [Word(word)] if word else []
    return _make_sequence(_read, items, annotation)


def _read_dict(term: Term, annotation: Any) -> Any:
    if isinstance(term, Malformed):
        raise term.error
    if not isinstance(term, Pairs):
        raise ValueError(term.text)
    key_type, value_type = get_args(annotation) or (None, None)
    pairs = [(_read(key, key_type), _read(item, value_type)) for key, item in term.pairs]
    return _make_dict(pairs)


def _make_dict(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    try:
        dictionary = dict(pairs)
    except TypeError:
        raise GrammarError("a list or dictionary cannot be the key of a dictionary") from None
    if len(dictionary) < len(pairs):
        raise GrammarError("a dictionary has a key twice")
    return dictionary


def _read_constant(term: Term) -> Any:
    """Return a term that has no annotation: a constant, or else a string as it stands."""
    if isinstance(term, Items) and not term.bracket:
        with suppress(_NoConstantError):
            return tuple(map(_read_nested, term.items))
        return term.text
    try:
        return _read_nested(term)
    except _NoConstantError:
        return term.text


class _NoConstantError(ValueError):
    """A word is a string."""


def _read_nested(term: Term) -> Any:
    """Return a term that has no annotation, and is not a string unless it is in quotes.

    Raises:
        GrammarError: it is written wrongly.
        _NoConstantError: it is a word.
    """
    if isinstance(term, Quoted):
        return term.value
    if isinstance(term, Items | Pairs):
        try:
            return _read_group(term)
        except _NoConstantError:
            raise GrammarError(
                f"what begins with {term.text.strip()[0]} is not a value: put strings in it into "
                "quotes"
            ) from None
    word = term.text.strip()
    if word.startswith(BRACKETS + QUOTES):
        reason: object = "a comma or the end must come after it"
        if isinstance(term, Malformed):
            reason = term.error
        raise GrammarError(f"what begins with {word[0]} is not a value: {reason}")
    if word in CONSTANTS:
        return CONSTANTS[word]
    number = parse_number(word)
    if number is None:
        raise _NoConstantError(word)
    return number


def _read_group(term: Items | Pairs) -> Any:
    if isinstance(term, Pairs):
        return _make_dict([(_read_nested(key), _read_nested(item)) for key, item in term.pairs])
    items = [_read_nested(item) for item in term.items]
    if term.bracket == "[":
        return items
    return tuple(items) if term.has_comma or not items else items[0]


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
    for choice in get_args(annotation):
        if isinstance(choice, Enum) and value == choice.name:
            return choice
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
    """Return a key of a dictionary, which JSON makes a string of, as a value of an annotation."""
    try:
        return _fit(key, annotation)
    except ValueError:
        return _read(Word(key), annotation) if isinstance(key, str) else _fit(key, annotation)


_READERS: dict[Any, Callable[[Term, Any], Any]] = {
    Literal: _read_choice,
    type(None): lambda term, _: {"none": None, "null": None}[_get_word(term).lower()],
    bool: lambda term, _: {"true": True, "false": False}[_get_word(term).lower()],
    int: lambda term, _: parse_int(_get_word(term)),
    float: lambda term, _: parse_float(_get_word(term)),
    Enum: lambda term, annotation: annotation.__members__[_get_string(term)],
    str: lambda term, _: _get_string(term),
    PurePath: lambda term, annotation: annotation(_get_string(term)),
    SECRET: lambda term, _: _get_string(term),
    tuple: _read_items,
    list: _read_items,
    dict: _read_dict,
    None: lambda term, _: _read_constant(term),
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
