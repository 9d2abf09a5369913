"""A sweep on a cluster of Ray of which something is killed at random, again and again."""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
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
from ray_cluster import VARIABLES
from sweep_processes import kill_started, read_records, start_sweep, train_alone, wait_for

CLUSTER = Path(__file__).with_name("ray_cluster.py")
NUM_KILLS = int(os.environ.get("FULGURITE_SWEEP_KILLS", "20"))
RATES = [f"{0.01 + 0.005 * index:.3f}" for index in range(16)]
STEPS = 60


class Soak:
    """A cluster, a sweep of 16 trials on it, and what is killed.

    Args:
        folder: in which the sweep has the directory `sweep`.
        cluster: the process of the cluster.
    """

    def __init__(self, folder: Path, cluster: "subprocess.Popen[str]") -> None:
        self._folder = folder
        self._cluster = cluster
        assert cluster.stdout is not None
        self._address = cluster.stdout.readline().strip()
        assert self._address, "there is no cluster"
        self.driver = self.start_driver()

    def start_driver(self) -> Any:
        """Start or continue the sweep."""
        space = [f"steps={STEPS}", f"lr={','.join(RATES)}", "--sampler", "grid"]
        workers = ["--workers", f"ray:{self._address}", "--retries", "50"]
        return start_sweep(self._folder, *space, *workers)

    def kill_driver(self) -> None:
        """Kill the driver, and start another one."""
        self.driver.kill()
        self.driver.communicate()
        self.driver = self.start_driver()

    def list_processes(self) -> list[int]:
        """Return the processes that train a trial."""
        folders = (self._folder / "sweep").glob("trial-*/")
        entries = [RunDirectory(folder).read_owner() for folder in folders]
        return [entry[0].pid for entry in entries if entry and entry[0].is_running(entry[1])]

    def kill_trial(self) -> None:
        """Kill the process of a trial, unless it has ended in this moment."""
        for pid in self.list_processes()[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_machine(self) -> None:
        """Replace a machine of the cluster by another one."""
        assert self._cluster.stdin is not None and self._cluster.stdout is not None
        self._cluster.stdin.write("replace\n")
        self._cluster.stdin.flush()
        assert self._cluster.stdout.readline() == "replaced\n"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the dependency group `ray`")
def test_a_sweep_survives_drivers_trials_and_machines_that_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PAUSE, "0.1")
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    ray_folder = tempfile.mkdtemp(prefix="fg-ray-")
    cluster = subprocess.Popen(
        [sys.executable, str(CLUSTER), ray_folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    draw = random.Random(0)
    kills = Counter[str]()
    try:
        soak = Soak(tmp_path, cluster)
        while kills.total() < NUM_KILLS and soak.driver.poll() is None:
            # Nothing is lost where nothing has begun.
            wait_for(lambda: soak.list_processes() or soak.driver.poll() is not None)
            time.sleep(draw.uniform(0, 5))
            if soak.driver.poll() is not None:
                break
            kind = draw.choice(["driver", "trial", "machine"])
            {
                "driver": soak.kill_driver,
                "trial": soak.kill_trial,
                "machine": soak.kill_machine,
            }[kind]()
            kills[kind] += 1
            print(f"killed: {dict(kills)}", flush=True)
        output, _ = soak.driver.communicate(timeout=1800)
        assert soak.driver.returncode == 0, output
    finally:
        kill_started()
        cluster.communicate(timeout=120)
        shutil.rmtree(ray_folder)
    assert kills.total() == NUM_KILLS
    trials = list_trials(tmp_path / "sweep")
    assert [(trial.state, trial.params["lr"]) for trial in trials] == [
        ("complete", lr) for lr in RATES
    ]
    attempts = [RunDirectory(trial.run_dir).num_attempts for trial in trials]
    print(f"attempts: {attempts}", flush=True)
    monkeypatch.delenv(PAUSE)
    for trial in trials:
        alone = tmp_path / trial.name
        alone.mkdir()
        records = train_alone(alone, f"steps={STEPS}", f"lr={trial.params['lr']}")
        assert read_records(trial.run_dir) == records
