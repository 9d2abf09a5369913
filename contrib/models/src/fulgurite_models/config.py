"""Values of a config.json, which may be anything."""

import math
from collections.abc import Mapping
from typing import Any

from fulgurite.errors import ConfigurationError, check_positive_int, set_ints

_MAX_SIZE = 2**31 - 1


def check_sizes(config: Any, *names: str) -> None:
    """Raise a ConfigurationError for a size that is not a positive integer; those of NumPy become
    Python's, which JSON can hold.

    Args:
        config: of a model, a dataclass.
        names: of its sizes.
    """
    set_ints(config, *names)
    for name in names:
        check_positive_int(getattr(config, name), f"{type(config).__name__}: {name}")


def check_divides(config: Any, name: str, whole: str) -> None:
    """Raise a ConfigurationError for a size that does not divide another one; the arguments are
    those of `check_sizes`, and the name of the other size."""
    size, total = getattr(config, name), getattr(config, whole)
    if total % size:
        raise ConfigurationError(
            f"{type(config).__name__}: {name} is {size}, which does not divide {whole}={total}"
        )


def get_size(
    values: Mapping[str, Any], name: str, default: int | None = None, *, divides: int | None = None
) -> int:
    """Return a positive integer.

    Args:
        values: of a config.json.
        name: of the value.
        default: where there is none, or it is null; None where there must be one.
        divides: a number that it must divide.

    Raises:
        ConfigurationError: it is anything else.
    """
    value = _get(values, name, default)
    if type(value) is not int or not 0 < value <= _MAX_SIZE:
        raise ConfigurationError(f"{name} is {value!r:.100}; it must be a positive integer")
    if divides is not None and divides % value:
        raise ConfigurationError(f"{name} is {value}, which does not divide {divides}")
    return value


def get_number(values: Mapping[str, Any], name: str, default: float) -> float:
    """Return a positive finite number; the arguments are those of `get_size`."""
    value = _get(values, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(f"{name} is {value!r:.100}; it must be a number")
    if not 0 < value < 1e300 or not math.isfinite(value):
        raise ConfigurationError(f"{name} is {value!r:.100}; it must be positive and finite")
    return float(value)


def get_rate(values: Mapping[str, Any], name: str, default: float) -> float:
    """Return a probability below 1; the arguments are those of `get_size`."""
    value = _get(values, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigurationError(
            f"{name} is {value!r:.100}; it must be a number at least 0 and below 1"
        )
    return float(value)


def get_flag(values: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return true or false; the arguments are those of `get_size`."""
    value = _get(values, name, default)
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} is {value!r:.100}; it must be true or false")
    return value


def refuse_values(values: Mapping[str, Any], **known: tuple[Any, ...]) -> None:
    """Raise a ConfigurationError for a value that changes what the model computes, and that the
    model does not have.

    Args:
        values: of a config.json.
        known: what the model has, by name; a value that is missing or null has the first of these.
    """
    for name, choices in known.items():
        value = _get(values, name, choices[0])
        if value not in choices:
            raise ConfigurationError(
                f"{name} is {value!r:.100}, and this model is built for "
                f"{' or '.join(map(repr, choices))} alone"
            )


def _get(values: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return a value, or the default where it is missing or null."""
    value = values.get(name)
    return default if value is None else value
