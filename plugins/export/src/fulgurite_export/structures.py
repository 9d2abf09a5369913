"""The structure of inputs and outputs: dictionaries, lists and tuples, as JSON.

JAX cannot write the structure of a tree that has nodes of a class, and reading such a class would
mean importing it.
"""

from collections.abc import Iterator, Sequence, Set as AbstractSet
from typing import Any

from fulgurite_export.errors import ExportError, InputError

MAX_DEPTH = 32
"""Of structures within each other."""
Template = Any
"""None, the number of an array, or `{"dict": {name: template}}`, `{"list": [...]}`,
`{"tuple": [...]}`."""


class Missing:
    """Stands for an array that was left out and that nothing reads."""


def describe(tree: Any) -> tuple[Template, list[Any]]:
    """Return the template of a tree, and its leaves in the order of their numbers.

    Args:
        tree: of dictionaries with strings as keys, lists, tuples, None, and anything else as
            leaves.

    Raises:
        ExportError: it has a node of another class, or is too deep.
    """
    leaves: list[Any] = []

    def visit(node: Any, depth: int) -> Template:
        if depth > MAX_DEPTH:
            raise ExportError(f"structures of more than {MAX_DEPTH} levels cannot be exported")
        if node is None:
            return None
        if type(node) is dict:
            if not all(isinstance(key, str) for key in node):
                raise ExportError(f"{list(node)!r:.100}: names in a dictionary must be strings")
            return {"dict": {key: visit(value, depth + 1) for key, value in sorted(node.items())}}
        if type(node) in (list, tuple):
            return {type(node).__name__: [visit(value, depth + 1) for value in node]}
        if not hasattr(node, "shape") or not hasattr(node, "dtype"):
            raise ExportError(
                f"{type(node).__name__} cannot be exported: inputs and outputs are arrays in "
                "dictionaries, lists and tuples"
            )
        leaves.append(node)
        return len(leaves) - 1

    return visit(tree, 0), leaves


def build(template: Template, leaves: Sequence[Any]) -> Any:
    """Return the tree of a template with these leaves."""
    if template is None:
        return None
    if isinstance(template, int):
        return leaves[template]
    (kind, parts), *_ = template.items()
    if kind == "dict":
        return {key: build(part, leaves) for key, part in parts.items()}
    values = [build(part, leaves) for part in parts]
    return tuple(values) if kind == "tuple" else values


def list_paths(template: Template) -> list[str]:
    """Return the path of each leaf, such as `tokens.ids` and `[1]`, in the order of their
    numbers."""
    return [path for _, path in sorted(_iter_paths(template, ""))]


def _iter_paths(template: Template, path: str) -> Iterator[tuple[int, str]]:
    """Yield number and path of each leaf below a path."""
    if isinstance(template, int):
        yield template, path
    elif template is not None:
        (kind, parts), *_ = template.items()
        if kind == "dict":
            for key, part in parts.items():
                yield from _iter_paths(part, f"{path}.{key}" if path else key)
        else:
            for index, part in enumerate(parts):
                yield from _iter_paths(part, f"{path}[{index}]")


def check_template(template: Any) -> None:
    """Raise `ExportError` unless JSON that was read is a template.

    Args:
        template: what was read.
    """
    numbers: list[int] = []

    def visit(node: Any, depth: int) -> None:
        if node is None:
            return
        if type(node) is int:
            numbers.append(node)
            return
        if depth > MAX_DEPTH or not isinstance(node, dict) or len(node) != 1:
            raise ExportError("a structure of inputs or outputs in manifest.json is not valid")
        ((kind, parts),) = node.items()
        is_valid = type(parts) is (dict if kind == "dict" else list)
        if kind not in ("dict", "list", "tuple") or not is_valid:
            raise ExportError("a structure of inputs or outputs in manifest.json is not valid")
        for part in parts.values() if kind == "dict" else parts:
            visit(part, depth + 1)

    visit(template, 0)
    if sorted(numbers) != list(range(len(numbers))):
        raise ExportError("a structure in manifest.json does not number its arrays from 0")


def flatten(template: Template, tree: Any, read: AbstractSet[int], name: str) -> list[Any]:
    """Return the leaves of a tree that has the structure of a template.

    What is left out is `Missing`: keys of dictionaries, and the end of lists and tuples.

    Args:
        template: of the structure.
        tree: what a caller gave.
        read: the numbers of the leaves that are needed, for errors.
        name: of the function, for errors.

    Raises:
        InputError: the structure is another one.
    """
    leaves: dict[int, Any] = {}

    def visit(part: Template, node: Any, path: str) -> None:
        if isinstance(node, Missing):
            leaves.update(dict.fromkeys((number for number, _ in _iter_paths(part, path)), node))
        elif isinstance(part, int):
            leaves[part] = node
        elif part is None:
            _check_is_none(node, path, name)
        else:
            ((kind, parts),) = part.items()
            pair = _pair_dict if kind == "dict" else _pair_sequence
            for key, value, inner in pair(parts, node, path, name, read):
                visit(inner, value, f"{path}.{key}" if path and kind == "dict" else f"{path}{key}")

    visit(template, tree, "")
    return [leaves[number] for number in sorted(leaves)]


Pairs = Iterator[tuple[str, Any, Template]]
"""The last part of a path, what the caller gave there, and its template."""


def _pair_dict(
    parts: dict[str, Template], node: Any, path: str, name: str, read: AbstractSet[int]
) -> Pairs:
    """Yield what a caller's dictionary has for each key of a template."""
    needed = [key for key, part in parts.items() if _has_any(part, read)]
    place = f"the input {path!r}" if path else "the input"
    if not isinstance(node, dict):
        raise InputError(
            f"{name}: {place} is {type(node).__name__}; it must be a dictionary with "
            f"{', '.join(map(repr, needed))}"
        )
    unknown = [key for key in node if key not in parts]
    if unknown:
        raise InputError(
            f"{name}: {place} has {unknown[0]!r:.100}, which is not expected: give "
            f"{', '.join(map(repr, needed))}"
        )
    for key, part in parts.items():
        yield key, node.get(key, Missing()), part


def _pair_sequence(
    parts: list[Template], node: Any, path: str, name: str, read: AbstractSet[int]
) -> Pairs:
    """Yield what a caller's list or tuple has for each item of a template."""
    num_needed = max((i + 1 for i, part in enumerate(parts) if _has_any(part, read)), default=0)
    place = f"the input {path!r}" if path else "the input"
    if not isinstance(node, list | tuple) or len(node) > len(parts):
        is_sequence = isinstance(node, list | tuple)
        what = f"has {len(node)} items" if is_sequence else f"is {type(node).__name__}"
        raise InputError(f"{name}: {place} {what}; it must be a tuple of {num_needed}")
    for index, part in enumerate(parts):
        yield f"[{index}]", node[index] if index < len(node) else Missing(), part


def _has_any(template: Template, numbers: AbstractSet[int]) -> bool:
    """Return whether a template has one of some leaves."""
    return any(number in numbers for number, _ in _iter_paths(template, ""))


def _check_is_none(node: Any, path: str, name: str) -> None:
    if node is not None:
        raise InputError(f"{name}: the input {path!r} is {type(node).__name__}; it must be None")
