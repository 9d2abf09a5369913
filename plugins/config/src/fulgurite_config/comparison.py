"""Copying, merging and comparing configurations."""

import json
from collections.abc import Iterator
from typing import Any, TypeVar

from fulgurite_config.codec import to_plain
from fulgurite_config.equality import is_equal
from fulgurite_config.expressions import (
    APPLY,
    Expression,
    Lazy,
    Reference,
    format_path,
    get_expression,
    get_reference,
    has_lazy,
)
from fulgurite_config.nodes import (
    OPERATIONS,
    Node,
    State,
    find_line,
    get_state,
    iter_children,
    iter_nodes,
    set_value,
)

T = TypeVar("T")


def copy(config: T) -> T:
    """Return a copy that shares nothing with the original. References lead into the copy, and a
    node that is used at several places is one node in the copy too."""
    return _copy_all(config, {})


def _copy_all(config: Any, memo: dict[int, Any]) -> Any:
    """Copy a configuration.

    Args:
        config: the configuration.
        memo: what is copied already, by the identity of the original, as `copy.deepcopy` has it.
    """
    known = set(memo)
    # Nodes first: a reference may start from a node that comes after it.
    _make_nodes(config, memo)
    for node in iter_nodes(config, known):
        _fill_node(node, memo)
    return _copy(config, memo)


def _make_nodes(value: Any, nodes: dict[int, Node]) -> None:
    """Make an empty node for each node below a value, by the identity of that node."""
    if isinstance(value, Node):
        if id(value) in nodes:
            return
        state = get_state(value)
        nodes[id(value)] = Node(State(state.target, is_partial=state.is_partial))
    for _, child in iter_children(value):
        _make_nodes(child, nodes)


def _fill_node(node: Node, memo: dict[int, Node]) -> None:
    state = get_state(node)
    copied = get_state(memo[id(node)])
    copied.positional = [_copy(item, memo) for item in state.positional]
    copied.keywords = {name: _copy(item, memo) for name, item in state.keywords.items()}
    copied.sources = dict(state.sources)
    copied.source = state.source
    copied.aux = None if state.aux is None else memo.get(id(state.aux))


def _copy(value: Any, memo: dict[int, Node]) -> Any:
    if isinstance(value, Node):
        return memo[id(value)]
    if isinstance(value, Reference):
        root, path = get_reference(value)
        return Reference(memo.get(id(root), root), path)
    if isinstance(value, Expression):
        symbol, operands = get_expression(value)
        return Expression(symbol, *(_copy(operand, memo) for operand in operands))
    if isinstance(value, list | tuple):
        return type(value)(_copy(item, memo) for item in value)
    if isinstance(value, dict):
        return {key: _copy(item, memo) for key, item in value.items()}
    return value


def copy_one_way(config: T) -> T:
    """Return a copy that follows the original: what is later changed there changes here too, until
    it is set here. What is set here, and what is added there, changes nothing on the other side.

    References lead into the copy. A list follows as a whole, or item by item where it holds calls
    or references.
    """
    memo: dict[int, Node] = {}
    _make_nodes(config, memo)
    return _follow(config, None, (), memo)


def _follow(value: Any, root: Node | None, path: tuple[Any, ...], memo: dict[int, Node]) -> Any:
    """Return what follows a value.

    Args:
        value: the value.
        root: the node of the original that the references start from, the outermost.
        path: of the value below that node.
        memo: the nodes of the copy, by the identity of those of the original.
    """
    if isinstance(value, Node):
        if root is None:
            root = value
            path = ()
        followed = memo[id(value)]
        if not get_state(followed).source:
            _follow_arguments(value, followed, root, path, memo)
        return followed
    if isinstance(value, Lazy):
        return _copy(value, memo)
    is_container = isinstance(value, list | tuple | dict)
    # A reference goes through no other key, as None.
    has_place = root is not None and all(isinstance(key, str | int) for key in path)
    if has_place and not is_container:
        return Reference(root, path)
    if has_place and not has_lazy(value) and not any(iter_nodes(value, set())):
        return Expression(APPLY, type(value), Reference(root, path))
    if isinstance(value, dict):
        return {key: _follow(item, root, (*path, key), memo) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_follow(item, root, (*path, index), memo) for index, item in enumerate(value)]
        return type(value)(items)
    return value


