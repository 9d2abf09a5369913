"""Sweeps whose points the agent of W&B chooses. A stand-in starts the command as `wandb agent` does:
with `${args_no_hyphens}` filled in, and the name of the run in the environment."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite_sweeps import (
    AgentSweep,
    Job,
    LocalExecutor,
    Sweep,
    describe_sweep,
    list_trials,
)
from instant_executor import PROGRAM, InstantExecutor, compute_quadratic


def ignore(text: str) -> None:
    """Tell nothing."""


class StandInAgent:
    """Starts commands in this process, as the agent of W&B starts them in others.

    Args:
        folder: the directory of the sweep.
        monkeypatch: sets the environment.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch

    def start(self, run_id: str, *point: str, executor: Any = None) -> AgentSweep:
        self._monkeypatch.setenv("WANDB_RUN_ID", run_id)
        sweep = AgentSweep(self._folder, PROGRAM, point, ["test/loss"])
        executor = executor or InstantExecutor(compute_quadratic)
        assert sweep.run_trial(executor=executor, tell=ignore) == []
        return sweep


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandInAgent:
    return StandInAgent(tmp_path / "sweep", monkeypatch)


def test_a_run_of_an_earlier_sweep_is_not_the_trial_of_an_agent(
    agent: StandInAgent, tmp_path: Path
) -> None:
    agent.start("abc", "lr=0.1")
    (tmp_path / "sweep" / "journal.jsonl").unlink()
    with pytest.raises(CheckpointError, match="a run of an earlier sweep is there"):
        agent.start("def", "lr=0.5")
    assert list_trials(tmp_path / "sweep") == []


def test_each_command_of_an_agent_is_one_trial(agent: StandInAgent, tmp_path: Path) -> None:
    agent.start("abc", "lr=0.1", "width=1")
    agent.start("def", "lr=0.5", "width=2")
    assert agent.start("ghi", "lr=0.25", executor=InstantExecutor(lambda _: 3)).state == "fail"
    trials = list_trials(tmp_path / "sweep")
    assert [trial.params for trial in trials] == [
        {"lr": "0.1", "width": "1"},
        {"lr": "0.5", "width": "2"},
        {"lr": "0.25"},
    ]
    assert [trial.values for trial in trials] == [[4.5 * 0.9**16], [4.5 * 0.5**16], None]
    assert f"fulgurite fit {PROGRAM} lr=0.5 width=2 --run" in describe_sweep(tmp_path / "sweep")
    summary = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert summary["axes"][0] == {"name": "lr", "low": 0.1, "high": 0.5, "log": False}
    assert summary["trials"][1]["params"] == {"lr": 0.5, "width": 2.0}


def test_a_command_that_was_cut_off_resumes_its_own_trial(
    agent: StandInAgent, tmp_path: Path
) -> None:
    def interrupt(_: Any) -> Any:
        raise KeyboardInterrupt

    for run_id, lr in (("abc", "0.1"), ("def", "0.5")):
        with pytest.raises(KeyboardInterrupt):
            agent.start(run_id, f"lr={lr}", executor=InstantExecutor(interrupt))
    executor = InstantExecutor(compute_quadratic)
    agent.start("def", "lr=0.5", executor=executor)
    assert executor.list_arguments() == [("lr=0.5",)]
    assert [trial.state for trial in list_trials(tmp_path / "sweep")] == ["stopped", "complete"]
    # Once more there is nothing to do.
    assert agent.start("def", "lr=0.5").state == "complete"


def test_what_an_agent_cannot_do_is_an_error(
    agent: StandInAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="has no argument 'rl'"):
        agent.start("abc", "rl=0.1")
    agent.start("abc", "lr=0.1")
    with pytest.raises(ConfigurationError, match="begun with another"):
        Sweep(tmp_path / "sweep", PROGRAM, {"lr": "log(0.1,1)"}, ["test/loss"])
    monkeypatch.delenv("WANDB_RUN_ID")
    with pytest.raises(ConfigurationError, match="WANDB_RUN_ID is not set"):
        AgentSweep(tmp_path / "sweep", PROGRAM, ["lr=0.1"], ["test/loss"])
    with pytest.raises(ConfigurationError, match="there is no agent 'wandbb'"):
        AgentSweep(tmp_path / "sweep", PROGRAM, ["lr=0.1"], ["test/loss"], agent="wandbb")


def test_the_process_of_a_trial_is_the_run_that_the_agent_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the variables by which wandb finds the run."""
    monkeypatch.setenv("WANDB_RUN_ID", "abc")
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    code = "import os; print(os.environ['WANDB_RUN_ID'], os.environ['WANDB_SWEEP_ID'])"
    job = Job(0, [sys.executable, "-c", code], {}, tmp_path / "log", tmp_path / "run")
    running = LocalExecutor().start(job)
    while running.poll() is None:
        pass
    assert (tmp_path / "log").read_text() == "abc s1\n"
