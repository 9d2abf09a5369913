"""What `--print` and `--help` show of a program's arguments and of its configuration."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

from fulgurite.plugins import REDACTED, redact_value
from fulgurite_config import (
    JSON_SOURCE,
    Budget,
    Name,
    Node,
    Required,
    ValueReader,
    format_item,
    format_type,
    format_value,
    get_public_name,
    has_lazy,
    iter_nodes_by_path,
    iter_values,
    say_where,
)

from fulgurite_cli.values import get_parameters, read_type_hints, to_plain


def format_config(config: Any, start_source: str, allow: Sequence[str] = ()) -> str:
    """Return a line for each value of a configuration: path, value, and where it was set.

    Args:
        config: the configuration.
        start_source: what to say of values that were read from a file.
        allow: what functions in expressions may be of.
    """
    rows = []
    paths = {id(node): path for path, node in iter_nodes_by_path(config)}
    evaluation = ValueReader(allow)
    for path, value, place in iter_values(config):
        source = start_source if place == JSON_SOURCE else place
        shown = _format_value(path, value, paths, evaluation.budget)
        if has_lazy(value):
            with say_where(path):
                resolved = evaluation.expand(value)
            source = f"{shown}, {source}"
            shown = _format_value(path, resolved, paths, evaluation.budget)
        rows.append((f"{path} = {shown}", source))
    return _align(rows)


def format_arguments(rows: Sequence[tuple[str, Any, str]]) -> str:
    """Return a line for each argument: name, value, and where it comes from."""
    return _align([(_format_argument(name, value), source) for name, value, source in rows])


def list_arguments(experiment: Callable[..., Any]) -> list[str]:
    """Return a line for each argument of an experiment, or for each value of the configuration
    that it returns."""
    parameters = get_parameters(experiment)
    if not parameters and not _returns_experiment(experiment):
        config = experiment()
        return [f"  {line}" for line in _iter_config_lines(config)]
    return [
        f"  {_format_argument(name, parameter.default)}  ({format_type(parameter.type)})"
        for name, parameter in parameters.items()
    ]


def _format_argument(name: str, value: Any) -> str:
    """Return an argument as the command line takes it; `...` for one without a value."""
    shown = "..." if value is inspect.Parameter.empty else format_value(_redact(name, value))
    return f"{name}={shown}"


def _returns_experiment(experiment: Callable[..., Any]) -> bool:
    """Return whether an annotation says that a function returns an `Experiment`, so that calling
    it would load its data."""
    written = inspect.signature(experiment).return_annotation
    annotation = read_type_hints(experiment).get("return", written)
    return getattr(annotation, "__name__", annotation) == "Experiment"


def _iter_config_lines(config: Any) -> Iterator[str]:
    if isinstance(config, Node):
        budget = Budget()
        for path, value, _ in iter_values(config):
            about = f"  ({value.description})" if isinstance(value, Required) else ""
            yield f"{path}={_format_value(path, value, {}, budget)}{about}"


def _format_value(path: str, value: Any, paths: Mapping[int, str], budget: Budget) -> str:
    """Return a value as text.

    Args:
        path: of the value.
        value: the value.
        paths: the first path of each node, by its identity.
        budget: counts what is shown.
    """
    if isinstance(value, Node):
        return f"(that of {paths.get(id(value), 'a value above')})"
    if isinstance(value, Required):
        return "..."
    if isinstance(value, Name) or inspect.isroutine(value) or isinstance(value, type):
        return get_public_name(value)
    budget.spend_on(value)
    return format_item(_redact(path, value))


def _redact(path: str, value: Any) -> Any:
    """Return a value without secrets, and otherwise as it is: a tuple, or a member of an Enum, is
    written differently from the list or the text that JSON has in its place."""
    name = path.rpartition(".")[2]
    redacted = redact_value(to_plain(value), name)
    if isinstance(redacted, str) and redacted == REDACTED:  # a reference would compare itself
        return REDACTED
    if isinstance(value, list | tuple):
        return type(value)(_redact("", item) for item in value)
    if isinstance(value, dict):
        return {key: _redact(str(key), item) for key, item in value.items()}
    if isinstance(value, Enum | PurePath):
        return value
    return redacted


def _align(rows: Sequence[tuple[str, str]]) -> str:
    width = min(60, max((len(text) for text, _ in rows), default=0))
    return "\n".join(f"{text:{width}}  # {source}" if source else text for text, source in rows)
