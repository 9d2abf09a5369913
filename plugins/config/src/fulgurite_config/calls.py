"""`L`, which makes nodes, and what is imported for the names in them."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

from fulgurite_config.errors import ConfigError, NotAllowedError
from fulgurite_config.expressions import APPLY, get_expression, set_function
from fulgurite_config.names import Name, get_name, load
from fulgurite_config.nodes import (
    Node,
    State,
    describe,
    find_line,
    find_position,
    get_signature,
    get_state,
    iter_expressions,
    iter_places,
    note_place,
    set_value,
)
from fulgurite_config.permissions import check_allowed

P = ParamSpec("P")
T = TypeVar("T")


class _Maker:
    """What `L` is: typed as the call that it stands for, so that editors complete arguments and
    type checkers check them."""

    @overload
    def __call__(self, /, **values: Any) -> Any: ...
    @overload
    def __call__(self, target: str, /, *args: Any, **kwargs: Any) -> Any: ...
    @overload
    def __call__(self, target: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def __call__(self, target: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        return make_node(target, args, kwargs, is_partial=False)

    def partial(self, target: Callable[..., T] | str, /, *args: Any, **kwargs: Any) -> Any:
        """Return a node that resolves to `functools.partial(target, ...)`.

        Args:
            target: a function or class, or its name `module:name`.
            args: its first arguments.
            kwargs: its arguments by name.
        """
        return make_node(target, args, kwargs, is_partial=True)


L = _Maker()
"""`L(Classifier, width=128)` is a call to make later, `L(width=128)` a section of values."""


def make_node(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_partial: bool
) -> Node:
    """Return a node, and check the names of its arguments.

    Args:
        target: a callable, a name `module:name`, or None for a section.
        args: arguments by position.
        kwargs: arguments by name.
        is_partial: whether the node resolves to a partial.
    """
    line = find_line()
    target = Name(target, is_trusted=True) if isinstance(target, str) else target
    if target is not None:
        get_name(target)
    if target is not None and not isinstance(target, Name) and not callable(target):
        raise ConfigError(f"{target!r} cannot be called: L takes a function or a class first")
    node = Node(State(target, is_partial=is_partial, source=line))
    names = _get_positional_names(target, len(args))
    for index, value in enumerate(args):
        set_value(node, names[index] if names else index, value, line)
    for name, value in kwargs.items():
        if name in get_state(node).keywords or find_position(node, name) != name:
            raise ConfigError(f"{describe(node)} gets {name!r} twice, by position and by name")
        set_value(node, name, value, line)
    return node


def load_targets(config: Any, allow: Sequence[str] = ()) -> None:
    """Import the functions and classes that a configuration names, in place: overrides then know
    their arguments, with types and defaults.

    Args:
        config: the configuration.
        allow: the names `module:name` that may be imported though they were read from JSON, and
            packages and modules of which all names may be.

    Raises:
        NotAllowedError: it names others, all of which the error says.
        ConfigError: there is no such module or name.
    """
    check_allowed(config, allow)
    not_allowed: dict[str, str] = {}
    for path, node in iter_places(config, (), set()):
        state = get_state(node)
        if not isinstance(state.target, Name):
            continue
        try:
            state.target = load(state.target, allow)
        except NotAllowedError as error:
            not_allowed |= error.modules
            continue
        except Exception as error:
            note_place(error, node, path)
            raise
        _name_positional(node)
    for expression in iter_expressions(config, set()):
        symbol, (function, *_) = get_expression(expression)
        if symbol != APPLY or not isinstance(function, Name):
            continue
        try:
            set_function(expression, load(function, allow))
        except NotAllowedError as error:
            not_allowed |= error.modules
    if not_allowed:
        raise NotAllowedError(not_allowed, allow)


def _name_positional(node: Node) -> None:
    """Set arguments by position by their names, now that those are known."""
    state = get_state(node)
    names = _get_positional_names(state.target, len(state.positional))
    if not names:
        return
    named = dict(zip(names, state.positional, strict=False))
    for index, name in enumerate(named):
        if name in state.keywords:
            raise ConfigError(f"{describe(node)} gets {name!r} twice, by position and by name")
        state.sources[name] = state.sources.pop(index, state.source)
    state.keywords = {**named, **state.keywords}
    state.positional = []


def _get_positional_names(target: Any, count: int) -> list[str]:
    """Return names for positional arguments, or none if some of them have no name."""
    signature = get_signature(target)
    if signature is None:
        return []
    named = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        return []
    if count > len(named) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise ConfigError(f"{get_name(target)} takes {len(named)} arguments by position")
    return named if count <= len(named) else []
