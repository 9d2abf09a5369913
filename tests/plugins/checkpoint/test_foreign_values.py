"""Manifests and numbers that nobody wrote, with right hashes or none: they are shown or refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edits import write_signed
from fulgurite.errors import CheckpointError
from fulgurite_checkpoint import commands
from fulgurite_checkpoint.comparing import compare_runs
from fulgurite_checkpoint.contents import Contents
from fulgurite_checkpoint.format import Commit, Entry, list_entries, read_commit, write_commit
from fulgurite_checkpoint.inspecting import format_checkpoint, parse_dtype
from fulgurite_checkpoint.restoring import SavedCheckpoint

PLUGIN = {"name": "a", "version": "1", "settings": {}}


def write_manifest(run: Path, **sections: Any) -> None:
    (run / "attempts").mkdir(parents=True)
    (run / "attempts" / "1").write_text(json.dumps(sections))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"plugins": 3}, "plugins"),
        ({"plugins": [3]}, "plugins"),
        ({"plugins": [{**PLUGIN, "settings": 3}]}, "plugins"),
        ({"plugins": [{**PLUGIN, "name": [1]}]}, "plugins"),
        ({"plugins": [{"name": "a"}]}, "plugins"),
        ({"plugins": [PLUGIN], "model": [1]}, "model"),
    ],
)
def test_a_manifest_that_nobody_wrote_cannot_be_compared(
    sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_manifest(tmp_path / "a", plugins=[PLUGIN], model=[])
    write_manifest(tmp_path / "b", **sections)
    with pytest.raises(CheckpointError, match=rf"/b cannot be compared.* describes no {message}"):
        compare_runs(tmp_path / "a", tmp_path / "b")


def test_numbers_beyond_floats_and_dates_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    commit = Commit(1, 1, ["0" * 64], [{}], {"train": {"loss": 1.0}}, ("train/loss", "min"), {}, 0)
    write_commit(checkpoint, commit)
    content = json.loads((checkpoint / "COMMIT").read_text())
    content["metrics"]["train"]["loss"] = 10**400
    content["wall_time"] = 9e11
    write_signed(checkpoint / "COMMIT", content, "0" * 64)
    loss = read_commit(checkpoint).metrics["train"]["loss"]
    assert loss == 10**400
    assert [entry.get_metric("train/loss") for entry in list_entries(tmp_path)] == [None]
    assert isinstance(list_entries(tmp_path)[0], Entry)
    assert commands.checkpoints([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "30489-11-" in output
    assert "loss inf" in output
    assert commands.runs([str(tmp_path)]) == 0


@pytest.mark.parametrize("name", ["(1,,2)i4", "x", "i4,,", "key<x>"])
def test_a_dtype_that_does_not_exist_is_an_error(name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be read with this version of jax"):
        parse_dtype(name)


def test_a_metric_that_is_an_array_is_shown(tmp_path: Path) -> None:
    metrics = {"test": {"confusion": np.arange(4)}}
    commit = Commit(1, 1, ["0" * 64], [{}], metrics, None, {}, 0)
    index = {"step_range": {"start": 0, "stop": 1, "epoch_ends": []}}
    make_snapshot: Any = None
    contents = Contents({}, {}, True, make_snapshot)
    checkpoint = SavedCheckpoint(tmp_path, commit, {}, index, contents)
    assert '"confusion"' in format_checkpoint(checkpoint)


def test_a_text_of_another_encoding_is_listed(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    for name, folder in (("a", "x\udcff"), ("b", "y")):
        write_manifest(tmp_path / name, configuration={"folder": folder})
    for options in ([], ["--csv"], ["--json"]):
        assert commands.runs([str(tmp_path), *options, "--show", "folder"]) == 0
    assert b"x\\udcff" in capfdbinary.readouterr().out
