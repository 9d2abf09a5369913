"""Keys of caches for objects that may define `==` and `hash` in their own way, or have no hash."""

from typing import Any


class ByIdentity:
    """A key that equals another one if both are of one and the same object.

    It holds the object. The key `id(thing)` does not, so that a later object may get the same one.

    Example:
        cache = {ByIdentity(rule): "compiled"}
        cache[ByIdentity(rule)]  # "compiled"

    Args:
        value: the object.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)
