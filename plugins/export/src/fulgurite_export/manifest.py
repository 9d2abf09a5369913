"""The manifest of an exported folder: what is in it, and the hash of every file.

It is read by hand and checked field by field: a folder may come from anywhere.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fulgurite_export.dtypes import DTYPES, get_storage
from fulgurite_export.errors import ExportError
from fulgurite_export.files import open_file, parse_json
from fulgurite_export.sizes import collect_names
from fulgurite_export.structures import Template, check_template, list_paths

FILE = "manifest.json"
WEIGHTS_FILE = "weights.safetensors"
MAX_MANIFEST = 1 << 23
"""Bytes of a manifest, enough for 40,000 arrays. JSON in memory takes up to forty times as much."""
MAX_PROGRAM = 1 << 28
"""Bytes of the program of a function."""
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_FORMAT = "fulgurite-export"
_VERSION = 1
WRITERS = ("fulgurite-export", "jax", "jaxlib")
"""The distributions whose versions are noted."""
_VERSION_TEXT = re.compile(r"[0-9][0-9A-Za-z.+!-]{0,50}")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_SIZE = 2**63


@dataclass(frozen=True)
class ArraySpec:
    """An array by name, dtype and shape.

    Attributes:
        name: its path.
        dtype: the name of its dtype.
        shape: sizes; of an axis that is open an expression, such as `batch`.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        return f"{self.dtype} ({sizes}{',' if len(self.shape) == 1 else ''})"


