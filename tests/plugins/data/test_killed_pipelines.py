"""Programs that are killed in the middle of an epoch, and resumed by another process with other
workers: the batches of a program that was not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fulgurite_data import write_tokens

PROGRAM = """
import json
import os
import signal
import sys
from pathlib import Path

import fulgurite as fg
import fulgurite_data as fd
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_checkpoint import Checkpointer

STEPS = 23


class Sum(fg.Module):
    weight: jax.Array

    def training_step(self, batch, ctx):
        values = (self.weight - batch["tokens"] * 0.01) ** 2
        return fg.Output(fg.metrics.Mean.from_values(values, batch["mask"]))

    def configure_optimizers(self):
        return optax.sgd(0.05)


class Kill:
    def __init__(self, step):
        self.step = step

    @fg.hookimpl
    def register_actions(self):
        return [fg.ScheduledAction("kill", fg.At(self.step), self.kill)]

    def kill(self, run):
        os.kill(os.getpid(), signal.SIGKILL)


def add_noise(row, rng):
    return {**row, "tokens": row["tokens"] + rng.integers(9, dtype=np.int32)}


def is_long(example):
    return len(example["tokens"]) > 2


def build(folder, options):
    left = fd.Tokens(folder / "left.bin").filter(is_long).pack(16, open_rows=2)
    right = fd.Tokens(folder / "right.bin").pack(16, how="split")
    mixed = fd.mix([left.shuffle(), right.shuffle()], [2, 1], exhausted="restart")
    return mixed.map(add_noise, rng=True, **options).batch(4, remainder="drop")


if __name__ == "__main__":
    folder, name = Path(sys.argv[1]), sys.argv[2]
    options, kill_at = json.loads(sys.argv[3]), int(sys.argv[4])
    plugins = [Checkpointer(every=5)] + ([Kill(kill_at)] if kill_at else [])
    engine = fg.Engine(steps=STEPS, run_dir=folder / name, plugins=plugins)
    result = engine.fit(Sum(jnp.zeros(())), build(folder, options), resume="auto")
    print(float(result.module.weight).hex())
"""


def run_program(folder: Path, name: str, options: dict[str, int], kill_at: int = 0) -> Any:
    """Return the weight that a program ends with, or minus the signal that ended it."""
    arguments = [str(folder), name, json.dumps(options), str(kill_at)]
    process = subprocess.run(
        [sys.executable, str(folder / "program.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode in (0, -9), process.stderr
    return process.stdout.split()[-1] if process.returncode == 0 else process.returncode


@pytest.mark.full
def test_a_killed_program_resumes_with_other_workers_and_the_same_bits(tmp_path: Path):
    rng = np.random.default_rng(0)
    for name in ("left", "right"):
        lengths = rng.integers(1, 14, 60)
        write_tokens(tmp_path / f"{name}.bin", [rng.integers(0, 200, n) for n in lengths])
    (tmp_path / "program.py").write_text(PROGRAM)
    whole = run_program(tmp_path, "whole", {})
    assert run_program(tmp_path, "killed", {}, kill_at=8) == -9
    assert run_program(tmp_path, "killed", {"threads": 4}, kill_at=17) == -9
    assert run_program(tmp_path, "killed", {"processes": 2}) == whole
