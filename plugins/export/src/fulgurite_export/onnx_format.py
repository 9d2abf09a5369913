"""Writing an ONNX file by jax2onnx, compared with JAX by onnxruntime before it is kept."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import numpy as np
from fulgurite.errors import ConfigurationError, ModelError
from fulgurite.plugins import hide_internal_frames
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import partial_eval

from fulgurite_export.exporting import expand, flatten_model, make_functions, make_options
from fulgurite_export.functions import Function
from fulgurite_export.structures import describe, list_paths
from fulgurite_export.tracing import Prepared, prepare_function

RTOL, ATOL = 1e-4, 1e-5
"""How far what onnxruntime computes may be from what JAX does, by ratio and by difference."""


@hide_internal_frames
def export_onnx(
    model: Any,
    path: str | os.PathLike[str],
    inputs: Any,
    *,
    function: str | Function = "predict",
    engine: fg.Engine | None = None,
    batch: int | str | None = "symbolic",
    shapes: Mapping[str, str] | None = None,
) -> float:
    """Write a function of a trained model to an ONNX file, weights included; return by how much
    onnxruntime differs from JAX on the example.

    Needs the extra `onnx`. jax2onnx does not know every operation, and less of open sizes than
    `export`: a file that onnxruntime cannot run, or that computes something else, is not kept.

    Example:
        from fulgurite_export import export_onnx

        example = {"x": np.ones((2, 2), np.float32), "y": np.ones(2, np.float32)}
        try:
            export_onnx(model, "model.onnx", inputs=example)
        except ValueError as error:
            print(error)  # without the extra `onnx`

    Args:
        model: as of `export`.
        path: of the file, which must not be there.
        inputs: an example of a batch, with which the file is checked, too.
        function: what is exported.
        engine: as of `export`.
        batch: as of `export`.
        shapes: as of `export`.

    Raises:
        ConfigurationError: an argument is invalid, jax2onnx is not installed, or the file is there.
        ModelError: the function cannot be written as ONNX; the message says why.
    """
    file = expand(path)
    if file.exists() or file.is_symlink():
        raise ConfigurationError(f"{file} exists: remove it, or give another file")
    try:
        from jax2onnx import to_onnx  # pyright: ignore[reportMissingImports]
        from onnxruntime import InferenceSession  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigurationError(
            f"ONNX files are written by jax2onnx and onnxruntime ({error}): install the extra "
            "`onnx` of fulgurite-export"
        ) from error
    options = make_options(batch, ("cpu",))
    flat = flatten_model(model)
    engine = fg.Engine(steps=1, autoload=False) if engine is None else engine
    (complete,) = make_functions([function], inputs, shapes or {}, ())
    if complete.constraints:
        raise ConfigurationError(
            f"{complete.name}: an ONNX file holds no constraints: fix the sizes, batch= and shapes="
        )
    prepared = prepare_function(complete, flat, engine, options)
    if prepared.takes_seed:
        raise ModelError(f"{complete.name} draws random numbers, which an ONNX file cannot")
    call = _close_over_weights(prepared, flat.arrays)
    arrays = _read_examples(prepared, complete.inputs)
    expected = jax.jit(call)(*arrays)
    names = _choose_names(prepared, len(expected))
    specs = [prepared.input_specs[number] for number in prepared.reads]
    failures = []
    # jax2onnx replaces whole layers by ONNX operations where it sees them called; where it cannot,
    # it may still know the operations that they are made of.
    for choose in (lambda: call, lambda: _as_operations(call, specs)):
        try:
            data = to_onnx(choose(), specs, **names).SerializeToString()  # type: ignore[union-attr]
            session = InferenceSession(data, providers=["CPUExecutionProvider"])
            outputs = session.run(None, dict(zip(names["input_names"], arrays, strict=True)))
            difference = _compare(outputs, expected)
        except Exception as error:  # both libraries raise whatever they meet
            failures.append(f"{type(error).__name__}: {error!s:.300}")
            continue
        _write(file, data)
        return difference
    raise ModelError(
        f"{complete.name} cannot be written as ONNX: {failures[0]}; and from its operations: "
        f"{failures[1]}. Fix the sizes, batch= and shapes=, or update jax2onnx, or use export"
    )


def _close_over_weights(prepared: Prepared, arrays: list[Any]) -> Callable[..., list[Any]]:
    """Return a function of the inputs that are read."""
    weights = [arrays[number] for number in prepared.weights]

    def call(*inputs: Any) -> list[Any]:
        return prepared.flat(weights, list(inputs))

    return call


def _as_operations(call: Callable[..., list[Any]], specs: list[Any]) -> Callable[..., list[Any]]:
    """Return a function as its operations, without those of which nothing is used, such as the
    random numbers of a dropout that is off."""
    program = jax.jit(call).trace(*specs).jaxpr
    used, _ = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars), True)
    return jaxpr_as_fun(program.replace(jaxpr=used))


def _read_examples(prepared: Prepared, inputs: Any) -> list[np.ndarray]:
    """Return the examples of the inputs that are read, in their dtypes."""
    _, leaves = describe(inputs)
    return [
        np.asarray(leaves[number]).astype(prepared.input_specs[number].dtype)
        for number in prepared.reads
    ]


def _choose_names(prepared: Prepared, num_outputs: int) -> dict[str, list[str]]:
    """Return the names of inputs and outputs, which are all different in an ONNX file.

    Args:
        prepared: the function, which was traced.
        num_outputs: how many arrays it returns.
    """
    inputs = _name(prepared.structure, prepared.reads, "input")
    outputs = _name(prepared.body.output_structure, range(num_outputs), "output")
    outputs = [f"output.{name}" if name in inputs else name for name in outputs]
    return {"input_names": inputs, "output_names": outputs}


def _name(structure: Any, numbers: Sequence[int], alone: str) -> list[str]:
    """Return the names of some arrays of a structure; `alone` is that of one without a path."""
    paths = list_paths(structure)
    return [paths[number] or alone for number in numbers]


def _compare(outputs: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest difference between two lists of arrays; raise `ModelError` if they are not
    close."""
    largest = 0.0
    for output, value in zip(outputs, expected, strict=True):
        wanted = np.asarray(value)
        if output.shape != wanted.shape or output.dtype != wanted.dtype:
            raise ModelError(
                f"onnxruntime gives {output.dtype} {output.shape} instead of {wanted.dtype} "
                f"{wanted.shape}"
            )
        if wanted.size:
            with np.errstate(invalid="ignore"):  # of two infinities, which are equal
                difference = np.abs(_widen(output) - _widen(wanted))
            largest = max(largest, float(np.nanmax(difference, initial=0)))
        if not np.allclose(output, wanted, RTOL, ATOL, equal_nan=True):
            raise ModelError(f"onnxruntime differs from JAX by {largest:.2g}")
    return largest


def _widen(array: np.ndarray) -> np.ndarray:
    """Return an array in a dtype in which any two numbers have a difference."""
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _write(file: Path, data: bytes) -> None:
    """Write a file, which is there at the end if nothing fails."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(data)
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