@dataclass(frozen=True)
class FunctionSpec:
    """A function of a folder.

    Attributes:
        size: of its program, in bytes.
        sha256: of its program.
        weights: the numbers of the arrays of `Manifest.weights` that it reads, in order.
        inputs: every array of its inputs.
        reads: the numbers of those that it reads.
        structure: of its inputs.
        outputs: every array that it returns.
        output_structure: their structure.
        constraints: on open sizes.
        takes_seed: whether it has an integer more, from which it makes random numbers.
    """

    size: int
    sha256: str
    weights: tuple[int, ...]
    inputs: tuple[ArraySpec, ...]
    reads: tuple[int, ...]
    structure: Template
    outputs: tuple[ArraySpec, ...]
    output_structure: Template
    constraints: tuple[str, ...]
    takes_seed: bool

    @property
    def read_inputs(self) -> list[ArraySpec]:
        """The inputs that the program gets."""
        return [self.inputs[number] for number in self.reads]

    def describe(self, name: str) -> str:
        """Return what the function takes and returns, a line each.

        Args:
            name: of the function.
        """
        lines = [f"{name}:"]
        for spec in self.read_inputs:
            lines.append(f"  {_as_printable(spec.name) or 'input'}: {spec}")
        lines += [f"  {constraint}" for constraint in self.constraints]
        if self.takes_seed:
            lines.append("  seed: a whole number")
        for spec in self.outputs:
            lines.append(f"  -> {_as_printable(spec.name) or 'output'}: {spec}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Manifest:
    """What an exported folder holds.

    Attributes:
        platforms: those that its programs run on.
        versions: of the distributions that wrote it.
        weights: the arrays of `weights.safetensors`.
        weights_size: of that file, in bytes.
        weights_sha256: of that file.
        functions: by name; the program of each is the file `NAME.bin`.
    """

    platforms: tuple[str, ...]
    versions: dict[str, str]
    weights: tuple[ArraySpec, ...]
    weights_size: int
    weights_sha256: str
    functions: dict[str, FunctionSpec]

    def encode(self) -> tuple[bytes, str]:
        """Return the text of the file, and the digest in it."""
        content = {"format": _FORMAT, "format_version": _VERSION, **asdict(self)}
        digest = _compute_digest(content)
        return _as_text({**content, "digest": digest}), digest


def get_program_file(name: str) -> str:
    """Return the name of the file with the program of a function."""
    return f"{name}.bin"


def is_function_name(name: object) -> bool:
    """Return whether a function may have a name, which is that of a file too."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """Return the manifest of a folder, and its digest.

    Raises:
        ExportError: there is none, or one that `export` has not written so.
    """
    with open_file(folder, FILE) as file:
        if file.size > MAX_MANIFEST:
            raise ExportError(f"{folder / FILE} has {file.size} bytes, more than {MAX_MANIFEST}")
        data = file.read(file.size)
    try:
        return decode_manifest(data)
    except ExportError as error:
        raise ExportError(f"{folder / FILE}: {error}") from error


def decode_manifest(data: bytes) -> tuple[Manifest, str]:
    """Return the manifest in the bytes of a file, and its digest.

    Raises:
        ExportError: it is not as `Manifest.encode` writes one.
    """
    content = parse_json(data, "it")
    fields = _take_fields(content, "the manifest", {"digest", "format", "format_version"}, Manifest)
    if fields.pop("format") != _FORMAT:
        raise ExportError("it is not the manifest of an exported model")
    if fields.pop("format_version") != _VERSION:
        raise ExportError("it was written by another version of fulgurite-export: update this one")
    digest = fields.pop("digest")
    rest = {key: value for key, value in content.items() if key != "digest"}
    if digest != _compute_digest(rest) or _as_text(content) != data:
        raise ExportError("it was changed after it was written: copy the folder again")
    versions = fields["versions"]
    if not isinstance(versions, dict) or versions.keys() != {*WRITERS}:
        raise ExportError(f"versions must be those of {', '.join(WRITERS)}")
    _decode_tuple([*versions.values()], "versions", _is_version)
    weights = _decode_arrays(fields["weights"], "weights")
    if any(isinstance(size, str) for spec in weights for size in spec.shape):
        raise ExportError("a weight has an axis without a size")
    if len({spec.name for spec in weights}) != len(weights):
        raise ExportError("two weights have one name")
    platforms = _decode_tuple(fields["platforms"], "platforms", lambda name: name in PLATFORMS)
    manifest = Manifest(
        platforms=platforms,
        versions=versions,
        weights=weights,
        weights_size=_decode_size(fields["weights_size"], _MAX_SIZE),
        weights_sha256=_decode_sha256(fields["weights_sha256"]),
        functions=_decode_functions(fields["functions"], len(weights)),
    )
    _check_weights_size(manifest)
    return manifest, digest


def _decode_functions(content: Any, num_weights: int) -> dict[str, FunctionSpec]:
    """Return the functions of a manifest.

    Args:
        content: of the field.
        num_weights: how many arrays there are.
    """
    if not isinstance(content, dict) or not content:
        raise ExportError("it has no functions")
    functions = {}
    for name, function in content.items():
        if not is_function_name(name):
            raise ExportError(f"{name!r:.100} is not the name of a function")
        functions[name] = _decode_function(function, num_weights)
    return functions


def _decode_function(content: Any, num_weights: int) -> FunctionSpec:
    fields = _take_fields(content, "a function", set(), FunctionSpec)
    inputs = _decode_arrays(fields["inputs"], "inputs")
    outputs = _decode_arrays(fields["outputs"], "outputs")
    for specs, name in ((inputs, "structure"), (outputs, "output_structure")):
        check_template(fields[name])
        if list_paths(fields[name]) != [spec.name for spec in specs]:
            raise ExportError(f"{name} does not have the arrays that are listed")
    if type(fields["takes_seed"]) is not bool:
        raise ExportError("takes_seed must be true or false")
    spec = FunctionSpec(
        size=_decode_size(fields["size"], MAX_PROGRAM),
        sha256=_decode_sha256(fields["sha256"]),
        weights=_decode_numbers(fields["weights"], num_weights),
        inputs=inputs,
        reads=_decode_numbers(fields["reads"], len(inputs)),
        structure=fields["structure"],
        outputs=outputs,
        output_structure=fields["output_structure"],
        constraints=_decode_tuple(
            fields["constraints"], "constraints", lambda text: isinstance(text, str)
        ),
        takes_seed=fields["takes_seed"],
    )
    _check_sizes_are_known(spec)
    return spec


def _check_sizes_are_known(spec: FunctionSpec) -> None:
    """Raise `ExportError` if an open size cannot be told from the inputs."""
    known = {size for array in spec.read_inputs for size in array.shape if isinstance(size, str)}
    sizes = [size for array in (*spec.read_inputs, *spec.outputs) for size in array.shape]
    names = {name for text in (*sizes, *spec.constraints) for name in collect_names(text)}
    if names - known:
        raise ExportError(f"no input has an axis of size {min(names - known)!r:.100}")


def _check_weights_size(manifest: Manifest) -> None:
    """Raise `ExportError` if the file of the weights must have another size, before any memory is
    taken for them."""
    total = 0
    for spec in manifest.weights:
        _, shape = get_storage(spec.dtype, spec.shape)  # type: ignore[arg-type]
        count = 1
        for size in shape:
            assert isinstance(size, int)
            count *= size
            if count >= _MAX_SIZE:
                raise ExportError(f"{spec.name!r:.100} is too large")
        total += count * (1 if len(shape) > len(spec.shape) else DTYPES[spec.dtype].itemsize)
    if total > manifest.weights_size:
        raise ExportError("the weights do not fit into the size of their file")


def _take_fields(content: Any, what: str, more: set[str], record: type) -> dict[str, Any]:
    """Return a copy of an object that has exactly the fields of a dataclass, and some more.

    Args:
        content: the object.
        what: it is, for errors.
        more: names of further fields.
        record: the dataclass.
    """
    names = {*record.__dataclass_fields__, *more}
    if not isinstance(content, dict) or content.keys() != names:
        raise ExportError(f"{what} must have the fields {', '.join(sorted(names))}")
    return dict(content)


def _decode_arrays(content: Any, what: str) -> tuple[ArraySpec, ...]:
    """Return arrays by name, dtype and shape."""
    if not isinstance(content, list):
        raise ExportError(f"{what} must be a list")
    specs = []
    for entry in content:
        fields = _take_fields(entry, f"an array of {what}", set(), ArraySpec)
        name, dtype, shape = fields["name"], fields["dtype"], fields["shape"]
        if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in DTYPES:
            raise ExportError(f"an array of {what} has no name or no known dtype")
        specs.append(ArraySpec(name, dtype, _decode_tuple(shape, f"the shape of {what}", _is_size)))
    return tuple(specs)


def _as_printable(name: str) -> str:
    """Return a name as a terminal shows it, and does not obey it."""
    return name if name.isprintable() else repr(name)


def _is_version(text: Any) -> bool:
    return isinstance(text, str) and _VERSION_TEXT.fullmatch(text) is not None


def _is_size(size: Any) -> bool:
    """Return whether this is the size of an axis; raise `ExportError` for an invalid expression."""
    if isinstance(size, str):
        return bool(collect_names(size))
    return type(size) is int and 0 <= size < _MAX_SIZE


def _decode_tuple(content: Any, what: str, is_valid: Callable[[Any], bool]) -> tuple[Any, ...]:
    """Return a list as a tuple, if each of its values is valid."""
    if not isinstance(content, list) or not all(map(is_valid, content)):
        raise ExportError(f"{what}: {content!r:.100} is not valid")
    return tuple(content)


def _decode_numbers(content: Any, count: int) -> tuple[int, ...]:
    """Return numbers in increasing order below a count."""
    numbers = _decode_tuple(
        content, "the numbers of arrays", lambda n: type(n) is int and 0 <= n < count
    )
    if list(numbers) != sorted({*numbers}):
        raise ExportError("the numbers of arrays are not in order")
    return numbers


def _decode_size(content: Any, limit: int) -> int:
    if type(content) is not int or not 0 <= content < limit:
        raise ExportError(f"{content!r:.50} is not the size of a file below {limit}")
    return content


def _decode_sha256(content: Any) -> str:
    if not isinstance(content, str) or not _SHA256.fullmatch(content):
        raise ExportError(f"{content!r:.100} is not a SHA-256")
    return content


def _as_text(content: Any) -> bytes:
    """Return the one text in which a manifest is written."""
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=True).encode() + b"\n"


def _compute_digest(content: Any) -> str:
    return hashlib.sha256(_as_text(content)).hexdigest()
