"""Reading from a checkpoint what a plugin has seen and done."""

from dataclasses import fields
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def read_progress(kind: type[T], state: Any) -> T:
    """Return what `dataclasses.asdict` made JSON of.

    Args:
        kind: a dataclass of numbers and lists of them, of which integers are counts.
        state: what a checkpoint holds for it.

    Raises:
        ValueError: that is something else.
    """
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(state, dict) or state.keys() != names:
        raise ValueError(f"it is {state!r:.100}, and should have {', '.join(sorted(names))}")
    types = get_type_hints(kind)
    for name, value in state.items():
        if not _fits(value, types[name]):
            raise ValueError(f"{name} is {value!r:.100}, which a run never writes")
    return kind(**state)


def _fits(value: Any, expected: Any) -> bool:
    """Return whether a value is one of a type: `int`, `float`, `list[...]`, or a union of them."""
    if get_origin(expected) is list:
        (item,) = get_args(expected)
        return isinstance(value, list) and all(_fits(entry, item) for entry in value)
    if type(value) is int:
        return value >= 0
    return type(value) in (get_args(expected) or (expected,))
