"""A pipeline in several processes, each of which reads its part of every batch, and resumed by
another number of them."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = """
import sys

import fulgurite as fg
import fulgurite_data as fd
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_checkpoint import Checkpointer
from fulgurite_sharding import DataParallel


class Line(fg.Module):
    weight: jax.Array

    def training_step(self, batch, ctx):
        return fg.Output(jnp.mean((batch["x"] @ self.weight - batch["y"]) ** 2))

    def configure_optimizers(self):
        return optax.sgd(0.05)


def halve(example):
    return {**example, "x": example["x"] / 2}


run_dir, steps = sys.argv[1], int(sys.argv[2])
examples = np.load("examples.npz")
first = fd.Arrays({"x": examples["x"][:40], "y": examples["y"][:40]})
second = fd.Arrays({"x": examples["x"][40:], "y": examples["y"][40:]})
data = fd.mix([first, second], [3, 1]).map(halve).batch(8, remainder="drop")
engine = fg.Engine(run_dir=run_dir, plugins=[DataParallel(), Checkpointer(every=5)], autoload=False)
result = engine.fit(Line(jnp.zeros(3)), data, steps=steps, resume="auto")
if jax.process_index() == 0:
    np.save("weight.npy", np.asarray(result.module.weight))
together = next(iter(fd.Together({"both": data})))
np.save(f"part-{jax.process_index()}.npy", together["both"]["x"])
"""


def descend(x: np.ndarray, y: np.ndarray, steps: int) -> np.ndarray:
    """Return the weights of a plain loop over three of the first 40 examples to one of the others,
    in batches of 8, an epoch ending where one of the two is used up."""
    numbers: list[int] = []
    counts = [0, 0]
    while True:
        source = int(len(numbers) % 4 == 3)
        if counts[source] == 40:
            break
        numbers.append(40 * source + counts[source])
        counts[source] += 1
    batches = [numbers[low : low + 8] for low in range(0, len(numbers) - 7, 8)]
    weight = np.zeros(3)
    for step in range(steps):
        batch = batches[step % len(batches)]
        inputs = x[batch] / 2
        weight = weight - 0.05 * 2 / 8 * inputs.T @ (inputs @ weight - y[batch])
    return weight


@pytest.mark.full
def test_two_processes_and_then_one_train_on_the_batches_of_a_plain_loop(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3)).astype(np.float32)
    y = (x @ np.array([1, 2, 3]) + 0.1 * rng.normal(size=80)).astype(np.float32)
    np.savez(tmp_path / "examples.npz", x=x, y=y)
    (tmp_path / "program.py").write_text(PROGRAM)
    launch = [sys.executable, "-m", "fulgurite_cli", "launch", "--processes", "2"]
    # One device for each process, whatever the tests were started with.
    environment = {**os.environ, "XLA_FLAGS": ""}
    for command, steps in ((launch, 7), ([sys.executable], 17)):  # in the middle of an epoch
        subprocess.run(
            [*command, "program.py", "run", str(steps)], cwd=tmp_path, env=environment, check=True
        )
        if command is launch:
            # Of several sources, too, each process reads its part: the whole batch is read once.
            parts = [np.load(tmp_path / f"part-{process}.npy") for process in range(2)]
            numbers = [0, 1, 2, 40, 3, 4, 5, 41]
            assert np.array_equal(np.concatenate(parts), x[numbers] / 2)
        weight = np.load(tmp_path / "weight.npy")
        np.testing.assert_allclose(weight, descend(x, y, steps), rtol=1e-5)
