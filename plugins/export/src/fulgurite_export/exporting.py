"""Writing the folder of an exported model."""

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from hashlib import file_digest, sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
from fulgurite.errors import (
    ConfigurationError,
    ModelError,
    as_int,
    check_one_of,
    check_positive_int,
)
from fulgurite.plugins import check_not_consumed, hide_internal_frames

from fulgurite_export.dtypes import DTYPES
from fulgurite_export.errors import ExportError
from fulgurite_export.files import expand_path
from fulgurite_export.functions import Function
from fulgurite_export.manifest import (
    FILE,
    MAX_MANIFEST,
    MAX_PROGRAM,
    PLATFORMS,
    WEIGHTS_FILE,
    WRITERS,
    ArraySpec,
    FunctionSpec,
    Manifest,
    decode_manifest,
    get_program_file,
    is_function_name,
)
from fulgurite_export.shapes import Options
from fulgurite_export.tracing import FlatModel, Traced, trace_function
from fulgurite_export.weights import write_weights


@hide_internal_frames
def export(
    model: Any,
    path: str | os.PathLike[str],
    inputs: Any = None,
    *,
    functions: Sequence[str | Function] = ("predict",),
    engine: fg.Engine | None = None,
    batch: int | str | None = "symbolic",
    shapes: Mapping[str, str] | None = None,
    constraints: Iterable[str] = (),
    platforms: Sequence[str] = ("cpu", "cuda", "tpu"),
) -> str:
    """Write functions of a trained model to a new folder, which `load` reads with JAX and NumPy
    alone; return the digest of the folder.

    The model is exported in inference mode. Arrays that no function reads are left out: weights as
    well as inputs, such as the labels of a batch.

    Example:
        from fulgurite_export import export

        example = {"x": np.zeros((1, 2), np.float32), "y": np.zeros(1, np.float32)}
        export(model, "exported", inputs=example)

    Args:
        model: a result of `fit`, a train state such as `result.view("averaged")`, a module, or a
            pair of a module and its state.
        path: of the folder, which must not be there.
        inputs: an example of a batch, for shapes and dtypes: arrays in dictionaries with strings as
            keys, lists and tuples.
        functions: what is exported, by name; `predict` is the module's `predict_step`.
        engine: the engine, for a model whose predictions its plugins change, such as `Precision`.
        batch: the size of the first axis of all inputs: `symbolic` for any, or a number; None for
            that of the examples.
        shapes: of inputs by path, in the place of that: `{"tokens": "batch, length"}`.
        constraints: on open sizes: `["length <= 128", "mod(batch, 8) == 0"]`.
        platforms: of `cpu`, `cuda`, `rocm` and `tpu`, those that the programs are for.

    Raises:
        ConfigurationError: an argument is invalid, or the folder is there.
        ModelError: a function cannot be exported; the message says why.
    """
    folder = expand(path)
    if folder.exists() or folder.is_symlink():
        raise ConfigurationError(f"{folder} exists: remove it, or give another folder")
    options = make_options(batch, platforms)
    flat = flatten_model(model)
    engine = fg.Engine(steps=1, autoload=False) if engine is None else engine
    traced: dict[str, Traced] = {}
    for function in make_functions(functions, inputs, shapes or {}, constraints):
        traced[function.name] = trace_function(function, flat, engine, options)
    return _write_folder(folder, flat, traced, options)


def expand(path: str | os.PathLike[str]) -> Path:
    """Return a path with `~` and variables expanded; raise `ConfigurationError` for unknown
    ones."""
    try:
        return expand_path(path)
    except ExportError as error:
        raise ConfigurationError(f"export: {error}") from error


def make_options(batch: int | str | None, platforms: Sequence[str]) -> Options:
    """Return the options of an export; raise `ConfigurationError` for invalid ones."""
    if isinstance(platforms, str):
        raise ConfigurationError("export: platforms is a list of strings, such as ['cpu']")
    platforms = tuple(platforms)
    batch = as_int(batch)
    if isinstance(batch, str):
        check_one_of(batch, ("symbolic",), "export: batch")
    elif batch is not None:
        check_positive_int(batch, "export: batch")
    for platform in platforms:
        check_one_of(platform, PLATFORMS, "export: platforms")
    if not platforms:
        raise ConfigurationError("export: platforms is empty; give one, such as 'cpu'")
    return Options(batch, platforms)


def make_functions(
    functions: Sequence[str | Function],
    inputs: Any,
    shapes: Mapping[str, str],
    constraints: Iterable[str],
) -> list[Function]:
    """Return what is exported, each with examples of its inputs, their shapes and constraints.

    Args:
        functions: as of `export`.
        inputs: likewise.
        shapes: likewise.
        constraints: likewise.
    """
    functions = [] if isinstance(functions, str | Function) else list(functions)
    if not functions:
        raise ConfigurationError("export: functions is a list of names, such as ['predict']")
    shared = Function("", None, inputs, shapes, _as_constraints(constraints, "export"))
    complete = [
        _complete_function(Function(function) if isinstance(function, str) else function, shared)
        for function in functions
    ]
    if len({function.name for function in complete}) != len(complete):
        raise ConfigurationError("export: two functions have one name")
    is_used = any(isinstance(function, str) or function.inputs is None for function in functions)
    if not is_used and (shared.shapes or shared.constraints):
        raise ConfigurationError(
            "export: shapes and constraints are about inputs, and each function has inputs of its "
            "own: give Function(shapes=, constraints=)"
        )
    return complete


