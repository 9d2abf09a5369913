"""What losses, metrics and summaries by key have in common: fields that are keys."""

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from jaxtyping import Array, Bool

from fulgurite_keys.scope import UPDATE, KeyPath, Scope, is_per_example, list_key_fields


@dataclass(frozen=True)
class Keyed:
    """An object whose fields annotated with `Key` are keys."""

    def __post_init__(self) -> None:
        # Read at once, so that a mistake is found where the object is made.
        self.get_keys()

    def get_keys(self) -> dict[str, KeyPath]:
        """Return the keys that are set, by field.

        Raises:
            ConfigurationError: a required key is not set, or a string is not a key.
        """
        keys = {}
        for name, is_required in _list_key_fields(type(self)).items():
            value = getattr(self, name)
            if value is not None or is_required:
                keys[name] = KeyPath.parse(value, f"{type(self).__name__}: {name}")
        return keys

    @property
    def needs_update(self) -> bool:
        """Whether a key finds something only after the update of a training step."""
        return any(key.prefix in UPDATE for key in self.get_keys().values())

    def resolve(self, scope: Scope) -> dict[str, Any]:
        """Return what the keys find, by field; None for those that are not set."""
        keys = self.get_keys()
        return {
            name: scope.resolve(keys[name]) if name in keys else None
            for name in _list_key_fields(type(self))
        }

    def make_mask(
        self, values: dict[str, Any], mask: Bool[Array, " batch"] | None
    ) -> Bool[Array, "..."] | None:
        """Return which examples count: the mask of the batch, where the keys find examples, and the
        one of the field `mask`.

        Args:
            values: what the keys find; its `mask` is taken out.
            mask: of the batch, or None.
        """
        chosen = values.pop("mask", None)
        keys = self.get_keys()
        has_examples = any(is_per_example(keys[name].prefix) for name in values if name in keys)
        if mask is None or not has_examples:
            return chosen
        if chosen is None:
            return mask
        return chosen & mask.reshape(mask.shape + (1,) * (chosen.ndim - mask.ndim))

    def describe(self) -> str:
        """Return the call that makes this object, with the fields that are set."""
        parts = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in sorted(fields(self), key=lambda field: field.kw_only is True)
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(parts)})"


@cache
def _list_key_fields(owner: type) -> dict[str, bool]:
    return list_key_fields(owner)


def make_call_scope(preds: Any, batch: Any) -> Scope:
    """Return the scope of a function of predictions and batch, as an evaluator calls it."""
    values = {"batch": batch, "preds": preds}
    return Scope(values, "the losses=, metrics= and summaries= of an evaluator")
