"""Which functions and classes a configuration from a file may name."""

import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal, get_args, get_origin

from fulgurite_config.errors import ConfigError, NotAllowedError
from fulgurite_config.expressions import Expression, Reference, get_expression
from fulgurite_config.names import Name, get_name, is_allowed
from fulgurite_config.nodes import (
    Node,
    get_state,
    is_constant,
    iter_children,
    iter_names,
    iter_nodes,
)
from fulgurite_config.overrides import get_annotation
from fulgurite_config.required import Required
from fulgurite_config.values import flatten_union


def check_allowed(config: Any, allow: Sequence[str]) -> None:
    """Raise a `NotAllowedError` if a configuration names what is not allowed. Nothing is imported.

    Args:
        config: the configuration.
        allow: names `module:name`, packages and modules.

    Raises:
        NotAllowedError: it names others, all of which the error says.
        ConfigError: a module of Python itself is allowed as a whole.
    """
    if isinstance(allow, str):
        raise ConfigError(
            f"allow is a list of names, packages and modules: write allow=[{allow!r}]"
        )
    for entry in allow:
        # Almost every one of these modules leads to a function that runs any program.
        if ":" not in entry and entry.partition(".")[0] in sys.stdlib_module_names:
            raise ConfigError(
                f"{entry!r} cannot be allowed as a whole, as it is a module of Python itself, by "
                "which a file could run anything: allow the full name of what is needed, as in "
                f"'{entry}:name'"
            )
    refused = {
        value.text: value.module
        for value in _iter_callables(config)
        if isinstance(value, Name) and not is_allowed(value, allow)
    }
    if refused:
        raise NotAllowedError(refused, allow)


def find_names(config: Any) -> list[str]:
    """Return the names `module:name` of what a program put into its configuration, and of what its
    arguments can be besides: the members of an Enum.

    Args:
        config: the configuration, whose targets are loaded.
    """
    names = {
        get_name(value)
        for value in _iter_callables(config)
        if not isinstance(value, Name) or value.is_trusted
    }
    return sorted(names | set(_iter_choices(config)))


def _iter_callables(config: Any) -> Iterator[Any]:
    """Yield the functions and classes in a configuration, or their names, also those in keys and
    expressions."""
    visited: set[int] = set()
    waiting = [config]
    while waiting:
        value = waiting.pop()
        children: list[Any] = []
        if isinstance(value, Node):
            if id(value) in visited:
                continue
            visited.add(id(value))
            if get_state(value).target is not None:
                yield get_state(value).target
            children = [child for _, child in iter_children(value)]
        elif isinstance(value, Expression):
            children = list(get_expression(value)[1])
        elif isinstance(value, dict):
            children = [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            children = list(value)
        elif not is_constant(value) and not isinstance(value, Reference | Required | PurePath):
            yield value
        waiting += reversed(children)


def _iter_choices(config: Any) -> Iterator[str]:
    """Yield the names of the members of each Enum that is the type of an argument, or of those in
    a `Literal`."""
    for node in iter_nodes(config, set()):
        for name in iter_names(node):
            for member in flatten_union(get_annotation(node, name)):
                choices: Any = get_args(member) if get_origin(member) is Literal else ()
                if isinstance(member, type) and issubclass(member, Enum):
                    choices = member
                yield from (get_name(choice) for choice in choices if isinstance(choice, Enum))
