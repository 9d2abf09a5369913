"""Paths: where a node is in a tree.

A path is written like Python: `module.layers[0].weight`. A name is an attribute or a dictionary
key; one that is not an identifier is quoted, `plugin_states["evaluator:test"]`; a number is an
index. `tree.select` adds wildcards; `tree.path_grammar` is the grammar of both.

`jax.tree_util.keystr` is not used: it tells attributes from dictionary keys (`.a` and `['a']`), and
its quotes are Python's, so that a path could not be read back from what it writes.
"""

import re
from collections.abc import Iterable
from typing import Any

import jax
from jaxtyping import PyTree

from fulgurite._src.tree.path_grammar import Token, format_name, tokenize
from fulgurite.errors import PathError

Segment = str | int

_INDEX = re.compile(r"-?[0-9]+|\*")


class TreePath(tuple[Segment, ...]):
    """The segments from the root to a node. `str` writes what `parse_path` reads.

    Example:
        from fulgurite.plugins import TreePath

        str(TreePath(["layers", 0, "weight"]))  # "layers[0].weight"
    """

    def __str__(self) -> str:
        return "".join(map(_format_segment, self)).removeprefix(".")


def parse_path(text: str) -> TreePath:
    """Return the path that `text` writes, empty for the root; raise a PathError if it is none."""
    return TreePath(_parse_segment(kind, value, text) for kind, value in read_tokens(text))


def path_from_keys(keys: Iterable[Any]) -> TreePath:
    """Return the path of a key path of `jax.tree_util`."""
    return TreePath(map(_segment_from_key, keys))


def resolve_path(tree: PyTree, path: TreePath | str) -> Any:
    """Return the node of a tree at a path, static fields included.

    Args:
        tree: any pytree.
        path: a path or its text; `[-1]` is the last item of a list or tuple.

    Raises:
        PathError: there is no such node; the message lists what is there.
    """
    if isinstance(path, str):
        path = parse_path(path)
    node = tree
    for depth, segment in enumerate(path):
        children = _get_children(node)
        if segment in children:
            node = children[segment]
        elif _is_index_of(segment, node):
            node = node[segment]
        else:
            description = describe_node(node)
            parent = f"{TreePath(path[:depth])} ({description})" if depth else description
            names = ", ".join(str(TreePath([child])) for child in children) or "nothing below it"
            raise PathError(
                f"no {TreePath([segment])} in {parent}, for the path {path}. There is: {names}"
            )
    return node


def leaves_with_paths(tree: PyTree) -> list[tuple[str, Any]]:
    """Return the leaves of a tree, each with its path written out."""
    return [
        (str(path_from_keys(keys)), leaf)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def map_to_paths(tree: PyTree) -> PyTree[str]:
    """Return the same tree with every leaf replaced by its path."""
    return jax.tree_util.tree_map_with_path(lambda keys, _: str(path_from_keys(keys)), tree)


def find_wholes(tree: PyTree) -> dict[str, str]:
    """Return the paths of leaves that mean nothing without each other, each with the path of the
    node that they are parts of: one whose class says `is_loaded_whole = True`.

    What reads a part of a tree leaves such a node as it is unless it has all of it.
    """
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_loaded_whole)
    return {
        str(path_from_keys((*keys, *inner_keys))): str(path_from_keys(keys))
        for keys, node in nodes
        if _is_loaded_whole(node)
        for inner_keys, _ in jax.tree_util.tree_leaves_with_path(node)
    }


def is_array_like(node: Any) -> bool:
    """Return whether a node is an array, or stands for one as `jax.ShapeDtypeStruct` does."""
    return hasattr(node, "shape") and hasattr(node, "dtype")


def describe_node(node: Any) -> str:
    """Return dtype and shape of an array, such as `float32[3, 2]`, or else the name of a type."""
    return f"{node.dtype}{list(node.shape)}" if is_array_like(node) else type(node).__name__


def read_tokens(text: str) -> list[Token]:
    """Return the segments of a path or pattern; raise a PathError where it cannot be read.

    What stands in brackets is a whole number or `*`.
    """
    tokens = list(tokenize(text))
    for kind, value in tokens:
        if kind == "invalid" or (kind == "index" and not _INDEX.fullmatch(value)):
            rest = f"[{value}]" if kind == "index" else value
            raise PathError(
                f'cannot read {text!r} from {rest!r} on; a path is like a.layers[0]["odd key"]'
            )
    return tokens


def format_plain_segment(segment: Segment) -> str:
    """Return a segment as it stands in a path, without quotes even where it is not an
    identifier."""
    return f".{segment}" if isinstance(segment, str) else f"[{segment}]"


def _format_segment(segment: Segment) -> str:
    return format_name(segment) if isinstance(segment, str) else f"[{segment}]"


def _parse_segment(kind: str, value: str, text: str) -> Segment:
    is_wildcard = kind == "index" and value == "*"
    is_unquoted = kind == "name" and not value.isidentifier()
    if is_wildcard or is_unquoted:
        raise PathError(
            f"{value!r} in the path {text!r} is not an identifier; a key is written as "
            f"{_format_segment(value)}"
        )
    return int(value) if kind == "index" else value


def _segment_from_key(key: Any) -> Segment:
    value = key
    for field in ("name", "idx", "key"):
        if hasattr(key, field):
            value = getattr(key, field)
            break
    # Other keys of dictionaries, enums for example, are written as their text.
    return value if type(value) in (int, str) else str(value)


def _is_index_of(segment: Segment, node: Any) -> bool:
    return (
        isinstance(node, list | tuple)
        and isinstance(segment, int)
        and -len(node) <= segment < len(node)
    )


def _get_children(node: Any) -> dict[Segment, Any]:
    """Return the nodes one level down, and after them what an object holds outside of the tree,
    such as static fields."""
    level = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda other: other is not node)
    children = {_segment_from_key(keys[0]): child for keys, child in level if keys}
    fields = {} if is_array_like(node) else getattr(node, "__dict__", {})
    return children | {name: value for name, value in fields.items() if name not in children}


def _is_loaded_whole(node: Any) -> bool:
    return getattr(type(node), "is_loaded_whole", False) is True
