"""Models with losses and metrics on inner layers equal those by hand, also after they were killed."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fulgurite_checkpoint.commands import checkpoints

PROGRAM = Path(__file__).with_name("keyed_programs.py")
NAMES = ("game", "transformer", "normed")


def train(*arguments: object) -> int:
    """Run the program; return its exit status."""
    command = [sys.executable, PROGRAM, *arguments]
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert run.returncode in (0, -signal.SIGKILL), run.stderr
    return run.returncode


def read_arrays(path: Path) -> list[np.ndarray]:
    with np.load(path) as file:
        return [file[name] for name in file.files]


@pytest.mark.slow
def test_losses_and_metrics_on_layers_are_those_by_hand_and_resume_exactly(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("by-hand", "whole", "killed")]
    for folder in folders:
        folder.mkdir()
    by_hand, whole, killed = folders
    assert train("by-hand", by_hand) == 0
    assert train("by-keys", whole) == 0
    assert [train("by-keys", killed, 6) for _ in range(2)] == [-signal.SIGKILL, 0]
    for name in NAMES:
        expected = read_arrays(by_hand / f"{name}.npz")
        arrays = read_arrays(whole / f"{name}.npz")
        for first, second in zip(expected, arrays, strict=True):
            np.testing.assert_allclose(first, second, rtol=1e-6, atol=1e-6)
        records = [(folder / name / "records.jsonl").read_bytes() for folder in (whole, killed)]
        assert records[0] == records[1]
        assert checkpoints(["diff", str(whole / name), str(killed / name)]) == 0
