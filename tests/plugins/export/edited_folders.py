"""Random edits of an exported folder, as damage or malice make them."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Edit = Callable[[Path, random.Random], None]

HOSTILE_STRINGS = ("../../etc/passwd", "", "a" * 5000, "\x00", "__import__('os').abort()", "9^9^9")
HOSTILE_NUMBERS = (-1, 0, 1, 2**31, 2**62, 2**63, 10**30, True, 1.5)


def copy_and_edit(folder: Path, copy: Path, seed: int) -> str:
    """Copy a folder and edit the copy; return what was done. Every edit changes something."""
    rng = random.Random(seed)
    shutil.copytree(folder, copy)
    edit = rng.choice(EDITS)
    edit(copy, rng)
    return edit.__name__


def flip_a_bit(folder: Path, rng: random.Random) -> None:
    path = rng.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def change_the_length_of_a_file(folder: Path, rng: random.Random) -> None:
    path = rng.choice(sorted(folder.iterdir()))
    data = path.read_bytes()
    path.write_bytes(rng.choice([data[: rng.randrange(len(data))], data + b"\0", b""]))


def replace_a_file(folder: Path, rng: random.Random) -> None:
    path = rng.choice(sorted(folder.iterdir()))
    target = folder.parent / f"{folder.name}-target"
    path.rename(target)
    kind = rng.randrange(4)
    if kind == 0:
        path.symlink_to(target)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        os.mkfifo(path)


def edit_the_manifest(folder: Path, rng: random.Random) -> None:
    """Without its digest."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    mutate(manifest, rng)
    path.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


def edit_and_sign_the_manifest(folder: Path, rng: random.Random) -> None:
    """As who lies about names, shapes and sizes would."""
    manifest = read_manifest(folder)
    del manifest["digest"]
    mutate(manifest, rng)
    sign(folder, manifest)


def rename_a_function(folder: Path, rng: random.Random) -> None:
    manifest = read_manifest(folder)
    name = rng.choice(["../predict", "/predict", "predict.bin", "..", "con:", "a" * 300])
    manifest["functions"][name] = manifest["functions"].pop("predict")
    sign(folder, manifest)


def lie_about_all_sizes(folder: Path, rng: random.Random) -> None:
    """Of an array, in the manifest and in the header of the weights, and of their file."""
    manifest = read_manifest(folder)
    size = rng.choice([10**9, 2**40, 2**62])
    manifest["weights"][0]["shape"][0] = size
    manifest["weights_size"] = size * 16
    sign(folder, manifest)


def write_a_bomb(folder: Path, rng: random.Random) -> None:
    bombs = [
        b"[" * 5_000_000,
        b'{"a":' * 100_000,
        b"[" + b"[]," * 2_000_000 + b"[]]",
        b"9" * 5_000_000,
        b"NaN",
        b'{"digest": 1, "digest": 2}',
        b"\xff\xfe",
        b'"' + b"a" * 9_000_000 + b'"',
    ]
    (folder / "manifest.json").write_bytes(rng.choice(bombs))


def edit_and_sign_the_header_of_the_weights(folder: Path, rng: random.Random) -> None:
    data = (folder / "weights.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    kind = rng.randrange(3)
    if kind == 0:
        data = rng.choice([2**63, 2**64 - 1, len(data), 0, 1]).to_bytes(8, "little") + data[8:]
    elif kind == 1:
        header = json.loads(data[8 : 8 + length])
        mutate(header, rng)
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + data[8 + length :]
    else:
        text = b"[" * (1 << 20)
        data = len(text).to_bytes(8, "little") + text + data[8 + length :]
    (folder / "weights.safetensors").write_bytes(data)
    manifest = read_manifest(folder)
    manifest["weights_size"] = len(data)
    manifest["weights_sha256"] = hashlib.sha256(data).hexdigest()
    sign(folder, manifest)


def edit_and_sign_the_program(folder: Path, rng: random.Random) -> None:
    path = folder / "predict.bin"
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 3, 30])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data)
    manifest = read_manifest(folder)
    manifest["functions"]["predict"]["sha256"] = hashlib.sha256(data).hexdigest()
    sign(folder, manifest)


def mutate(tree: Any, rng: random.Random) -> None:
    """Change one random value within JSON."""
    before = json.dumps(tree)
    while json.dumps(tree) == before:
        change_a_value(tree, rng)


def change_a_value(tree: Any, rng: random.Random) -> None:
    """Change a random value, perhaps to what it is."""
    places = [*iter_places(tree)]
    holder, key = rng.choice(places)
    kind = rng.randrange(5)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.append(holder[key])
    elif kind == 1:
        holder["extra"] = holder[key]
    elif kind == 2:
        holder[key] = rng.choice(["-", *HOSTILE_STRINGS])
    elif kind == 3:
        holder[key] = rng.choice([-7, *HOSTILE_NUMBERS])
    else:
        holder[key] = rng.choice([[[]], {"dict": {"x": {"list": [7]}}}, [holder[key], None]])


def iter_places(tree: Any):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        yield tree, key
        if isinstance(value, dict | list):
            yield from iter_places(value)


