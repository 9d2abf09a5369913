"""A run that is killed at any moment and started again until it is done leaves what an undisturbed
one leaves."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crash_harness import Kill, Left, killed_until_done, kills, undisturbed

pytestmark = pytest.mark.full

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {"source": "arrays", "period": 0.25},
    "fused": {"source": "ahead", "steps_per_execution": 4},
    "replayed": {"source": "replayed", "steps_per_execution": 3, "async_save": False},
    "stream": {"source": "stream", "period": 0.3},
}
Wholes = Callable[[str], Left]


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Wholes:
    """What undisturbed runs leave, by the name of their configuration."""
    left: dict[str, Left] = {}

    def get_whole(name: str) -> Left:
        if name not in left:
            left[name] = undisturbed(tmp_path_factory.mktemp(name), **CONFIGURATIONS[name])
        return left[name]

    return get_whole


def killed(tmp_path: Path, plan: list[Kill], count: int, name: str, wholes: Wholes) -> None:
    """Has `count` kills of the plan hit, in as many runs as that takes: some come when a run is
    over already."""
    arguments = CONFIGURATIONS[name]
    whole, left, hits = wholes(name), iter(plan), 0
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
        "stream",
        pytest.param("plain", marks=pytest.mark.slow),
        pytest.param("fused", marks=pytest.mark.slow),
        pytest.param("replayed", marks=pytest.mark.slow),
    ],
)
def test_killed_run_leaves_what_an_uninterrupted_run_leaves(
    name: str, tmp_path: Path, wholes: Wholes
) -> None:
    """Three times each: in a step, an evaluation, a save, a write, right after a COMMIT, at any
    time."""
    # The first three for a stream are after a COMMIT, in a save, and at a record in between.
    seed = 38 + list(CONFIGURATIONS).index(name)
    killed(tmp_path, kills(seed, 16, CONFIGURATIONS[name]["source"]), 3, name, wholes)


def test_stopped_run_leaves_what_an_uninterrupted_run_leaves(
    tmp_path: Path, wholes: Wholes
) -> None:
    """By SIGTERM or Ctrl-C, at the same moments."""
    plan = kills(11, 12, "stream", [signal.SIGTERM, signal.SIGINT])
    killed(tmp_path, plan, 2, "stream", wholes)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_two_hundred_kills(name: str, tmp_path: Path, wholes: Wholes) -> None:
    plan = kills(100 + list(CONFIGURATIONS).index(name), 120, CONFIGURATIONS[name]["source"])
    killed(tmp_path, plan, 50, name, wholes)
