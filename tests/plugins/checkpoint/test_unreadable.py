"""Runs that may not be read, or that are damaged, among others."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fulgurite.errors import CheckpointError
from fulgurite_checkpoint.listing import list_runs
from fulgurite_runs import RunDirectory
from trained import counting

COMMAND = [
    sys.executable,
    "-c",
    "import sys; from fulgurite_cli.command import main; sys.exit(main())",
]


PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from fulgurite_cli import Experiment
from trained import ZEROS, Checkpointer, Counting, engine

def experiment() -> Experiment:
    return Experiment(engine(None, Checkpointer(every=1), steps=2), Counting, ZEROS)
"""


@pytest.fixture(scope="module")
def without_rights() -> list[str]:
    """What a command begins with so that permissions hold for it, whoever runs the tests."""
    if os.geteuid() != 0:
        return []
    prefix = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    if shutil.which("setpriv") is None or subprocess.run([*prefix, "true"]).returncode:
        pytest.skip("root may read everything, and setpriv cannot take that away here")
    return prefix


@pytest.fixture(scope="module")
def template_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("made") / "run"
    counting(run, steps=2)
    return run


@pytest.mark.slow
def test_a_run_that_may_not_be_read_is_a_row_and_an_error_elsewhere(
    template_run: Path, tmp_path: Path, without_rights: list[str]
) -> None:
    closed = {
        "no-folder": "",
        "no-attempts": "attempts",
        "no-checkpoints": "checkpoints",
        "no-lock": "lock",
        "no-manifest": "attempts/1",
    }
    shutil.copytree(template_run, tmp_path / "a")
    for name, part in closed.items():
        shutil.copytree(template_run, tmp_path / name)
        os.chmod(tmp_path / name / part, 0)

    def run(*arguments: Any) -> "subprocess.CompletedProcess[str]":
        command = [*without_rights, *COMMAND, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True)

    try:
        done = run("runs", tmp_path, "--json")
        assert done.returncode == 0, done.stderr
        rows = {row["run"]: row for row in json.loads(done.stdout)}
        states = {name: row["state"] for name, row in rows.items()}
        assert states == dict.fromkeys(closed, "unreadable") | {
            "a": "complete",
            "no-manifest": "complete",
        }
        for name, part in closed.items():
            assert "Permission denied" in rows[name]["note"]
            assert str(tmp_path / name / part) in rows[name]["note"]
        for name in ("no-folder", "no-manifest"):
            done = run("compare", tmp_path / "a", tmp_path / name)
            assert done.returncode == 2
            assert done.stderr.startswith(f"error: the run in {tmp_path / name} cannot be read")
        program = tmp_path / "program.py"
        program.write_text(PROGRAM)
        for name in ("no-attempts", "no-checkpoints", "no-lock"):
            part = closed[name]
            done = run("fit", program, "--run", tmp_path / name)
            assert done.returncode == 1
            assert "Permission denied" in done.stderr
            assert "Traceback" not in done.stderr and "Frames of" not in done.stderr
            assert str(tmp_path / name / part) in done.stderr
    finally:
        for name, part in closed.items():
            os.chmod(tmp_path / name / part, 0o700)


def test_an_empty_manifest_hides_neither_the_run_nor_its_arguments(
    template_run: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(template_run, tmp_path / "run"))
    manifest = json.loads((run / "attempts" / "1").read_text())
    manifest["configuration"] = {"width": 3}
    (run / "attempts" / "1").write_text(json.dumps(manifest))
    (run / "attempts" / "2").touch()
    (row,) = list_runs(run)
    assert (row.state, row.attempts, row.arguments, row.note) == ("complete", 2, {"width": 3}, "")
    (run / "attempts" / "2").write_text("{")
    (row,) = list_runs(run)
    assert row.state == "complete" and "attempts/2 cannot be read" in row.note
    with pytest.raises(CheckpointError, match="attempts/2 cannot be read"):
        RunDirectory(run).read_manifest()
