"""Arguments whose values are shown nowhere."""

from collections.abc import Callable
from typing import Any, NoReturn, get_args, get_origin

from fulgurite.plugins import REDACTED, register_secret
from fulgurite_config import flatten_union


class SecretStr:
    """A string that shows as `***`: the type of an argument that is a password or the like.

    Its value stays in memory: manifests, checkpoints, records, telemetry and messages of this
    process show `***` in its place, the command line included, as it is and as it is written in
    URLs, JSON and base64. Parts of it, and what is computed from it, are not known. It cannot be
    pickled. `pydantic.SecretStr` does as well, but for the pickling.

    Example:
        from fulgurite_cli import Experiment, SecretStr


        def experiment(login: SecretStr, lr: float = 1e-3) -> Experiment:
            data = connect(login.get_secret_value())
            return Experiment(fg.Engine(steps=100), model=model, data=data)

    Args:
        value: the text.
    """

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        register_secret(value)
        self._value = value

    def get_secret_value(self) -> str:
        """Return the text."""
        return self._value

    def __copy__(self) -> "SecretStr":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "SecretStr":
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a SecretStr cannot be pickled, because its value would be written: pass the name of "
            "an environment variable to other processes"
        )

    def __repr__(self) -> str:
        return f"SecretStr({REDACTED!r})"

    def __str__(self) -> str:
        return REDACTED

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretStr) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)


def is_secret_type(annotation: Any) -> bool:
    """Return whether a type is that of secrets: this one, or another with the same method."""
    return isinstance(annotation, type) and hasattr(annotation, "get_secret_value")


def make_secret(annotation: Any, text: str) -> Any:
    """Return a secret of a type.

    Args:
        annotation: the type.
        text: its value.
    """
    register_secret(text)
    return annotation(text)


def convert_secrets(value: Any, annotation: Any, make: Callable[[Any, str], Any]) -> Any:
    """Return a value with each string in it that is a secret by its annotation converted.

    Args:
        value: the value, or a list, tuple or dictionary of values.
        annotation: its type, such as `list[SecretStr] | None`.
        make: called with the type of a secret and its text.
    """
    for member in flatten_union(annotation):
        if isinstance(value, str) and is_secret_type(member):
            return make(member, value)
        origin = get_origin(member)
        types = get_args(member)
        if isinstance(value, dict) and origin is dict:
            return {key: convert_secrets(item, types[1], make) for key, item in value.items()}
        if isinstance(value, list | tuple) and origin in (list, tuple):
            if origin is list or types[1:] == (...,):
                types = (types[0],) * len(value)
            pairs = zip(value, types, strict=False)
            return type(value)(convert_secrets(item, item_type, make) for item, item_type in pairs)
    return value
