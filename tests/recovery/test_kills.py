"""A run that is killed at any moment and started again until it is done leaves what an undisturbed
one leaves."""

import signal
from pathlib import Path
from typing import Any

import pytest
from crash_harness import Kill, killed_until_done, kills, undisturbed

pytestmark = pytest.mark.full

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {"source": "arrays", "period": 0.25},
    "fused": {"source": "ahead", "steps_per_execution": 4},
    "replayed": {"source": "replayed", "steps_per_execution": 3, "async_save": False},
    "stream": {"source": "stream", "period": 0.1},
}


def killed(tmp_path: Path, plan: list[Kill], count: int, **arguments: Any) -> None:
    """Has `count` kills of the plan hit, in as many runs as that takes: some come when a run is
    over already."""
    whole, left, hits = undisturbed(tmp_path / "whole", **arguments), iter(plan), 0
    for number in range(len(plan)):
        hits += len(
            killed_until_done(tmp_path / f"run-{number}", left, count - hits, whole, **arguments)
        )
        if hits == count:
            return
    raise AssertionError(f"of {len(plan)} kills {hits} hit")


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "stream",
        pytest.param("fused", marks=pytest.mark.slow),
        pytest.param("replayed", marks=pytest.mark.slow),
    ],
)
def test_killed_run_leaves_what_an_uninterrupted_run_leaves(tmp_path: Path, name: str) -> None:
    """Three times each: in a step, an evaluation, a save, a write, right after a COMMIT, at any
    time."""
    arguments = CONFIGURATIONS[name]
    seed = list(CONFIGURATIONS).index(name)
    killed(tmp_path, kills(seed, 16, arguments["source"]), 3, **arguments)


def test_stopped_run_leaves_what_an_uninterrupted_run_leaves(tmp_path: Path) -> None:
    """By SIGTERM or Ctrl-C, at the same moments."""
    arguments = CONFIGURATIONS["stream"]
    plan = kills(11, 12, "stream", [signal.SIGTERM, signal.SIGINT])
    killed(tmp_path, plan, 3, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_two_hundred_kills(tmp_path: Path, name: str) -> None:
    arguments = CONFIGURATIONS[name]
    plan = kills(100 + list(CONFIGURATIONS).index(name), 120, arguments["source"])
    killed(tmp_path, plan, 50, **arguments)
