"""A run that resumes has its first step compiled while the arrays of its checkpoint are read."""

import subprocess
import sys
from pathlib import Path

import pytest


def train(run: Path, steps: int, seconds: float = 60.0) -> list[str]:
    """Return what a process prints that trains a run, or resumes it.

    Args:
        run: its directory.
        steps: how many it has.
        seconds: how long to wait for XLA to begin before the arrays are read.
    """
    program = [sys.executable, str(Path(__file__).with_name("resumed_early.py"))]
    done = subprocess.run(
        [*program, str(run), str(steps), str(seconds)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout.splitlines()


@pytest.mark.full
def test_a_process_that_resumes_compiles_while_it_reads(tmp_path: Path) -> None:
    run = tmp_path / "run"
    *begun, whole = train(tmp_path / "whole", 8)
    assert begun == ["compiles", "accounts 1 compile"]
    train(run, 4)
    *events, weights = train(run, 8)
    assert events == ["compiles", "reads while it compiles", "accounts 1 compile"]
    assert weights == whole
    # A finished run needs no program.
    *events, weights = train(run, 8, seconds=0.5)
    assert events == ["reads", "accounts 0"]
    assert weights == whole


@pytest.mark.full
def test_a_run_whose_newest_checkpoint_is_damaged_continues_from_the_one_before(
    tmp_path: Path,
) -> None:
    """What was begun for the damaged one serves the other, too."""
    run = tmp_path / "run"
    *_, whole = train(tmp_path / "whole", 8)
    train(run, 4)
    damaged = [
        path for path in (run / "checkpoints" / "step-4" / "arrays").rglob("*") if path.is_file()
    ]
    for path in damaged:
        path.write_bytes(path.read_bytes()[::-1])
    *events, weights = train(run, 8)
    assert events == ["compiles", "reads while it compiles", "accounts 1 compile"]
    assert weights == whole
