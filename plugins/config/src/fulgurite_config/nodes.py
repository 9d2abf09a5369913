"""Nodes: calls to make later, and sections of values."""

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache, partial
from pathlib import PurePath
from typing import Any, cast

from fulgurite_config.errors import ConfigError, suggest
from fulgurite_config.expressions import (
    APPLY,
    Expression,
    Lazy,
    Reference,
    format_path,
    get_expression,
)
from fulgurite_config.names import Name, get_name
from fulgurite_config.required import Required
from fulgurite_config.views import DictView, ListView, read, show_result, unwrap

FOLDER = os.path.dirname(__file__)
EMPTY = inspect.Parameter.empty
RESERVED = ("ref", "aux")
OPERATIONS: dict[str, Callable[..., Any]] = {}
"""What a node does by functions of the modules above, which enter them here: `is_equal`, `copy`
and `describe`."""


@dataclass
class State:
    """What a node holds. It is kept out of the attributes, which are the arguments.

    Attributes:
        target: what is called, its name where it is not imported, or None in a section.
        positional: arguments by position that have no name.
        keywords: arguments by name, or the values of a section.
        is_partial: whether the node resolves to a `functools.partial`.
        aux: values that are not handed to the target.
        sources: file and line, or override, that set each argument.
        source: file and line that made the node.
    """

    target: Any
    positional: list[Any] = field(default_factory=list)
    keywords: dict[str, Any] = field(default_factory=dict)
    is_partial: bool = False
    aux: "Node | None" = None
    sources: dict[str | int, str] = field(default_factory=dict)
    source: str = ""


