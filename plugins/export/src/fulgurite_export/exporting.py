"""Writing the folder of an exported model."""

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
from fulgurite.errors import ConfigurationError, ModelError, check_one_of, check_positive_int
from fulgurite.plugins import check_not_consumed

from fulgurite_export.dtypes import DTYPES
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
    get_program_file,
    is_function_name,
)
from fulgurite_export.shapes import Options
from fulgurite_export.tracing import FlatModel, Traced, trace_function
from fulgurite_export.weights import write_weights


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
    folder = Path(path)
    if folder.exists() or folder.is_symlink():
        raise ConfigurationError(f"{folder} exists: remove it, or give another folder")
    options = make_options(batch, shapes or {}, constraints, platforms)
    flat = flatten_model(model)
    engine = fg.Engine(steps=1, autoload=False) if engine is None else engine
    traced: dict[str, Traced] = {}
    for function in make_functions(functions, inputs):
        traced[function.name] = trace_function(function, flat, function.inputs, engine, options)
    return _write_folder(folder, flat, traced, options)


def make_options(
    batch: int | str | None,
    shapes: Mapping[str, str],
    constraints: Iterable[str],
    platforms: Sequence[str],
) -> Options:
    """Return the options of an export; raise `ConfigurationError` for invalid ones."""
    if isinstance(constraints, str) or isinstance(platforms, str):
        raise ConfigurationError("export: constraints and platforms are lists of strings")
    if isinstance(batch, str):
        check_one_of(batch, ("symbolic",), "export: batch")
    elif batch is not None:
        check_positive_int(batch, "export: batch")
    for platform in platforms:
        check_one_of(platform, PLATFORMS, "export: platforms")
    if not platforms:
        raise ConfigurationError("export: platforms is empty; give one, such as 'cpu'")
    return Options(batch, shapes, tuple(constraints), tuple(platforms))


def make_functions(functions: Sequence[str | Function], inputs: Any) -> list[Function]:
    """Return what is exported, each with examples of its inputs."""
    if isinstance(functions, str) or not functions:
        raise ConfigurationError("export: functions is a list of names, such as ['predict']")
    complete = []
    for function in functions:
        function = Function(function) if isinstance(function, str) else function
        if not is_function_name(function.name):
            raise ConfigurationError(
                f"export: {function.name!r} cannot be the name of a function, and of a file: use "
                "lower-case letters, digits and underscores"
            )
        own_inputs = inputs if function.inputs is None else function.inputs
        if own_inputs is None:
            raise ConfigurationError(
                f"export: {function.name} has no inputs: give an example of a batch, "
                "export(model, path, inputs=batch)"
            )
        if isinstance(own_inputs, fg.Batch):
            own_inputs = own_inputs.value
        complete.append(Function(function.name, function.call, own_inputs))
    if len({function.name for function in complete}) != len(complete):
        raise ConfigurationError("export: two functions have one name")
    return complete


def flatten_model(model: Any) -> FlatModel:
    """Return what is exported as a list of arrays."""
    if isinstance(model, fg.FitResult):
        model = model.state
    check_not_consumed(model)
    if isinstance(model, fg.TrainState):
        return FlatModel(model.module, model.model_state, int(model.step))
    module, model_state = model if isinstance(model, tuple) else (model, None)
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
    numbers = sorted({number for function in traced.values() for number in function.weights})
    arrays = {model.names[number]: _read_array(model, number) for number in numbers}
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    partial.mkdir()
    try:
        write_weights(partial, arrays)
        programs = {}
        for name, function in traced.items():
            data = bytes(function.exported.serialize())
            if len(data) >= MAX_PROGRAM:
                raise ModelError(
                    f"{name}: its program has {len(data):,} bytes, most of them of arrays that are "
                    "not part of the module: make them fields of it"
                )
            _write_file(partial / get_program_file(name), data)
            programs[name] = data
            # safetensors lets nobody else read its files.
            shutil.copymode(partial / get_program_file(name), partial / WEIGHTS_FILE)
        weights_file = (partial / WEIGHTS_FILE).read_bytes()
        positions = {number: position for position, number in enumerate(numbers)}
        manifest = Manifest(
            platforms=options.platforms,
            versions={name: version(name) for name in WRITERS},
            weights=tuple(
                ArraySpec(name, array.dtype.name, array.shape) for name, array in arrays.items()
            ),
            weights_size=len(weights_file),
            weights_sha256=sha256(weights_file).hexdigest(),
            functions={
                name: _make_function_spec(function, programs[name], positions, options)
                for name, function in traced.items()
            },
        )
        text, digest = manifest.encode()
        if len(text) > MAX_MANIFEST:
            raise ModelError(f"the model has {len(arrays):,} arrays, too many for a manifest")
        _write_file(partial / FILE, text)
        os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return digest


def _make_function_spec(
    function: Traced, program: bytes, positions: Mapping[int, int], options: Options
) -> FunctionSpec:
    """Return a function as the manifest has it.

    Args:
        function: the function.
        program: its program.
        positions: of the model's arrays in the list of weights.
        options: how it was exported.
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
        constraints=options.constraints,
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
