"""jaxtyping annotations on batches and modules, checked when a step is traced."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from inspect import ismethod, signature
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from jax.core import Tracer

from fulgurite._src.foreign_names import add_attribute_hint
from fulgurite._src.tree.paths import path_from_keys
from fulgurite._src.tree.specs import format_tree
from fulgurite.errors import DataError, ModelError, error_context

MAX_STACKED = 4
"""The number of axes that stacked modules may have in front, and one."""

# Path, value and annotation of a part of a batch.
Part = tuple[str, Any, Any]
# Path, value, and in words what was expected there.
Mismatch = tuple[str, Any, str]


def check_batch(step: Callable[..., Any], batch: Any, module: Any = None) -> None:
    """Check a batch against the annotation of a step's first parameter after `self`.

    Annotations are a jaxtyping array type, or tuples, lists, dictionaries, `TypedDict`s,
    `NamedTuple`s, dataclasses or unions of these; named dimensions must agree across the batch. Any
    other annotation is left alone.

    Args:
        step: a function or method of a module, such as `training_step`.
        batch: what it is about to get.
        module: the `self` of the step, for axes such as `{self.size}`; that of a method by default.

    Raises:
        DataError: the batch has another structure, shape or dtype; the message names the path.
        ModelError: an axis is computed from what is not known where it stands.
    """
    names = list(signature(step).parameters)
    position = 0 if ismethod(step) else 1
    try:
        hints = get_type_hints(step)
    except NameError:  # names imported for type checkers only: nothing to check against
        return
    hint = hints.get(names[position]) if position < len(names) else None
    try:
        mismatch = _find_mismatch(getattr(step, "__self__", module), batch, hint)
    except jaxtyping.AnnotationError as error:
        raise _explain_axis(f"{step.__qualname__}: {names[position]}", error) from None
    if mismatch is not None:
        path, value, expected = mismatch
        actual = "missing" if value is None else format_tree(value)
        raise DataError(
            f"{path} is {actual}; {step.__qualname__} expects {expected}. "
            f"The batch: {format_tree(batch)}"
        )


# jaxtyping evaluates axes such as `{self.size}` with the arguments of the function that it wraps.
@jaxtyping.jaxtyped(typechecker=None)
def _find_mismatch(self: Any, batch: Any, hint: Any) -> Mismatch | None:
    """Return the first part of a batch that is not as annotated.

    Args:
        self: the module.
        batch: the batch.
        hint: its annotation.
    """
    return next(_iter_mismatches("batch", batch, hint), None)


def _explain_axis(where: str, error: Exception) -> ModelError:
    """Return the error for an axis that jaxtyping cannot compute yet.

    Args:
        where: which annotation it is.
        error: that of jaxtyping, which names the axis in quotes.
    """
    axis = str(error).partition("'")[2].partition("'")[0]
    return ModelError(
        f"{where} is annotated with the axis {axis!r}, but a name in it is bound by no axis before "
        'it. Put the axis that binds it first, as in "d 2*d", or write {self.field} for a number '
        "of the module"
    )


def check_module_fields(module: Any) -> None:
    """Check the arrays in a module, and in the modules in it, against the jaxtyping annotations of
    their fields. Named dimensions must agree within each module.

    Modules of which several are stacked, as by `eqx.filter_vmap`, have further axes in front: an
    array may have more axes than its annotation, if the others fit.

    Args:
        module: traced, so that nothing is computed.

    Raises:
        ModelError: an array has another shape or dtype; the message names its path.
    """
    for keys, part in _iter_modules((), module):
        hints = _get_array_hints(type(part))
        mismatches = [
            _find_field_mismatch(part, hints, num_stacked) for num_stacked in range(MAX_STACKED)
        ]
        if hints and all(mismatches):
            assert mismatches[0] is not None
            name, value, expected = mismatches[0]
            path = path_from_keys((*keys, jax.tree_util.GetAttrKey(name)))
            raise ModelError(
                f"{path} is {format_tree(value)}; {type(part).__name__} declares {expected}"
            )


def check_static_fields(module: Any) -> None:
    """Check that no static field of a module holds an array: JAX compares static fields whenever a
    program might be used again, and arrays have no single answer.

    Raises:
        ModelError: one does; the message names its path.
    """
    for keys, part in _iter_modules((), module):
        for field in fields(type(part)):
            value = getattr(part, field.name, None) if field.metadata.get("static") else None
            if any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(value)):
                path = path_from_keys((*keys, jax.tree_util.GetAttrKey(field.name)))
                raise ModelError(
                    f"{path} is a static field of {type(part).__name__} and holds an array, but "
                    "JAX can compare arrays of static fields neither with each other nor with "
                    "those of another run. Remove static=True, and freeze the field by "
                    "jax.lax.stop_gradient or fg.OptimizerSpec(params=...); or hold numbers in a "
                    "tuple"
                )


@contextmanager
def batch_error_context(what: str, batch: Any) -> Iterator[None]:
    """Add to an exception from tracing `what`, or from running it where JAX debugs numbers, its
    batch; and what is in the place of an attribute that modules of other libraries have."""

    def describe() -> str:
        is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(batch))
        verb = "tracing" if is_traced else "running"
        return f"while {verb} {what} on a batch of {format_tree(batch)}"

    try:
        with error_context(describe):
            yield
    except AttributeError as error:
        add_attribute_hint(error, eqx.Module)
        raise


def _iter_mismatches(path: str, value: Any, hint: Any) -> Iterator[Mismatch]:
    """Yield where a value is not as annotated."""
    if _is_array_type(hint):
        if not isinstance(value, hint):
            yield path, value, f'{hint.dtype.__name__}[Array, "{hint.dim_str}"]'
    elif get_origin(hint) in (Union, UnionType):
        yield from _iter_union_mismatches(path, value, hint)
    else:
        expected = _describe_container_mismatch(value, hint)
        if expected is not None:
            if _holds_arrays(hint):
                yield path, value, expected
            return
        for part in _iter_parts(path, value, hint):
            yield from _iter_mismatches(*part)


def _iter_union_mismatches(path: str, value: Any, hint: Any) -> Iterator[Mismatch]:
    members = [member for member in get_args(hint) if member is not NoneType]
    mismatches = [list(_iter_mismatches(path, value, member)) for member in members]
    if value is not None and all(mismatches):
        yield from mismatches[0]


def _describe_container_mismatch(value: Any, hint: Any) -> str | None:
    """Return which container was expected, or None where the value is one or needs to be none."""
    container = dict if is_typeddict(hint) else get_origin(hint)
    if container is dict:
        return None if isinstance(value, Mapping) else "a dictionary"
    if container not in (tuple, list):
        return None
    length = _get_tuple_length(hint)
    if isinstance(value, tuple | list) and length in (None, len(value)):
        return None
    if container is list:
        return "a list"
    return f"a tuple of {length}" if length else "a tuple"


def _get_tuple_length(hint: Any) -> int | None:
    """Return how many items a tuple is annotated with; None for any number."""
    members = get_args(hint)
    return len(members) if get_origin(hint) is tuple and ... not in members else None


def _iter_parts(path: str, value: Any, hint: Any) -> Iterator[Part]:
    """Yield the parts of a container whose annotations are known, one level down."""
    origin = get_origin(hint)
    members = get_args(hint)
    if is_typeddict(hint) and isinstance(value, dict):
        for name, member in get_type_hints(hint).items():
            if name in value or name in hint.__required_keys__:
                yield f'{path}["{name}"]', value.get(name), member
    elif _is_record_type(hint) and isinstance(value, hint):
        for name, member in get_type_hints(hint).items():
            yield f"{path}.{name}", getattr(value, name), member
    elif origin in (tuple, list) and isinstance(value, tuple | list):
        is_homogeneous = origin is list or ... in members
        for index, item in enumerate(value):
            yield f"{path}[{index}]", item, members[0 if is_homogeneous else index]
    elif origin is dict and isinstance(value, dict):
        for name, item in value.items():
            yield f'{path}["{name}"]', item, members[1]


def _iter_modules(keys: tuple[Any, ...], tree: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the modules in a tree with the keys of their paths."""
    if isinstance(tree, eqx.Module):
        yield keys, tree
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    for child_keys, child in children:
        if child is not tree:
            yield from _iter_modules((*keys, *child_keys), child)


