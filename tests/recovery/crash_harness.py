"""Starts a program again and again, kills it, and compares what it leaves with what an undisturbed
run leaves."""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
from fulgurite_runs import RunDirectory

# Processes are forked from one that has imported what takes long; jax's backend starts in each of
# them.
STARTING = multiprocessing.get_context("forkserver")
STARTING.set_forkserver_preload(
    [
        *(
            "fulgurite",
            "fulgurite_checkpoint.commands",
            "fulgurite_logging",
            "fulgurite_evaluators",
        ),
        *("fulgurite_rng", "orbax.checkpoint.experimental.v1"),
    ]
)
PATIENCE = 240.0
"""Seconds after which a process that does not end is an error, on a machine with much else to
do."""

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Kill:
    """A moment, and what is sent then.

    `batch`, `evaluation`, `record` and `save` count those of one process, which kills itself, as at
    the `step` of that number; `commit` counts checkpoints that become complete, and `start` is when
    training begins, both seen from outside.
    """

    place: str
    count: int
    after: float
    number: signal.Signals = signal.SIGKILL

    def arguments(self) -> Arguments:
        """What makes the program do it itself."""
        if self.place in ("commit", "start"):
            return {}
        return {
            "place": self.place,
            "count": self.count,
            "after": self.after,
            "number": int(self.number),
        }


def kills(
    seed: int, count: int, source: str, numbers: Sequence[signal.Signals] = (signal.SIGKILL,)
) -> list[Kill]:
    """Random moments of all kinds."""
    draw = random.Random(seed)
    kinds: dict[str, Callable[[], tuple[int, float]]] = {
        "evaluation": lambda: (draw.randint(1, 12), 0.0),
        "record": lambda: (draw.randint(1, 14), draw.choice([0.0, draw.uniform(0, 0.005)])),
        "save": lambda: (
            draw.randint(1, 3),
            draw.choice([0.0, draw.uniform(0, 0.05), draw.uniform(0, 0.2)]),
        ),
        "commit": lambda: (draw.randint(1, 3), draw.choice([0.0, draw.uniform(0, 0.02)])),
        "start": lambda: (1, draw.uniform(0.0, 1.0)),
    }
    if source in ("replayed", "stream"):
        kinds["batch"] = lambda: (draw.randint(1, 50), draw.choice([0.0, draw.uniform(0, 0.01)]))
    places = [place for _ in range(count) for place in draw.sample(list(kinds), len(kinds))][:count]
    return [Kill(place, *kinds[place](), draw.choice(list(numbers))) for place in places]


@dataclass(frozen=True)
class Left:
    """What a run leaves: arrays by path, and the bytes of its exact records."""

    arrays: dict[str, tuple[str, tuple[int, ...], bytes]]
    records: bytes

    @classmethod
    def of(cls, run: Path) -> "Left":
        with np.load(run / "final.npz") as file:
            arrays = {
                name: (str(file[name].dtype), file[name].shape, file[name].tobytes())
                for name in file
            }
        return cls(arrays, (run / "records.jsonl").read_bytes())


def undisturbed(run: Path, **arguments: Any) -> Left:
    """What the program leaves when nobody disturbs it."""
    assert attempt(run, arguments) == 0, log(run)
    return Left.of(run)


def killed_until_done(
    run: Path, plan: Iterator[Kill], most: int, whole: Left, **arguments: Any
) -> list[Kill]:
    """Starts the program until it has ended by itself, with the next kill of the plan at each
    start, or with none when there is no more or `most` have hit it; gives those. What it leaves
    must be `whole`."""
    hits = []
    while True:
        kill = next(plan, None) if len(hits) < most else None
        code = attempt(run, arguments, kill)
        if code == 0:
            assert RunDirectory(run).is_complete
            compare(Left.of(run), whole)
            return hits
        assert kill is not None, log(run)
        expected = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: 130}[
            kill.number
        ]
        # A signal to stop that comes before or after training ends the process as it ends any
        # other.
        assert code in (expected, -kill.number), f"{kill}: exit code {code}\n{log(run)}"
        hits.append(kill)
        check_commits(run, whole, kill.number != signal.SIGKILL)


def compare(outcome: Left, whole: Left) -> None:
    """Both are the same, byte for byte."""
    assert outcome.records.decode() == whole.records.decode()
    assert outcome.arrays.keys() == whole.arrays.keys()
    assert [path for path in whole.arrays if outcome.arrays[path] != whole.arrays[path]] == []


def check_commits(run: Path, whole: Left, pending: bool) -> None:
    """Everything that happened up to a checkpoint that is complete is on disk, however the process
    ended; but for what is `pending` at its step, where it was asked to stop."""
    for step, _ in RunDirectory(run).list_checkpoints()[-1:]:
        lines = whole.records.splitlines(True)
        before = [line for line in lines if json.loads(line)["step"] <= step - pending]
        assert (run / "records.jsonl").read_bytes().startswith(b"".join(before)), (
            f"step {step}\n{log(run)}"
        )


def attempt(run: Path, arguments: Arguments, kill: Kill | None = None) -> int:
    """Starts the program once, and gives its exit code."""
    options = arguments | (kill.arguments() if kill else {})
    process = started(run, options)
    try:
        if kill is not None and not kill.arguments():
            strike(process, run, kill)
        process.join(PATIENCE)
        assert process.exitcode is not None, f"{kill}: it does not end\n{log(run)}"
        return process.exitcode
    finally:
        process.kill()
        process.join()


def started(run: Path, arguments: Arguments) -> ForkServerProcess:
    """A process that runs the program."""
    run.mkdir(parents=True, exist_ok=True)
    process = STARTING.Process(
        target=_run, args=(str(run), [f"{name}={value}" for name, value in arguments.items()])
    )
    process.start()
    return process


def strike(process: ForkServerProcess, run: Path, kill: Kill) -> None:
    """Waits for a moment that can be seen from outside, and sends the signal."""
    directory = RunDirectory(run)
    # Checkpoints are counted by what appears: old ones go while new ones come.
    before, attempts, num_events = (
        {step for step, _ in directory.list_checkpoints()},
        directory.num_attempts,
        0,
    )
    while num_events < kill.count:
        if not process.is_alive():
            return
        if kill.place == "start":
            num_events += directory.num_attempts > attempts
        else:
            steps = {step for step, _ in directory.list_checkpoints()}
            num_events, before = num_events + len(steps - before), before | steps
        time.sleep(0.0005)
    time.sleep(kill.after)
    if process.is_alive() and process.pid is not None:
        os.kill(process.pid, kill.number)


def records(run: Path) -> list[dict[str, Any]]:
    """The exact records of a run."""
    return [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]


def log(run: Path) -> str:
    """What the program said, the last of it."""
    return (run / "output.txt").read_text()[-6000:]


def _run(run: str, arguments: list[str]) -> None:
    with open(Path(run, "output.txt"), "a") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    from crash_program import main

    print("---", *arguments, flush=True)
    main(run, arguments)