def _follow_arguments(
    node: Node, followed: Node, root: Node, path: tuple[Any, ...], memo: dict[int, Node]
) -> None:
    state = get_state(node)
    copied = get_state(followed)
    copied.source = find_line()
    copied.sources = dict(state.sources)
    copied.positional = [
        _follow(item, root, (*path, index), memo) for index, item in enumerate(state.positional)
    ]
    copied.keywords = {
        name: _follow(item, root, (*path, name), memo) for name, item in state.keywords.items()
    }
    if state.aux is not None and id(state.aux) in memo:
        copied.aux = _follow(state.aux, root, (*path, "aux"), memo)


def merge(config: Any, other: Any) -> None:
    """Set every value of another configuration in this one.

    Sections, and calls of the same target, are merged value by value; all else is replaced.

    Args:
        config: what is changed.
        other: what wins. It is copied, and its references lead into `config`.
    """
    copied = copy(other)
    roots: dict[int, Node] = {}
    # Roots first: a reference may start from a node that comes after it.
    _find_roots(config, copied, roots)
    _merge(config, copied, roots, find_line())


def _find_roots(config: Node, other: Node, roots: dict[int, Node]) -> None:
    """Enter the node that is changed for each node that is merged into it."""
    roots.setdefault(id(other), config)
    for name, value in get_state(other).keywords.items():
        current: Any = get_state(config).keywords.get(name)
        if _has_same_call(current, value):
            _find_roots(current, value, roots)
    aux = get_state(other).aux
    if aux is not None:
        _find_roots(config.aux, aux, roots)


def _merge(config: Node, other: Node, roots: dict[int, Node], source: str) -> None:
    for name, value in get_state(other).keywords.items():
        current: Any = get_state(config).keywords.get(name)
        if _has_same_call(current, value):
            _merge(current, value, roots, source)
        else:
            set_value(config, name, _redirect(value, roots), source)
    for index, value in enumerate(get_state(other).positional):
        set_value(config, index, _redirect(value, roots), source)
    aux = get_state(other).aux
    if aux is not None:
        _merge(config.aux, aux, roots, source)


def _has_same_call(first: Any, second: Any) -> bool:
    if not isinstance(first, Node) or not isinstance(second, Node):
        return False
    states = get_state(first), get_state(second)
    return states[0].target == states[1].target and states[0].is_partial == states[1].is_partial


def _redirect(value: Any, roots: dict[int, Node]) -> Any:
    """Let references below a value start from the nodes that took the place of theirs."""
    if isinstance(value, Reference):
        root, path = get_reference(value)
        return Reference(roots.get(id(root), root), path)
    if isinstance(value, Expression):
        symbol, operands = get_expression(value)
        return Expression(symbol, *(_redirect(operand, roots) for operand in operands))
    if isinstance(value, list | tuple):
        return type(value)(_redirect(item, roots) for item in value)
    if isinstance(value, dict):
        return {key: _redirect(item, roots) for key, item in value.items()}
    if not isinstance(value, Node):
        return value
    if id(value) not in roots:
        roots[id(value)] = value
        state = get_state(value)
        state.positional = [_redirect(item, roots) for item in state.positional]
        state.keywords = {name: _redirect(item, roots) for name, item in state.keywords.items()}
        if state.aux is not None:
            _redirect(state.aux, roots)
    return roots[id(value)]


def diff(first: Any, second: Any) -> dict[str, tuple[str | None, str | None]]:
    """Return what differs between two configurations, by path.

    Args:
        first: a configuration.
        second: another.

    Returns:
        For each path the two values as text; None where there is none.
    """
    old = _list_leaves(to_plain(first))
    new = _list_leaves(to_plain(second))
    paths = dict.fromkeys([*old, *new])
    return {
        path: (old.get(path), new.get(path)) for path in paths if old.get(path) != new.get(path)
    }


def _list_leaves(form: Any) -> dict[str, str]:
    """Return the text of each leaf of a form that `to_plain` made, by path."""
    places: dict[int, str] = {}
    _find_places(form, (), places)
    return dict(_flatten(_name_shared(form, places), ()))


