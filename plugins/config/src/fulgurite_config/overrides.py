"""Overrides as strings: `model.width=256`, `layers[0].units=3`, `**.dropout=0`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import lru_cache, partial
from pathlib import PurePath
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from fulgurite_config.errors import ConfigError, NotLoadedError, suggest
from fulgurite_config.evaluation import Evaluation
from fulgurite_config.expressions import Lazy, format_expression, format_path
from fulgurite_config.limits import Budget
from fulgurite_config.nodes import (
    EMPTY,
    Node,
    describe,
    find_position,
    get_default,
    get_signature,
    get_state,
    has_name,
    is_constant,
    is_default,
    is_loaded,
    iter_children,
    iter_names,
    iter_nodes,
    set_value,
)
from fulgurite_config.paths import Pattern, Wildcard, parse_path, split_override
from fulgurite_config.undo import undo_on_error
from fulgurite_config.values import Key, fit_value, flatten_union, read_value


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


class Match(NamedTuple):
    """A place that a path leads to.

    Attributes:
        parent: the node, list or dictionary that has the value.
        key: of the value there.
        path: of the value.
        annotation: the type of the value; None where nothing says it.
    """

    parent: Any
    key: Key
    path: tuple[Key, ...]
    annotation: Any


def apply_overrides(config: Any, overrides: Sequence[str]) -> list[Change]:
    """Change a configuration as strings say, a later one after an earlier one.

    `*` stands for each name or index of one level, all of which must have what follows; `**` for
    any number of levels, and it changes what follows wherever that is.

    Args:
        config: the configuration. It is changed in place, or not at all if there is an error.
        overrides: strings `path=value`.

    Returns:
        What was changed, in order.

    Raises:
        ConfigError: an override matches nothing, or its value is not of the argument's type.
        NotLoadedError: it may match once `load_targets` has imported what is called.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are a list of strings: write [{overrides!r}]")
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
        return list(_apply_nested(config, values, (), source, Budget()))


def _apply_override(config: Node, override: str) -> Iterator[Change]:
    path, text = split_override(override)
    budget = Budget()
    for match in _find_matches(config, path, (), budget):
        yield _apply(match, partial(read_value, text), f"override {override}", budget)


def _apply_nested(
    config: Any, values: Mapping[str, Any], above: tuple[Key, ...], source: str, budget: Budget
) -> Iterator[Change]:
    for name, value in values.items():
        if name.startswith("$"):
            place = format_path((*above, name))
            raise ConfigError(
                f"{place}: values by name are constants. A call can only stand in a whole "
                f"configuration, as to_json writes it"
            )
        for match in _find_matches(config, name, above, budget):
            current = Evaluation(budget=budget).compute(_read(match.parent, match.key))
            if isinstance(value, dict) and isinstance(current, Node):
                yield from _apply_nested(current, value, match.path, source, budget)
            else:
                yield _apply(match, partial(fit_value, value), source, budget)


def _find_matches(config: Node, text: str, above: tuple[Key, ...], budget: Budget) -> list[Match]:
    """Return what a path leads to.

    Args:
        config: where the path begins.
        text: the path.
        above: where that is.
        budget: counts what is looked at.
    """
    pattern = parse_path(text)
    matches: list[Match] = []
    places: set[tuple[int, Key]] = set()
    text = f"{format_path(above)}.{text}" if above else text
    for match in _Search(text, budget).iter_matches(config, pattern, above):
        place = (id(match.parent), match.key)
        if place not in places:
            matches.append(match)
        places.add(place)
    if not matches:
        last = str(pattern[-1])
        for node in iter_nodes(config, set()):
            _check_loaded(node, last, text)
        raise ConfigError(f"{text} matches nothing. {suggest(last, _find_all_names(config))}")
    return matches


