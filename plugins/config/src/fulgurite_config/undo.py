"""Changes of a configuration that are all made, or none of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fulgurite_config.expressions import Expression, Reference, get_expression, get_reference
from fulgurite_config.nodes import Node, copy_state, get_state, iter_children, set_state


@contextmanager
def undo_on_error(config: Any) -> Iterator[None]:
    """Give a configuration back what it held if what is done to it fails."""
    saved: dict[int, tuple[Any, Any]] = {}
    _save(config, saved)
    try:
        yield
    except BaseException:  # Ctrl-C as well
        for value, before in saved.values():
            _restore(value, before)
        raise


def _save(value: Any, saved: dict[int, tuple[Any, Any]]) -> None:
    """Enter all nodes, lists and dictionaries that can be reached, each with what it holds."""
    if isinstance(value, Reference):
        _save(get_reference(value)[0], saved)
    elif isinstance(value, Expression):
        for operand in get_expression(value)[1]:
            _save(operand, saved)
    elif isinstance(value, Node | list | dict):
        if id(value) in saved:
            return
        content = copy_state(get_state(value)) if isinstance(value, Node) else value.copy()
        saved[id(value)] = (value, content)
    for _, child in iter_children(value):
        _save(child, saved)


def _restore(value: Any, before: Any) -> None:
    if isinstance(value, Node):
        set_state(value, before)
    elif isinstance(value, list):
        value[:] = before
    else:
        value.clear()
        value.update(before)