def _find_places(form: Any, path: tuple[Any, ...], places: dict[int, str]) -> None:
    """Enter the first path of each node that is used twice, by its number."""
    if isinstance(form, dict) and "$id" in form:
        places[form["$id"]] = format_path(path)
    for key, child in iter_children(form):
        if key in ("$args", "$tuple"):
            _find_places(child, path, places)
        else:
            _find_places(child, (*path, "aux" if key == "$aux" else key), places)


def _name_shared(form: Any, places: dict[int, str]) -> Any:
    """Return a form with paths in the place of numbers, which change with those of other nodes."""
    if isinstance(form, list):
        return [_name_shared(item, places) for item in form]
    if not isinstance(form, dict):
        return form
    if "$same" in form:
        return {"$same": places[form["$same"]]}
    return {key: _name_shared(item, places) for key, item in form.items() if key != "$id"}


def _flatten(form: Any, path: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    kind = next((key for key in form if key.startswith("$")), "") if isinstance(form, dict) else ""
    place = format_path(path) or "(root)"
    if kind in ("$call", "$partial"):
        yield place, f"{form[kind]}{'' if kind == '$call' else ' (partial)'}"
    elif kind == "$section":
        yield place, "(section)"
    if isinstance(form, dict) and form and kind in ("", "$section", "$call", "$partial"):
        for key, value in form.items():
            if key == "$aux":
                yield from _flatten(value, (*path, "aux"))
            elif key == "$args":
                yield from _flatten(value, path)
            elif not key.startswith("$"):
                yield from _flatten(value, (*path, key))
    elif isinstance(form, list) and form:
        for index, value in enumerate(form):
            yield from _flatten(value, (*path, index))
    else:
        yield place, _format_leaf(form)


def _format_leaf(form: Any) -> str:
    if isinstance(form, dict) and "$ref" in form:
        return f"cfg.ref.{format_path((*form.get('from', ()), *form['$ref']))}"
    if isinstance(form, dict) and "$same" in form:
        return f"that of {form['$same']}"
    return json.dumps(form, ensure_ascii=False)


def iter_values(config: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield path, value and source of each leaf, and of each call its function: what `--print`
    shows. A reference is yielded as it is, and a node that was yielded before as that node."""
    yield from _iter_values(config, (), set())


def _iter_values(node: Node, path: tuple[Any, ...], visited: set[int]) -> Iterator[Any]:
    visited.add(id(node))
    for key, child in iter_children(node):
        source = get_state(node).sources.get(key, "")
        place = (*path, key)
        if isinstance(child, Node) and id(child) not in visited:
            yield from _iter_node(child, place, visited)
        elif isinstance(child, list | dict) and child:
            yield from _iter_items(child, place, visited, source)
        else:
            yield format_path(place), child, source


def _iter_items(items: Any, path: tuple[Any, ...], visited: set[int], source: str) -> Iterator[Any]:
    for key, item in iter_children(items):
        place = (*path, key)
        if isinstance(item, Node) and id(item) not in visited:
            yield from _iter_node(item, place, visited)
        else:
            yield format_path(place), item, source


def _iter_node(node: Node, path: tuple[Any, ...], visited: set[int]) -> Iterator[Any]:
    state = get_state(node)
    if state.target is not None:
        yield format_path(path), state.target, state.source
    yield from _iter_values(node, path, visited)


def iter_nodes_by_path(config: Any) -> Iterator[tuple[str, Node]]:
    """Yield each node of a configuration once, with the first of its paths."""
    yield from _iter_nodes_by_path(config, (), set())


def _iter_nodes_by_path(
    value: Any, path: tuple[Any, ...], visited: set[int]
) -> Iterator[tuple[str, Node]]:
    if isinstance(value, Node):
        if id(value) in visited:
            return
        visited.add(id(value))
        yield format_path(path) or "(root)", value
    for key, child in iter_children(value):
        yield from _iter_nodes_by_path(child, (*path, key), visited)


OPERATIONS["is_equal"] = is_equal
OPERATIONS["copy"] = _copy_all
