"""Overrides as texts: `model.width=256`, `layers[0].units=3`, `**.dropout=0`."""

import ast
import re
import types
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from fulgurite_config.errors import ConfigError, suggest
from fulgurite_config.expressions import Evaluation, format_path
from fulgurite_config.nodes import (
    EMPTY,
    Node,
    get_default,
    get_state,
    iter_children,
    iter_names,
    set_value,
)

CONSTANTS = {"null": None, "true": True, "false": False}
MAX_CHARACTERS = 10_000
SEGMENT = re.compile(r"(?:^|\.)(\*\*|\*|[^\W\d]\w*)|\[(\*|-?\d+|'[^']*'|\"[^\"]*\")\]")
Key = str | int


class Change(NamedTuple):
    """A value that an override changed.

    Example:
        from fulgurite_config import L, apply_overrides

        (change,) = apply_overrides(L(width=1), ["width=2"])
        assert change == ("width", 1, 2)

    Attributes:
        path: where.
        old: the value before.
        new: the value now.
    """

    path: str
    old: Any
    new: Any


class _Wildcard(NamedTuple):
    is_deep: bool


Pattern = tuple[Key | _Wildcard, ...]
Match = tuple[Any, Key, tuple[Key, ...]]


def apply_overrides(config: Any, overrides: Sequence[str]) -> list[Change]:
    """Change a configuration as texts say, a later one after an earlier one.

    `*` stands for each name or index of one level, all of which must have what follows; `**` for
    any number of levels, and it changes what follows wherever that is.

    Args:
        config: the configuration. It is changed in place, or not at all if there is an error.
        overrides: texts `path=value`.

    Returns:
        What was changed, in order.

    Raises:
        ConfigError: an override matches nothing, or its value is not of the argument's type.
    """
    changes: list[Change] = []
    undo: list[tuple[Any, Key, Any]] = []
    try:
        for override in overrides:
            for match in _find_matches(config, override):
                changes.append(_apply(match, override, undo))
    except Exception:
        for parent, key, old in reversed(undo):
            _restore(parent, key, old)
        raise
    return changes


def _find_matches(config: Node, override: str) -> list[Match]:
    text, equals, _ = override.partition("=")
    if not equals:
        raise ConfigError(f"{override!r} is no override: write path=value")
    pattern = parse_path(text)
    matches: list[Match] = []
    places: set[tuple[int, Key]] = set()
    for match in _iter_matches(config, pattern, (), text):
        place = (id(match[0]), match[1])
        if place not in places:
            matches.append(match)
        places.add(place)
    if not matches:
        last = str(pattern[-1])
        raise ConfigError(f"{text} matches nothing. {suggest(last, set(_iter_all_names(config)))}")
    return matches


def parse_path(text: str) -> Pattern:
    """Return the keys of a path such as `model.layers[0].*.units`.

    Raises:
        ConfigError: it is none, or it ends with a wildcard.
    """
    keys: list[Key | _Wildcard] = []
    position = 0
    while position < len(text):
        match = SEGMENT.match(text, position)
        if match is None:
            raise ConfigError(f"{text!r} is no path at {text[position:]!r}: write a.b[0].*.c")
        part = match[1] or match[2]
        if part in ("*", "**"):
            keys.append(_Wildcard(part == "**"))
        elif match[2] is not None:
            keys.append(part[1:-1] if part[0] in "'\"" else int(part))
        else:
            keys.append(part)
        position = match.end()
    if not keys or isinstance(keys[-1], _Wildcard):
        raise ConfigError(f"{text!r} must end with the name of what is set, not with a wildcard")
    return tuple(keys)


def _iter_matches(
    value: Any, pattern: Pattern, path: tuple[Key, ...], text: str
) -> Iterator[Match]:
    key, *rest = pattern
    if isinstance(key, _Wildcard):
        yield from _iter_wildcard(value, key, tuple(rest), path, text)
    elif not rest:
        _check_key(value, key, path, text)
        yield value, key, (*path, key)
    else:
        _check_key(value, key, path, text)
        child = Evaluation().compute(_read(value, key))
        yield from _iter_matches(child, tuple(rest), (*path, key), text)


