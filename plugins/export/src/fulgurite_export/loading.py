"""Loading an exported folder, with JAX and NumPy alone: neither Fulgurite nor Equinox is imported,
and no Python code of the folder is executed."""

import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from fulgurite_export.dtypes import WIDE
from fulgurite_export.errors import ExportError, InputError
from fulgurite_export.files import expand_path, open_file
from fulgurite_export.manifest import (
    ArraySpec,
    FunctionSpec,
    Manifest,
    get_program_file,
    read_manifest,
)
from fulgurite_export.sizes import compute_shape, is_satisfied
from fulgurite_export.structures import Missing, build, flatten
from fulgurite_export.weights import read_weights

_HOST_CALLS = (b"_python_cpu_callback", b"_python_gpu_callback")
"""Ends of the names by which XLA calls into Python. `jax.export` writes no such program, and the
address that one of them would hold is not to be trusted."""
_MAX_SEED = 2**32


class ExportedFunction:
    """A function of an exported model.

    Example:
        from fulgurite_export import export, load

        example = {"x": np.zeros((1, 2), np.float32), "y": np.zeros(1, np.float32)}
        export(model, "line", inputs=example)
        predict = load("line").functions["predict"]
        print(predict)
        print(predict({"x": np.ones((3, 2), np.float32)}))

    Attributes:
        name: of the function.
        spec: what it takes and returns.
        exported: the program, as `jax.export` has it; `exported.mlir_module()` is its text.

    Args:
        name: becomes an attribute.
        spec: likewise.
        exported: likewise.
        weights: the arrays that the program reads.
    """

    def __init__(
        self, name: str, spec: FunctionSpec, exported: jax_export.Exported, weights: list[jax.Array]
    ) -> None:
        self.name = name
        self.spec = spec
        self.exported = exported
        self._weights = weights
        self._call = jax.jit(exported.call)

    def __call__(self, inputs: Any, *, seed: int | None = None) -> Any:
        """Return what the function gives for some inputs, as jax arrays. Each shape is compiled
        once.

        Args:
            inputs: arrays in the structure that was exported. What the function does not read may
                be left out.
            seed: for a function that draws random numbers, and for no other.

        Raises:
            InputError: the inputs are not as they must be; in one sentence.
        """
        leaves, sizes = self.check(inputs)
        leaves += self._check_seed(seed)
        if 0 in sizes.values():
            outputs = self._make_empty(sizes)
        else:
            outputs = self._call(self._weights, leaves)
        return build(self.spec.output_structure, outputs)

    def check(self, inputs: Any) -> tuple[list[Any], dict[str, int]]:
        """Return the arrays that the function reads of some inputs, and the sizes of open axes; the
        function itself is not called.

        Args:
            inputs: as of a call.

        Raises:
            InputError: the inputs are not as they must be; in one sentence.
        """
        arrays = flatten(self.spec.structure, inputs, {*self.spec.reads}, self.name)
        sizes: dict[str, int] = {}
        leaves = [
            self._check_array(self.spec.inputs[number], arrays[number], sizes)
            for number in self.spec.reads
        ]
        self._check_sizes(leaves, sizes)
        return leaves, sizes

    def __str__(self) -> str:
        return self.spec.describe(self.name)

    def _check_array(self, spec: ArraySpec, value: Any, sizes: dict[str, int]) -> Any:
        """Return an input as an array; note the sizes of its open axes.

        Args:
            spec: what it must be.
            value: what a caller gave.
            sizes: the sizes that are known so far.
        """
        place = f"{self.name}: the input {spec.name!r}" if spec.name else f"{self.name}: the input"
        if isinstance(value, Missing):
            raise InputError(f"{place} is missing; it must be {spec}")
        array = value if isinstance(value, jax.Array) else _as_array(value, place, spec)
        is_shaped = array.ndim == len(spec.shape)
        if is_shaped:
            for expected, size in zip(spec.shape, array.shape, strict=True):
                if isinstance(expected, str):
                    if expected.isidentifier():
                        sizes.setdefault(expected, size)
                elif size != expected:
                    is_shaped = False
        if not is_shaped or array.dtype.name != spec.dtype:
            actual = ArraySpec("", array.dtype.name, array.shape)
            raise InputError(f"{place} is {actual}; it must be {spec}")
        return array

    def _check_sizes(self, leaves: list[Any], sizes: dict[str, int]) -> None:
        """Raise `InputError` unless the open axes of all inputs agree, and satisfy the
        constraints, and outputs for empty inputs are empty.

        Args:
            leaves: the inputs that are read.
            sizes: of the open axes.
        """
        for spec, leaf in zip(self.spec.read_inputs, leaves, strict=True):
            if self._compute_shape(spec, sizes) != leaf.shape:
                actual = ArraySpec("", spec.dtype, leaf.shape)
                raise InputError(
                    f"{self.name}: the input {spec.name!r} is {actual}; it must be {spec}, where "
                    f"{_format_sizes(sizes)} by the other inputs"
                )
        for constraint in self.spec.constraints:
            if not is_satisfied(constraint, sizes):
                raise InputError(
                    f"{self.name}: {_format_sizes(sizes)}, and it must be that {constraint}"
                )
        if 0 not in sizes.values():
            return
        for spec in self.spec.outputs:
            if 0 not in self._compute_shape(spec, sizes):
                place = f"the output {spec.name!r}" if spec.name else "the output"
                raise InputError(
                    f"{self.name}: {_format_sizes(sizes)}, and {place} is not empty for empty "
                    "inputs: give at least one example"
                )

    def _compute_shape(self, spec: ArraySpec, sizes: dict[str, int]) -> tuple[int, ...]:
        """Return the shape of an array; raise `InputError` if an axis would have none.

        Args:
            spec: of the array.
            sizes: of the open axes.
        """
        try:
            return compute_shape(spec.shape, sizes)
        except ExportError as error:
            raise InputError(f"{self.name}: {_format_sizes(sizes)}, and {error}") from error

    def _check_seed(self, seed: int | None) -> list[np.ndarray]:
        if not self.spec.takes_seed:
            if seed is not None:
                raise InputError(f"{self.name} draws no random numbers: leave out seed")
            return []
        is_integer = hasattr(seed, "__index__") and not isinstance(seed, bool | np.bool_)
        number = operator.index(seed) if seed is not None and is_integer else -1  # also of NumPy
        if not 0 <= number < _MAX_SEED:
            raise InputError(
                f"{self.name}: seed is {seed!r:.50}; it draws random numbers, and needs a whole "
                "number below 2**32"
            )
        return [np.asarray(number, np.uint32)]

    def _make_empty(self, sizes: dict[str, int]) -> list[jax.Array]:
        """Return the outputs for empty inputs, which programs of `jax.export` do not take.

        Args:
            sizes: of the open axes.
        """
        return [
            jnp.zeros(compute_shape(spec.shape, sizes), spec.dtype) for spec in self.spec.outputs
        ]


