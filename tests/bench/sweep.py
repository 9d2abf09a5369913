"""What a sweep saves, and what it costs: the perceptron of examples/digits.py.

`--search`: 40 trials that learn from each other and end early, against a grid of 40. The steps that the
first had trained when one of its trials was as good as the best of the grid are to be 40 % of the
steps of the grid, at most. Started for several seeds, since one of them may be lucky. The trials train
in this process, one after the other, since only steps are counted. A moving average of the weights is
evaluated: the loss of the last weights (`--last`) differs more from one evaluation to the next than
between the good trials, so the best of a grid is its luckiest trial, and no search can aim for it.

`--overhead`: the processor time of a trial over that of the same run by `fulgurite fit`. That of the
driver for a trial is in it, its start is not: it is the difference of sweeps of one and three trials.

    python tests/bench/sweep.py --search --seeds 3
    python tests/bench/sweep.py --overhead
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fulgurite_sweeps import Executor, Job, Sweep, SweepTrial, Trial, TrialSettings
from sweep_digits import build

PROGRAM = str(Path(__file__).with_name("sweep_digits.py"))
METRIC = "test/loss"
COMMAND = [sys.executable, "-P", "-m", "fulgurite_cli"]
WIDTHS = (16, 32, 64, 128, 256)
RATES = tuple(10 ** (-4.5 + 0.5 * index) for index in range(8))


class ThisProcess(Executor):
    """Trains trials in this process.

    Args:
        is_averaged: whether a moving average of the weights is evaluated.
    """

    num_slots = 1

    def __init__(self, is_averaged: bool) -> None:
        self._is_averaged = is_averaged

    def start(self, job: Job) -> "Ended":
        """Train a trial."""
        words = job.command[: job.command.index("--run")]
        values = dict(word.split("=") for word in words if "=" in word)
        settings = TrialSettings(**json.loads(job.environment["FULGURITE_SWEEP_TRIAL"]))
        trial = build(
            int(values["width"]),
            float(values["lr"]),
            steps=1000,
            every=100,
            is_averaged=self._is_averaged,
            run_dir=job.command[job.command.index("--run") + 1],
            plugins=[SweepTrial(settings)],
            autoload=False,
        )
        trial.engine.fit(trial.model, trial.data)
        return Ended()


class Ended:
    """A trial that has ended."""

    def poll(self) -> int:
        """Return its exit code."""
        return 0

    def stop(self, number: int) -> None:
        """There is nothing to stop."""


def search(folder: Path, num_seeds: int, pruner: str, is_averaged: bool) -> None:
    """Print how many steps a sweep needs to be as good as a grid.

    Args:
        folder: for the runs.
        num_seeds: how many sweeps.
        pruner: of each.
        is_averaged: whether a moving average of the weights is evaluated.
    """
    executor = ThisProcess(is_averaged)
    space = {"lr": [f"{rate:.3g}" for rate in RATES], "width": list(WIDTHS)}
    grid = Sweep(folder / "grid", PROGRAM, space, [METRIC])
    grid.run(sampler="grid", executor=executor, tell=ignore)
    target = get_loss(grid.best)
    num_steps = sum(trial.step or 0 for trial in grid.trials)
    print(f"grid: {len(grid.trials)} trials, {num_steps} steps, best {METRIC} {target:.4f}")
    for seed in range(num_seeds):
        limits = {"lr": f"log({RATES[0]:.3g},{RATES[-1]:.3g})", "width": "int(16,256,log)"}
        sweep = Sweep(folder / f"tpe-{seed}", PROGRAM, limits, [METRIC])
        sweep.run(40, pruner=pruner, executor=executor, seed=seed, tell=ignore)
        show_search(sweep.trials, target, num_steps, seed)


def show_search(trials: Sequence[Trial], target: float, num_steps: int, seed: int) -> None:
    """Print the steps of a sweep.

    Args:
        trials: in their order.
        target: the loss that one of them is to reach.
        num_steps: of the grid.
        seed: of the sampler.
    """
    trained = 0
    when = None
    for trial in trials:
        trained += trial.step or 0
        if when is None and trial.state == "complete" and get_loss(trial) <= target:
            when = trained
    pruned = sum(trial.state == "pruned" for trial in trials)
    best = min(get_loss(trial) for trial in trials if trial.state == "complete")
    reached = "never" if when is None else f"{when / num_steps:.0%} of the grid's steps"
    print(
        f"seed {seed}: {pruned} of {len(trials)} pruned, {trained / num_steps:.0%} of the grid's "
        f"steps in all, best {best:.4f}; as good as the grid after {reached}",
        flush=True,
    )


def get_loss(trial: Trial | None) -> float:
    """Return the loss of a complete trial."""
    assert trial is not None and trial.values is not None
    return trial.values[0]


def ignore(text: str) -> None:
    """Print nothing."""


def measure_overhead(folder: Path, num_rounds: int) -> None:
    """Print the processor time of a trial over that of a run."""
    options = ["steps=4000", "every=400"]
    run([*COMMAND, "fit", PROGRAM, *options, "--run", str(folder / "warm")])
    for pruner in ([], ["--pruner", "median(n_startup_trials=100)"]):
        ratios = []
        for index in range(num_rounds):
            alone = sum(
                run(
                    [
                        *COMMAND,
                        "fit",
                        PROGRAM,
                        *options,
                        "--run",
                        f"{folder}/{len(pruner)}-{index}-{k}",
                    ]
                )
                for k in range(2)
            )
            times = {}
            for count in (1, 3):
                sweep = [*COMMAND, "sweep", PROGRAM, *options, "copy=int(0,1000)"]
                sweep += ["--metric", METRIC, "--trials", str(count), *pruner]
                times[count] = run([*sweep, "--run", f"{folder}/s{len(pruner)}-{index}-{count}"])
            ratios.append((times[3] - times[1]) / alone)
        name = "with a pruner" if pruner else "without a pruner"
        print(f"{name}: a trial takes {sorted(ratios)} of a run", flush=True)


def run(command: Sequence[str]) -> float:
    """Run a command, and return the processor time that it and its children took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--last", action="store_true", help="evaluate the last weights")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pruner", default="asha(min_resource=100,reduction_factor=3)")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        if options.search:
            search(Path(path), options.seeds, options.pruner, not options.last)
        if options.overhead:
            measure_overhead(Path(path), options.rounds)


if __name__ == "__main__":
    main()
