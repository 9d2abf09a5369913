"""jaxtyping annotations on batches, checked when a step is traced; and how a batch is described in
errors."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import is_dataclass
from inspect import ismethod, signature
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

import jax
import jaxtyping

from fulgurite.errors import DataError, error_context
from fulgurite.tree.paths import leaves_with_paths


def check_batch(step: Callable[..., Any], batch: Any) -> None:
    """Checks a batch against the annotation of the step's first parameter behind `self`: a
    jaxtyping array type, or tuples, lists, dictionaries, `TypedDict`s, `NamedTuple`s, dataclasses
    or unions of these; named dimensions must agree across the batch. A mismatch, of structure too,
    is an error that names the place. Any other annotation is left alone."""
    try:
        hint = get_type_hints(step).get(
            [*signature(step).parameters, ""][0 if ismethod(step) else 1]
        )
    except NameError:  # names imported for type checkers only: nothing to check against
        return
    with jaxtyping.jaxtyped("context"):
        if misfit := next(_iter_mismatches("batch", batch, hint), None):
            path, value, wanted = misfit
            given = "missing" if value is None else format_tree(value)
            raise DataError(
                f"{path} is {given}; {step.__qualname__} expects {wanted}. The batch: {format_tree(batch)}"
            )


def batch_error_context(what: str, batch: Any) -> AbstractContextManager[None]:
    """Adds to an exception from tracing `what` the batch on which it was traced."""
    return error_context(lambda: f"while tracing {what} on a batch of {format_tree(batch)}")


def format_tree(tree: Any) -> str:
    """A tree's leaves with dtypes and shapes on one line, such as `image float32[64,28,28], label
    int32[64]`."""
    return ", ".join(
        f"{path} {leaf.dtype}[{','.join(map(str, leaf.shape))}]".strip()
        if hasattr(leaf, "dtype")
        else f"{path} {leaf!r}"
        for path, leaf in leaves_with_paths(tree)
    )


def shape_spec(tree: Any) -> Any:
    """The tree with `jax.ShapeDtypeStruct`s for arrays, of the dtypes that NumPy arrays have on a
    device."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jax.typeof(leaf).dtype), tree)


def shape_signature(tree: Any) -> tuple[Any, ...]:
    """What tells the executables of a compiled function apart: structure, shapes and dtypes of a
    tree of arrays."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple([(leaf.shape, leaf.dtype) for leaf in leaves])


def _iter_mismatches(path: str, value: Any, hint: Any) -> Iterator[tuple[str, Any, str]]:
    """Where a value is not as annotated: path, what is there, what is wanted."""
    origin, kinds, parts = get_origin(hint), get_args(hint), []
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        if not isinstance(value, hint):
            yield path, value, f'{hint.dtype.__name__}[Array, "{hint.dim_str}"]'
        return
    if origin in (Union, UnionType):
        found = [list(_iter_mismatches(path, value, one)) for one in kinds if one is not NoneType]
        if value is not None and all(found):
            yield from found[0]
        return
    kind = dict if is_typeddict(hint) else origin
    several = len(kinds) if origin is tuple and ... not in kinds else None
    odd = kind in (tuple, list) and (
        not isinstance(value, tuple | list) or several not in (None, len(value))
    )
    if (odd or (kind is dict and not isinstance(value, Mapping))) and _holds_arrays(hint):
        wanted = {
            dict: "a dictionary",
            list: "a list",
            tuple: f"a tuple of {several}" if several else "a tuple",
        }
        yield path, value, wanted[kind]
    elif is_typeddict(hint) and isinstance(value, dict):
        asked = [
            item
            for item in get_type_hints(hint).items()
            if item[0] in value or item[0] in hint.__required_keys__
        ]
        parts = [(f'{path}["{name}"]', value.get(name), kind) for name, kind in asked]
    elif (
        isinstance(hint, type)
        and (is_dataclass(hint) or hasattr(hint, "_fields"))
        and isinstance(value, hint)
    ):
        parts = [
            (f"{path}.{name}", getattr(value, name), kind)
            for name, kind in get_type_hints(hint).items()
        ]
    elif origin in (tuple, list) and isinstance(value, tuple | list):
        kinds = kinds[:1] * len(value) if origin is list or kinds[-1] is ... else kinds
        parts = [
            (f"{path}[{at}]", part, kind)
            for at, (part, kind) in enumerate(zip(value, kinds, strict=False))
        ]
    elif origin is dict and isinstance(value, dict):
        parts = [(f'{path}["{name}"]', part, kinds[1]) for name, part in value.items()]
    for part in parts:
        yield from _iter_mismatches(*part)


def _holds_arrays(hint: Any) -> bool:
    """Whether there is an array in the structure that is annotated."""
    parts = get_type_hints(hint).values() if is_typeddict(hint) else get_args(hint)
    return (isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)) or any(
        map(_holds_arrays, parts)
    )