class ExportedModel:
    """An exported folder that was loaded.

    Example:
        from fulgurite_export import export, load

        example = {"x": np.zeros((1, 2), np.float32), "y": np.zeros(1, np.float32)}
        export(model, "model", inputs=example)
        loaded = load("model")
        print(loaded({"x": np.ones((3, 2), np.float32)}))

    Attributes:
        functions: by name.
        weights: all arrays, by name.
        platforms: those that it was exported for.
        versions: of what wrote it.
        digest: of the folder, for `load(digest=...)`.

    Args:
        manifest: of the folder.
        digest: likewise.
        weights: in the order of the manifest.
        programs: by the names of their functions.
    """

    def __init__(
        self,
        manifest: Manifest,
        digest: str,
        weights: list[jax.Array],
        programs: dict[str, jax_export.Exported],
    ) -> None:
        self.digest = digest
        self.platforms = manifest.platforms
        self.versions = manifest.versions
        names = [spec.name for spec in manifest.weights]
        self.weights: Mapping[str, jax.Array] = dict(zip(names, weights, strict=True))
        self.functions: Mapping[str, ExportedFunction] = {
            name: ExportedFunction(
                name, spec, programs[name], [weights[number] for number in spec.weights]
            )
            for name, spec in manifest.functions.items()
        }

    def __call__(self, inputs: Any, *, seed: int | None = None) -> Any:
        """Return what the function `predict` gives, or the only one there is.

        Args:
            inputs: as of `ExportedFunction`.
            seed: likewise.
        """
        name = "predict" if "predict" in self.functions else min(self.functions)
        if name != "predict" and len(self.functions) > 1:
            raise InputError(
                "the model has no function 'predict': call functions[name] with one of "
                f"{', '.join(self.functions)}"
            )
        return self.functions[name](inputs, seed=seed)

    def __str__(self) -> str:
        return "\n".join(map(str, self.functions.values()))


