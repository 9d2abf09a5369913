"""The command `fulgurite export`."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from exported_program import TOKENS
from fulgurite_cli.command import main as fulgurite
from fulgurite_export import load

PROGRAM = Path(__file__).parent / "exported_program.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run with checkpoints of steps 2 and 4."""
    folder = str(tmp_path_factory.mktemp("export") / "run")
    assert fulgurite(["fit", str(PROGRAM), "--run", folder]) == 0
    return folder


def export(run: str, out: Path, *arguments: str) -> int:
    return fulgurite(["export", run, "--program", str(PROGRAM), "-o", str(out), *arguments])


@pytest.mark.full
def test_a_step_of_a_run_is_exported_with_a_view(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(run, tmp_path / "latest") == 0
    out = capsys.readouterr().out
    assert "tokens: int32 (batch, 5)" in out and "wrote step 4" in out
    model = load(tmp_path / "latest")
    assert f"digest {model.digest}" in out
    # Labels are not among what must be given.
    np.testing.assert_array_equal(model({"tokens": TOKENS[:3]}), TOKENS[:3] + 4)
    assert export(run, tmp_path / "two", "--step", "2", "--view", "averaged") == 0
    # Halves of what it was before: 0, then (0 + 1) / 2 = 0.5, then (0.5 + 2) / 2.
    np.testing.assert_array_equal(load(tmp_path / "two")({"tokens": TOKENS}), TOKENS + 1.25)


def test_functions_shapes_and_constraints_are_options(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--function", "predict", "--function", "double", "--platform", "cpu"]
    arguments += ["--shape", "tokens=batch, length", "--constraint", "length <= 7"]
    assert export(run, tmp_path / "model", *arguments) == 0
    model = load(tmp_path / "model")
    assert model.platforms == ("cpu",)
    tokens = np.zeros((2, 7), np.int32)
    np.testing.assert_array_equal(model.functions["double"]({"tokens": tokens}), tokens + 8)
    assert model.functions["double"].spec.constraints == ("length <= 7",)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert export(run, Path("~/fixed"), "--batch", "3") == 0
    assert load(tmp_path / "fixed").functions["predict"].spec.inputs[1].shape == (3, 5)


@pytest.mark.full
def test_an_onnx_file_is_another_format(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jax2onnx", reason="jax2onnx is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    assert export(run, tmp_path / "model.onnx", "--format", "onnx") == 0
    assert "onnxruntime differs from JAX by 0" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (out,) = session.run(None, {"tokens": TOKENS[:3]})
    np.testing.assert_array_equal(out, TOKENS[:3] + 4)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [flip, Path.unlink])
@pytest.mark.parametrize("file", ["COMMIT", "index.json"])
def test_a_damaged_checkpoint_is_refused_and_no_older_one_taken(
    run: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    file: str,
) -> None:
    copy = str(tmp_path / "run")
    shutil.copytree(run, copy)
    damage(Path(copy, "checkpoints", "step-4", file))
    for step in ("latest", "4"):
        assert export(copy, tmp_path / "model", "--step", step) == 1
        mistake = capsys.readouterr().err
        assert mistake.startswith("error: ") and "step-4" in mistake.partition("\n")[0]
        assert ("--step names an older checkpoint" in mistake) == (step == "latest")
        assert "Traceback" not in mistake
    assert not (tmp_path / "model").exists()


def test_a_run_without_checkpoints_is_said(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = str(tmp_path / "run")
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("step-*"))
    assert export(copy, tmp_path / "model") == 1
    assert "there is no checkpoint" in capsys.readouterr().err


def test_mistakes_are_said_and_write_nothing(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(run, tmp_path / "model", "--view", "average") == 1
    assert "Did you mean 'averaged'?" in capsys.readouterr().err
    assert export(run, tmp_path / "model", "--function", "triple") == 2
    assert "no method 'triple'" in capsys.readouterr().err
    for constraint in ("length <= 8", "batch < 8"):
        assert export(run, tmp_path / "model", "--constraint", constraint) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: predict: ") and constraint in line
    assert export(run, tmp_path) == 2
    assert "exists" in capsys.readouterr().err
    assert export(str(tmp_path / "nowhere"), tmp_path / "model") in (1, 2)
    for arguments in (
        ["--step", "x"],
        ["--batch", "0"],
        ["--shape", "tokens"],
        ["--format", "onnx", "--platform", "cpu"],
    ):
        with pytest.raises(SystemExit):
            export(run, tmp_path / "model", *arguments)
    assert not [*tmp_path.iterdir()]
