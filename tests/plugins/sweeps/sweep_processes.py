"""Sweeps in processes, and what the tests look at while they run."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fulgurite_runs import RunDirectory
from instant_executor import PROGRAM
from quadratic import HOLD

COMMAND = [sys.executable, "-P", "-m", "fulgurite_cli"]
STARTED: list[Any] = []
"""The processes of sweeps that were started."""


def kill_started() -> None:
    """Kill the sweeps that were started, which ends their trials, too."""
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()
        process.stdout.close()


def start_sweep(
    folder: Path, *arguments: str, hold: Path | None = None, program: Path = PROGRAM
) -> Any:
    """Start a sweep in a process.

    Args:
        folder: in which the sweep has the directory `sweep`.
        *arguments: of the command.
        hold: the folder that the program waits for.
        program: what is trained.
    """
    command = [*COMMAND, "sweep", str(program), *arguments]
    command += ["--metric", "test/loss", "--run", str(folder / "sweep")]
    environment = os.environ | ({HOLD: str(hold)} if hold else {})
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    STARTED.append(process)
    return process


def run_sweep(folder: Path, *arguments: str, code: int = 0, program: Path = PROGRAM) -> str:
    """Run a sweep, and return what it prints.

    Args:
        folder: in which the sweep has the directory `sweep`.
        *arguments: of the command.
        code: the exit code that it has.
        program: what is trained.
    """
    process = start_sweep(folder, *arguments, program=program)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == code, output
    return output


def read_records(run_dir: Path) -> list[str]:
    """Return the records of a run."""
    return (run_dir / "records.jsonl").read_text().splitlines()


def train_alone(folder: Path, *arguments: str) -> list[str]:
    """Return the records of a run that `fulgurite fit` starts."""
    command = [*COMMAND, "fit", str(PROGRAM), *arguments, "--run", str(folder / "alone")]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return read_records(folder / "alone")


def wait_for(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen within five minutes")


def has_saved(folder: Path, number: int) -> bool:
    """Return whether a trial of a sweep has a checkpoint; one that is held has no more than that."""
    return bool(RunDirectory(folder / "sweep" / f"trial-{number}").list_checkpoints())
