"""Arguments of an experiment: their types, their values as text, and as manifests hold them."""

import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any, NamedTuple, get_type_hints

from fulgurite.errors import ConfigurationError
from fulgurite.plugins import REDACTED
from fulgurite_config import ConfigError, fit_value, format_type, is_known_type, read_value
from fulgurite_runs import dumps

from fulgurite_cli.secrets import convert_secrets, is_secret_type, make_secret


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
    """Return the parameters of a function by name, without `*args` and `**kwargs`, which no name
    sets.

    Raises:
        ConfigurationError: it is not a function, but an object such as a `functools.partial`.
    """
    try:
        hints = read_type_hints(experiment)
    except TypeError as error:
        raise ConfigurationError(
            f"{experiment!r} is not a function, so that the types of its arguments are not known: "
            "define `def experiment(lr: float = 1e-3): ...`, and call it there"
        ) from error
    parameters = {}
    for name, parameter in inspect.signature(experiment).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        default = parameter.default
        fallback = str if default in (None, parameter.empty) else type(default)
        annotation = hints.get(name, fallback)
        if default is None:
            annotation = annotation | None
        parameters[name] = Parameter(default, annotation)
    return parameters


def read_type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function by name, without those that name what is imported for
    type checkers only.

    Raises:
        TypeError: it is an object that has none.
    """
    with suppress(NameError):
        return get_type_hints(function)
    origin: Any = inspect.unwrap(function)
    hints: dict[str, Any] = {}
    for name, annotation in origin.__annotations__.items():
        holder = SimpleNamespace(__annotations__={name: annotation})
        with suppress(NameError):
            hints |= get_type_hints(holder, origin.__globals__)
    return hints


def parse_value(name: str, text: str, annotation: Any) -> Any:
    """Return `text` as a value of the type `annotation`.

    Args:
        name: of the argument, for the error.
        text: the value, as on the command line.
        annotation: bool, int, float, str, None, a Literal, a path, an Enum (whose members are
            written by their names), a `SecretStr`, a tuple, list or dictionary of these, or a
            union.

    Raises:
        ConfigurationError: the text is not a value of that type.
    """
    if not is_known_type(annotation):
        raise ConfigurationError(
            f"{name} is of the type {format_type(annotation)}, which no string can be read as: let "
            "the program choose it by an argument that is a string or a number"
        )
    return _convert(read_value, name, text, annotation)


def from_plain(name: str, value: Any, annotation: Any) -> Any:
    """Return an argument from its form in a manifest, where tuples are lists, and paths and
    members of an Enum are text.

    Args:
        name: of the argument, for the error.
        value: what the manifest holds.
        annotation: the type of the argument.

    Raises:
        ConfigurationError: it is not a value of that type.
    """
    return _convert(fit_value, name, value, annotation)


def _convert(convert: Callable[..., Any], name: str, value: Any, annotation: Any) -> Any:
    """Return a value of an annotation; what reads configurations leaves secrets text.

    Args:
        convert: `read_value` or `fit_value`.
        name: of the argument.
        value: the text or the constant.
        annotation: the type.
    """
    try:
        converted = convert(value, annotation, (name,))
    except ConfigError as error:
        raise ConfigurationError(str(error)) from error
    return convert_secrets(converted, annotation, make_secret)


def fit_default(name: str, parameter: Parameter) -> Any:
    """Return the default of an argument as the command line would give it, 1 as 1.0 for a float; as
    it is if it is not of the type of its annotation, which Python does not check.

    Args:
        name: of the argument.
        parameter: the argument.
    """
    try:
        return fit_value(parameter.default, parameter.type, (name,))
    except ConfigError:
        return parameter.default


def restore_value(name: str, value: Any, parameter: Parameter) -> Any:
    """Return an argument from its form in a manifest, as `from_plain` does. What is the default
    there is the default, whatever type it has.

    Args:
        name: of the argument.
        value: what the manifest holds.
        parameter: the argument.

    Raises:
        ConfigurationError: it is not a value of the argument's type.
    """
    for default in (parameter.default, fit_default(name, parameter)):
        with suppress(ConfigurationError):  # JSON cannot hold every default
            if dumps(to_plain(default)) == dumps(value):
                return parameter.default
    return from_plain(name, value, parameter.type)


def is_same_value(first: Any, second: Any) -> bool:
    """Return whether two values of a manifest are the same: 1 and 1.0 are, and NaN and NaN.

    Args:
        first: a value.
        second: another.
    """
    return json.loads(dumps(first)) == json.loads(dumps(second))


def to_plain(value: Any) -> Any:
    """Return an argument as manifests hold it and as the command line takes it."""
    if isinstance(value, Enum):
        return value.name
    if is_secret_type(type(value)):
        return REDACTED
    if isinstance(value, list | tuple):
        return type(value)(to_plain(item) for item in value)
    if isinstance(value, dict):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, PurePath) else value