def _get_array_hints(module_class: type) -> dict[str, Any]:
    """Return the annotations of fields that are arrays, or None, by name."""
    try:
        hints = get_type_hints(module_class)
    except (NameError, TypeError):  # names that only type checkers know
        return {}
    arrays = {}
    for name, hint in hints.items():
        members = [member for member in get_args(hint) or (hint,) if member is not NoneType]
        if len(members) == 1 and _is_array_type(members[0]):
            arrays[name] = members[0]
    return arrays


@jaxtyping.jaxtyped(typechecker=None)
def _find_field_mismatch(self: Any, hints: dict[str, Any], num_stacked: int) -> Mismatch | None:
    """Return the first field that is not as annotated; what is not an array is left alone.

    Args:
        self: the module.
        hints: annotations by name.
        num_stacked: how many axes are in front of those annotated.
    """
    # Those with an axis such as "n+1" come last: another field may bind n.
    for name, hint in sorted(hints.items(), key=lambda item: _has_expression(item[1])):
        value = getattr(self, name, None)
        if not isinstance(value, jax.Array):
            continue
        if num_stacked > value.ndim:
            return name, value, ""
        # Not the first item, because a stack may have none.
        example = jnp.empty(value.shape[num_stacked:], value.dtype) if num_stacked else value
        try:
            is_as_annotated = isinstance(example, hint)
        except jaxtyping.AnnotationError as error:
            raise _explain_axis(f"{type(self).__name__}.{name}", error) from None
        if not is_as_annotated:
            return name, value, f'{hint.dtype.__name__}[Array, "{hint.dim_str}"]'
    return None


def _has_expression(hint: Any) -> bool:
    """Return whether an annotation has an axis that is computed from others."""
    members = [member for member in get_args(hint) or (hint,) if _is_array_type(member)]
    axes = [axis.lstrip("#*_?") for member in members for axis in member.dim_str.split()]
    return any(set(axis) & set("+-*/{") for axis in axes)


def _is_array_type(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)


def _is_record_type(hint: Any) -> bool:
    """Return whether this is a dataclass or a NamedTuple."""
    return isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_fields"))


def _holds_arrays(hint: Any) -> bool:
    """Return whether there is an array in the structure that is annotated."""
    if _is_array_type(hint):
        return True
    members = get_type_hints(hint).values() if is_typeddict(hint) else get_args(hint)
    return any(map(_holds_arrays, members))