def _iter_wildcard(
    value: Any, wildcard: _Wildcard, rest: Pattern, path: tuple[Key, ...], text: str
) -> Iterator[Match]:
    children = [
        (key, child)
        for key, child in iter_children(value)
        if isinstance(child, Node | dict | list | tuple) or not wildcard.is_deep
    ]
    if not wildcard.is_deep:
        for key, child in children:
            child = Evaluation().compute(child)
            yield from _iter_matches(child, rest, (*path, key), text)
        return
    if _has_key(value, rest[0]):
        yield from _iter_matches(value, rest, path, text)
    for key, child in children:
        yield from _iter_wildcard(child, wildcard, rest, (*path, key), text)


def _has_key(value: Any, key: Any) -> bool:
    if isinstance(key, _Wildcard):
        return True
    if isinstance(value, Node) and isinstance(key, str):
        return key in iter_names(value)
    return key in dict(iter_children(value)) or (
        isinstance(value, list) and isinstance(key, int) and -len(value) <= key < len(value)
    )


def _check_key(value: Any, key: Any, path: tuple[Key, ...], text: str) -> None:
    if _has_key(value, key):
        return
    if isinstance(value, Node) and isinstance(key, int):
        count = len(get_state(value).positional)
        if -count <= key < count:
            return
    place = format_path(path) or "the configuration"
    if not isinstance(value, Node | dict | list | tuple):
        raise ConfigError(f"{text} matches nothing: {place} is {value!r}, which has no {key!r}")
    names = list(iter_names(value)) if isinstance(value, Node) else list(dict(iter_children(value)))
    raise ConfigError(f"{text} matches nothing: {place} has no {key!r}. {suggest(str(key), names)}")


def _read(parent: Any, key: Key) -> Any:
    return parent.__config_get__(key) if isinstance(parent, Node) else parent[key]


def _apply(match: Match, override: str, undo: list[tuple[Any, Key, Any]]) -> Change:
    parent, key, path = match
    text = override.partition("=")[2]
    is_set = not isinstance(parent, Node) or key in dict(iter_children(parent)) or key == "aux"
    old = _read(parent, key)
    annotation = _get_annotation(parent, key)
    value = parse_value(text) if annotation is None else convert_value(text, annotation, path)
    if isinstance(parent, tuple):
        raise ConfigError(f"{format_path(path)} is in a tuple, which cannot be changed: set it all")
    undo.append((parent, key, old if is_set or isinstance(key, int) else EMPTY))
    if isinstance(parent, Node):
        set_value(parent, key, value, f"override {override}")
    else:
        parent[key] = value
    return Change(format_path(path), None if old is EMPTY else old, value)


def _restore(parent: Any, key: Key, old: Any) -> None:
    if not isinstance(parent, Node):
        parent[key] = old
    elif isinstance(key, int):
        get_state(parent).positional[key] = old
    elif old is EMPTY:
        del get_state(parent).keywords[key]
    else:
        get_state(parent).keywords[key] = old


def _iter_all_names(value: Any) -> Iterator[str]:
    names = iter_names(value) if isinstance(value, Node) else ()
    yield from names
    for key, child in iter_children(value):
        yield str(key)
        yield from _iter_all_names(child)


def _get_annotation(parent: Any, key: Key) -> Any:
    """Return the annotation of an argument, or None."""
    if not isinstance(parent, Node) or isinstance(key, int):
        return None
    target = get_state(parent).target
    if get_default(parent, key) is EMPTY and key not in iter_names(parent):
        return None
    function = target.__init__ if isinstance(target, type) else target
    for annotated in (function, target):
        try:
            annotation = get_type_hints(annotated).get(key)
        except Exception:  # annotations may name what is imported for type checkers only
            continue
        if annotation is not None:
            return annotation
    return None


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
            raise ConfigError(f"{text} is no value of Python: quote texts in it") from None
        return text
    is_plain = isinstance(value, bool | int | float | str | list | tuple | dict | None)
    return value if is_plain else text


def convert_value(text: str, annotation: Any, path: Sequence[Key]) -> Any:
    """Return a text as a value of an annotation; what it does not know is parsed as a constant.

    Args:
        text: the value as written.
        annotation: the type of the argument.
        path: of the argument, for the error.

    Raises:
        ConfigError: it is no value of that type.
    """
    members = _flatten_union(annotation)
    value = parse_value(text)
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


def _flatten_union(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        return [leaf for member in get_args(annotation) for leaf in _flatten_union(member)]
    return [annotation]


def _get_choices(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()
