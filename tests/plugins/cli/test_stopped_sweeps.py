"""Sweeps that are asked to stop, or killed: no run of theirs trains on."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fulgurite_runs import RunDirectory

PROGRAM = """
import time
import fulgurite as fg, jax, jax.numpy as jnp, numpy as np, optax
from fulgurite_checkpoint import Checkpointer
from fulgurite_cli import Experiment

class Net(fg.Module):
    weight: jax.Array

    def __init__(self, *, key=None):
        self.weight = jnp.zeros(())

    def training_step(self, batch, ctx):
        return fg.Output(self.weight * 1.0)

    def configure_optimizers(self):
        return optax.sgd(1.0)

class Slow:
    def __iter__(self):
        for number in range(100_000):
            if number == 10:
                print("training", flush=True)
            time.sleep(0.01)
            yield np.zeros(1, np.float32)

def experiment(rate: float = 1.0):
    engine = fg.Engine(steps=100_000, plugins=[Checkpointer(50_000)], autoload=False, log_every=None)
    return Experiment(engine, Net, fg.DataSource(Slow(), resume="replay"))
"""


ACCEPT_HANGUPS = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Undo what `nohup pytest` begins with, since a program keeps ignoring what it is told to."""


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Any]:
    """A sweep of two long runs, one after the other; what is left of it is killed."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-c", ACCEPT_HANGUPS, "-m", "fulgurite_cli", "fit"]
    command += [str(tmp_path / "program.py")]
    command += ["--sweep", "rate=1,2", "--run", str(tmp_path / "runs")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def read_until(process: Any, beginning: str) -> None:
    assert any(line.startswith(beginning) for line in process.stdout), "it ended before"


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_run_whose_sweep_is_ended_saves_and_ends(
    tmp_path: Path, sweep: Any, number: int, code: int
) -> None:
    read_until(sweep, "training")
    sweep.send_signal(number)
    sweep.communicate(timeout=300)  # until the run, whose output it is, has ended as well
    assert sweep.returncode == code
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    run = RunDirectory(folder)
    run.check_unused()
    owner = run.read_owner()
    assert owner is not None and owner[0].ended and not run.is_complete
    ((step, _),) = run.list_checkpoints()
    assert 0 < step < 100_000


@pytest.mark.full
def test_a_signal_right_at_the_start_of_a_run_reaches_it(tmp_path: Path, sweep: Any) -> None:
    read_until(sweep, "starting ")
    sweep.send_signal(signal.SIGTERM)
    output, _ = sweep.communicate(timeout=300)
    assert sweep.returncode == 143
    assert "starting" not in output and "training" not in output
