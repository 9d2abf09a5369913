"""The shapes of inputs, some of whose sizes are open."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from fulgurite.errors import ConfigurationError, ModelError
from jax import export as jax_export

from fulgurite_export.dtypes import DTYPES

BATCH = "batch"
"""The name of the open size of the axis of examples."""


@dataclass(frozen=True)
class Options:
    """How functions are exported.

    Attributes:
        batch: `symbolic` for any number of examples, a number of them, or None for the shapes of
            the examples of inputs as they are.
        shapes: of inputs by path, such as `batch, length`.
        constraints: on open sizes, such as `length <= 128`.
        platforms: on which the programs run.
    """

    batch: int | str | None
    shapes: Mapping[str, str]
    constraints: tuple[str, ...]
    platforms: tuple[str, ...]


def collect_open(specs: Sequence[jax.ShapeDtypeStruct]) -> set[str]:
    """Return the names of the open sizes of some arrays."""
    return {str(size) for spec in specs for size in spec.shape if not isinstance(size, int)}


def make_specs(
    name: str, paths: list[str], leaves: list[Any], options: Options
) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of the inputs of a function, some with open sizes.

    Args:
        name: of the function.
        paths: of the inputs.
        leaves: examples of them.
        options: which sizes are open.
    """
    unknown = options.shapes.keys() - {*paths}
    if unknown:
        raise ConfigurationError(
            f"{name}: there is no input {min(unknown)!r} whose shape could be given: there are "
            f"{', '.join(map(repr, paths))}"
        )
    scope = jax_export.SymbolicScope(options.constraints)
    specs = []
    for path, leaf in zip(paths, leaves, strict=True):
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        if getattr(dtype, "name", None) not in DTYPES:
            raise ConfigurationError(
                f"{name}: the input {path!r} is of dtype {leaf.dtype}, which cannot be exported"
            )
        shape = _make_shape(name, path, np.shape(leaf), scope, options)
        specs.append(jax.ShapeDtypeStruct(shape, dtype))
    alone = {str(size) for spec in specs for size in spec.shape if str(size).isidentifier()}
    for spec in specs:
        for size in spec.shape:
            names = set() if isinstance(size, int) else set(size.get_vars())
            if names - alone:
                raise ConfigurationError(
                    f"{name}: no input has an axis of size {min(names - alone)!r} alone, from "
                    f"which {size} could be told: give one"
                )
    return specs


def _make_shape(
    name: str,
    path: str,
    shape: tuple[int, ...],
    scope: jax_export.SymbolicScope,
    options: Options,
) -> tuple[Any, ...]:
    """Return the shape of an input.

    Args:
        name: of the function.
        path: of the input.
        shape: of the example.
        scope: of the open sizes.
        options: which sizes are open.
    """
    text = options.shapes.get(path)
    if text is None:
        if not shape or options.batch is None:
            return shape
        if options.batch != "symbolic":
            return (options.batch, *shape[1:])
        text = ", ".join([BATCH, *map(str, shape[1:])])
    try:
        sizes = jax_export.symbolic_shape(text, scope=scope)
    except ValueError as error:
        raise ConfigurationError(
            f"{name}: the shape {text!r} of the input {path!r} cannot be read: {error}"
        ) from error
    if len(sizes) != len(shape):
        raise ConfigurationError(
            f"{name}: the shape {text!r} of the input {path!r} has {len(sizes)} axes, and the "
            f"example has the shape {shape}"
        )
    return tuple(sizes)


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
