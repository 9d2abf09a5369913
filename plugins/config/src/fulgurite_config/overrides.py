"""Overrides as texts: `model.width=256`, `layers[0].units=3`, `**.dropout=0`."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

from fulgurite_config.errors import ConfigError, NotLoadedError, suggest
from fulgurite_config.expressions import Evaluation, Lazy, format_expression, format_path
from fulgurite_config.nodes import (
    EMPTY,
    Node,
    describe,
    find_position,
    get_default,
    get_signature,
    get_state,
    is_constant,
    is_loaded,
    iter_children,
    iter_names,
    iter_nodes,
    set_value,
)
from fulgurite_config.undo import undo_on_error
from fulgurite_config.values import Key, fit_value, flatten_union, parse_value

SEGMENT = re.compile(r"(?:^|\.)(\*\*|\*|[^\W\d]\w*)|\[(\*|-?\d+|'[^']*'|\"[^\"]*\")\]")
OVERRIDE = re.compile(r"""((?:\['[^']*'\]|\["[^"]*"\]|[^=])*+)=(.*)""", re.DOTALL)


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
        NotLoadedError: it may match once `load_targets` has imported what is called.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are a list of texts: write [{overrides!r}]")
    with undo_on_error(config):
        return [change for override in overrides for change in _apply_override(config, override)]


def apply_values(config: Any, values: Mapping[str, Any], source: str = "") -> list[Change]:
    """Change a configuration as nested dictionaries say: those of a file that holds a part of it.

    Args:
        config: the configuration. It is changed in place, or not at all if there is an error.
        values: constants by path, or by name below a dictionary: `{"model": {"width": 8}}`.
        source: where they come from.

    Returns:
        What was changed, in order.

    Raises:
        ConfigError: a path matches nothing, or a value is not of the argument's type.
    """
    with undo_on_error(config):
        return list(_apply_nested(config, values, (), source))


def _apply_override(config: Node, override: str) -> Iterator[Change]:
    parts = OVERRIDE.match(override)
    if parts is None:
        raise ConfigError(f"{override!r} is no override: write path=value")
    path, text = parts.groups()
    for match in _find_matches(config, path):
        try:
            value = parse_value(text)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        yield _apply(match, value, text, f"override {override}")


def _apply_nested(
    config: Any, values: Mapping[str, Any], above: tuple[Key, ...], source: str
) -> Iterator[Change]:
    for name, value in values.items():
        if name.startswith("$"):
            place = format_path((*above, name))
            raise ConfigError(
                f"{place}: values by name are constants. A call can only stand in a whole "
                f"configuration, as to_json writes it"
            )
        for parent, key, place in _find_matches(config, name, above):
            current = Evaluation().compute(_read(parent, key))
            if isinstance(value, dict) and isinstance(current, Node):
                yield from _apply_nested(current, value, place, source)
            else:
                text = value if isinstance(value, str) else json.dumps(value)
                yield _apply((parent, key, place), value, text, source)


def _find_matches(config: Node, text: str, above: tuple[Key, ...] = ()) -> list[Match]:
    """Return what a path leads to.

    Args:
        config: where the path begins.
        text: the path.
        above: where that is.
    """
    pattern = parse_path(text)
    matches: list[Match] = []
    places: set[tuple[int, Key]] = set()
    text = f"{format_path(above)}.{text}" if above else text
    for match in _iter_matches(config, pattern, above, text):
        place = (id(match[0]), match[1])
        if place not in places:
            matches.append(match)
        places.add(place)
    if not matches:
        last = str(pattern[-1])
        for node in iter_nodes(config, set()):
            _check_loaded(node, last, text)
        raise ConfigError(f"{text} matches nothing. {suggest(last, set(_iter_all_names(config)))}")
    return matches


def parse_path(text: str) -> Pattern:
    """Return the keys of a path such as `model.layers[0].*.units`.

    Raises:
        ConfigError: it is none, or it ends with a wildcard.
    """
    keys: list[Key | _Wildcard] = []
    position = 0
    if not text:
        raise ConfigError("there is no path before '=': write path=value")
    if text[0] in "+~":
        raise ConfigError(
            f"{text!r}: overrides add and delete nothing. Write path=value for what is there; what "
            "may be left out gets a value of its own in the configuration that says so"
        )
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
        child = _enter(value, key, (*path, key))
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
            child = _enter(value, key, (*path, key))
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
        has_aux = get_state(value).aux is not None
        return key in iter_names(value) or (key == "aux" and has_aux)
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
    if isinstance(value, Node):
        _check_loaded(value, key, text)
    place = format_path(path) or "the configuration"
    if not isinstance(value, Node | dict | list | tuple):
        raise ConfigError(f"{text} matches nothing: {place} is {value!r}, which has no {key!r}")
    names = list(iter_names(value)) if isinstance(value, Node) else list(dict(iter_children(value)))
    raise ConfigError(f"{text} matches nothing: {place} has no {key!r}. {suggest(str(key), names)}")


def _check_loaded(node: Node, key: Any, text: str) -> None:
    """Raise a `NotLoadedError` if a node may have an argument, and nobody knows."""
    if not is_loaded(node):
        raise NotLoadedError(
            f"{text} matches nothing that is known: the arguments of {describe(node)} are those "
            f"that are set until it is imported. Set {key!r} where the configuration is written, "
            "or call load_targets(config) before"
        )


def _read(parent: Any, key: Key) -> Any:
    """Return what is at a key, or EMPTY for an argument that is not set and has no default."""
    if not isinstance(parent, Node):
        return parent[key]
    if isinstance(key, str) and key in iter_names(parent) and find_position(parent, key) == key:
        return get_state(parent).keywords.get(key, get_default(parent, key))
    return parent.__config_get__(key)


def _enter(parent: Any, key: Key, path: tuple[Key, ...]) -> Any:
    """Return what is at a key, or what the reference there stands for. A list or dictionary that is
    computed takes the place of its expression, since an override will change it."""
    evaluation = Evaluation()
    child = evaluation.compute(_read(parent, key))
    if not evaluation.is_result(child):
        return child
    if isinstance(parent, tuple):
        raise ConfigError(f"{format_path(path)} is in a tuple, which cannot be changed: set it all")
    if isinstance(parent, Node):
        set_value(parent, key, child, get_state(parent).sources.get(key, ""))
    else:
        parent[key] = child
    return child


def _apply(match: Match, value: Any, text: str, source: str) -> Change:
    """Set a value.

    Args:
        match: where.
        value: the value as it stands there.
        text: the same as text.
        source: what sets it.
    """
    parent, key, path = match
    old = _read(parent, key)
    annotation = get_annotation(parent, key)
    _check_replaceable(old, value, annotation, path)
    if annotation is None:
        annotation = _guess_annotation(parent, old)
    if annotation is not None:
        value = fit_value(value, text, annotation, path)
        _check_number(old, value, annotation, path)
    if isinstance(parent, tuple):
        raise ConfigError(f"{format_path(path)} is in a tuple, which cannot be changed: set it all")
    if isinstance(parent, Node):
        set_value(parent, key, value, source)
    else:
        parent[key] = value
    return Change(format_path(path), None if old is EMPTY else old, value)


def _check_replaceable(old: Any, value: Any, annotation: Any, path: tuple[Key, ...]) -> None:
    """Raise a `ConfigError` if a text would take the place of a call or a section, which no text
    can stand for."""
    chosen = old
    if isinstance(old, Lazy):
        chosen = Evaluation().compute(old)
    if not isinstance(chosen, Node) or not isinstance(value, str):
        return
    if annotation is not None and str in flatten_union(annotation):
        return
    place = format_path(path)
    how = f"set its values, {place}.{next(iter_names(chosen), 'name')}=..."
    if isinstance(old, Lazy):
        how = f"it is {format_expression(old)}: set what that refers to, or its values"
    raise ConfigError(f"{place}={value} is no value for {describe(chosen)}: {how}")


def _check_number(old: Any, value: Any, annotation: Any, path: tuple[Key, ...]) -> None:
    """Raise a `ConfigError` if a text would take the place of a number, and the annotation has
    numbers and no texts: `fit_value` leaves those to the function that have arrays among them."""
    members = flatten_union(annotation)
    is_number = old is EMPTY or (isinstance(old, int | float) and not isinstance(old, bool))
    if is_number and isinstance(value, str) and {int, float} & {*members} and str not in members:
        raise ConfigError(f"{format_path(path)}={value} is not a number")


def check_types(config: Any) -> None:
    """Raise a `ConfigError` if a constant is not of the type of its argument.

    Type checkers see that where a configuration is written; this is for what was read from a file.

    Args:
        config: the configuration, whose targets are loaded.
    """
    _check_types(config, (), set())


def _check_types(value: Any, path: tuple[Key, ...], visited: set[int]) -> None:
    if isinstance(value, Node):
        if id(value) in visited:
            return
        visited.add(id(value))
    for key, child in iter_children(value):
        place = (*path, key)
        if is_constant(child) and isinstance(value, Node):
            annotation = get_annotation(value, key)
            is_default = child is None and get_default(value, str(key)) is None
            if annotation is not None and not is_default:
                text = child if isinstance(child, str) else json.dumps(child)
                fit_value(child, text, annotation, place)
        _check_types(child, place, visited)


def _guess_annotation(parent: Any, old: Any) -> Any:
    """Return the type of a value in a section, which has no annotation: that of the value before
    if it is a number, True or False; None for any other."""
    if not isinstance(parent, Node) or get_state(parent).target is not None:
        return None
    if isinstance(old, bool):
        return bool | None
    return int | float | None if isinstance(old, int | float) else None


def _iter_all_names(value: Any) -> Iterator[str]:
    names = iter_names(value) if isinstance(value, Node) else ()
    yield from names
    for key, child in iter_children(value):
        yield str(key)
        yield from _iter_all_names(child)


def get_annotation(parent: Any, key: Key) -> Any:
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
    # One annotation that cannot be read hides all of them above, as with optax.adamw.
    signature = get_signature(target)
    if signature is None or key not in signature.parameters:
        return None
    annotation = signature.parameters[key].annotation
    return None if annotation is EMPTY or isinstance(annotation, str) else annotation
