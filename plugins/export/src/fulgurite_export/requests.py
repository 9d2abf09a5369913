"""Requests to an exported function, of which a server gets many: examples in JSON become arrays,
and those that wait are computed together."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fulgurite_export.dtypes import DTYPES
from fulgurite_export.errors import ExportError, InputError
from fulgurite_export.files import build_object
from fulgurite_export.loading import ExportedFunction
from fulgurite_export.manifest import ArraySpec
from fulgurite_export.sizes import collect_names, is_satisfied
from fulgurite_export.structures import Missing, build, flatten

_MAX_DOUBLINGS = 16
_MAX_TRIES = 1024
"""Sizes of batches that are tried for one that a function takes."""


def parse_example(function: ExportedFunction, text: str | bytes) -> Any:
    """Return an example in JSON as inputs of a function, as a batch of one.

    JSON holds for each input its numbers in nested lists, without the axis of the batch:
    `{"image": [0.5, 0.25]}`. Integers and floating-point numbers become arrays of the dtype that
    the function takes; what would not fit is an error, and so is all that `function.check` refuses
    of a batch of such examples, of a size that the function takes.

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
        ExportError: the function does not take batches of examples.
    """
    try:
        values = json.loads(text, object_pairs_hook=build_object, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{function.name}: the request is not JSON: {error!s:.100}") from error
    spec = function.spec
    axis = _find_batch_axis(function, spec.read_inputs)
    reads = {*spec.reads}
    leaves = flatten(spec.structure, values, reads, function.name)
    inputs = build(
        spec.structure,
        [
            _as_batch(function.name, array_spec, leaf) if number in reads else None
            for number, (array_spec, leaf) in enumerate(zip(spec.inputs, leaves, strict=True))
        ],
    )
    size = _choose_batch_size(function, inputs, axis, 1) or 1
    function.check(jax.tree.map(lambda leaf: _repeat(leaf, size), inputs))
    return inputs


def call_together(function: ExportedFunction, examples: Sequence[Any]) -> list[Any]:
    """Return what a function gives for each of several examples, in as few calls as their shapes
    allow.

    A batch is filled with its first example: up to a power of two, so that few sizes are compiled,
    or up to a size that the function takes. More examples than it takes are several batches.

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

    Raises:
        ExportError: the function does not take batches of examples, also where there is no example.
    """
    spec = function.spec
    axis = _find_batch_axis(function, [*spec.read_inputs, *spec.outputs])
    if spec.takes_seed:
        raise ExportError(f"{function.name} draws random numbers, for which no example has a seed")
    groups: dict[Any, list[int]] = {}
    for index, example in enumerate(examples):
        shapes = tuple(np.shape(leaf) for leaf in jax.tree.leaves(example))
        groups.setdefault(shapes, []).append(index)
    outputs: list[Any] = [None] * len(examples)
    for indices in groups.values():
        remaining = indices
        while remaining:
            size = _choose_batch_size(function, examples[remaining[0]], axis, len(remaining))
            if size is None:
                raise ExportError(f"{function.name} takes no number of such examples together")
            chosen, remaining = remaining[:size], remaining[size:]
            members = [examples[index] for index in chosen + chosen[:1] * (size - len(chosen))]
            batch = jax.tree.map(lambda *arrays: np.concatenate(arrays), *members)
            together = jax.tree.map(np.asarray, function(batch))
            for row, index in enumerate(chosen):
                outputs[index] = jax.tree.map(lambda leaf, row=row: np.asarray(leaf[row]), together)
    return outputs


def _find_batch_axis(function: ExportedFunction, specs: Sequence[ArraySpec]) -> int | str:
    """Return the size of the axis with which arrays begin, or its name; raise `ExportError` if
    there is none.

    Args:
        function: which takes or returns the arrays.
        specs: of the arrays.
    """
    first_axes = {spec.shape[:1] for spec in specs}
    if len(first_axes) == 1 and () not in first_axes:
        ((axis,),) = first_axes
        is_open = isinstance(axis, str) and axis.isidentifier()
        if is_open or (isinstance(axis, int) and axis > 0):
            return axis
    raise ExportError(f"{function.name} has arrays that do not begin with the axis of the batch")


def _choose_batch_size(
    function: ExportedFunction, example: Any, axis: int | str, count: int
) -> int | None:
    """Return the size of the batch in which a function takes `count` examples, or the most of them
    that it takes together; None if it takes none.

    Args:
        function: the function.
        example: one of the examples.
        axis: as `_find_batch_axis` returns it.
        count: how many there are.
    """
    if isinstance(axis, int):
        return axis
    spec = function.spec
    constraints = [text for text in spec.constraints if axis in collect_names(text)]
    leaves = flatten(spec.structure, example, {*spec.reads}, function.name)
    sizes = {
        name: size
        for number in spec.reads
        for name, size in zip(spec.inputs[number].shape, np.shape(leaves[number]), strict=False)
        if isinstance(name, str)
    }
    for size in _iter_batch_sizes(count):
        try:
            if all(is_satisfied(text, {**sizes, axis: size}) for text in constraints):
                return size
        except ExportError:  # of an example of another shape, which `check` refuses
            return None
    return None


def _iter_batch_sizes(count: int) -> Iterator[int]:
    """Yield sizes of batches, the best one for `count` examples first."""
    smallest = 1 << (count - 1).bit_length()
    yield from (smallest << doublings for doublings in range(_MAX_DOUBLINGS))
    yield from range(count, count + _MAX_TRIES)
    yield from range(count - 1, 0, -1)


def _repeat(leaf: Any, size: int) -> Any:
    """Return an input of an example as one of a batch of this size; what is missing stays so."""
    if isinstance(leaf, Missing):
        return leaf
    return np.broadcast_to(leaf, (size, *leaf.shape[1:]))


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
