"""Arguments of an experiment: their types, their values as text, and as manifests hold them."""

import inspect
import types
from collections.abc import Callable
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from fulgurite.errors import ConfigurationError
from fulgurite.redact import MASK
from fulgurite_config import ConfigError
from fulgurite_config.values import fit_value

from fulgurite_cli.secrets import is_secret_type, make_secret


class Parameter(NamedTuple):
    """An argument of an experiment.

    Attributes:
        default: its default, or `inspect.Parameter.empty`.
        type: its annotation, or the type of its default.
    """

    default: Any
    type: Any

    @property
    def is_required(self) -> bool:
        """Whether there is no default."""
        return self.default is inspect.Parameter.empty


def get_parameters(experiment: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters of a function by name."""
    hints = get_type_hints(experiment)
    parameters = {}
    for name, parameter in inspect.signature(experiment).parameters.items():
        default = parameter.default
        fallback = str if default in (None, parameter.empty) else type(default)
        parameters[name] = Parameter(default, hints.get(name, fallback))
    return parameters


def parse_value(name: str, text: str, annotation: Any) -> Any:
    """Return `text` as a value of the type `annotation`.

    Args:
        name: of the argument, for the error.
        text: the value, as on the command line.
        annotation: bool, int, float, str, None, a Literal, a path, an Enum (whose members are
            written by their names), a `SecretStr`, a tuple or list of these, or a union.

    Raises:
        ConfigurationError: the text is no value of that type.
    """
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _parse_union(name, text, annotation)
    if origin in (tuple, list) or annotation in (tuple, list):
        return _parse_sequence(name, text, annotation)
    try:
        return _parse_scalar(text, annotation)
    except ValueError:
        raise ConfigurationError(f"{name}={text!r} is not {format_type(annotation)}") from None


def _parse_union(name: str, text: str, annotation: Any) -> Any:
    # None first: `limit=none` of `str | None` is None, not the text.
    for member in sorted(get_args(annotation), key=lambda member: member is not type(None)):
        try:
            return parse_value(name, text, member)
        except ConfigurationError:
            continue
    raise ConfigurationError(f"{name}={text!r} is not {format_type(annotation)}")


def _parse_sequence(name: str, text: str, annotation: Any) -> Any:
    parts = [part.strip() for part in text.strip("()[] ").split(",")]
    items = [part for part in parts if part]
    arguments = get_args(annotation)
    is_tuple = tuple in (get_origin(annotation), annotation)
    if is_tuple and arguments and arguments[1:] != (...,):
        item_types = arguments
    else:
        item_types = (arguments[0] if arguments else str,) * len(items)
    if len(item_types) != len(items):
        raise ConfigurationError(f"{name}={text!r} is not {format_type(annotation)}")
    values = [
        parse_value(name, item, item_type)
        for item, item_type in zip(items, item_types, strict=True)
    ]
    return tuple(values) if is_tuple else values


def _parse_scalar(text: str, annotation: Any) -> Any:
    """Return `text` as a value of a type without parts; a `ValueError` if it is none."""
    if get_origin(annotation) is Literal:
        choices = {str(choice): choice for choice in reversed(get_args(annotation))}
        return _look_up(choices, text)
    if annotation is type(None):
        return _look_up({"none": None}, text.lower())
    if annotation is bool:
        return _look_up({"true": True, "false": False}, text.lower())
    if is_enum(annotation):
        return _look_up(annotation.__members__, text)
    if annotation in (str, int, float) or is_path(annotation):
        return annotation(text)
    if is_secret_type(annotation):
        return make_secret(annotation, text)
    raise ValueError(text)


def _look_up(choices: Any, text: str) -> Any:
    if text not in choices:
        raise ValueError(text)
    return choices[text]


def to_plain(value: Any) -> Any:
    """Return an argument as manifests hold it and as the command line takes it."""
    if isinstance(value, Enum):
        return value.name
    if is_secret_type(type(value)):
        return MASK
    return str(value) if isinstance(value, PurePath) else value


def from_plain(name: str, value: Any, annotation: Any) -> Any:
    """Return an argument from its form in a manifest, where tuples are lists, and paths and
    members of an Enum are text.

    Args:
        name: of the argument, for the error.
        value: what the manifest holds.
        annotation: the type of the argument.

    Raises:
        ConfigurationError: it is no value of that type.
    """
    if isinstance(value, list) and "tuple" in str(annotation):
        return tuple(value)
    members = get_args(annotation) or (annotation,)
    is_parsed = any(
        is_enum(member) or is_path(member) or is_secret_type(member) for member in members
    )
    if isinstance(value, str) and is_parsed:
        return parse_value(name, value, annotation)
    try:
        return fit_value(value, str(value), annotation, (name,))
    except ConfigError as error:
        raise ConfigurationError(str(error)) from error


def is_enum(annotation: Any) -> bool:
    """Return whether a type is an Enum."""
    return isinstance(annotation, type) and issubclass(annotation, Enum)


def is_path(annotation: Any) -> bool:
    """Return whether a type is a path of `pathlib`."""
    return isinstance(annotation, type) and issubclass(annotation, PurePath)


def format_type(annotation: Any) -> str:
    """Return a type as help and errors show it."""
    if is_enum(annotation):
        return " | ".join(annotation.__members__)
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "")
