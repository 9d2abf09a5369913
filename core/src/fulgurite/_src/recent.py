"""A cache of the values that were asked for last."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class RecentCache(Generic[V]):
    """Builds values at their first use, and keeps those that were asked for last.

    Not all of them, because a lambda in a loop is another key each time.

    Args:
        size: how many keys are kept.
    """

    def __init__(self, size: int = 16) -> None:
        self._size = size
        self._values: dict[Hashable, V] = {}

    def get_or_build(self, key: Hashable, build: Callable[[], V]) -> V:
        """Return the value of a key.

        Args:
            key: compared by `==`.
            build: called if there is none.
        """
        value = self._values.pop(key) if key in self._values else build()
        self._values[key] = value
        if len(self._values) > self._size:
            oldest = next(iter(self._values))
            del self._values[oldest]
        return value

    def list_distinct(self) -> list[V]:
        """Return the values, each once, from the one that was asked for longest ago."""
        return list(dict.fromkeys(self._values.values()))
