"""What keys can find at one place of a step, by their first name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_type_hints

from fulgurite.errors import ConfigurationError, PathError, did_you_mean

from fulgurite_keys.paths import Name, Part, format_parts, parse, resolve


class _KeyMarker:
    """Marks the fields that are keys."""


Key = Annotated[Any, _KeyMarker()]
"""The type of a field that is a key: text such as `batch.image`, or what `build_path` gives."""

FORWARD = ("batch", "preds", "aux", "module", "interms", "model_state", "step")
"""The first names of keys in a forward pass."""
UPDATE = ("grads", "updates", "opt_state", "losses", "metrics")
"""Those that are there after the update of a training step only."""
ALIASES = {"params": "module"}

PER_EXAMPLE = ("batch", "preds", "aux", "interms")
"""What begins with the example axis, so that the mask of the batch applies to it."""

ReadValue = Callable[[Mapping[str, Any]], Any]
_registered: dict[str, ReadValue] = {}
_registered_per_example: set[str] = set()


def register_prefix(name: str, read: ReadValue, *, per_example: bool = True) -> None:
    """Give keys another first name.

    Args:
        name: such as `teacher`.
        read: `read(values)` returns what is there, of what a forward pass has by first name: batch,
            preds, aux, module, model_state, step.
        per_example: whether it begins with the example axis, as what is computed from a batch does,
            so that the mask of a padded batch applies; not so of parameters.

    Raises:
        ConfigurationError: there is such a first name already.

    Example:
        from fulgurite_keys import register_prefix

        register_prefix("pixels", lambda values: values["batch"]["image"] / 255)
    """
    if name in (*FORWARD, *UPDATE, *ALIASES, *_registered) or not name.isidentifier():
        raise ConfigurationError(
            f"register_prefix({name!r}): it is taken, or no identifier; choose another name"
        )
    _registered[name] = read
    if per_example:
        _registered_per_example.add(name)


def is_per_example(prefix: str) -> bool:
    """Return whether what begins with a first name begins with the example axis."""
    return prefix in PER_EXAMPLE or prefix in _registered_per_example


@dataclass(frozen=True)
class KeyPath:
    """A key that was read.

    Attributes:
        prefix: its first name, without an alias.
        parts: the parts after it.
    """

    prefix: str
    parts: tuple[Part, ...]

    @staticmethod
    def parse(key: Any, where: str) -> "KeyPath":
        """Return a key that was read; raise a ConfigurationError if it is none.

        Args:
            key: text, or what `build_path` gives.
            where: what it is for, for errors.
        """
        if isinstance(key, KeyPath):
            return key
        if key is None or key == "":
            raise ConfigurationError(f"{where} is not set: give a key such as 'preds.logits'")
        try:
            first, *rest = parse(str(key))
        except PathError as error:
            raise ConfigurationError(f"{where}: {error}") from error
        known = (*FORWARD, *UPDATE, *ALIASES, *_registered)
        if not isinstance(first, Name) or first.text not in known:
            raise ConfigurationError(
                f"{where} is {str(key)!r}, which begins with none of the names there are. "
                f"{did_you_mean(format_parts([first]), known)}"
            )
        return KeyPath(ALIASES.get(first.text, first.text), tuple(rest))

    def __str__(self) -> str:
        return format_parts((Name(self.prefix), *self.parts))


@dataclass
class Scope:
    """What keys find at one place of a step.

    Attributes:
        values: by first name.
        place: what the place is, for errors, such as `losses`.
        layers: finds what inner layers computed, for `interms`.
    """

    values: dict[str, Any]
    place: str
    layers: Any = None

    def resolve(self, key: KeyPath) -> Any:
        """Return what a key finds.

        Raises:
            PathError: there is nothing; the message says what there is.
        """
        prefix = (Name(key.prefix),)
        if key.prefix == "interms" and self.layers is not None:
            return self.layers.resolve(key)
        if key.prefix in _registered:
            return resolve(_registered[key.prefix](self.values), key.parts, prefix)
        if key.prefix not in self.values:
            raise PathError(
                f"{key.prefix!r} is not available to {self.place}, for the key {str(key)!r}. "
                f"There is: {', '.join([*self.values, *_registered])}"
            )
        return resolve(self.values[key.prefix], key.parts, prefix)


def list_key_fields(owner: type) -> dict[str, bool]:
    """Return the names of the fields of a class that are keys, each with whether it is required."""
    names = {}
    for name, hint in get_type_hints(owner, include_extras=True).items():
        if _is_key(hint):
            names[name] = True
        elif any(map(_is_key, get_args(hint))):
            names[name] = False
    return names


def _is_key(hint: Any) -> bool:
    return any(isinstance(part, _KeyMarker) for part in getattr(hint, "__metadata__", ()))
