"""Whether two configurations are equal."""

import json
from typing import Any

from fulgurite_config.codec import to_plain
from fulgurite_config.errors import ConfigError
from fulgurite_config.expressions import Expression, Reference, get_expression, get_reference
from fulgurite_config.names import get_name
from fulgurite_config.nodes import Node, get_state


def is_equal(first: Any, second: Any) -> bool:
    """Return whether two configurations have the same calls, values, references and sharing.

    `1`, `1.0` and `True` differ; the order in which arguments were set does not matter. References
    that lead out of the configurations are equal if they lead to the same, or to equal ones.

    Args:
        first: a configuration.
        second: another.
    """
    comparison = _Comparison()
    return comparison.compare(first, second) and comparison.has_equal_roots()


class _Comparison:
    def __init__(self) -> None:
        self._pairs: dict[int, Node] = {}
        self._paired: set[int] = set()
        self._roots: list[tuple[Any, Any]] = []

    def has_equal_roots(self) -> bool:
        """Return whether the references that were compared start from nodes that correspond."""
        for first, second in self._roots:
            if id(first) in self._pairs or id(second) in self._paired:
                if self._pairs.get(id(first)) is not second:
                    return False
            elif first is not second and not _has_equal_text(first, second):
                return False
        return True

    def compare(self, first: Any, second: Any) -> bool:
        if isinstance(first, Node) and isinstance(second, Node):
            return self._compare_nodes(first, second)
        if isinstance(first, Reference) and isinstance(second, Reference):
            roots, paths = zip(get_reference(first), get_reference(second), strict=True)
            self._roots.append(roots)
            return self._compare_items([*paths[0]], [*paths[1]])
        if isinstance(first, Expression) and isinstance(second, Expression):
            return self.compare(get_expression(first), get_expression(second))
        if isinstance(first, dict) and isinstance(second, dict):
            return self._compare_values(first, second)
        for kind in (list, tuple):
            if isinstance(first, kind) and isinstance(second, kind):
                return self._compare_items(first, second)
        is_leaf = not isinstance(first, Node | Reference | Expression | dict | list | tuple)
        return is_leaf and _has_equal_text(first, second)

    def _compare_nodes(self, first: Node, second: Node) -> bool:
        if id(first) in self._pairs or id(second) in self._paired:
            return self._pairs.get(id(first)) is second
        self._pairs[id(first)] = second
        self._paired.add(id(second))
        states = get_state(first), get_state(second)
        names = [None if state.target is None else get_name(state.target) for state in states]
        if names[0] != names[1] or states[0].is_partial != states[1].is_partial:
            return False
        aux = [{} if state.aux is None else get_state(state.aux).keywords for state in states]
        if any(aux) and not self.compare(states[0].aux, states[1].aux):
            return False
        positional = self._compare_items(states[0].positional, states[1].positional)
        return positional and self._compare_values(states[0].keywords, states[1].keywords)

    def _compare_values(self, first: dict[Any, Any], second: dict[Any, Any]) -> bool:
        others = {_get_text(key): value for key, value in second.items()}
        return len(first) == len(others) and all(
            _get_text(key) in others and self.compare(value, others[_get_text(key)])
            for key, value in first.items()
        )

    def _compare_items(self, first: Any, second: Any) -> bool:
        return len(first) == len(second) and all(map(self.compare, first, second))


def _has_equal_text(first: Any, second: Any) -> bool:
    try:
        return _get_text(first) == _get_text(second)
    except ConfigError:  # what has no name is equal only to itself
        return first is second


def _get_text(value: Any) -> str:
    return json.dumps(to_plain(value))