class _Search:
    """Finds what a path leads to, and looks into each node, list and dictionary once.

    Args:
        text: the path, for errors.
        budget: counts what is looked at.
    """

    def __init__(self, text: str, budget: Budget) -> None:
        self._text = text
        self._evaluation = Evaluation(budget=budget)
        # With the value, so that no other one gets its identity.
        self._visited: dict[tuple[int, Pattern], Any] = {}

    def iter_matches(
        self, value: Any, pattern: Pattern, path: tuple[Key, ...], annotation: Any = None
    ) -> Iterator[Match]:
        """Yield what a path leads to, some of it perhaps twice.

        Args:
            value: where the path begins.
            pattern: the path.
            path: where that value is.
            annotation: the type of that value; None where nothing says it.
        """
        if (id(value), pattern) in self._visited:
            return
        self._visited[id(value), pattern] = value
        self._evaluation.budget.spend()
        key, *rest = pattern
        if isinstance(key, Wildcard):
            yield from self._iter_wildcard(value, pattern, path, annotation)
            return
        _check_key(value, key, path, self._text)
        child_annotation = _find_annotation(value, key, annotation)
        if rest:
            child = _enter(value, key, (*path, key), self._evaluation)
            yield from self.iter_matches(child, tuple(rest), (*path, key), child_annotation)
        else:
            yield Match(value, key, (*path, key), child_annotation)

    def _iter_wildcard(
        self, value: Any, pattern: Pattern, path: tuple[Key, ...], annotation: Any
    ) -> Iterator[Match]:
        wildcard: Any = pattern[0]
        rest = pattern[1:]
        children = list(iter_children(value))
        if not wildcard.is_deep:
            for key in (key for key, _ in children if wildcard.matches(key)):
                child = _enter(value, key, (*path, key), self._evaluation)
                child_annotation = _find_annotation(value, key, annotation)
                yield from self.iter_matches(child, rest, (*path, key), child_annotation)
            return
        if self._leads_somewhere(value, rest):
            yield from self.iter_matches(value, rest, path, annotation)
        for key, child in children:
            if isinstance(child, Node | dict | list | tuple):
                child_annotation = _find_annotation(value, key, annotation)
                yield from self.iter_matches(child, pattern, (*path, key), child_annotation)

    def _leads_somewhere(self, value: Any, pattern: Pattern) -> bool:
        """Return whether there is what follows a `**`, up to the next wildcard."""
        for key in pattern:
            if isinstance(key, Wildcard) or not _has_key(value, key):
                return isinstance(key, Wildcard)
            value = self._evaluation.compute(_read(value, key))
        return True


def _has_key(value: Any, key: Any) -> bool:
    if isinstance(key, Wildcard):
        return True
    if isinstance(value, Node) and isinstance(key, str):
        has_aux = get_state(value).aux is not None
        return has_name(value, key) or (key == "aux" and has_aux)
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
    if isinstance(key, str) and has_name(parent, key) and find_position(parent, key) == key:
        return get_state(parent).keywords.get(key, get_default(parent, key))
    return parent.__config_get__(key)


def _enter(parent: Any, key: Key, path: tuple[Key, ...], evaluation: Evaluation) -> Any:
    """Return what is at a key, or what the reference there stands for. A list or dictionary that is
    computed or a default takes that place itself, since an override will change it."""
    child = evaluation.compute(_read(parent, key))
    is_copied_default = (
        isinstance(parent, Node) and isinstance(child, list | dict) and is_default(parent, key)
    )
    if not is_copied_default and not evaluation.is_result(child):
        return child
    if isinstance(parent, tuple):
        raise ConfigError(f"{format_path(path)} is in a tuple, which cannot be changed: set it all")
    if isinstance(parent, Node):
        set_value(parent, key, child, get_state(parent).sources.get(key, ""))
    else:
        parent[key] = child
    return child


def _apply(
    match: Match, convert: Callable[[Any, Sequence[Key]], Any], source: str, budget: Budget
) -> Change:
    """Set a value.

    Args:
        match: where.
        convert: returns the value for an annotation and a path.
        source: what sets it.
        budget: counts what is computed.
    """
    parent, key, path, annotation = match
    old = _read(parent, key)
    if annotation is None:
        annotation = _guess_annotation(parent, old)
    value = convert(annotation, path)
    chosen = Evaluation(budget=budget).compute(old)
    _check_replaceable(old, chosen, value, annotation, path)
    if annotation is not None:
        _check_number(old, value, annotation, path)
    if isinstance(parent, tuple):
        raise ConfigError(f"{format_path(path)} is in a tuple, which cannot be changed: set it all")
    if isinstance(parent, Node):
        set_value(parent, key, value, source)
    else:
        parent[key] = value
    return Change(format_path(path), None if old is EMPTY else old, value)


