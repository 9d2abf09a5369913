"""What the directory of a sweep holds: what a full disk, an earlier sweep, or a value that looks
like several leaves of it."""

import resource
import signal
from pathlib import Path
from typing import Any

import optuna
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite_sweeps import Sweep, describe_sweep, list_trials
from fulgurite_sweeps.journal import STUDY, SweepDirectory
from fulgurite_sweeps.space import Space
from instant_executor import PROGRAM, InstantExecutor, compute_quadratic
from optuna.distributions import FloatDistribution


def run(folder: Path, num_trials: int, space: Any = None, **settings: Any) -> list[Any]:
    """Return the values of the trials."""
    sweep = Sweep(folder, PROGRAM, space or {"lr": "log(0.01,0.9)"}, ["test/loss"], **settings)
    executor = InstantExecutor(compute_quadratic)
    sweep.run(num_trials, sampler="random", executor=executor, tell=lambda _: None)
    return [trial.values for trial in sweep.trials]


def test_a_line_that_a_full_disk_cut_off_is_not_glued_to_the_next(tmp_path: Path) -> None:
    before = run(tmp_path, 2)
    journal = SweepDirectory(tmp_path).journal
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.stat().st_size + 20, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            run(tmp_path, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert not journal.read_bytes().endswith(b"\n")
    assert "2 complete" in describe_sweep(tmp_path)
    values = run(tmp_path, 3)
    assert len(values) == 3 and values[:2] == before


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_run_of_an_earlier_sweep_is_not_taken_for_a_trial(
    tmp_path: Path, is_complete: bool
) -> None:
    (first,) = run(tmp_path, 1)
    journal = SweepDirectory(tmp_path).journal
    journal.unlink()
    if not is_complete:
        (tmp_path / "trial-0" / "COMPLETE").unlink()
    with pytest.raises(CheckpointError, match="trial-0 in .* a run of an earlier sweep is there"):
        run(tmp_path, 1)
    assert list_trials(tmp_path) == [] and first is not None


@pytest.mark.parametrize(
    "choices",
    [["0.1,0.2", "0.5"], [" 0.1", "0.5"], ["0.1 if width=1", "0.5"], ["0.5"], ["'0.1'", "0.5"]],
)
def test_a_value_that_looks_like_several_stays_one(choices: list[str]) -> None:
    space = Space.make({"name": choices, "width": FloatDistribution(0, 4, step=1)}, ["steps=8"])
    assert Space.read(space.describe_axes(), space.fixed) == space
    point = space.make_point({"name": choices[0], "width": 2.0})
    assert space.build_overrides(point) == ["steps=8", f"name={choices[0]}", "width=2.0"]


def test_the_command_of_the_best_trial_has_the_options_it_was_started_with(tmp_path: Path) -> None:
    run(tmp_path, 1, fit_options=["--no-compilation-cache"])
    assert "--no-compilation-cache" in describe_sweep(tmp_path)
    run(tmp_path, 1)
    assert "--no-compilation-cache" in describe_sweep(tmp_path)


def test_a_sweep_that_was_killed_before_its_settings_had_not_begun(tmp_path: Path) -> None:
    directory = SweepDirectory(tmp_path)
    directory.make()
    optuna.create_study(study_name=STUDY, storage=directory._open_storage())
    with pytest.raises(ConfigurationError, match="had not begun"):
        describe_sweep(tmp_path)
    assert len(run(tmp_path, 1)) == 1


def test_a_sweep_whose_summary_cannot_be_written_continues(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, PROGRAM, {"lr": [0.1]}, ["test/loss"])
    (tmp_path / "sweep.json").mkdir()
    lines: list[str] = []
    executor = InstantExecutor(compute_quadratic)
    sweep.run(sampler="grid", executor=executor, tell=lines.append)
    assert [trial.state for trial in sweep.trials] == ["complete"]
    assert any("what a report shows of the sweep is not up to date" in line for line in lines)
