"""Keys as attributes of types, so that editors complete them and a mistake is seen at once."""

from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from fulgurite.errors import PathError, did_you_mean

from fulgurite_keys.paths import Index, Name, Part, Slice, format_parts

T = TypeVar("T")


class PathBuilder:
    """A key that grows by attributes and indices; its text is the key.

    Example:
        from fulgurite_keys import build_path

        class Batch:
            image: jax.Array

        str(build_path("batch", Batch).image[:8])  # "batch.image[:8]"
    """

    def __init__(self, parts: tuple[Part, ...], hint: Any) -> None:
        self._parts = parts
        self._hint = hint

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        hints = _get_hints(self._hint)
        if hints is not None and name not in hints:
            raise PathError(
                f"{getattr(self._hint, '__name__', self._hint)} has no {name}, after "
                f"{self}. {did_you_mean(name, hints)}"
            )
        hint = Any if hints is None else hints[name]
        return PathBuilder((*self._parts, Name(name)), hint)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            part: Part = Name(index)
        else:
            items = index if isinstance(index, tuple) else (index,)
            part = Index(tuple(_as_item(item) for item in items))
        arguments = get_args(self._hint) if get_origin(self._hint) in (list, dict) else ()
        return PathBuilder((*self._parts, part), arguments[-1] if arguments else Any)

    def __str__(self) -> str:
        return format_parts(self._parts)

    def __repr__(self) -> str:
        return f"build_path({str(self)!r})"


def build_path(prefix: str, kind: type[T]) -> T:
    """Return a key that is written with the attributes of a type.

    Args:
        prefix: the first name of the key, such as `batch`.
        kind: the type of what is there: a class with annotations.

    Raises:
        PathError: an attribute that the type does not have.

    Example:
        from fulgurite_keys import build_path

        class Batch:
            image: jax.Array

        str(build_path("batch", Batch).image[0])  # "batch.image[0]"
    """
    return cast(T, PathBuilder((Name(prefix),), kind))


def _get_hints(hint: Any) -> dict[str, Any] | None:
    """Return the annotations of a class of a user; None for a type that has none."""
    if not isinstance(hint, type):
        return None
    return get_type_hints(hint) or None


def _as_item(item: Any) -> Any:
    return Slice(item.start, item.stop, item.step) if isinstance(item, slice) else item
