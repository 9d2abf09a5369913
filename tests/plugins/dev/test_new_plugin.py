"""`fulgurite new-plugin`: what it writes installs with pip, passes its own tests, and trains by its name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fulgurite.command import main
from fulgurite_dev.new_plugin import KINDS

TRAIN = """
import fulgurite as fg
from fulgurite_testing import TinyModel, tiny_data
arguments = {"data": tiny_data(), "every": 4} if KIND == "evaluator" else {}
engine = fg.Engine(steps=8, plugins=[{"new_one": arguments}], run="run", autoload=False)
result = engine.fit(TinyModel, tiny_data())
print(list(engine.plugins.plugins), int(result.state.step), result.failed)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_plugin_installs_passes_its_tests_and_trains(kind: str, tmp_path: Path) -> None:
    folder, site = tmp_path / "made", tmp_path / "site"
    assert main(["new-plugin", "new-one", "--kind", kind, "--folder", str(folder)]) == 0
    install = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(site), str(folder)]
    subprocess.run([sys.executable, "-m", *install], check=True)
    variables = {**os.environ, "PYTHONPATH": str(site)}
    train = subprocess.run(
        [sys.executable, "-c", f"KIND = {kind!r}\n{TRAIN}"], env=variables, cwd=tmp_path, capture_output=True, text=True
    )
    assert train.stdout == "['new_one'] 8 {}\n", train.stderr
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "tests")]
    ran = subprocess.run(tests, env=variables, cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
    assert {path.name for path in folder.iterdir()} >= {"pyproject.toml", "README.md", "LICENSE", ".github", "src"}


@pytest.mark.parametrize(("name", "why"), [("Noise", "small letters"), ("fulgurite-noise", "is called fulgurite-NAME")])
def test_a_bad_name_is_an_error(name: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["new-plugin", name])
    assert stop.value.code == 2
    assert why in capsys.readouterr().err


def test_what_is_there_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["new-plugin", "noise", "--folder", str(tmp_path)])
    assert "is there already" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
