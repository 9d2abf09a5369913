"""Which arrays of a checkpoint fit a model that is not the one that was saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import CheckpointError

from fulgurite_checkpoint import arrays
from fulgurite_checkpoint.arrays import Pair, Spec

T = TypeVar("T")


@dataclass
class Matches:
    """How the arrays of a checkpoint fit a model.

    Attributes:
        names: the arrays that are read, by path, each with its name in the checkpoint.
        specs: shape and dtype in which they are read, by their name in the checkpoint.
        rest: a row for each array that does not fit.
        cast: a row for each array that is cast.
        num_needed: how many arrays of the module and of its state were to be filled.
    """

    names: dict[str, str] = field(default_factory=dict)
    specs: dict[str, jax.ShapeDtypeStruct] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    num_needed: int = 0

    @property
    def differences(self) -> list[str]:
        """A row for each array that differs."""
        return sorted([*self.rest, *self.cast])

    def describe(self) -> str:
        """Return what comes from the checkpoint, and a row for each array that differs."""
        num_filled = sum(map(_is_of_model, self.names))
        rows = sorted([*self.rest, *(f"{row}, and cast" for row in self.cast)])
        return (
            f"{num_filled} of {self.num_needed} arrays come from it; what differs is cast "
            "where it says so, and otherwise stays as the model makes it:\n"
            f"{arrays.join_rows(rows)}"
        )


def match(
    needed: Mapping[str, Any],
    saved: Mapping[str, Spec],
    pairs: Sequence[Pair],
    wholes: Mapping[str, str],
) -> Matches:
    """Return what of a checkpoint comes into a model.

    Args:
        needed: arrays or shapes by path.
        saved: what the checkpoint has, by path.
        pairs: paths in the model, each with the one in the checkpoint; None where there is none.
        wholes: of the model, as `find_wholes` returns them.
    """
    matches = Matches()
    left = {
        wholes[target_name]
        for target_name, source_name in pairs
        if target_name is not None
        and target_name in wholes
        and not _fits(_get(needed, target_name), _get(saved, source_name))
    }
    for target_name, source_name in pairs:
        target, spec = _get(needed, target_name), _get(saved, source_name)
        row = arrays.format_difference(_join_names(target_name, source_name), spec, target)
        matches.num_needed += target_name is not None and _is_of_model(target_name)
        if not _fits(target, spec):
            matches.rest.append(row)
            continue
        assert target is not None and spec is not None
        assert target_name is not None and source_name is not None
        if wholes.get(target_name) in left:
            matches.rest.append(f"{row}, and left with the rest of {wholes[target_name]}")
            continue
        dtype = target.dtype
        if spec[1] != str(dtype):
            dtype = jnp.dtype(spec[1])
            matches.cast.append(row)
        matches.names[target_name] = source_name
        sharding = getattr(target, "sharding", None)
        matches.specs[source_name] = jax.ShapeDtypeStruct(target.shape, dtype, sharding=sharding)
    return matches


def pick(
    matches: Matches, needed: Mapping[str, Any], loaded: Mapping[str, jax.Array], source: Path
) -> dict[str, jax.Array]:
    """Return the arrays that come into a model, by its paths and in its dtypes.

    Args:
        matches: what comes.
        needed: arrays or shapes by path.
        loaded: what was read, by its name in the checkpoint.
        source: the checkpoint.

    Raises:
        CheckpointError: a finite number is none in the dtype of the model.
    """
    return {
        name: _cast(name, loaded[source_name], needed[name].dtype, source)
        for name, source_name in matches.names.items()
    }


def _is_of_model(name: str) -> bool:
    """Return whether an array is of a module or its state, and not of the rest of a train state."""
    return name.startswith(("module", "model_state"))


def _join_names(target_name: str | None, source_name: str | None) -> str:
    if target_name is None or source_name is None or target_name == source_name:
        return target_name or source_name or ""
    return f"{target_name}, from {source_name}"


def _get(values: Mapping[str, T], name: str | None) -> T | None:
    return None if name is None else values[name]


def _fits(target: Any, spec: Spec | None) -> bool:
    """Return whether an array of a checkpoint can fill one of a model, perhaps cast; either may be
    None, which fits nothing."""
    if target is None or spec is None or tuple(spec[0]) != target.shape:
        return False
    return spec[1] == str(target.dtype) or _can_cast(spec[1], target.dtype)


def _can_cast(saved: str, dtype: Any) -> bool:
    """Return whether numbers of a saved dtype are cast: between real floating-point numbers, or
    between complex ones, that jax can hold."""
    if saved.startswith("key<") or jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return False
    saved_dtype = jnp.dtype(saved)
    if jax.dtypes.canonicalize_dtype(saved_dtype) != saved_dtype:
        return False
    kinds = (jnp.floating, jnp.complexfloating)
    return any(jnp.issubdtype(saved_dtype, kind) and jnp.issubdtype(dtype, kind) for kind in kinds)


def _cast(name: str, array: jax.Array, dtype: Any, source: Path) -> jax.Array:
    """Return an array in the dtype of the model; an error if a finite number is none there.

    Args:
        name: its path.
        array: as it was saved.
        dtype: of the model.
        source: the checkpoint that holds it.
    """
    if array.dtype == dtype:
        return array
    result = array.astype(dtype)
    num_lost = int(np.sum(np.asarray(jnp.isfinite(array) & ~jnp.isfinite(result))))
    if num_lost:
        raise CheckpointError(
            f"{num_lost} numbers of {name} in {source} are too large for {dtype}: give a "
            f"model with {array.dtype}"
        )
    return result
