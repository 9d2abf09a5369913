"""Whether two modules are the same program: in what they differ besides the numbers in arrays."""

import dataclasses
import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import numpy as np


def find_difference(
    first: Any, other: Any, numbers: Sequence[tuple[float, float]], path: str = "the module"
) -> str | None:
    """Return where two modules differ in more than the numbers in arrays; None for nowhere.

    Args:
        first: a module, or a part of one.
        other: the same part of another one.
        numbers: pairs of hyperparameters; a number in a module that differs as one of these is
            where the optimizer has it from.
        path: what to call the part.
    """
    if type(first) is not type(other):
        return path
    if eqx.is_array(first):
        is_same = (first.shape, first.dtype) == (other.shape, other.dtype)
        return None if is_same else f"the shape of {path}"
    parts = _list_parts(first, other)
    if parts is None:
        return path
    for name, part, other_part in parts:
        difference = find_difference(part, other_part, numbers, f"{path}{name}")
        if difference is not None:
            return difference
    if parts or _are_equal(first, other) or _is_hyperparameter(first, other, numbers):
        return None
    return path


def _list_parts(first: Any, other: Any) -> list[tuple[str, Any, Any]] | None:
    """Return the parts of two objects of one type, with their names; none for a single value, and
    None where the numbers of parts differ."""
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        missing = object()
        return [
            (f".{name}", getattr(first, name, missing), getattr(other, name, missing))
            for name in names
        ]
    if isinstance(first, Mapping):
        if first.keys() != other.keys():
            return None
        return [(f"[{name!r}]", part, other[name]) for name, part in first.items()]
    if isinstance(first, list | tuple):
        if len(first) != len(other):
            return None
        pairs = zip(first, other, strict=True)
        return [(f"[{index}]", part, other_part) for index, (part, other_part) in enumerate(pairs)]
    if isinstance(first, functools.partial):
        names = ("func", "args", "keywords")
        return [(f".{name}", getattr(first, name), getattr(other, name)) for name in names]
    if isinstance(first, types.MethodType):
        names = ("__func__", "__self__")
        return [(f".{name}", getattr(first, name), getattr(other, name)) for name in names]
    if isinstance(first, types.FunctionType) and first.__code__ is other.__code__:
        # The same function with other variables around it.
        cells = [_read_cells(function) for function in (first, other)]
        return [(f".{name}", part, cells[1][name]) for name, part in cells[0].items()]
    return []


def _read_cells(function: types.FunctionType) -> dict[str, Any]:
    names = function.__code__.co_freevars
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    defaults = dict(enumerate(function.__defaults__ or ()))
    return {**dict(zip(names, values, strict=True)), **{str(key): v for key, v in defaults.items()}}


def _are_equal(first: Any, other: Any) -> bool:
    if isinstance(first, types.FunctionType) and first.__code__ is other.__code__:
        return True  # its parts are
    if first is other:
        return True
    equal = first == other
    return bool(np.all(equal)) if isinstance(equal, np.ndarray) else equal is True


def _is_hyperparameter(first: Any, other: Any, numbers: Sequence[tuple[float, float]]) -> bool:
    """Return whether two numbers are those of a hyperparameter, which has 32 bits."""
    if not isinstance(first, float | int) or isinstance(first, bool):
        return False
    pair = (float(np.float32(first)), float(np.float32(other)))
    return pair in numbers
