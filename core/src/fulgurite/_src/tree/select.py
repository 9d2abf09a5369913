"""Selections: which arrays of a tree a pattern or a function means.

In a pattern `*` is one segment of a path, `**` any number of them, `[*]` an index and `[-1]` the
last item of a list or tuple; within a name `*` and `?` are characters.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import jax
from jaxtyping import PyTree

from fulgurite._src.tree.paths import (
    Segment,
    TreePath,
    describe_node,
    format_plain_segment,
    is_array_like,
    leaves_with_paths,
    path_from_keys,
    read_tokens,
    resolve_path,
)
from fulgurite.errors import ConfigurationError, PathError

Choice = Callable[[PyTree], list[bool]]

# The tree that others are parts of, in a list of one; None outside of `select_from_parts`.
_whole: ContextVar[list[PyTree] | None] = ContextVar("whole", default=None)


@dataclass(frozen=True)
class PathPattern:
    """A path with wildcards, read by `PathPattern.parse`.

    Example:
        from fulgurite.plugins import PathPattern, TreePath

        path = TreePath(["layers", 0, "weight"])
        PathPattern.parse("layers[*].weight").matches(path)  # True

    Attributes:
        text: the pattern as it was written.
        parts: an expression for each segment; None for any number of segments.
    """

    text: str
    parts: tuple[re.Pattern[str] | None, ...]

    @staticmethod
    def parse(text: str) -> "PathPattern":
        """Return the pattern that `text` writes; raise a PathError if it is none."""
        if not text:
            raise PathError("an empty pattern matches nothing; write ** for everything")
        return PathPattern(
            text, tuple(_compile_segment(kind, value) for kind, value in read_tokens(text))
        )

    @property
    def has_negative_index(self) -> bool:
        """Whether an index counts from the end, so that a tree is needed to find its place."""
        return any(
            kind == "index" and value.startswith("-") for kind, value in read_tokens(self.text)
        )

    def matches(self, path: TreePath) -> bool:
        """Return whether this is the whole path."""
        return _match_segments(self.parts, [_list_spellings(segment) for segment in path])

    def occurs_in(self, path: TreePath, tree: PyTree = None) -> bool:
        """Return whether this is a run of whole segments anywhere in the path.

        Args:
            path: of a leaf.
            tree: that holds the leaf. An index that counts from the end matches nothing without it.
        """
        if tree is not None and self.has_negative_index:
            lengths = _find_lengths(tree, path)
        else:
            lengths = [None] * len(path)
        segments = [
            _list_spellings(segment, length) for segment, length in zip(path, lengths, strict=True)
        ]
        return _match_segments((None, *self.parts, None), segments)


@dataclass(frozen=True)
class Selector:
    """A choice of arrays, made by `select` and `exclude`.

    `|` and `&` join selectors; `~` is every other array. `selector(tree)` is that tree with True
    for each array chosen and False for every other leaf. To choose nothing is a PathError, for the
    whole and for each pattern and function in it.

    As a mask of an optimizer, it gets the part of the module that the optimizer updates, such as
    what is not frozen. It may choose nothing there, but must choose something in the module.

    Example:
        weights = fg.select("weight") & ~fg.select("layers[0]")
    """

    text: str
    choose: Choice

    def __call__(self, tree: PyTree) -> PyTree[bool]:
        whole = _whole.get()
        if whole is not None:
            with _set_whole(None):
                self(whole[0])
        mask = _check_not_empty(self.choose(tree), self.text, tree)
        return jax.tree.unflatten(jax.tree.structure(tree), mask)

    def __or__(self, other: "Selector") -> "Selector":
        return _combine(f"({self.text} | {other.text})", any, [self.choose, other.choose])

    def __and__(self, other: "Selector") -> "Selector":
        return _combine(f"({self.text} & {other.text})", all, [self.choose, other.choose])

    def __invert__(self) -> "Selector":
        return Selector(f"~{self.text}", partial(_invert, self.choose))


@contextmanager
def select_from_parts(whole: PyTree) -> Iterator[None]:
    """Let selectors choose nothing in the block, as long as they choose something in a tree.

    For optimizers, whose masks get the part of a module that is updated.

    Args:
        whole: the tree that others are parts of.
    """
    with _set_whole([whole]):
        yield


@contextmanager
def _set_whole(whole: list[PyTree] | None) -> Iterator[None]:
    token = _whole.set(whole)
    try:
        yield
    finally:
        _whole.reset(token)


def select(*patterns: str | Callable[[Any], Any]) -> Selector:
    """Select arrays by any of the arguments.

    A pattern selects every array in whose path it occurs; a function of the tree, the arrays of the
    node (or tuple of nodes) that it returns. The function must not read array values.
    """
    if not patterns:
        raise ConfigurationError(
            "select() and exclude() need a pattern or a function; '**' is everything"
        )
    names = ", ".join(map(_get_name, patterns))
    choices = [
        partial(_choose_by_pattern, PathPattern.parse(pattern))
        if isinstance(pattern, str)
        else partial(_choose_by_function, pattern)
        for pattern in patterns
    ]
    return _combine(f"select({names})", any, choices)


def exclude(*patterns: str | Callable[[Any], Any]) -> Selector:
    """Select every array that `select` with the same arguments does not."""
    return ~select(*patterns)


def _combine(text: str, reduce: Callable[[Any], bool], choices: Sequence[Choice]) -> Selector:
    def choose(tree: PyTree) -> list[bool]:
        masks = [choice(tree) for choice in choices]
        return [reduce(flags) for flags in zip(*masks, strict=True)]

    return Selector(text, choose)


def _invert(choose: Choice, tree: PyTree) -> list[bool]:
    return [
        is_array_like(leaf) and not is_chosen
        for leaf, is_chosen in zip(jax.tree.leaves(tree), choose(tree), strict=True)
    ]


def _choose_by_pattern(pattern: PathPattern, tree: PyTree) -> list[bool]:
    mask = [
        is_array_like(leaf) and pattern.occurs_in(path_from_keys(keys), tree)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return _check_not_empty(mask, pattern.text, tree)


def _choose_by_function(function: Callable[[Any], Any], tree: PyTree) -> list[bool]:
    leaves, structure = jax.tree.flatten(tree)
    # The function gets a marker for each leaf: they tell equal leaves apart, and nodes that are in
    # the tree twice.
    markers = [object() for _ in leaves]
    try:
        node = function(jax.tree.unflatten(structure, markers))
        chosen = {id(marker) for marker in jax.tree.leaves(node)}
    except (AttributeError, LookupError, TypeError) as error:
        raise PathError(
            f"{_get_name(function)} cannot select from {describe_node(tree)}: {error}"
        ) from error
    if not chosen <= set(map(id, markers)):
        raise PathError(
            f"{_get_name(function)} must return a node of {describe_node(tree)}, "
            "or several in a tuple"
        )
    mask = [
        is_array_like(leaf) and id(marker) in chosen
        for leaf, marker in zip(leaves, markers, strict=True)
    ]
    return _check_not_empty(mask, _get_name(function), tree)


def _check_not_empty(mask: list[bool], text: str, tree: PyTree) -> list[bool]:
    """Return `mask`; raise a PathError that lists the nearest paths if nothing is chosen, unless
    `select_from_parts` allows it."""
    if not any(mask) and _whole.get() is None:
        paths = [path for path, leaf in leaves_with_paths(tree) if is_array_like(leaf)]
        nearest = ", ".join(get_close_matches(text, paths, n=6, cutoff=0)) or "none"
        raise PathError(
            f"{text!r} selects no array of {describe_node(tree)}; of its {len(paths)} the nearest "
            f"are: {nearest}"
        )
    return mask


def _compile_segment(kind: str, value: str) -> re.Pattern[str] | None:
    """Return what one segment, as `format_plain_segment` writes it, must match; None for `**`."""
    if kind == "name" and value == "**":
        return None
    if kind == "name" and value == "*":
        return re.compile(".*", re.DOTALL)
    expression = re.escape(f"[{value}]" if kind == "index" else f".{value}")
    if kind != "quoted":
        expression = expression.replace(r"\*", ".*").replace(r"\?", ".")
    return re.compile(expression, re.DOTALL)


def _list_spellings(segment: Segment, length: int | None = None) -> list[str]:
    """Return the ways to write a segment in a pattern.

    Args:
        segment: of a path.
        length: of the list or tuple that it is an index of; None for any other segment.
    """
    spellings = [format_plain_segment(segment)]
    if length is not None and isinstance(segment, int):
        spellings.append(format_plain_segment(segment - length))
    return spellings


def _find_lengths(tree: PyTree, path: TreePath) -> list[int | None]:
    """Return, for each segment of the path of a leaf, how many items the list or tuple has that it
    is an index of, or None."""
    lengths: list[int | None] = []
    node = tree
    for segment in path:
        if isinstance(node, list | tuple) and isinstance(segment, int):
            lengths.append(len(node))
            # `resolve` lists all children of a node, which for a list of 300 layers took 0.3 s.
            node = node[segment]
        else:
            lengths.append(None)
            node = resolve_path(node, TreePath([segment]))
    return lengths


def _match_segments(
    parts: Sequence[re.Pattern[str] | None], segments: Sequence[Sequence[str]]
) -> bool:
    """Return whether expressions match segments, each of which may be written in several ways."""
    if not parts:
        return not segments
    first, *rest = parts
    if first is None:
        return any(_match_segments(rest, segments[start:]) for start in range(len(segments) + 1))
    if not segments or not any(first.fullmatch(spelling) for spelling in segments[0]):
        return False
    return _match_segments(rest, segments[1:])


def _get_name(function: str | Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))
