"""jaxtyping annotations on batches, checked when a step is traced."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints, is_typeddict

import jax
import jaxtyping

from fulgurite.errors import DataError
from fulgurite.paths import leaves_with_paths


def check_batch(step: Callable[..., Any], batch: Any) -> None:
    """Checks a batch against the annotation of the step's first argument.

    The annotation is a jaxtyping array type, or a `TypedDict`, `NamedTuple` or dataclass whose fields are annotated with
    such types; named dimensions must agree across the batch. A mismatch is an error that names the leaf and lists the
    batch's structure. Anything else that the annotation may be is left alone.
    """
    try:
        hints = get_type_hints(step)
    except NameError:  # names imported for type checkers only: nothing to check against
        return
    hint = next((kind for name, kind in hints.items() if name not in ("return", "ctx")), None)
    with jaxtyping.jaxtyped("context"):
        for path, value, expected in _annotated("batch", batch, hint):
            if not isinstance(value, expected):
                raise DataError(
                    f"{path} is {describe(value)}, but {step.__qualname__} expects {_shown(expected)}. "
                    f"The whole batch: {describe(batch)}"
                )


def describe(tree: Any) -> str:
    """A tree's leaves with dtypes and shapes on one line, such as `image float32[64,28,28], label int32[64]`."""
    return ", ".join(
        f"{path} {leaf.dtype}[{','.join(map(str, leaf.shape))}]".strip() if hasattr(leaf, "dtype") else f"{path} {leaf!r}"
        for path, leaf in leaves_with_paths(tree)
    )


def _annotated(path: str, value: Any, hint: Any) -> list[tuple[str, Any, Any]]:
    if _is_array_type(hint):
        return [(path, value, hint)]
    if is_typeddict(hint) and isinstance(value, dict):
        parts = [(f'{path}["{name}"]', value.get(name), kind) for name, kind in get_type_hints(hint).items()]
    elif isinstance(hint, type) and isinstance(value, hint) and (is_dataclass(hint) or hasattr(hint, "_fields")):
        names = [field.name for field in fields(hint)] if is_dataclass(hint) else hint._fields  # type: ignore[attr-defined]
        kinds = get_type_hints(hint)
        parts = [(f"{path}.{name}", getattr(value, name), kinds.get(name)) for name in names]
    else:
        return []
    return [found for part in parts for found in _annotated(*part)]


def _is_array_type(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)


def _shown(hint: Any) -> str:
    return f'{hint.dtype.__name__}[Array, "{hint.dim_str}"]'


def spec_of(tree: Any) -> Any:
    """The tree with `jax.ShapeDtypeStruct`s for arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
