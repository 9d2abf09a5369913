"""The one path language: where a node is in a tree, and which leaves a pattern means.

A path is written like Python: `module.layers[0].weight`. A name is an attribute or a dictionary
key; one that is no identifier is quoted, `plugins["evaluator:test"]`; a number is an index. In a
pattern `*` is one segment, `**` any number of them, `[*]` an index; within a name `*` and `?` are
characters.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import jax
from jaxtyping import PyTree

from fulgurite.errors import ConfigurationError, PathError

Segment = str | int
Choice = Callable[[PyTree], list[bool]]


class Path(tuple[Segment, ...]):
    """The segments from the root to a node. `str` writes what `parse` reads."""

    def __str__(self) -> str:
        return "".join(map(_written, self)).removeprefix(".")


def parse(text: str) -> Path:
    """The path that `text` writes, empty for the root; a PathError if it is none."""
    return Path(_segment(kind, value, text) for kind, value in _tokens(text))


def from_keys(keys: Iterable[Any]) -> Path:
    """The path of a key path of `jax.tree_util`."""
    return Path(map(_from_key, keys))


def resolve(tree: PyTree, path: Path | str) -> Any:
    """The node of a tree at a path, static fields included; `[-1]` is the last of a list or tuple.
    Where there is none, the PathError lists what is there."""
    path = parse(path) if isinstance(path, str) else path
    node = tree
    for depth, segment in enumerate(path):
        children = _children(node)
        if segment in children:
            node = children[segment]
        elif (
            isinstance(node, list | tuple)
            and isinstance(segment, int)
            and -len(node) <= segment < len(node)
        ):
            node = node[segment]
        else:
            where = f"{Path(path[:depth])} ({_kind(node)})" if depth else _kind(node)
            there = ", ".join(str(Path([child])) for child in children) or "nothing below it"
            raise PathError(
                f"no {Path([segment])} in {where}, for the path {path}. There is: {there}"
            )
    return node


def leaves_with_paths(tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves of a tree, each with its path written out."""
    return [
        (str(from_keys(keys)), leaf) for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def path_tree(tree: PyTree) -> PyTree[str]:
    """The same tree with every leaf replaced by its path."""
    return jax.tree_util.tree_map_with_path(lambda keys, _: str(from_keys(keys)), tree)


def total_size(tree: PyTree) -> tuple[int, int]:
    """The total number of elements in the arrays of a tree, and of bytes."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if _is_array(leaf)]
    return sum(leaf.size for leaf in arrays), sum(
        leaf.size * leaf.dtype.itemsize for leaf in arrays
    )


def shape_summary(tree: PyTree) -> str:
    """A table of the arrays of a tree: path, shape, dtype, bytes. The last line: all elements and
    bytes."""
    arrays = [(path, leaf) for path, leaf in leaves_with_paths(tree) if _is_array(leaf)]
    rows = [
        (path, str(list(leaf.shape)), str(leaf.dtype), f"{total_size(leaf)[1]:,}")
        for path, leaf in arrays
    ]
    count, size = total_size(tree)
    rows = [("path", "shape", "dtype", "bytes"), *rows, ("total", f"{count:,}", "", f"{size:,}")]
    a, b, c, d = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(
        f"{path:{a}}  {shape:{b}}  {dtype:{c}}  {size:>{d}}" for path, shape, dtype, size in rows
    )


@dataclass(frozen=True)
class Pattern:
    """A path with wildcards, made by `Pattern.parse`: an expression for each segment, None for any
    number of them."""

    text: str
    parts: tuple[re.Pattern[str] | None, ...]

    @staticmethod
    def parse(text: str) -> "Pattern":
        """The pattern that `text` writes; a PathError if it is none."""
        if not text:
            raise PathError("an empty pattern matches nothing; write ** for everything")
        return Pattern(text, tuple(_expression(kind, value) for kind, value in _tokens(text)))

    def matches(self, path: Path) -> bool:
        """Whether this is the whole path."""
        return _matches(self.parts, [_plain(segment) for segment in path])

    def occurs_in(self, path: Path) -> bool:
        """Whether this is a run of whole segments anywhere in the path."""
        return _matches((None, *self.parts, None), [_plain(segment) for segment in path])


@dataclass(frozen=True)
class Selector:
    """Made by `select` and `exclude`, joined by `|` and `&`; `~` is every other array.
    `selector(tree)` is that tree with True for each array chosen and False for every other leaf. To
    choose nothing is a PathError, for the whole and for each pattern and function in it."""

    text: str
    choose: Choice

    def __call__(self, tree: PyTree) -> PyTree[bool]:
        return jax.tree.unflatten(
            jax.tree.structure(tree), _some(self.choose(tree), self.text, tree)
        )

    def __or__(self, other: "Selector") -> "Selector":
        return _joined(f"({self.text} | {other.text})", any, [self.choose, other.choose])

    def __and__(self, other: "Selector") -> "Selector":
        return _joined(f"({self.text} & {other.text})", all, [self.choose, other.choose])

    def __invert__(self) -> "Selector":
        return Selector(f"~{self.text}", partial(_others, self.choose))


def select(*what: str | Callable[[Any], Any]) -> Selector:
    """Selects arrays by any of the arguments: a pattern selects every array in whose path it
    occurs; a function of the tree, the arrays of the node (or tuple of nodes) that it returns. The
    function must not read array values."""
    if not what:
        raise ConfigurationError(
            "select() and exclude() need a pattern or a function; '**' is everything"
        )
    patterns = [Pattern.parse(one) if isinstance(one, str) else one for one in what]
    return _joined(
        f"select({', '.join(map(_name, what))})", any, [partial(_chosen, one) for one in patterns]
    )


def exclude(*what: str | Callable[[Any], Any]) -> Selector:
    """Selects every array that `select` with the same arguments does not."""
    return ~select(*what)


def _joined(text: str, how: Callable[[Any], bool], parts: Sequence[Choice]) -> Selector:
    return Selector(
        text,
        lambda tree: [how(flags) for flags in zip(*(part(tree) for part in parts), strict=True)],
    )


def _others(choose: Choice, tree: PyTree) -> list[bool]:
    return [
        _is_array(leaf) and not one
        for leaf, one in zip(jax.tree.leaves(tree), choose(tree), strict=True)
    ]


def _chosen(what: Pattern | Callable[[Any], Any], tree: PyTree) -> list[bool]:
    if not isinstance(what, Pattern):
        return _some(_under(what, tree), _name(what), tree)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return _some(
        [_is_array(leaf) and what.occurs_in(from_keys(keys)) for keys, leaf in leaves],
        what.text,
        tree,
    )


def _under(function: Callable[[Any], Any], tree: PyTree) -> list[bool]:
    leaves, structure = jax.tree.flatten(tree)
    marks = [object() for _ in leaves]  # tell equal leaves apart, and nodes that are there twice
    try:
        found = {
            id(leaf): leaf
            for leaf in jax.tree.leaves(function(jax.tree.unflatten(structure, marks)))
        }
    except (AttributeError, LookupError, TypeError) as error:
        raise PathError(f"{_name(function)} cannot select from {_kind(tree)}: {error}") from error
    if not found.keys() <= set(map(id, marks)):
        raise PathError(
            f"{_name(function)} must return a node of {_kind(tree)}, or several in a tuple"
        )
    return [_is_array(leaf) and id(mark) in found for leaf, mark in zip(leaves, marks, strict=True)]


def _some(chosen: list[bool], text: str, tree: PyTree) -> list[bool]:
    if not any(chosen):
        paths = [path for path, leaf in leaves_with_paths(tree) if _is_array(leaf)]
        near = ", ".join(get_close_matches(text, paths, n=6, cutoff=0)) or "none"
        raise PathError(
            f"{text!r} selects no array of {_kind(tree)}; of its {len(paths)} the nearest are: {near}"
        )
    return chosen


_STRING = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'  # of JSON
_TOKEN = re.compile(
    rf'\.(?P<name>[^.\[\]"\s]+)|\[(?P<quoted>{_STRING})\]|\[(?P<index>-?[0-9]+|\*)\]'
)


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """The segments of a path or pattern as (kind, text), kind one of name, quoted, index."""
    rest = text if text.startswith("[") or not text else f".{text}"
    while rest:
        token = _TOKEN.match(rest)
        if token is None:
            raise PathError(
                f'cannot read {text!r} from {rest!r} on; a path is like a.layers[0]["odd key"]'
            )
        kind = token.lastgroup or ""
        yield kind, json.loads(token[kind]) if kind == "quoted" else token[kind]
        rest = rest[token.end() :]


def _segment(kind: str, value: str, text: str) -> Segment:
    if (kind, value) == ("index", "*") or (kind == "name" and not value.isidentifier()):
        raise PathError(
            f"{value!r} in the path {text!r} is no identifier; a key is written as {_written(value)}"
        )
    return int(value) if kind == "index" else value


def _written(segment: Segment) -> str:
    odd = isinstance(segment, str) and not segment.isidentifier()
    return f"[{json.dumps(segment, ensure_ascii=False)}]" if odd else _plain(segment)


def _plain(segment: Segment) -> str:
    return f".{segment}" if isinstance(segment, str) else f"[{segment}]"


def _expression(kind: str, value: str) -> re.Pattern[str] | None:
    """What one segment, as `_plain` gives it, must match."""
    if kind == "name" and value in ("*", "**"):
        return re.compile(".*", re.DOTALL) if value == "*" else None
    literal = re.escape(f"[{value}]" if kind == "index" else f".{value}")
    return re.compile(
        literal if kind == "quoted" else literal.replace(r"\*", ".*").replace(r"\?", "."), re.DOTALL
    )


def _matches(parts: Sequence[re.Pattern[str] | None], segments: Sequence[str]) -> bool:
    if not parts:
        return not segments
    if parts[0] is None:
        return any(_matches(parts[1:], segments[start:]) for start in range(len(segments) + 1))
    return bool(segments and parts[0].fullmatch(segments[0])) and _matches(parts[1:], segments[1:])


def _from_key(key: Any) -> Segment:
    value = next(
        (getattr(key, field) for field in ("name", "idx", "key") if hasattr(key, field)), key
    )
    return value if type(value) in (int, str) else str(value)


def _children(node: Any) -> dict[Segment, Any]:
    """One level down, and after it what an object holds outside of the tree, such as static
    fields."""
    level = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda other: other is not node)
    children = {_from_key(keys[0]): child for keys, child in level if keys}
    fields = {} if _is_array(node) else getattr(node, "__dict__", {})
    return children | {name: value for name, value in fields.items() if name not in children}


def _is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, or stands for one as `jax.ShapeDtypeStruct` does."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _kind(node: Any) -> str:
    return f"{node.dtype}{list(node.shape)}" if _is_array(node) else type(node).__name__


def _name(what: str | Callable[..., Any]) -> str:
    return getattr(what, "__name__", repr(what))