def _check_replaceable(
    old: Any, chosen: Any, value: Any, annotation: Any, path: tuple[Key, ...]
) -> None:
    """Raise a `ConfigError` if a string would take the place of a call or a section, which no
    string can stand for.

    Args:
        old: what has been there.
        chosen: what that stands for.
        value: what is to be there.
        annotation: of the argument.
        path: where that is.
    """
    if not isinstance(chosen, Node) or not isinstance(value, str):
        return
    if annotation is not None and str in flatten_union(annotation):
        return
    place = format_path(path)
    how = f"set its values, {place}.{next(iter_names(chosen), 'name')}=..."
    if isinstance(old, Lazy):
        how = f"it is {format_expression(old)}: set what that refers to, or its values"
    raise ConfigError(f"{place}={value} is not a value for {describe(chosen)}: {how}")


def _check_number(old: Any, value: Any, annotation: Any, path: tuple[Key, ...]) -> None:
    """Raise a `ConfigError` if a string would take the place of a number, and the annotation has
    numbers and no strings: `fit_value` leaves those to the function that have arrays among them."""
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
                fit_value(child, annotation, place)
        _check_types(child, place, visited)


def _guess_annotation(parent: Any, old: Any) -> Any:
    """Return the type of a value in a section, which has no annotation: that of the value before
    if it is a number, a string, True or False, a path or a member of an Enum; None for any
    other."""
    if not isinstance(parent, Node) or get_state(parent).target is not None:
        return None
    if isinstance(old, bool):
        return bool | None
    if isinstance(old, Enum | PurePath):
        return type(old) | None
    if isinstance(old, str):
        return str | None
    return int | float | None if isinstance(old, int | float) else None


def _find_all_names(config: Any) -> set[str]:
    """Return the names of all nodes, and the keys of all that they hold."""
    names: set[str] = set()
    visited: set[int] = set()
    waiting = [config]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Node):
            if id(value) in visited:
                continue
            visited.add(id(value))
            names.update(iter_names(value))
        for key, child in iter_children(value):
            names.add(str(key))
            waiting.append(child)
    return names


def _find_annotation(parent: Any, key: Key, annotation: Any) -> Any:
    """Return the type of a value, or None where nothing says it: of an argument, or of an item of a
    list or dictionary.

    Args:
        parent: what has the value.
        key: of the value there.
        annotation: the type of the parent, or None.
    """
    if isinstance(parent, Node):
        return get_annotation(parent, key)
    kind = list if isinstance(parent, list) else dict
    members = [member for member in flatten_union(annotation) if get_origin(member) is kind]
    if not members or kind in flatten_union(annotation):
        return None
    return Union[tuple(get_args(member)[-1] for member in members)]  # noqa: UP007


def get_annotation(parent: Any, key: Key) -> Any:
    """Return the annotation of an argument, or None."""
    if not isinstance(parent, Node) or isinstance(key, int):
        return None
    target = get_state(parent).target
    signature = get_signature(target)
    if signature is None or key not in signature.parameters:
        return None
    function = target.__init__ if isinstance(target, type) else target
    for annotated in (function, target):
        try:
            annotation = _read_type_hints(annotated).get(key)
        except Exception:  # annotations may name what is imported for type checkers only
            continue
        if annotation is not None:
            return annotation
    # One annotation that cannot be read hides all of them above, as with optax.adamw.
    annotation = signature.parameters[key].annotation
    return None if annotation is EMPTY or isinstance(annotation, str) else annotation


@lru_cache(maxsize=4096)  # they are asked for with each argument of a call
def _read_type_hints(annotated: Any) -> dict[str, Any]:
    return get_type_hints(annotated)
