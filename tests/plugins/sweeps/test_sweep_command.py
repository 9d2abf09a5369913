"""`fulgurite sweep` with processes: what trials compute, and what is left when something is killed."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fulgurite_runs import RunDirectory
from fulgurite_sweeps import list_trials, read_result
from instant_executor import PROGRAM
from sweep_processes import (
    has_saved,
    kill_started,
    read_records,
    run_sweep,
    start_sweep,
    train_alone,
    wait_for,
)

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def no_sweep_is_left() -> Iterator[None]:
    """Kill what a test has started, which ends its trials, too."""
    yield
    kill_started()


def test_trials_are_runs_whose_records_are_those_of_a_run_alone(tmp_path: Path) -> None:
    space = ["steps=8", "lr=0.1,0.5", "bad=no,raise"]
    output = run_sweep(tmp_path, *space, "--sampler", "grid", "--workers", "local:2")
    trials = list_trials(tmp_path / "sweep")
    assert [tuple(trial.params.values()) for trial in trials] == [
        ("0.1", "no"),
        ("0.1", "raise"),
        ("0.5", "no"),
        ("0.5", "raise"),
    ]
    assert [trial.state for trial in trials] == ["complete", "fail"] * 2
    assert trials[1].error == "MemoryError: RESOURCE_EXHAUSTED: out of memory (exit code 1)"
    for trial, lr in ((trials[0], 0.1), (trials[2], 0.5)):
        np.testing.assert_allclose(trial.values or [], [4.5 * (1 - lr) ** 16], rtol=1e-5)
        assert RunDirectory(trial.run_dir).is_complete
    assert read_records(trials[2].run_dir) == train_alone(tmp_path, "steps=8", "lr=0.5")
    assert f"fulgurite fit {PROGRAM} steps=8 lr=0.5 bad=no --run sweep-trial-2" in output
    # It can be extended by another sampler, and looked at.
    output = run_sweep(tmp_path, *space, "--trials", "4")
    assert "starting" not in output and "2 complete, 2 fail" in output


def test_a_sweep_whose_driver_is_killed_resumes_its_trials(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.mkdir()
    arguments = ["steps=40", "lr=0.02,0.05,0.1", "--sampler", "grid", "--workers", "local:2"]
    driver = start_sweep(tmp_path, *arguments, hold=hold)
    wait_for(lambda: all(has_saved(tmp_path, number) for number in (0, 1)))
    driver.kill()
    driver.wait()
    (hold / "go").touch()
    run_sweep(tmp_path, *arguments)
    trials = list_trials(tmp_path / "sweep")
    assert [(trial.state, trial.params["lr"]) for trial in trials] == [
        ("complete", lr) for lr in ("0.02", "0.05", "0.1")
    ]
    attempts = [RunDirectory(trial.run_dir).num_attempts for trial in trials]
    assert attempts == [2, 2, 1]
    for trial in trials:
        lr = float(trial.params["lr"])
        np.testing.assert_allclose(trial.values or [], [4.5 * (1 - lr) ** 80], rtol=1e-3)
    assert read_records(trials[0].run_dir) == train_alone(tmp_path, "steps=40", "lr=0.02")


@pytest.mark.slow
def test_a_trial_whose_process_is_killed_is_resumed(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.mkdir()
    driver = start_sweep(tmp_path, "steps=40", "lr=log(0.1,0.5)", "--trials", "1", hold=hold)
    wait_for(lambda: has_saved(tmp_path, 0) and list(hold.iterdir()))
    (pid,) = (int(path.name) for path in hold.iterdir())
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(list(hold.iterdir())) == 2)
    (hold / "go").touch()
    output, _ = driver.communicate(timeout=600)
    assert "trial-0 was cut off (killed by SIGKILL, as if memory had run out): resuming" in output
    (trial,) = list_trials(tmp_path / "sweep")
    assert trial.state == "complete" and RunDirectory(trial.run_dir).num_attempts == 2
    assert read_records(trial.run_dir) == train_alone(
        tmp_path, "steps=40", f"lr={trial.params['lr']!r}"
    )


@pytest.mark.slow
def test_ctrl_c_saves_trials_and_the_same_command_resumes_them(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.mkdir()
    arguments = ["steps=40", "lr=0.02,0.05", "--sampler", "grid"]
    driver = start_sweep(tmp_path, *arguments, hold=hold)
    wait_for(lambda: has_saved(tmp_path, 0))
    driver.send_signal(signal.SIGINT)
    output, _ = driver.communicate(timeout=600)
    assert driver.returncode == 130, output
    assert "trial-0 is saved as far as it got" in output and "starting trial-1" not in output
    (trial, other) = list_trials(tmp_path / "sweep")
    assert (trial.state, other.state) == ("stopped", "waiting")
    ((step, _), *_) = reversed(RunDirectory(trial.run_dir).list_checkpoints())
    assert 0 < step < 40
    output = run_sweep(tmp_path, *arguments)
    assert "resuming trial-0" in output
    assert [trial.state for trial in list_trials(tmp_path / "sweep")] == ["complete"] * 2
    assert read_records(trial.run_dir) == train_alone(tmp_path, "steps=40", "lr=0.02")


@pytest.mark.slow
def test_a_pruned_trial_ends_at_its_evaluation_with_the_steps_so_far(tmp_path: Path) -> None:
    """The second trial is worse than the median of those before it at each step; the pruner begins
    at step 4."""
    pruner = "median(n_startup_trials=1,n_warmup_steps=4)"
    output = run_sweep(tmp_path, "lr=0.5,0.1", "--sampler", "grid", "--pruner", pruner)
    best, pruned = list_trials(tmp_path / "sweep")
    assert (best.state, best.step, pruned.state, pruned.step) == ("complete", 8, "pruned", 4)
    assert "trial-1 was pruned by median(n_startup_trials=1,n_warmup_steps=4)" in output
    result = read_result(pruned.run_dir)
    assert result is not None and result.is_pruned and "at step 4" in str(result.stop_reason)
    np.testing.assert_allclose(result.metrics["test/loss"], 4.5 * 0.9**8, rtol=1e-5)
    steps = [json.loads(line)["step"] for line in read_records(pruned.run_dir)]
    assert max(steps) == 4
    alone = [line for line in train_alone(tmp_path, "lr=0.1") if json.loads(line)["step"] <= 4]
    assert read_records(pruned.run_dir)[: len(alone)] == alone
    assert RunDirectory(pruned.run_dir).is_complete


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lrr=log(0.1,1)", "--trials", "2"], "has no argument 'lrr'"),
        *(
            pytest.param(*mistake, marks=pytest.mark.slow)
            for mistake in (
                (["lr=log(0.1,1)"], "give --trials N"),
                (["lr=log(0.1,1)", "--trials", "0"], "0 is not a number of trials"),
                (["lr=0.1,1", "--workers", "lokal:2"], "there are no workers 'lokal:2'"),
                (["lr=0.1,1", "--enqueue", "lr=3", "--trials", "1"], "is not in the search space"),
            )
        ),
    ],
)
def test_a_mistake_ends_with_2_before_the_first_trial(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    assert message in run_sweep(tmp_path, *arguments, code=2)
    folder = tmp_path / "sweep"
    assert not list(folder.glob("trial-*"))
