"""Resolving: the calls of a configuration are made."""

from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from fulgurite_config.errors import ConfigError, NotAllowedError, suggest
from fulgurite_config.evaluation import Evaluation, say_where
from fulgurite_config.expressions import Lazy, format_expression, format_path
from fulgurite_config.limits import check_result
from fulgurite_config.names import SAFE, Name, get_name, load
from fulgurite_config.nodes import (
    Node,
    State,
    accepts,
    get_signature,
    get_state,
    iter_children,
    iter_names,
    note_place,
)
from fulgurite_config.permissions import check_allowed
from fulgurite_config.required import Required

Path = tuple[str | int, ...]
T = TypeVar("T")


def resolve(config: T, allow: Sequence[str] = ()) -> T:
    """Make the calls of a configuration, and return what it stands for.

    A node that is used at several places is called once. A section becomes a
    `types.SimpleNamespace`. The configuration stays as it is.

    Args:
        config: a node, or a value that a node may hold.
        allow: the names `module:name` that may be imported though they were read from JSON, and
            packages and modules of which all names may be.

    Raises:
        ConfigError: a required value is missing, a reference leads nowhere or in a circle, a name
            is not allowed or an argument does not exist. No constructor was called then.
    """
    check_allowed(config, allow)
    return _Resolution(allow).run(config)


class _Resolution:
    def __init__(self, allow: Sequence[str]) -> None:
        self._allow = allow
        self._evaluation = Evaluation(allow)
        self._targets: dict[int, Any] = {}
        self._results: dict[int, Any] = {}
        self._missing: list[str] = []
        self._not_allowed: dict[str, str] = {}

    def run(self, config: Any) -> Any:
        try:
            self._check(config, (), frozenset())
            if self._not_allowed:
                raise NotAllowedError(self._not_allowed, self._allow)
            if self._missing:
                raise ConfigError(f"values are missing: {'; '.join(self._missing)}")
            return self._build(config, ())
        except RecursionError:
            raise ConfigError("the configuration is nested too deeply to be resolved") from None

    def _check(self, value: Any, path: Path, above: frozenset[int]) -> None:
        """Find every mistake that can be found before a constructor is called."""
        self._evaluation.budget.spend()
        written = value
        if isinstance(written, Lazy):
            with say_where(format_path(path) or "the root of the configuration"):
                value = self._evaluation.compute(written)
        if isinstance(value, Required):
            cause = f" = {format_expression(written)}" if isinstance(written, Lazy) else ""
            about = f" ({value.description})" if value.description else ""
            self._missing.append(f"{format_path(path)}{cause}{about}")
        if id(value) in above:
            raise ConfigError(f"{format_path(path)} contains itself")
        if isinstance(value, Name):
            self._load(value)
        if isinstance(value, Node):
            if id(value) in self._targets:
                return
            self._check_node(value, path)
        for key, child in iter_children(value):
            if not (key == "aux" and isinstance(value, Node)):
                self._check(child, (*path, key), above | {id(value)})

    def _check_node(self, node: Node, path: Path) -> None:
        state = get_state(node)
        target = self._load_target(node, path)
        if isinstance(target, Name):  # it is not allowed, which is said of all together
            return
        if target is not None and not callable(target):
            raise ConfigError(f"{format_path(path)}: {get_name(target)} cannot be called")
        self._targets[id(node)] = target
        loaded = Node(state)
        if isinstance(state.target, Name):
            loaded = Node(State(target, state.positional, state.keywords, state.is_partial))
        for name in state.keywords:
            if not accepts(loaded, name):
                raise ConfigError(
                    f"{format_path((*path, name))}: {get_name(target)} has no argument {name!r}. "
                    f"{suggest(name, (other for other in iter_names(loaded) if other != name))}"
                )
        for name in _iter_missing(loaded):
            place = format_path((*path, name))
            self._missing.append(f"{place} (an argument of {get_name(target)})")

    def _load_target(self, node: Node, path: Path) -> Any:
        target = get_state(node).target
        if not isinstance(target, Name):
            return target
        try:
            return self._load(target)
        except Exception as error:
            note_place(error, node, path)
            raise

    def _load(self, name: Name) -> Any:
        """Return what a name stands for, or itself if that is not allowed."""
        try:
            return load(name, self._allow)
        except NotAllowedError as error:
            self._not_allowed |= error.modules
            return name

    def _build(self, value: Any, path: Path) -> Any:
        if isinstance(value, Lazy):
            value = self._evaluation.compute(value)
        if isinstance(value, Node):
            return self._call(value, path)
        if isinstance(value, Name):
            return load(value, self._allow)
        if isinstance(value, list | tuple):
            return type(value)(self._build(item, (*path, i)) for i, item in enumerate(value))
        if isinstance(value, dict):
            return {
                self._build(key, path): self._build(item, (*path, key))
                for key, item in value.items()
            }
        return value

    def _call(self, node: Node, path: Path) -> Any:
        if id(node) in self._results:
            return self._results[id(node)]
        state = get_state(node)
        args = [self._build(value, (*path, i)) for i, value in enumerate(state.positional)]
        kwargs = {name: self._build(value, (*path, name)) for name, value in state.keywords.items()}
        target = self._targets[id(node)]
        if target is None:
            result: Any = SimpleNamespace(**kwargs)
        elif state.is_partial:
            result = partial(target, *args, **kwargs)
        elif get_name(target) in SAFE or target is str.format:
            result = self._call_safely(target, args, kwargs, path)
        else:
            try:
                result = target(*args, **kwargs)
            except Exception as error:
                note_place(error, node, path)
                raise
        self._results[id(node)] = result
        return result

    def _call_safely(self, target: Any, args: list[Any], kwargs: dict[str, Any], path: Path) -> Any:
        """Call a function of Python's own, with a bound for its work and an error that says where.

        Args:
            target: what is called.
            args: its arguments by position.
            kwargs: its arguments by name.
            path: where the call is.
        """
        values = [*args, *kwargs.values()]
        self._evaluation.budget.spend_on(values)
        self._evaluation.budget.spend_on_call(target, values)
        try:
            result = target(*args, **kwargs)
            check_result(result)
        except Exception as error:
            place = format_path(path) or "the root of the configuration"
            raise ConfigError(
                f"{place}: {get_name(target)} fails: {type(error).__name__}: {error}"
            ) from error
        return result


def _iter_missing(node: Node) -> Iterator[str]:
    """Yield the arguments without a default that a node does not set."""
    state = get_state(node)
    signature = get_signature(state.target)
    if signature is None or state.is_partial:
        return
    for index, parameter in enumerate(signature.parameters.values()):
        is_many = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_many or parameter.default is not parameter.empty:
            continue
        has_position = parameter.kind is not parameter.KEYWORD_ONLY
        if has_position and index < len(state.positional):
            continue
        has_name = parameter.kind is not parameter.POSITIONAL_ONLY
        if not has_name or parameter.name not in state.keywords:
            yield parameter.name
