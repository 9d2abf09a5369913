"""Kills and stops at chosen moments, and records that are slow to be written."""

import signal
from pathlib import Path

import pytest
from crash_harness import Kill, Left, attempt, compare, killed_until_done, records, undisturbed
from fulgurite_runs import RunDirectory

pytestmark = pytest.mark.full


def test_a_checkpoint_waits_for_slow_records(tmp_path: Path) -> None:
    """Each record takes 0.3 s to be written; killed after each COMMIT."""
    arguments = {"steps": 8, "log": 4, "save": 4, "evaluate": 100, "times": 2}
    whole = undisturbed(tmp_path / "whole", **arguments)
    plan = [Kill("commit", 1, 0.0)] * 2
    hits = killed_until_done(tmp_path / "run", iter(plan), 2, whole, delay=0.3, **arguments)
    assert hits


def test_windows_and_evaluations_across_a_kill_and_a_stop(tmp_path: Path) -> None:
    """Logged every 7, saved every 20; killed at 37, when the records of 28 are written, and resumed;
    stopped by SIGTERM at 44 and resumed: one result of the start, one of the end."""
    arguments = {"steps": 60, "log": 7, "save": 20, "evaluate": 1000, "async_save": False}

    def evaluated(run: Path) -> list[int]:
        return [record["step"] for record in records(run) if record["source"] == "test"]

    whole, run = undisturbed(tmp_path / "whole", **arguments), tmp_path / "run"
    assert attempt(run, arguments, Kill("step", 37, 0.0)) == -signal.SIGKILL
    assert attempt(run, arguments, Kill("step", 44, 0.0, signal.SIGTERM)) == 143
    assert [step for step, _ in RunDirectory(run).list_checkpoints()][-1] in (44, 45)
    assert evaluated(run) == [0]
    assert attempt(run, arguments) == 0
    assert evaluated(run) == [0, 60]
    compare(Left.of(run), whole)
