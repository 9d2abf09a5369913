"""Sweeps whose points the agent of W&B chooses. A stand-in starts the command as `wandb agent` does:
with `${args_no_hyphens}` filled in, and the name of the run in the environment."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_sweeps import AgentSweep, Sweep, describe_sweep, list_trials
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


@pytest.mark.full
def test_the_process_of_a_trial_is_the_run_that_the_agent_has_begun(tmp_path: Path) -> None:
    """The program prints what wandb reads to find the run; the sweep has it in the trial's log."""
    program = tmp_path / "printing.py"
    program.write_text(
        "import os\nfrom quadratic import experiment as make\n\n\n"
        "def experiment(lr: float = 0.1):\n"
        "    print('run', os.environ['WANDB_RUN_ID'], os.environ['WANDB_SWEEP_ID'])\n"
        "    return make(lr)\n"
    )
    command = [sys.executable, "-m", "fulgurite_cli", "sweep", str(program), "lr=0.5"]
    command += ["--agent", "wandb", "--metric", "test/loss", "--run", str(tmp_path / "sweep")]
    environment = {"WANDB_RUN_ID": "abc", "WANDB_SWEEP_ID": "s1"}
    environment["PYTHONPATH"] = str(PROGRAM.parent)
    subprocess.run(command, env=os.environ | environment, check=True, timeout=600)
    (trial,) = list_trials(tmp_path / "sweep")
    assert trial.state == "complete"
    assert "run abc s1" in (tmp_path / "sweep" / "trial-0.log").read_text()