def load(path: str | os.PathLike[str], *, digest: str | None = None) -> ExportedModel:
    """Return the model of a folder that `export` wrote, its weights on JAX's own device.

    Every byte is compared with the hashes in the manifest, which finds damage. It does not tell who
    made the folder: a program computes what it was made to compute. For that, keep the digest that
    `export` returned somewhere else, and give it.

    Args:
        path: the folder.
        digest: what the folder must have.

    Raises:
        ExportError: a file is missing or was changed, or cannot be used by this JAX or on this
            device.
    """
    folder = expand_path(path)
    manifest, own_digest = read_manifest(folder)
    if digest is not None and digest != own_digest:
        raise ExportError(f"{folder} has the digest {own_digest}, not {digest}: it is another one")
    _check_process(manifest)
    programs = {
        name: _read_program(folder, name, spec, manifest)
        for name, spec in manifest.functions.items()
    }
    weights = [jnp.array(array) for array in read_weights(folder, manifest)]
    return ExportedModel(manifest, own_digest, weights, programs)


def _check_process(manifest: Manifest) -> None:
    """Raise `ExportError` if this process cannot run the programs of a folder."""
    backend = jax.default_backend()
    is_gpu = backend == "gpu" and not {"cuda", "rocm"}.isdisjoint(manifest.platforms)
    if not is_gpu and backend not in manifest.platforms:
        raise ExportError(
            f"the model was exported for {', '.join(manifest.platforms)}, and this process "
            f"computes on {backend}: export it for that too, or set JAX_PLATFORMS"
        )
    specs = [*manifest.weights]
    for function in manifest.functions.values():
        specs += [*function.inputs, *function.outputs]
    wide = [spec.dtype for spec in specs if spec.dtype in WIDE]
    if wide and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ExportError(
            f"the model has {wide[0]} arrays, which this JAX does not: set JAX_ENABLE_X64=1"
        )


def _read_program(
    folder: Path, name: str, spec: FunctionSpec, manifest: Manifest
) -> jax_export.Exported:
    """Return the program of a function.

    Args:
        folder: the folder.
        name: of the function.
        spec: what it must take and return.
        manifest: of the folder.
    """
    file_name = get_program_file(name)
    with open_file(folder, file_name) as file:
        file.check_size(spec.size)
        data = file.read(spec.size)
        file.check_hash(spec.sha256)
    if any(text in data for text in _HOST_CALLS):
        raise ExportError(f"{folder / file_name} calls back into Python, which no export does")
    try:
        exported = jax_export.deserialize(bytearray(data))
        is_same = _describe_program(exported) == _expect_program(spec, manifest)
    except Exception as error:  # of a reader that trusts its file
        raise ExportError(
            f"{folder / file_name} cannot be read by JAX {jax.__version__}; it was written by "
            f"{manifest.versions['jax']}: {error!s:.200}"
        ) from error
    if not is_same:
        raise ExportError(f"{folder / file_name} is not the program that manifest.json describes")
    return exported


def _describe_program(exported: jax_export.Exported) -> Any:
    """Return what a program takes and returns, and where it runs."""
    arrays = [
        [(aval.dtype.name, tuple(map(str, aval.shape))) for aval in avals]
        for avals in (exported.in_avals, exported.out_avals)
    ]
    return exported.in_tree, *arrays, tuple(exported.platforms), exported.nr_devices


def _expect_program(spec: FunctionSpec, manifest: Manifest) -> Any:
    """Return what `_describe_program` must return of a function."""
    weights = [manifest.weights[number] for number in spec.weights]
    inputs = spec.read_inputs
    if spec.takes_seed:
        inputs = [*inputs, ArraySpec("seed", "uint32", ())]
    tree = jax.tree.structure((([0] * len(weights), [0] * len(inputs)), {}))
    taken = [(array.dtype, tuple(map(str, array.shape))) for array in (*weights, *inputs)]
    returned = [(array.dtype, tuple(map(str, array.shape))) for array in spec.outputs]
    return tree, taken, returned, manifest.platforms, 1


def _as_array(value: Any, place: str, spec: ArraySpec) -> np.ndarray:
    """Return an input as a NumPy array.

    Args:
        value: what a caller gave.
        place: names the input, for errors.
        spec: what it must be.
    """
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"{place} is not an array; it must be {spec}") from error
    if array.dtype.kind in "OSU":
        raise InputError(f"{place} is {type(value).__name__}; it must be {spec}")
    return array


def _format_sizes(sizes: dict[str, int]) -> str:
    """Return sizes as text, such as `batch = 7`."""
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())
