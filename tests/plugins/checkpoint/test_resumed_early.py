"""A run that resumes has its first step compiled while the arrays of its checkpoint are read."""

import shutil
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of four steps, and the weights of one of eight that nobody interrupts."""
    folder = tmp_path_factory.mktemp("trained")
    *events, whole = train(folder / "whole", 8)
    assert events == ["compiles", "accounts 1 compile"]
    train(folder / "run", 4)
    return folder / "run", whole


@pytest.mark.slow
def test_a_process_that_resumes_compiles_while_it_reads(
    trained: tuple[Path, str], tmp_path: Path
) -> None:
    template, whole = trained
    run = tmp_path / "run"
    shutil.copytree(template, run)
    *events, weights = train(run, 8)
    assert events == ["compiles", "reads while it compiles", "accounts 1 compile"]
    assert weights == whole
    # A finished run needs no program.
    *events, weights = train(run, 8, seconds=0.5)
    assert events == ["reads", "accounts 0"]
    assert weights == whole


@pytest.mark.full
def test_a_run_whose_newest_checkpoint_is_damaged_continues_from_the_one_before(
    trained: tuple[Path, str], tmp_path: Path
) -> None:
    """What was begun for the damaged one serves the other, too."""
    template, whole = trained
    run = tmp_path / "run"
    shutil.copytree(template, run)
    damaged = [
        path for path in (run / "checkpoints" / "step-4" / "arrays").rglob("*") if path.is_file()
    ]
    for path in damaged:
        path.write_bytes(path.read_bytes()[::-1])
    *events, weights = train(run, 8)
    assert events == ["compiles", "reads while it compiles", "accounts 1 compile"]
    assert weights == whole