class Node:
    """A call to make later, or a section. Its attributes are the arguments; `L` makes it.

    Example:
        from fulgurite_config import L, resolve

        config = L(width=4)
        config.size = L(dict, rows=config.ref.width, columns=config.ref.width * 2)
        config.width = 8
        assert config.size.columns == 16
        assert resolve(config.size) == {"rows": 8, "columns": 16}
    """

    __slots__ = ("_config_state",)
    __hash__ = None  # pyright: ignore[reportAssignmentType]
    _config_state: State

    def __init__(self, state: State) -> None:
        set_state(self, state)

    def __config_get__(self, key: str | int) -> Any:
        """Return an argument as it was set, a reference as a reference."""
        state = self._config_state
        key = find_position(self, key)
        if isinstance(key, int):
            return state.positional[key]
        if key in state.keywords:
            return state.keywords[key]
        if key == "aux":
            return self.aux
        default = get_default(self, key)
        if default is not EMPTY:
            return default
        if key in iter_names(self):
            raise AttributeError(f"the argument {key!r} of {describe(self)} is not set")
        raise AttributeError(
            f"{describe(self)} has no value {key!r}. {suggest(key, iter_names(self))}"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._config_read(name)

    def __getitem__(self, key: str | int) -> Any:
        try:
            return self._config_read(key)
        except AttributeError as error:
            raise KeyError(str(error)) from None

    def _config_read(self, key: str | int) -> Any:
        value = self.__config_get__(key)

        def replace(result: Any) -> None:
            set_value(self, key, result, find_line())

        if is_default(self, key):
            return show_result(value, partial(replace, value))
        return read(value, replace)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in RESERVED:
            is_argument = get_state(self).target is not None and accepts(self, name)
            how = "choose another name; values for references are set by cfg.aux.name = ..."
            if is_argument:
                how = f"write cfg[{name!r}] = ... for the argument of {describe(self)}"
            raise ConfigError(f"cfg.{name} means something else: {how}")
        set_value(self, name, value, find_line())

    def __setitem__(self, key: str | int, value: Any) -> None:
        set_value(self, key, value, find_line())

    def __delattr__(self, name: str) -> None:
        if name not in self._config_state.keywords:
            raise AttributeError(
                f"{describe(self)}.{name} is not set. {suggest(name, self._config_state.keywords)}"
            )
        del self._config_state.keywords[name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and OPERATIONS["is_equal"](self, other)

    def __repr__(self) -> str:
        return OPERATIONS["describe"](self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Node":
        return OPERATIONS["copy"](self, memo)

    def __getstate__(self) -> State:
        return copy_state(self._config_state)

    def __setstate__(self, state: State) -> None:
        set_state(self, state)

    def __dir__(self) -> list[str]:
        return [*iter_names(self), *RESERVED]

    @property
    def ref(self) -> Any:
        """References to values below this node: `cfg.ref.model.width`."""
        return Reference(self)

    @property
    def aux(self) -> Any:
        """A section of free values beside the arguments, for references."""
        state = self._config_state
        if state.aux is None:
            state.aux = Node(State(None, source=find_line()))
        return state.aux


def get_state(node: Any) -> State:
    """Return what a node holds."""
    return node._config_state


def iter_nodes(value: Any, visited: set[int]) -> Iterator[Node]:
    """Yield each node of a configuration once."""
    for _, node in iter_places(value, (), visited):
        yield node


def iter_places(
    value: Any, path: tuple[Any, ...], visited: set[int]
) -> Iterator[tuple[tuple[Any, ...], Node]]:
    """Yield each node of a configuration once, with its first path.

    Args:
        value: the configuration, or a part of it.
        path: of that part.
        visited: the ids of nodes that are left out; it gets those of the others.
    """
    if isinstance(value, Node):
        if id(value) in visited:
            return
        visited.add(id(value))
        yield path, value
    for key, child in iter_children(value):
        yield from iter_places(child, (*path, key), visited)


def note_place(error: Exception, node: Node, path: tuple[Any, ...]) -> None:
    """Add a note to an error: which call it is of, where that is, and the line that wrote it.

    Args:
        error: the error.
        node: the call.
        path: of the call.
    """
    state = get_state(node)
    error.add_note(
        f"at {format_path(path) or 'the root'} of the configuration: {get_name(state.target)}, "
        f"written in {state.source}"
    )


def get_signature(target: Any) -> inspect.Signature | None:
    """Return the signature of a target, or None if it has none that can be read."""
    if target is None or isinstance(target, Name):
        return None
    try:
        return _read_signature(target)
    except TypeError:  # it has no hash
        return _read_signature.__wrapped__(target)


@lru_cache(maxsize=4096)  # it is asked for with each argument of a call
def _read_signature(target: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        return None


def set_state(node: Node, state: State) -> None:
    """Let a node hold something else."""
    object.__setattr__(node, "_config_state", state)


def copy_state(state: State) -> State:
    """Return what holds the same arguments, and can be changed on its own."""
    return replace(
        state,
        positional=state.positional.copy(),
        keywords=state.keywords.copy(),
        sources=state.sources.copy(),
    )


def get_default(node: Node, name: str) -> Any:
    """Return the default of an argument, or `inspect.Parameter.empty`. Lists and dictionaries are
    copied: the function keeps its own.

    Args:
        node: the node.
        name: of the argument.
    """
    signature = get_signature(get_state(node).target)
    parameter = signature.parameters.get(name) if signature else None
    default = EMPTY if parameter is None else parameter.default
    return deepcopy(default) if isinstance(default, list | dict) else default


def is_default(node: Node, key: str | int) -> bool:
    """Return whether a value is the default of its argument, and was not set.

    Args:
        node: the node.
        key: of the value, which there is.
    """
    place = find_position(node, key)
    return isinstance(place, str) and place != "aux" and place not in get_state(node).keywords


def find_position(node: Node, key: str | int) -> str | int:
    """Return the index of an argument that has a name and was given by position, which is so where
    others without a name follow; any other key as it is."""
    state = get_state(node)
    signature = get_signature(state.target) if state.positional else None
    if isinstance(key, int) or signature is None or key not in signature.parameters:
        return key
    if signature.parameters[key].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return key
    index = list(signature.parameters).index(key)
    return index if index < len(state.positional) else key


def iter_names(node: Node) -> Iterator[str]:
    """Yield the names that a node has or may have."""
    yield from dict.fromkeys([*get_state(node).keywords, *_list_parameters(node)])


def has_name(node: Node, name: str) -> bool:
    """Return whether a node has or may have a name."""
    return name in get_state(node).keywords or name in _list_parameters(node)


def _list_parameters(node: Node) -> list[str]:
    """Return the names of arguments in the signature of what a node calls."""
    signature = get_signature(get_state(node).target)
    return [
        parameter.name
        for parameter in (signature.parameters.values() if signature else ())
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]


def is_loaded(node: Node) -> bool:
    """Return whether the arguments of what a node calls are known: it is imported, or a section."""
    return not isinstance(get_state(node).target, Name)


def accepts(node: Node, name: str) -> bool:
    """Return whether a node may have an argument of this name."""
    state = get_state(node)
    signature = get_signature(state.target)
    if signature is None:
        return True
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds or name in _list_parameters(node)


def set_value(node: Node, key: str | int, value: Any, source: str) -> None:
    """Set an argument by its name or position.

    Args:
        node: the node.
        key: the name, or the index.
        value: the value.
        source: what sets it, for messages.

    Raises:
        ConfigError: the target has no such argument, or the value cannot be part of a
            configuration.
        IndexError: there is no such position.
    """
    state = get_state(node)
    value = unwrap(value)
    place = f"{describe(node)}[{key}]" if isinstance(key, int) else f"{describe(node)}.{key}"
    try:
        check_value(value, place)
    except RecursionError:
        raise ConfigError(f"{place} cannot be set: it is nested too deeply") from None
    key = find_position(node, key)
    if isinstance(key, str):
        if key in RESERVED and state.target is None:
            raise ConfigError(
                f"{key!r} cannot be the name of a value: cfg.{key} means something else"
            )
        if not accepts(node, key):
            raise ConfigError(
                f"{describe(node)} has no argument {key!r}. {suggest(key, iter_names(node))}"
            )
        state.keywords[key] = value
    elif key == len(state.positional):
        state.positional.append(value)
        key = len(state.positional) - 1
    else:
        state.positional[key] = value
        key %= len(state.positional)
    state.sources[key] = source


def check_value(value: Any, place: str) -> None:
    """Raise a `ConfigError` if a value cannot be part of a configuration.

    Args:
        value: the value.
        place: where it would be, for the message.
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        raise ConfigError(
            f"{place} cannot be set: {type(value).__name__} is a named tuple, which is made by a "
            f"call: write L({type(value).__name__}, ...), or tuple(...) around it"
        )
    if isinstance(value, ListView | DictView):
        raise ConfigError(
            f"{place} cannot be set: it holds {value!r} as read from a configuration. Refer to it, "
            "or write list(...) or dict(...) around it"
        )
    if isinstance(value, list | tuple | dict | Expression):
        for part in _list_parts(value):
            check_value(part, place)
    elif not isinstance(value, Node | Lazy | Required | PurePath | bool | int | float | str | None):
        try:
            get_name(value)
        except ConfigError as error:
            raise ConfigError(f"{place} cannot be set: {error}") from None


def _list_parts(value: Any) -> Sequence[Any]:
    """Return what a list, tuple, dictionary or expression holds."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if not isinstance(value, Expression):
        return value
    symbol, operands = get_expression(value)
    return operands[1:] if symbol == APPLY else operands


def describe(node: Node) -> str:
    """Return what a node stands for, in messages."""
    target = get_state(node).target
    return "this section" if target is None else get_name(target)


def find_line() -> str:
    """Return `file:line` of the caller outside this package."""
    frame = sys._getframe(1)
    # What a view of a list inherits is written in a frozen module of Python.
    while frame is not None and frame.f_code.co_filename.startswith((FOLDER, "<frozen")):
        frame = cast(Any, frame.f_back)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def iter_children(value: Any) -> Iterator[tuple[str | int, Any]]:
    """Yield the keys and raw values directly below a node, dictionary, list or tuple."""
    if isinstance(value, Node):
        state = get_state(value)
        yield from enumerate(state.positional)
        yield from state.keywords.items()
        if state.aux is not None and get_state(state.aux).keywords:
            yield "aux", state.aux
    elif isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def iter_expressions(value: Any, visited: set[int]) -> Iterator[Expression]:
    """Yield each expression of a configuration, those in others as well."""
    if id(value) in visited:
        return
    if isinstance(value, Node | Expression):
        visited.add(id(value))
    if isinstance(value, Expression):
        yield value
        for operand in get_expression(value)[1]:
            yield from iter_expressions(operand, visited)
    for _, child in iter_children(value):
        yield from iter_expressions(child, visited)


def is_constant(value: Any) -> bool:
    """Return whether a value is a leaf that is not a name of a function or class."""
    return isinstance(value, bool | int | float | str | None) and not isinstance(value, Enum)
