"""Keys as text: the paths of the core with slices, `None`, `...` and wildcards.

`batch.image[:8]`, `preds["odd key"]`, `tensor[None,...,1:,::2]`, `foo.baz[-2:]`, `tensor[0,0].T`.
`*` and `[*]` are every child, each of which must have the rest of the key; `**` is any number of
segments and leaves out what does not fit; within a name `*` and `?` are characters.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from types import EllipsisType
from typing import Any

from fulgurite.errors import PathError
from fulgurite.plugins import describe_node, is_array_like, path_grammar

ARRAY_ATTRIBUTES = ("T", "mT", "real", "imag")
"""What a key may read of an array besides its items."""
MISSING = object()

_INTEGER = r"(-?\d+)?"
_SLICE = re.compile(rf"{_INTEGER}:{_INTEGER}(?::{_INTEGER})?")


@dataclass(frozen=True)
class Name:
    """An attribute or the key of a dictionary.

    Attributes:
        text: the name, possibly with wildcards.
        is_literal: whether `*` and `?` in it are not wildcards.
    """

    text: str
    is_literal: bool = False

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for several names."""
        return not self.is_literal and path_grammar.is_pattern(self.text)

    def __str__(self) -> str:
        return f".{self.text}" if self.is_wildcard else path_grammar.format_name(self.text)


@dataclass(frozen=True)
class Slice:
    """A slice; unlike Python's, it can be hashed."""

    start: int | None
    stop: int | None
    step: int | None

    def __str__(self) -> str:
        ends = ["" if end is None else str(end) for end in (self.start, self.stop)]
        return ":".join([*ends, *([] if self.step is None else [str(self.step)])])


IndexItem = int | Slice | None | EllipsisType


