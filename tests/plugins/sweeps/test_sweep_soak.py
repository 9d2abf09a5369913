"""A sweep on a cluster of Ray of which something is killed at random, again and again."""

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fulgurite_runs import RunDirectory
from fulgurite_sweeps import list_trials
from quadratic import PAUSE
from ray_cluster import VARIABLES, RayCluster, find_machine, start_cluster
from sweep_processes import kill_started, read_records, start_sweep, train_alone, wait_for

NUM_KILLS = int(os.environ.get("FULGURITE_SWEEP_KILLS", "20"))
RATES = [f"{0.01 + 0.005 * index:.3f}" for index in range(16)]
STEPS = 60
SECONDS_PER_STEP = "0.2"
"""Long enough that the trials train longer than it takes to kill something twenty times."""


class Soak:
    """A sweep of 16 trials on a cluster, and what is killed.

    Args:
        folder: in which the sweep has the directory `sweep`.
        cluster: with room for two trials.
    """

    def __init__(self, folder: Path, cluster: RayCluster) -> None:
        self._folder = folder
        self._cluster = cluster
        self._first_steps: dict[int, int | None] = {}
        self.driver = self._start_driver()

    def _start_driver(self) -> Any:
        """Start or continue the sweep."""
        space = [f"steps={STEPS}", f"lr={','.join(RATES)}", "--sampler", "grid"]
        workers = ["--workers", f"ray:{self._cluster.address}", "--retries", "50"]
        return start_sweep(self._folder, *space, *workers)

    @property
    def is_over(self) -> bool:
        """Whether the driver has ended."""
        return self.driver.poll() is not None

    def list_training(self) -> list[int]:
        """Return the processes that have saved a step since this method saw them first: a trial that
        is killed before it has trained loses nothing."""
        processes = []
        for folder in (self._folder / "sweep").glob("trial-*/"):
            run = RunDirectory(folder)
            entry = run.read_owner()
            if entry is None or not entry[0].is_running(entry[1]):
                continue
            newest_step = run.find_newest_step()
            if self._first_steps.setdefault(entry[0].pid, newest_step) != newest_step:
                processes.append(entry[0].pid)
        return processes

    def kill(self, draw: random.Random) -> str:
        """Kill something on which a trial trains, and return what.

        Args:
            draw: what decides.
        """
        trial = draw.choice(self.list_training())
        machine = find_machine(trial)
        kind = draw.choice(["driver", "trial", "machine"])
        if kind == "driver":
            self.driver.kill()
            self.driver.communicate()
            self.driver = self._start_driver()
        elif kind == "machine" and machine is not None:
            self._cluster.replace_machine(machine)
        else:
            kind = "trial"
            os.kill(trial, signal.SIGKILL)
        return kind


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the dependency group `ray`")
def test_a_sweep_survives_drivers_trials_and_machines_that_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PAUSE, SECONDS_PER_STEP)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    draw = random.Random(0)
    kills = Counter[str]()
    try:
        with start_cluster() as cluster:
            soak = Soak(tmp_path, cluster)
            while kills.total() < NUM_KILLS and not soak.is_over:
                wait_for(lambda: soak.list_training() or soak.is_over)
                time.sleep(draw.uniform(0, 3))
                with suppress(ProcessLookupError, IndexError):  # the trial has ended in this moment
                    kills[soak.kill(draw)] += 1
                print(f"killed: {dict(kills)}", flush=True)
            output, _ = soak.driver.communicate(timeout=1800)
            assert soak.driver.returncode == 0, output
    finally:
        kill_started()
    assert kills.total() == NUM_KILLS
    trials = list_trials(tmp_path / "sweep")
    assert [(trial.state, trial.params["lr"]) for trial in trials] == [
        ("complete", lr) for lr in RATES
    ]
    attempts = [RunDirectory(trial.run_dir).num_attempts for trial in trials]
    print(f"attempts: {attempts}", flush=True)
    # Each kill has cut off one trial at least.
    assert sum(attempts) >= len(RATES) + NUM_KILLS
    monkeypatch.delenv(PAUSE)
    for trial in trials:
        alone = tmp_path / trial.name
        alone.mkdir()
        records = train_alone(alone, f"steps={STEPS}", f"lr={trial.params['lr']}")
        assert read_records(trial.run_dir) == records
