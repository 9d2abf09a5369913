"""A run that is killed at any moment and started again until it is done leaves what an undisturbed one leaves."""

import signal
from pathlib import Path
from typing import Any

import fulgurite as fg
import pytest
from crash_harness import Kill, Left, attempt, compare, killed_until_done, kills, records, undisturbed

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {"source": "arrays", "period": 0.25},
    "fused": {"source": "ahead", "fuse": 4},
    "replayed": {"source": "replayed", "fuse": 3, "background": False},
    "stream": {"source": "stream", "period": 0.1},
}


def killed(tmp_path: Path, plan: list[Kill], count: int, **arguments: Any) -> None:
    """Has `count` kills of the plan hit, in as many runs as that takes: some come when a run is over already."""
    whole, left, hits = undisturbed(tmp_path / "whole", **arguments), iter(plan), 0
    for number in range(len(plan)):
        hits += len(killed_until_done(tmp_path / f"run-{number}", left, count - hits, whole, **arguments))
        if hits == count:
            return
    raise AssertionError(f"of {len(plan)} kills {hits} hit")


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_killed_run_leaves_what_an_undisturbed_one_leaves(tmp_path: Path, name: str) -> None:
    """Twenty-eight times in all: in a step, an evaluation, a save, a write, right after a COMMIT, at any time."""
    arguments = CONFIGURATIONS[name]
    seed = list(CONFIGURATIONS).index(name)
    killed(tmp_path, kills(seed, 16, arguments["source"]), 7, **arguments)


def test_a_run_that_is_asked_to_stop_leaves_the_same(tmp_path: Path) -> None:
    """By SIGTERM or Ctrl-C, at the same moments."""
    arguments = CONFIGURATIONS["stream"]
    plan = kills(11, 12, "stream", [signal.SIGTERM, signal.SIGINT])
    killed(tmp_path, plan, 5, **arguments)


def test_a_checkpoint_waits_for_slow_records(tmp_path: Path) -> None:
    """Each record takes 2 s to be written; killed after each COMMIT."""
    arguments = {"steps": 12, "log": 6, "save": 4, "evaluate": 100, "times": 2}
    whole = undisturbed(tmp_path / "whole", **arguments)
    plan = [Kill("commit", 1, 0.0)] * 3
    hits = killed_until_done(tmp_path / "run", iter(plan), 3, whole, delay=2.0, **arguments)
    assert len(hits) >= 2


def test_case_37_a_window_that_straddles_a_save_and_a_stop(tmp_path: Path) -> None:
    """Logged every 7, saved every 10, SIGTERM at 13."""
    arguments = {"steps": 30, "log": 7, "save": 10}
    whole, run = undisturbed(tmp_path / "whole", **arguments), tmp_path / "run"
    assert attempt(run, arguments, Kill("step", 13, 0.0, signal.SIGTERM)) == 143
    assert [step for step, _ in fg.RunDirectory(run).committed()][-1] in (13, 14)
    assert attempt(run, arguments) == 0
    compare(Left.of(run), whole)


def test_case_38_evaluations_at_the_start_and_at_the_end(tmp_path: Path) -> None:
    """Killed at 500 and resumed, stopped by SIGTERM at 550 and resumed: one result of the start, one of the end."""
    arguments = {"steps": 600, "log": 100, "save": 200, "evaluate": 1000}

    def evaluated(run: Path) -> list[int]:
        return [record["step"] for record in records(run) if record["source"] == "test"]

    whole, run = undisturbed(tmp_path / "whole", **arguments), tmp_path / "run"
    assert attempt(run, arguments, Kill("step", 500, 0.0)) == -signal.SIGKILL
    assert attempt(run, arguments, Kill("step", 550, 0.0, signal.SIGTERM)) == 143
    assert evaluated(run) == [0]
    assert attempt(run, arguments) == 0
    assert evaluated(run) == [0, 600]
    compare(Left.of(run), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_two_hundred_kills(tmp_path: Path, name: str) -> None:
    arguments = CONFIGURATIONS[name]
    plan = kills(100 + list(CONFIGURATIONS).index(name), 120, arguments["source"])
    killed(tmp_path, plan, 50, **arguments)