def _complete_function(function: Function, shared: Function) -> Function:
    """Return a function with examples of its inputs, their shapes and constraints.

    Args:
        function: the function.
        shared: has what functions have that say nothing of their own.
    """
    if not is_function_name(function.name):
        raise ConfigurationError(
            f"export: {function.name!r} cannot be the name of a function, and of a file: use "
            "lower-case letters, digits and underscores"
        )
    is_own = function.inputs is not None
    inputs = function.inputs if is_own else shared.inputs
    if inputs is None:
        raise ConfigurationError(
            f"export: {function.name} has no inputs: give an example of a batch, "
            "export(model, path, inputs=batch)"
        )
    shapes, constraints = function.shapes, function.constraints
    if shapes is None:
        shapes = {} if is_own else shared.shapes
    if constraints is None:
        constraints = () if is_own else shared.constraints
    return Function(
        function.name,
        function.call,
        inputs.value if isinstance(inputs, fg.Batch) else inputs,
        shapes,
        _as_constraints(constraints or (), function.name),
    )


def _as_constraints(constraints: Iterable[str], user: str) -> tuple[str, ...]:
    if isinstance(constraints, str):
        raise ConfigurationError(
            f"{user}: constraints is a list of strings, such as ['length <= 128']"
        )
    return tuple(constraints)


def flatten_model(model: Any) -> FlatModel:
    """Return what is exported as a list of arrays."""
    if isinstance(model, fg.FitResult):
        model = model.state
    check_not_consumed(model)
    if isinstance(model, fg.TrainState):
        return FlatModel(model.module, model.model_state, int(model.step))
    is_pair = isinstance(model, tuple) and len(model) == 2
    module, model_state = model if is_pair else (model, None)
    if not isinstance(module, eqx.Module):
        raise ConfigurationError(
            f"export: {type(module).__name__} is not a model: give a result of fit, a train state, "
            "a module, or (module, state)"
        )
    return FlatModel(module, model_state, 0)


def _write_folder(
    folder: Path, model: FlatModel, traced: Mapping[str, Traced], options: Options
) -> str:
    """Write the folder, which is there at the end if nothing fails; return its digest.

    Args:
        folder: the folder.
        model: whose arrays are written.
        traced: the functions.
        options: how they were exported.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # In a container a process that was killed may have had the same number.
    partial = folder.with_name(f".{folder.name}.{uuid4().hex[:8]}.part")
    partial.mkdir()
    try:
        digest = _write_files(partial, model, traced, options)
        os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return digest


def _write_files(
    folder: Path, model: FlatModel, traced: Mapping[str, Traced], options: Options
) -> str:
    """Write weights, programs and manifest; the arguments and the result are those of
    `_write_folder`, but the folder is there."""
    numbers = sorted({number for function in traced.values() for number in function.weights})
    arrays = {model.names[number]: _read_array(model, number) for number in numbers}
    positions = {number: position for position, number in enumerate(numbers)}
    write_weights(folder, arrays)
    functions = {}
    for name, function in traced.items():
        program = bytes(function.exported.serialize())
        if len(program) >= MAX_PROGRAM:
            raise ModelError(
                f"{name}: its program has {len(program):,} bytes, most of them of arrays that are "
                "not part of the module: make them fields of it"
            )
        _write_file(folder / get_program_file(name), program)
        functions[name] = _make_function_spec(function, program, positions)
        # safetensors makes files that only their owner may read.
        shutil.copymode(folder / get_program_file(name), folder / WEIGHTS_FILE)
    with open(folder / WEIGHTS_FILE, "rb") as file:
        os.fsync(file.fileno())
        weights_size = os.fstat(file.fileno()).st_size
        weights_sha256 = file_digest(file, "sha256").hexdigest()
    manifest = Manifest(
        platforms=options.platforms,
        versions={name: version(name) for name in WRITERS},
        weights=tuple(
            ArraySpec(name, array.dtype.name, array.shape) for name, array in arrays.items()
        ),
        weights_size=weights_size,
        weights_sha256=weights_sha256,
        functions=functions,
    )
    text, digest = manifest.encode()
    if len(text) > MAX_MANIFEST:
        raise ModelError(f"the model has {len(arrays):,} arrays, too many for a manifest")
    try:
        decode_manifest(text)
    except ExportError as error:
        raise ModelError(f"the folder could not be loaded: {error}") from error
    _write_file(folder / FILE, text)
    return digest


def _make_function_spec(
    function: Traced, program: bytes, positions: Mapping[int, int]
) -> FunctionSpec:
    """Return a function as the manifest has it.

    Args:
        function: the function.
        program: its program.
        positions: of the model's arrays in the list of weights.
    """
    return FunctionSpec(
        size=len(program),
        sha256=sha256(program).hexdigest(),
        weights=tuple(positions[number] for number in function.weights),
        inputs=function.inputs,
        reads=function.reads,
        structure=function.structure,
        outputs=function.outputs,
        output_structure=function.output_structure,
        constraints=function.constraints,
        takes_seed=function.takes_seed,
    )


def _read_array(model: FlatModel, number: int) -> np.ndarray:
    """Return an array of a model on the host."""
    array = model.arrays[number]
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        raise ModelError(
            f"{model.names[number]} lies on devices of several processes: export a checkpoint of "
            "the run in one process"
        )
    if array.dtype.name not in DTYPES:
        raise ModelError(f"{model.names[number]} is of dtype {array.dtype}: it cannot be exported")
    return np.asarray(array)


def _write_file(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
