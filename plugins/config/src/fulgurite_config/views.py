"""Lists and dictionaries as they are read from a configuration, where they hold references or are
computed: reading an item computes it, and a change is one of the configuration."""

from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence
from functools import partial
from typing import Any

from fulgurite_config.errors import ConfigError
from fulgurite_config.evaluation import Evaluation
from fulgurite_config.expressions import has_lazy

Replace = Callable[[Any], object]
"""Puts a value in the place of the expression that it was computed from."""


def read(value: Any, replace: Replace) -> Any:
    """Return a value as it is read: what a reference stands for, and a view of a list or dictionary
    that holds references or is computed.

    Args:
        value: the value as it was set.
        replace: puts another in its place. A computed list that is changed takes the place of its
            expression.
    """
    evaluation = Evaluation()
    current = evaluation.compute(value)
    if evaluation.is_result(current):
        return show_result(current, partial(replace, current))
    if not has_lazy(current):
        return current
    if isinstance(current, list):
        return ListView(current, None)
    if isinstance(current, dict):
        return DictView(current, None)
    return tuple(read(item, _refuse) for item in current)


def unwrap(value: Any) -> Any:
    """Return the list or dictionary of a view, and any other value as it is."""
    return value._items if isinstance(value, ListView | DictView) else value


def show_result(value: Any, keep: Callable[[], object]) -> Any:
    """Return a view of a list or dictionary that is computed or a default, and any other value as
    it is.

    Args:
        value: what was computed or copied from the default, or a part of it.
        keep: puts that in the place of the expression or default, before a change.
    """
    if isinstance(value, list):
        return ListView(value, keep)
    if isinstance(value, dict):
        return DictView(value, keep)
    if isinstance(value, tuple):
        return tuple(show_result(item, keep) for item in value)
    return value


def _refuse(value: Any) -> None:
    raise ConfigError(f"{value!r} is computed and in a tuple, which cannot be changed: set it all")


class ListView(MutableSequence[Any]):
    """A list that holds references, or is computed."""

    __slots__ = ("_items", "_keep")

    def __init__(self, items: list[Any], keep: Callable[[], object] | None) -> None:
        self._items = items
        self._keep = keep

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if self._keep is not None:
            return show_result(self._items[index], self._keep)
        return read(self._items[index], partial(self._items.__setitem__, index))

    def __setitem__(self, index: Any, value: Any) -> None:
        self._prepare()
        if isinstance(index, slice):
            self._items[index] = [unwrap(item) for item in value]
        else:
            self._items[index] = unwrap(value)

    def __delitem__(self, index: Any) -> None:
        self._prepare()
        del self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __add__(self, other: Iterable[Any]) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Iterable[Any]) -> list[Any]:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | ListView) and [*self] == [*other]

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return repr([*self])

    def insert(self, index: int, value: Any) -> None:
        """Put a value before an index."""
        self._prepare()
        self._items.insert(index, unwrap(value))

    def reverse(self) -> None:
        """Reverse the order, and keep the references: what the class above has would compute
        them."""
        self._prepare()
        self._items.reverse()

    def _prepare(self) -> None:
        if self._keep is not None:
            self._keep()


class DictView(MutableMapping[Any, Any]):
    """A dictionary that holds references, or is computed."""

    __slots__ = ("_items", "_keep")

    def __init__(self, items: dict[Any, Any], keep: Callable[[], object] | None) -> None:
        self._items = items
        self._keep = keep

    def __getitem__(self, key: Any) -> Any:
        if self._keep is not None:
            return show_result(self._items[key], self._keep)
        return read(self._items[key], partial(self._items.__setitem__, key))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._prepare()
        self._items[key] = unwrap(value)

    def __delitem__(self, key: Any) -> None:
        self._prepare()
        del self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(dict(self))

    def _prepare(self) -> None:
        if self._keep is not None:
            self._keep()
