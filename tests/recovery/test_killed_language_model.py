"""The example of a language model, killed at random moments and resumed with other workers and
another number of processes: it is trained on the tokens of a plain definition in NumPy, none of
them lost or twice, and ends with the bits of a run that nobody disturbed."""

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from fulgurite_data import Arrays
from killed_language_model import BATCH_SIZE, LENGTH, ROWS, SEED, STEPS

PROGRAM = Path(__file__).with_name("killed_language_model.py")
NUM_DEVICES = 4
WORKERS: list[dict[str, int]] = [{}, {"threads": 4}, {"processes": 2}]
PATIENCE = 600
"""Seconds after which an attempt that does not end is an error, on a machine with much else to
do."""


@dataclass(frozen=True)
class Attempt:
    """A start of the program.

    Attributes:
        processes: among which the devices are divided.
        workers: of each process.
        kill: which process is killed, after how many steps and seconds; empty for none.
        is_optimized: whether XLA compiles as for users; otherwise as for other tests.
    """

    processes: int
    workers: dict[str, int]
    kill: dict[str, float]
    is_optimized: bool = True

    def run(self, run: Path, cache: Path) -> bool:
        """Return whether it came to its end. Otherwise a process was killed."""
        options = json.dumps({"workers": self.workers, **self.kill})
        launch = ["-m", "fulgurite_cli", "launch", "--processes", str(self.processes)]
        command = [*(launch if self.processes > 1 else []), PROGRAM, run, cache, options]
        devices = {"JAX_NUM_CPU_DEVICES": str(NUM_DEVICES // self.processes)}
        flags = {"XLA_FLAGS": ""} if self.is_optimized else {}
        num_killed = count_kills(run)
        process = subprocess.run(
            [sys.executable, *map(str, command)],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env={**os.environ, "JAX_PLATFORMS": "cpu", **flags, **devices},
        )
        if process.returncode:
            assert count_kills(run) == num_killed + 1, process.stdout + process.stderr
        return process.returncode == 0


def count_kills(run: Path) -> int:
    path = run / "kills"
    return len(path.read_text().splitlines()) if path.exists() else 0


def draw_attempt(draw: random.Random, processes: tuple[int, ...], is_killed: bool) -> Attempt:
    """Return an attempt with a kill at any moment: in a step, a save, or between them."""
    count = draw.choice(processes)
    kill = {
        "process": draw.randrange(count),
        "step": draw.randint(1, 9),
        "seconds": draw.choice([0.0, draw.uniform(0, 0.3)]),
    }
    return Attempt(count, draw.choice(WORKERS), kill if is_killed else {})


def define_batches(cache: Path) -> np.ndarray:
    """Return the tokens of each step, `(steps, batch, length + 1)`, in plain NumPy."""
    documents: list[np.ndarray] = []
    for path in sorted(cache.glob("*/shard-*[0-9].npy")):
        tokens, offsets = np.load(path), np.load(path.with_suffix(".offsets.npy"))
        documents += [tokens[a:b] for a, b in pairwise(offsets)]
    fixed = Arrays(np.arange(len(documents))).shuffle(seed=0, reshuffle=False)
    order = fixed.read(np.arange(len(documents)))
    assert sorted(order) == [*range(len(documents))]
    # The first ten are for validation. The example reads one token more than its length.
    stream = np.concatenate([documents[number] for number in order[10:]])
    rows = stream[: ROWS * (LENGTH + 1)].reshape(ROWS, LENGTH + 1)
    batches: list[np.ndarray] = []
    epoch = 0
    while len(batches) < STEPS:
        shuffled = read_order(epoch)
        assert sorted(shuffled) == [*range(ROWS)]
        full = shuffled[: ROWS // BATCH_SIZE * BATCH_SIZE]
        batches += [*rows[full].reshape(-1, BATCH_SIZE, LENGTH + 1)]
        epoch += 1
    assert epoch > 2  # three, so that orders of several are compared
    return np.array(batches[:STEPS])


def read_order(epoch: int) -> np.ndarray:
    """Return the order of the rows in an epoch: that of a second shuffle, after a fixed one."""
    first = Arrays(np.arange(ROWS)).shuffle(seed=0, reshuffle=False)
    places = np.argsort(first.read(np.arange(ROWS)))
    return places[first.shuffle().read(np.arange(ROWS), seed=SEED, epoch=epoch)]


def sort_rows(batches: np.ndarray) -> list[list[tuple[int, ...]]]:
    """Return the rows of each batch in an order that says nothing of the devices they were on."""
    return [sorted(map(tuple, batch)) for batch in batches.tolist()]


def load(run: Path) -> dict[str, np.ndarray]:
    with np.load(run / "final.npz") as file:
        return dict(file)


class Comparison:
    """What undisturbed runs give, and whether others give the same.

    Args:
        folder: of all runs.
    """

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.cache.mkdir()
        self.wholes: dict[int, dict[str, np.ndarray]] = {}
        self.folder = folder

    def train_undisturbed(self, processes: int) -> None:
        run = self.folder / f"whole-{processes}"
        assert Attempt(processes, {}, {}).run(run, self.cache)
        self.wholes[processes] = load(run)
        self.check_tokens(self.wholes[processes])

    def check_tokens(self, final: dict[str, np.ndarray]) -> None:
        log = final["tokens"].reshape(STEPS, BATCH_SIZE, LENGTH + 1)
        assert sort_rows(log) == sort_rows(define_batches(self.cache))

    def check(self, run: Path, processes: int, *, has_equal_bits: bool) -> None:
        final = load(run)
        self.check_tokens(final)
        for name, expected in self.wholes[processes].items():
            if has_equal_bits:
                assert final[name].tobytes() == expected.tobytes(), name
            else:
                np.testing.assert_allclose(final[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_language_model_killed_among_processes_is_trained_on_every_token_once(tmp_path: Path):
    comparison = Comparison(tmp_path)
    run = tmp_path / "run"
    kill = {"process": 1, "step": 11, "seconds": 0.05}
    attempts = [
        Attempt(2, {"threads": 4}, kill, is_optimized=False),
        Attempt(1, {"processes": 2}, {}, is_optimized=False),
    ]
    assert [attempt.run(run, comparison.cache) for attempt in attempts] == [False, True]
    comparison.check_tokens(load(run))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "num_kills", "has_equal_bits"),
    [
        pytest.param((1,), 5, True, id="one process"),
        # XLA adds the gradients of devices in one order within a process, and in another one,
        # which is the same however many there are, between processes.
        pytest.param((2, 4), 6, True, id="two and four processes"),
        pytest.param((1, 2, 4), 9, False, id="one, two and four processes"),
    ],
)
def test_language_model_killed_twenty_times_is_trained_on_every_token_once(
    tmp_path: Path, processes: tuple[int, ...], num_kills: int, has_equal_bits: bool
):
    comparison = Comparison(tmp_path)
    comparison.train_undisturbed(processes[0])
    draw = random.Random(num_kills)
    num_done = 0
    for number in range(num_kills):
        run = tmp_path / f"run-{number}"
        is_complete = False
        while not is_complete:
            is_killed = num_done + count_kills(run) < num_kills
            is_complete = draw_attempt(draw, processes, is_killed).run(run, comparison.cache)
        comparison.check(run, processes[0], has_equal_bits=has_equal_bits)
        num_done += count_kills(run)
        print(f"{run.name}: {count_kills(run)} kills")
        if num_done == num_kills:
            return
    raise AssertionError(f"{num_done} of {num_kills} kills hit")
