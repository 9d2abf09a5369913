"""Requests to an exported function, of which a server gets many: examples in JSON become arrays,
and those that wait are computed together."""

import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fulgurite_export.dtypes import DTYPES
from fulgurite_export.errors import ExportError, InputError
from fulgurite_export.files import build_object
from fulgurite_export.loading import ExportedFunction
from fulgurite_export.manifest import ArraySpec
from fulgurite_export.structures import Missing, build, flatten


def parse_example(function: ExportedFunction, text: str | bytes) -> Any:
    """Return an example in JSON as inputs of a function, as a batch of one.

    JSON holds for each input its numbers in nested lists, without the axis of the batch:
    `{"image": [0.5, 0.25]}`. Integers and floating-point numbers become arrays of the dtype that
    the function takes; what would not fit is an error, and so is all that `function.check` refuses.

    Example:
        from fulgurite_export import export, load, parse_example

        example = {"x": np.zeros((1, 2), np.float32), "y": np.zeros(1, np.float32)}
        export(model, "served", inputs=example)
        predict = load("served").functions["predict"]
        print(predict(parse_example(predict, '{"x": [0.5, 2]}')))

    Args:
        function: the function.
        text: the JSON, of which the caller bounds the length.

    Raises:
        InputError: it is not JSON, or not an example; in one sentence.
    """
    try:
        values = json.loads(text, object_pairs_hook=build_object, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{function.name}: the request is not JSON: {error!s:.100}") from error
    spec = function.spec
    reads = {*spec.reads}
    leaves = flatten(spec.structure, values, reads, function.name)
    inputs = build(
        spec.structure,
        [
            _as_batch(function.name, array_spec, leaf) if number in reads else None
            for number, (array_spec, leaf) in enumerate(zip(spec.inputs, leaves, strict=True))
        ],
    )
    function.check(inputs)
    return inputs


def call_together(function: ExportedFunction, examples: Sequence[Any]) -> list[Any]:
    """Return what a function gives for each of several examples, in as few calls as their shapes
    allow.

    A batch is filled up to a power of two with its first example, so that few sizes are compiled.

    Example:
        from fulgurite_export import call_together, export, load, parse_example

        example = {"x": np.zeros((1, 2), np.float32), "y": np.zeros(1, np.float32)}
        export(model, "together", inputs=example)
        predict = load("together").functions["predict"]
        requests = [parse_example(predict, text) for text in ('{"x": [0, 1]}', '{"x": [2, 3]}')]
        first, second = call_together(predict, requests)

    Args:
        function: whose inputs and outputs all begin with the axis of the batch.
        examples: inputs, each a batch of one.

    Returns:
        The outputs of each example, NumPy arrays without the axis of the batch.
    """
    spec = function.spec
    first_axes = {array.shape[:1] for array in (*spec.read_inputs, *spec.outputs)}
    if len(first_axes) != 1 or () in first_axes:
        raise ExportError(
            f"{function.name} has arrays that do not begin with the axis of the batch"
        )
    groups: dict[Any, list[int]] = {}
    for index, example in enumerate(examples):
        shapes = tuple(np.shape(leaf) for leaf in jax.tree.leaves(example))
        groups.setdefault(shapes, []).append(index)
    outputs: list[Any] = [None] * len(examples)
    for indices in groups.values():
        num_missing = (1 << (len(indices) - 1).bit_length()) - len(indices)
        members = [examples[index] for index in indices + indices[:1] * num_missing]
        batch = jax.tree.map(lambda *arrays: np.concatenate(arrays), *members)
        together = jax.tree.map(np.asarray, function(batch))
        for row, index in enumerate(indices):
            outputs[index] = jax.tree.map(lambda array, row=row: np.asarray(array[row]), together)
    return outputs


def _as_batch(name: str, spec: ArraySpec, value: Any) -> Any:
    """Return an input of an example as an array with one more axis; what is missing stays so.

    Args:
        name: of the function.
        spec: what the input must be.
        value: what JSON has.
    """
    if isinstance(value, Missing):
        return value
    place = f"{name}: the input {spec.name!r}" if spec.name else f"{name}: the input"
    dtype = DTYPES[spec.dtype]
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise InputError(f"{place} is {dtype}, of which JSON has no numbers")
    # Numbers stay what they are, whatever their size, and lists of unequal lengths stay lists.
    numbers = np.array([value], dtype=object)
    kinds = {*map(type, numbers.flat)}
    if list in kinds:
        raise InputError(f"{place} has lists of unequal lengths; it must be {spec}")
    if kinds - _get_kinds(dtype):
        raise InputError(f"{place} must be numbers of type {dtype}")
    array = _convert(numbers, dtype)
    if array is None:
        raise InputError(f"{place} has a number that is too large for {dtype}")
    return array


def _get_kinds(dtype: np.dtype) -> set[type]:
    """Return the types that values in JSON may have for a dtype."""
    if dtype.kind == "b":
        return {bool}
    return {int, float} if jnp.issubdtype(dtype, jnp.floating) else {int}


def _convert(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
    """Return Python's numbers in another dtype; None if one is too large for it.

    Args:
        numbers: of dtype `object`.
        dtype: that they get.
    """
    if dtype.kind == "b":
        return numbers.astype(bool)
    if jnp.issubdtype(dtype, jnp.floating):
        try:
            with np.errstate(over="ignore"):
                array = numbers.astype(np.float64).astype(dtype)
        except OverflowError:
            return None
        return array if np.isfinite(array.astype(np.float64)).all() else None
    limits = jnp.iinfo(dtype)
    if not all(limits.min <= number <= limits.max for number in numbers.flat):
        return None
    return numbers.astype(np.int64 if limits.min < 0 else np.uint64).astype(dtype)


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")
