"""A step of a run on several devices is replayed on one of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fulgurite_replay.commands import replay
from sharded import BAD_EXAMPLE

PROGRAM = Path(__file__).parent / "sharded.py"


def run_on_four_devices(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*may not be exact. count was 4 and is 1")
def test_step_of_a_sharded_run_is_replayed_on_one_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    trained = run_on_four_devices(str(PROGRAM), "--run", str(run))
    assert trained.returncode == 1
    assert "step 8: the loss is not finite" in trained.stderr
    assert f"fulgurite replay {run} --step 8" in trained.stderr
    lines = PROGRAM.read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "jnp.log" in text)
    expected = [
        "step 8: the loss is not finite",
        "infinity made by log in the forward pass",
        f"at {PROGRAM}:{line}, in Net.training_step",
        "input 0: batch.x: float32[8, 4] in [0, ",
        f"the first example concerned has the index {BAD_EXAMPLE} of 8",
    ]
    arguments = [str(run), "--step", "8", "--program", str(PROGRAM)]
    for source in ("checkpoint", "capture"):
        assert replay([*arguments, "--from", source]) == 1
        text = capsys.readouterr().out
        positions = [text.index(part) for part in expected]
        assert positions == sorted(positions)
