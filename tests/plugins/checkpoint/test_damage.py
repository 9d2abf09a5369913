"""Damage at every place in the newest checkpoint: the one before is taken, or that is an error;
never wrong numbers."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import pytest
from edits import write_commit
from fulgurite.errors import CheckpointError
from fulgurite_checkpoint import Checkpointer, format
from fulgurite_checkpoint.files import compute_checksum
from trained import ZEROS, Counting, counting, engine, steps_in


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def remove(path: Path) -> None:
    path.unlink()


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


# Of the files that Orbax writes, some have names that differ from save to save.
FILES = ("COMMIT", "hashes-0.json", "manifest.json", "index.json", "history.json", "host-0.json")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `Counting` with checkpoints of steps 1 and 2."""
    run = tmp_path_factory.mktemp("saved")
    counting(run, steps=2)
    return run


@pytest.fixture(scope="module")
def restore() -> Callable[..., float]:
    """Reads the weight in a checkpoint of a run, with a warning where it is not the newest."""
    checkpoints = Checkpointer(1)
    reader = engine(None, checkpoints, steps=1, log_every=None)
    like = jax.eval_shape(lambda: reader.init_state(Counting, ZEROS))

    def read(run: Path, step: Any = "latest", **options: Any) -> float:
        snapshot = Checkpointer(1, **options).restore_checkpoint(
            fg.CheckpointRef(run, step), like, reader, lambda _: None
        )
        assert snapshot is not None
        return float(snapshot.state.module.weight)

    return read


@pytest.mark.parametrize(
    "damages",
    [
        pytest.param((flip, remove), marks=pytest.mark.full),
        pytest.param((cut, empty, link), marks=pytest.mark.slow),
    ],
)
def test_damage_anywhere_is_detected(
    saved: Path, restore: Any, tmp_path: Path, damages: tuple[Callable[[Path], None], ...]
) -> None:
    assert restore(saved) == -2
    newest = saved / "checkpoints" / "step-2"
    files = [path.relative_to(newest) for path in sorted(newest.rglob("*")) if path.is_file()]
    assert set(FILES) < set(map(str, files)) and len(files) > len(FILES) + 5
    for number, file in enumerate(files):
        for damage in damages:
            if (newest / file).stat().st_size == 0 and damage in (cut, empty, flip):
                continue  # nothing to damage
            run = tmp_path / f"{number}-{damage.__name__}"
            shutil.copytree(saved, run)
            damage(run / "checkpoints" / "step-2" / file)
            with pytest.warns(
                UserWarning, match=r"step 2 is damaged: .*step 1 is used instead"
            ) as caught:
                assert restore(run) == -1, (file, damage)
            assert len(caught) == 1
            with pytest.raises(CheckpointError, match="step-2"):
                restore(run, 2)
            shutil.rmtree(run)


@pytest.mark.full
def test_truncation_is_detected_by_sizes(saved: Path, restore: Any, tmp_path: Path) -> None:
    for verify, damage in (("size", cut), ("size", remove)):
        run = tmp_path / damage.__name__
        shutil.copytree(saved, run)
        files = [
            path
            for path in (run / "checkpoints" / "step-2" / "arrays").rglob("*")
            if path.is_file()
        ]
        damage(max(files, key=lambda path: path.stat().st_size))
        with pytest.warns(UserWarning, match="damaged"):
            assert restore(run, verify=verify) == -1
    assert restore(saved, verify="size") == restore(saved, verify="none") == -2


def test_run_without_a_readable_checkpoint_is_an_error(
    saved: Path, restore: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    flip(run / "checkpoints" / "step-2" / "index.json")
    remove(run / "checkpoints" / "step-1" / "COMMIT")
    with pytest.raises(
        CheckpointError,
        match=r"(?s)no checkpoint of .* can be read.*step 2.*step 1.*resume='never'",
    ):
        counting(run, steps=3, resume="auto")
    assert float(counting(run, steps=3, resume="never").module.weight) == -3


@pytest.mark.parametrize("damage", [pytest.param(remove, marks=pytest.mark.full), flip])
def test_run_resumes_from_the_previous_checkpoint_and_rewrites_the_damaged_one(
    saved: Path, restore: Any, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    damage(run / "checkpoints" / "step-2" / "COMMIT")
    with pytest.warns(UserWarning, match="step 1 is used instead"):
        assert float(counting(run, steps=3, resume="auto").module.weight) == -3
    assert steps_in(run) == [1, 2, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [restore(run, step) for step in (1, 2, 3)] == [-1, -2, -3]


def test_checkpoint_deleted_during_restore_is_a_checkpoint_error(
    saved: Path, restore: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    (run / "checkpoints" / "step-1").rename(run / "gone")
    shutil.rmtree(run / "checkpoints" / "step-2" / "arrays" / "state")
    with pytest.raises(CheckpointError, match="can be read"):
        restore(run)


def test_reference_to_the_path_of_a_checkpoint_reads_that_one(saved: Path, restore: Any) -> None:
    assert restore(saved / "checkpoints" / "step-1") == -1


def test_checkpoint_of_another_format_is_an_error_naming_both(
    saved: Path, restore: Any, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    commit = tmp_path / "run" / "checkpoints" / "step-2" / "COMMIT"
    content = commit.read_text()
    advices = {"1": "written and read by versions from source before 2026-11-23", "77": "a later"}
    for number, advice in advices.items():
        commit.write_text(content.replace('"format":2', f'"format":{number}'))
        with pytest.raises(
            CheckpointError, match=rf"has format {number}, and this version reads 2; .*{advice}"
        ):
            restore(tmp_path / "run")


def test_every_format_is_in_the_table_of_the_documentation() -> None:
    page = Path(__file__).parents[3] / "docs" / "resume.md"
    lines = page.read_text().replace("`", "").splitlines()
    assert format.FORMAT == max(format.FORMATS)
    for number, writer in format.FORMATS.items():
        assert f"| {number} | {writer} |" in lines


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "edit", "reason"),
    [
        ("state/_METADATA", lambda text: "x", "does not say which arrays it has"),
        (
            "state/array_metadatas/process_0",
            lambda text: text.replace("random_key_impl", "other"),
            r"key is read as uint32\[2\], not as key<fry>\[\]",
        ),
    ],
)
def test_damaged_metadata_of_arrays_is_damage_though_hashes_fit(
    saved: Path, tmp_path: Path, name: str, edit: Callable[[str], str], reason: str
) -> None:
    """Orbax reads what it can, says nothing, and returns none or other arrays."""
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    checkpoint = run / "checkpoints" / "step-2"
    path = checkpoint / "arrays" / name
    text = edit(path.read_text())
    assert text != path.read_text()
    path.write_text(text)
    hashes = json.loads((checkpoint / "hashes-0.json").read_text())
    hashes[f"arrays/{name}"] = list(compute_checksum(path))
    write_commit(checkpoint, hashes, json.loads((checkpoint / "COMMIT").read_text()))
    with pytest.warns(UserWarning, match=rf"{reason}.*step 1 is used instead"):
        assert float(counting(run, steps=3, resume="auto").module.weight) == -3