def read_manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def sign(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with the digest that it must have."""
    manifest.pop("digest", None)
    manifest["digest"] = hashlib.sha256(as_text(manifest)).hexdigest()
    (folder / "manifest.json").write_bytes(as_text(manifest))


def as_text(content: Any) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True).encode() + b"\n"


# --- lies, each about a single thing --------------------------------------------------------------


def say_a_trillion_rows_of_weights(folder: Path) -> None:
    manifest = read_manifest(folder)
    manifest["weights"][0]["shape"][0] = 10**12
    sign(folder, manifest)


def say_a_trillion_rows_in_both_files(folder: Path) -> None:
    """Of an array that no function reads; the file is as long as it says, without taking room on
    the disk."""
    manifest = read_manifest(folder)
    manifest["weights"].append({"name": "more", "dtype": "uint8", "shape": [10**12]})
    data = (folder / "weights.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    start = max(entry["data_offsets"][1] for entry in header.values())
    header["more"] = {"dtype": "U8", "shape": [10**12], "data_offsets": [start, start + 10**12]}
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + data[8 + length :]
    (folder / "weights.safetensors").write_bytes(data)
    os.truncate(folder / "weights.safetensors", len(data) + 10**12)
    manifest["weights_size"] = len(data) + 10**12
    sign(folder, manifest)


def say_a_trillion_rows_of_inputs(folder: Path) -> None:
    manifest = read_manifest(folder)
    manifest["functions"]["predict"]["inputs"][0]["shape"] = [10**12, 4]
    sign(folder, manifest)


def say_a_long_header(folder: Path) -> None:
    data = (folder / "weights.safetensors").read_bytes()
    replace_weights(folder, (2**62).to_bytes(8, "little") + data[8:])


def nest_the_header(folder: Path) -> None:
    text = b"[" * (1 << 22) + b"]" * (1 << 22)
    replace_weights(folder, len(text).to_bytes(8, "little") + text)


def nest_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"[" * (1 << 22) + b"]" * (1 << 22))


def write_the_largest_manifest(folder: Path) -> None:
    """Lists that take as much memory as any JSON of that length."""
    text = b"[" + b"[]," * ((1 << 23) // 3 - 10) + b"[]]"
    (folder / "manifest.json").write_bytes(text)


def link_out_of_the_folder(folder: Path) -> None:
    (folder / "predict.bin").unlink()
    (folder / "predict.bin").symlink_to("/etc/passwd")


def name_a_function_by_a_path(folder: Path) -> None:
    rename_predict(folder, "/etc/passwd")


def name_a_function_above_the_folder(folder: Path) -> None:
    rename_predict(folder, "../predict")


def name_functions_in_two_cases(folder: Path) -> None:
    manifest = read_manifest(folder)
    manifest["functions"]["Predict"] = manifest["functions"]["predict"]
    sign(folder, manifest)


def name_weights_twice(folder: Path) -> None:
    manifest = read_manifest(folder)
    manifest["weights"][1]["name"] = manifest["weights"][0]["name"]
    sign(folder, manifest)


def write_a_key_twice(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace("{", '{"format": "fulgurite-export",', 1))


def write_nan(folder: Path) -> None:
    write_a_size(folder, b"NaN")


def write_infinity(folder: Path) -> None:
    write_a_size(folder, b"Infinity")


def write_many_digits(folder: Path) -> None:
    write_a_size(folder, b"9" * 1_000_000)


def write_a_float(folder: Path) -> None:
    write_a_size(folder, b"1e3")


def rename_predict(folder: Path, name: str) -> None:
    manifest = read_manifest(folder)
    manifest["functions"][name] = manifest["functions"].pop("predict")
    sign(folder, manifest)


def write_a_size(folder: Path, text: bytes) -> None:
    """Write something in the place of the size of the weights."""
    manifest = read_manifest(folder)
    size = b'"weights_size": %d' % manifest["weights_size"]
    data = (folder / "manifest.json").read_bytes()
    assert size in data
    (folder / "manifest.json").write_bytes(data.replace(size, b'"weights_size": ' + text))


def replace_weights(folder: Path, data: bytes) -> None:
    """Write another file of weights, whose size and hash the manifest has."""
    (folder / "weights.safetensors").write_bytes(data)
    manifest = read_manifest(folder)
    manifest["weights_size"] = len(data)
    manifest["weights_sha256"] = hashlib.sha256(data).hexdigest()
    sign(folder, manifest)


LIES: tuple[Callable[[Path], None], ...] = (
    say_a_trillion_rows_of_weights,
    say_a_trillion_rows_in_both_files,
    say_a_trillion_rows_of_inputs,
    say_a_long_header,
    nest_the_header,
    nest_the_manifest,
    write_the_largest_manifest,
    link_out_of_the_folder,
    name_a_function_by_a_path,
    name_a_function_above_the_folder,
    name_functions_in_two_cases,
    name_weights_twice,
    write_a_key_twice,
    write_nan,
    write_infinity,
    write_many_digits,
    write_a_float,
)
LIE_MESSAGES = {
    "say_a_trillion_rows_of_weights": "the weights do not fit into the size of their file",
    "say_a_trillion_rows_in_both_files": "does not fit into memory",
    "say_a_long_header": "its header would be 4611686018427387904 bytes long",
    "link_out_of_the_folder": "predict.bin is a symbolic link",
    "name_a_function_by_a_path": "'/etc/passwd' is not the name of a function",
    "name_functions_in_two_cases": "'Predict' is not the name of a function",
    "name_weights_twice": "two weights have one name",
    "write_a_key_twice": "an object has a key twice",
    "write_nan": "NaN is not a whole number",
    "write_infinity": "Infinity is not a whole number",
}
"""What the errors say of some of them."""


# --- random edits ---------------------------------------------------------------------------------

EDITS: tuple[Edit, ...] = (
    flip_a_bit,
    change_the_length_of_a_file,
    replace_a_file,
    edit_the_manifest,
    edit_and_sign_the_manifest,
    rename_a_function,
    lie_about_all_sizes,
    write_a_bomb,
    edit_and_sign_the_header_of_the_weights,
    edit_and_sign_the_program,
)
SIGNED_PROGRAMS = edit_and_sign_the_program.__name__
