"""The shapes of inputs, some of whose sizes are open."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from fulgurite.errors import ConfigurationError, ModelError
from jax import export as jax_export

from fulgurite_export.dtypes import DTYPES
from fulgurite_export.errors import ExportError
from fulgurite_export.functions import Function
from fulgurite_export.sizes import collect_names, find_impossible, is_satisfied

BATCH = "batch"
"""The name of the open size of the axis of examples."""


@dataclass(frozen=True)
class Options:
    """How functions are exported.

    Attributes:
        batch: `symbolic` for any number of examples, a number of them, or None for the shapes of
            the examples of inputs as they are.
        platforms: on which the programs run.
    """

    batch: int | str | None
    platforms: tuple[str, ...]


def collect_open(specs: Sequence[jax.ShapeDtypeStruct]) -> set[str]:
    """Return the names of the open sizes of some arrays."""
    return {str(size) for spec in specs for size in spec.shape if not isinstance(size, int)}


def make_specs(
    function: Function, paths: list[str], leaves: list[Any], options: Options
) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of the inputs of a function, some with open sizes.

    Args:
        function: the function, which says of which inputs other sizes are open than the batch.
        paths: of the inputs.
        leaves: examples of them.
        options: whether the batch is open.
    """
    name, shapes = function.name, function.shapes or {}
    unknown = shapes.keys() - {*paths}
    if unknown:
        raise ConfigurationError(
            f"{name}: there is no input {min(unknown)!r} whose shape could be given: there are "
            f"{', '.join(map(repr, paths))}"
        )
    scope = _make_scope(function)
    specs = []
    for path, leaf in zip(paths, leaves, strict=True):
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        if getattr(dtype, "name", None) not in DTYPES:
            raise ConfigurationError(
                f"{name}: the input {path!r} is of dtype {leaf.dtype}, which cannot be exported"
            )
        text = shapes[path] if path in shapes else _choose_shape(np.shape(leaf), options)
        place = f"{name}: the shape {text!r} of the input {path!r}"
        shape = _parse_shape(text, place, scope)
        if len(shape) != leaf.ndim:
            raise ConfigurationError(
                f"{place} has {len(shape)} axes, and the example has the shape {np.shape(leaf)}"
            )
        specs.append(jax.ShapeDtypeStruct(shape, dtype))
    _check_names(function, specs)
    return specs


def _make_scope(function: Function) -> jax_export.SymbolicScope:
    """Return the scope of the open sizes of a function, with its constraints."""
    constraints = function.constraints or ()
    try:
        for constraint in constraints:
            # Whoever loads the folder must be able to read them too.
            is_satisfied(constraint, dict.fromkeys(collect_names(constraint), 1))
        impossible = find_impossible(constraints)
        if impossible is not None:
            raise ExportError(f"there is no size {impossible!r} that satisfies all of them")
        return jax_export.SymbolicScope(constraints)
    except (ExportError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"{function.name}: constraints={[*constraints]}: {first}"
        ) from error


def _choose_shape(shape: tuple[int, ...], options: Options) -> str:
    """Return the shape of an input of which no shape is given.

    Args:
        shape: of the example.
        options: whether its first axis is open.
    """
    sizes = list(map(str, shape))
    if sizes and options.batch is not None:
        sizes[0] = BATCH if options.batch == "symbolic" else str(options.batch)
    return ", ".join(sizes)


def _parse_shape(text: str, place: str, scope: jax_export.SymbolicScope) -> tuple[Any, ...]:
    """Return a shape.

    Args:
        text: the shape, such as `batch, 2*length`.
        place: names it, for errors.
        scope: of the open sizes.
    """
    try:
        return tuple(jax_export.symbolic_shape(text, scope=scope))
    except ValueError as error:
        raise ConfigurationError(f"{place} cannot be read: {error}") from error


def _check_names(function: Function, specs: list[jax.ShapeDtypeStruct]) -> None:
    """Raise `ConfigurationError` if there is an open size that the inputs do not tell.

    Args:
        function: the function, of which constraints are checked too.
        specs: the shapes of its inputs.
    """
    sizes = [size for spec in specs for size in spec.shape if not isinstance(size, int)]
    alone = {str(size) for size in sizes if str(size).isidentifier()}
    for size in sizes:
        missing = set(size.get_vars()) - alone
        if missing:
            raise ConfigurationError(
                f"{function.name}: no input has an axis of size {min(missing)!r} alone, from "
                f"which {size} could be told: give one"
            )
    for constraint in function.constraints or ():
        missing = collect_names(constraint) - alone
        if not missing:
            continue
        name, other = min(missing), constraint.partition("==")[2].strip()
        # JAX puts the other side of an equation in the place of a size.
        is_fixed = bool(other) and constraint.partition("==")[0].strip() == name
        hint = (
            f"write {other!r} in its place in shapes= or batch="
            if is_fixed
            else "open it by shapes="
        )
        raise ConfigurationError(
            f"{function.name}: the constraint {constraint!r} is about {name!r}, and "
            f"its open sizes are {', '.join(sorted(alone)) or 'none'}: {hint}"
        )


@contextmanager
def explain_open_sizes(name: str, check_example: Callable[[], None]) -> Iterator[None]:
    """Raise a `ModelError` for a function that cannot be traced with open sizes.

    Args:
        name: of the function.
        check_example: traces it with the sizes of the example, to raise what else is wrong with
            it.
    """
    try:
        yield
    except jax.errors.InconclusiveDimensionOperation as error:
        check_example()
        first = str(error).partition("\n")[0].rstrip(".")
        raise ModelError(
            f"{name} depends on a size that is open: {first}. State what is known of "
            "it, such as constraints=['length >= 8'], or fix it by batch= or shapes="
        ) from error
    except TypeError as error:
        if "_DimExpr" not in str(error):
            raise
        check_example()
        raise ModelError(
            f"{name} makes a number of a size that is open, as len(x) does: write x.shape[0], or "
            "fix the size by batch= or shapes="
        ) from error