@dataclass(frozen=True)
class Index:
    """What stands in brackets: an index, a slice, or several of them.

    Attributes:
        items: as many as the brackets hold; none for `[*]`, every item.
    """

    items: tuple[IndexItem, ...]

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for every item."""
        return not self.items

    def __str__(self) -> str:
        items = ["..." if item is Ellipsis else str(item) for item in self.items]
        return f"[{','.join(items) or '*'}]"


Part = Name | Index


def parse(text: str) -> tuple[Part, ...]:
    """Return the parts of a key; raise a PathError if the text is none."""
    return tuple(_parse_token(kind, value, text) for kind, value in path_grammar.tokenize(text))


def format_parts(parts: Sequence[Part]) -> str:
    """Return the text of a key, which `parse` reads."""
    return "".join(map(str, parts)).removeprefix(".")


def has_wildcard(parts: Sequence[Part]) -> bool:
    """Return whether a key may stand for several nodes."""
    return any(part.is_wildcard for part in parts)


def matches(pattern: Sequence[Part], path: Sequence[Part]) -> bool:
    """Return whether a key with wildcards stands for a path without any."""
    if not pattern:
        return not path
    first, *rest = pattern
    if first == Name("**"):
        return any(matches(rest, path[start:]) for start in range(len(path) + 1))
    return bool(path) and _matches_part(first, path[0]) and matches(rest, path[1:])


def resolve(tree: Any, parts: Sequence[Part], prefix: Sequence[Part] = ()) -> Any:
    """Return what a key finds in a tree.

    Args:
        tree: a tree: dictionaries, lists, tuples, modules, arrays.
        parts: the rest of the key.
        prefix: the part of the key that led to the tree, for errors.

    Returns:
        The node, or for wildcards a tree of dictionaries and lists with the nodes.

    Raises:
        PathError: there is no such node; the message lists what there is.
    """
    node = tree
    for depth, part in enumerate(parts):
        place = (*prefix, *parts[:depth])
        if part == Name("**"):
            matched = _filter(node, parts[depth + 1 :])
            if matched is MISSING:
                raise _make_error(node, parts[depth + 1], place, parts[depth:])
            return matched
        if part.is_wildcard:
            return _resolve_each(node, part, parts[depth + 1 :], place)
        child = _get_child(node, part, place)
        if child is MISSING:
            raise _make_error(node, part, place, parts[depth:])
        node = child
    return node


def _parse_token(kind: str, value: str, key: str) -> Part:
    if kind == "invalid":
        raise PathError(
            f"cannot read the key {key!r} from {value!r} on; a key is like batch.image[:8], "
            'preds.layers[0] or batch["odd key"]'
        )
    if kind == "index":
        return _parse_index(value, key)
    if kind == "name":
        return _parse_name(value, key)
    # Without quotes where it needs none, so that a key can be written in one way.
    return Name(value, is_literal=path_grammar.is_pattern(value))


def _parse_name(text: str, key: str) -> Name:
    if not path_grammar.is_name(text):
        raise PathError(
            f"{text!r} in the key {key!r} is not an identifier; write "
            f"{Name(text, is_literal=True)} for the key of a dictionary, and [0] for an index"
        )
    return Name(text)


def _parse_index(text: str, key: str) -> Index:
    if text.strip() == "*":
        return Index(())
    return Index(tuple(_parse_item(item.strip(), key) for item in text.split(",")))


def _parse_item(text: str, key: str) -> IndexItem:
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    sliced = _SLICE.fullmatch(text)
    if sliced:
        return Slice(*(int(end) if end else None for end in sliced.groups()))
    if text in ("None", "..."):
        return None if text == "None" else Ellipsis
    raise PathError(
        f"{text!r} in the key {key!r} is not an index; write an integer, a slice such as 1:-1, "
        "None or "
        '..., or a quoted name, ["odd key"]'
    )


def _matches_part(pattern: Part, part: Part) -> bool:
    if isinstance(pattern, Name):
        return isinstance(part, Name) and (
            path_grammar.matches_name(pattern.text, part.text)
            if pattern.is_wildcard
            else pattern == part
        )
    return isinstance(part, Index) and (pattern.is_wildcard or pattern == part)


def _list_children(node: Any) -> dict[Part, Any]:
    """Return what is one level below a node."""
    if isinstance(node, Mapping):
        return {
            Index((name,)) if type(name) is int else Name(str(name)): child
            for name, child in node.items()
        }
    if is_array_like(node) or node is None:
        return {}
    if is_dataclass(node):
        names = [field.name for field in fields(node) if hasattr(node, field.name)]
    elif isinstance(node, list | tuple) and not hasattr(node, "_fields"):
        return {Index((index,)): child for index, child in enumerate(node)}
    else:
        names = getattr(node, "_fields", None) or list(getattr(node, "__dict__", {}))
    return {Name(name): getattr(node, name) for name in names}


def _get_child(node: Any, part: Part, place: Sequence[Part]) -> Any:
    """Return the child at one part of a key, or MISSING."""
    if isinstance(part, Name):
        if is_array_like(node):
            return getattr(node, part.text) if part.text in ARRAY_ATTRIBUTES else MISSING
        return _list_children(node).get(Name(part.text), MISSING)
    if is_array_like(node):
        return _index_array(node, part, place)
    if isinstance(node, Mapping):
        return _list_children(node).get(part, MISSING)
    if isinstance(node, list | tuple) and len(part.items) == 1:
        (item,) = part.items
        if isinstance(item, Slice):
            return node[slice(item.start, item.stop, item.step)]
        if isinstance(item, int) and -len(node) <= item < len(node):
            return node[item]
    return MISSING


def _index_array(array: Any, index: Index, place: Sequence[Part]) -> Any:
    """Return a part of an array. jax would take the last item for an index beyond it."""
    ndim = len(array.shape)
    num_axes = sum(item is not None and item is not Ellipsis for item in index.items)
    if num_axes > ndim or index.items.count(Ellipsis) > 1:
        raise PathError(
            f"{index} has {num_axes} indices for {format_parts(place)}, which is "
            f"{describe_node(array)}"
        )
    axis = 0
    for item in index.items:
        if item is Ellipsis:
            axis += ndim - num_axes
        elif item is not None:
            is_inside = not isinstance(item, int) or -array.shape[axis] <= item < array.shape[axis]
            if not is_inside:
                raise PathError(
                    f"{index} is outside of {format_parts(place)}, which is {describe_node(array)}"
                )
            axis += 1
    items = tuple(
        slice(item.start, item.stop, item.step) if isinstance(item, Slice) else item
        for item in index.items
    )
    return array[items]


def _resolve_each(
    node: Any, part: Part, rest: Sequence[Part], place: Sequence[Part]
) -> dict[Any, Any] | list[Any]:
    """Return what the rest of a key finds in every child that a wildcard stands for."""
    children = {
        child: value for child, value in _list_children(node).items() if _matches_part(part, child)
    }
    if part == Name("*"):
        children = _list_children(node)
    if not children:
        raise _make_error(node, part, place, (part, *rest))
    return _rebuild(
        node, {child: resolve(value, rest, (*place, child)) for child, value in children.items()}
    )


def _filter(node: Any, rest: Sequence[Part]) -> Any:
    """Return a tree of all that the rest of a key finds at or below a node; MISSING for nothing."""
    if not rest:
        return node
    matched: dict[Part, Any] = {}
    for child, value in _list_children(node).items():
        below = MISSING
        if _matches_part(rest[0], child):
            try:
                below = resolve(value, rest[1:])
            except PathError:
                below = MISSING
        if below is MISSING:
            below = _filter(value, rest)
        if below is not MISSING:
            matched[child] = below
    return _rebuild(node, matched) if matched else MISSING


def _rebuild(node: Any, children: Mapping[Part, Any]) -> dict[Any, Any] | list[Any]:
    if isinstance(node, list | tuple) and not hasattr(node, "_fields"):
        return list(children.values())
    return {
        child.text if isinstance(child, Name) else child.items[0]: value
        for child, value in children.items()
    }


def _make_error(node: Any, part: Part, place: Sequence[Part], rest: Sequence[Part]) -> PathError:
    key = format_parts((*place, *rest))
    present = {format_parts((*place, child)): child for child in _list_children(node)}
    wanted = format_parts((*place, part))
    parent = f"{format_parts(place)} ({describe_node(node)})" if place else describe_node(node)
    close = get_close_matches(wanted, present, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    names = ", ".join(present) or "nothing below it"
    return PathError(f"no {wanted} for the key {key!r} in {parent}. {hint}There is: {names}")
