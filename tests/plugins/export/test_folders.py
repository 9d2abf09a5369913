"""A folder that was changed is refused: nothing of it is executed, and memory stays bounded."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from edited_folders import (
    LIE_MESSAGES,
    LIES,
    SIGNED_PROGRAMS,
    copy_and_edit,
    read_manifest,
    sign,
)
from exported_models import Perceptron
from fulgurite_export import ExportError, export, load

X = np.ones((2, 4), np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    export(Perceptron(key=jax.random.key(0)), folder, {"x": X})
    return folder


@pytest.mark.parametrize("name", ["manifest.json", "predict.bin", "weights.safetensors"])
def test_one_changed_bit_anywhere_is_refused(folder: Path, name: str, tmp_path: Path) -> None:
    data = (folder / name).read_bytes()
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    for place in np.linspace(0, 8 * len(data) - 1, 60).astype(int):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << int(place % 8)
        (copy / name).write_bytes(changed)
        with pytest.raises(ExportError):
            load(copy)
    (copy / name).write_bytes(data)
    load(copy)


def test_damage_is_said_with_the_file_and_the_remedy(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    data = bytearray((copy / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "weights.safetensors").write_bytes(data)
    with pytest.raises(ExportError, match="weights.safetensors is not the file that was exported"):
        load(copy)
    (copy / "weights.safetensors").write_bytes(data[:-1])
    with pytest.raises(ExportError, match=f"{len(data) - 1} bytes instead of {len(data)}"):
        load(copy)
    (copy / "weights.safetensors").unlink()
    with pytest.raises(ExportError, match="cannot be read: No such file"):
        load(copy)
    (copy / "weights.safetensors").symlink_to(folder / "weights.safetensors")
    with pytest.raises(ExportError, match="is a symbolic link"):
        load(copy)


def test_the_digest_tells_a_folder_from_another_one(folder: Path, tmp_path: Path) -> None:
    digest = export(Perceptron(key=jax.random.key(1)), tmp_path / "model", {"x": X})
    assert load(tmp_path / "model", digest=digest).digest == digest
    with pytest.raises(ExportError, match="it is another one"):
        load(folder, digest=digest)


def test_a_folder_holds_no_paths_of_the_machine_and_is_the_same_each_time(tmp_path: Path) -> None:
    limit = jax.config.jax_traceback_in_locations_limit  # type: ignore[attr-defined]
    jax.config.update("jax_traceback_in_locations_limit", 10)
    try:
        digests = [
            export(Perceptron(key=jax.random.key(0)), tmp_path / name, {"x": X})
            for name in ("first", "second")
        ]
        assert jax.config.jax_traceback_in_locations_limit == 10  # type: ignore[attr-defined]
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)
    assert digests[0] == digests[1]
    data = (tmp_path / "first" / "predict.bin").read_bytes()
    assert b".py" not in data and os.fsencode(Path(__file__).parent) not in data


def test_a_program_that_calls_into_python_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    data = (copy / "predict.bin").read_bytes() + b"xla_ffi_python_cpu_callback"
    (copy / "predict.bin").write_bytes(data)
    manifest = read_manifest(copy)
    manifest["functions"]["predict"] |= {
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    sign(copy, manifest)
    with pytest.raises(ExportError, match="calls back into Python"):
        load(copy)


def test_a_program_with_other_inputs_than_the_manifest_says_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    manifest = read_manifest(copy)
    manifest["functions"]["predict"]["inputs"][0]["shape"] = ["batch", 5]
    sign(copy, manifest)
    with pytest.raises(ExportError, match="not the program that manifest.json describes"):
        load(copy)


def test_a_model_for_other_platforms_is_refused(tmp_path: Path) -> None:
    export(Perceptron(key=jax.random.key(0)), tmp_path / "model", {"x": X}, platforms=["tpu"])
    with pytest.raises(ExportError, match="exported for tpu, and this process computes on cpu"):
        load(tmp_path / "model")


def test_an_array_of_the_program_itself_is_refused_where_it_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fulgurite.errors import ModelError

    monkeypatch.setattr("fulgurite_export.exporting.MAX_PROGRAM", 100_000)
    table = jnp.asarray(np.random.default_rng(0).normal(size=100_000), jnp.float32)

    class Closed(fg.Module):
        def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
            return batch["x"] + table.sum()

    with pytest.raises(ModelError, match="not part of the module: make them fields"):
        export(Closed(), tmp_path / "model", {"x": X})
    assert not [*tmp_path.iterdir()]


def load_with_little_memory(folder: Path, edited: list[Path]) -> list[str]:
    """Return what loading each edited folder gives, in a process that cannot take more than 512 MiB
    beyond what the valid folder needs: the largest manifest that is read has 8 MiB, and JSON in
    memory is much larger.

    Args:
        folder: the valid one.
        edited: those made of it.
    """
    process = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "load_folders.py")],
        input="\n".join(map(str, [folder, *edited])),
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert process.returncode == 0, process.stderr
    first, *others = process.stdout.splitlines()
    assert first == "loaded" and len(others) == len(edited)
    return others


@pytest.mark.full
def test_folders_that_lie_are_refused_with_little_memory(folder: Path, tmp_path: Path) -> None:
    edited = []
    for edit in LIES:
        copy = tmp_path / edit.__name__
        shutil.copytree(folder, copy)
        edit(copy)
        edited.append(copy)
    answers = load_with_little_memory(folder, edited)
    reasons = {path.name: answer for path, answer in zip(edited, answers, strict=True)}
    assert [reason for reason in reasons.values() if not reason.startswith("ExportError: ")] == []
    for name, message in LIE_MESSAGES.items():
        assert message in reasons[name]


def check_edited_folders(folder: Path, tmp_path: Path, seeds: range) -> None:
    """Check that edited folders are refused: all but programs whose new hash is in the manifest,
    which only JAX could tell from valid ones."""
    copies = [tmp_path / f"model-{seed}" for seed in seeds]
    edits = [copy_and_edit(folder, copy, seed) for seed, copy in zip(seeds, copies, strict=True)]
    answers = load_with_little_memory(folder, copies)
    faults = [
        (seed, edit, answer)
        for seed, edit, answer in zip(seeds, edits, answers, strict=True)
        if not answer.startswith("ExportError: ") and (edit, answer) != (SIGNED_PROGRAMS, "loaded")
    ]
    assert faults == []


@pytest.mark.full
def test_fifty_edited_folders_are_refused_with_little_memory(folder: Path, tmp_path: Path) -> None:
    check_edited_folders(folder, tmp_path, range(50))


@pytest.mark.slow
def test_a_thousand_edited_folders_are_refused_with_little_memory(
    folder: Path, tmp_path: Path
) -> None:
    for start in range(0, 1000, 100):
        check_edited_folders(folder, tmp_path / str(start), range(start, start + 100))
