"""Trials as members of a population: the numbers of each, and what a population cannot train."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_cli import load_experiment
from fulgurite_runs import RunDirectory, loads
from fulgurite_sweeps import list_trials
from fulgurite_sweeps.members import take_values
from fulgurite_sweeps.population import build_member, check_is_seen, find_variation
from fulgurite_sweeps.population_executor import PopulationExecutor, format_numbers
from fulgurite_sweeps.workers import parse_executor
from sweep_processes import kill_started, read_records, run_sweep, start_sweep, wait_for

INJECTED = Path(__file__).with_name("injected.py")


@pytest.fixture(autouse=True)
def no_sweep_is_left() -> Iterator[None]:
    """Kill what a test has started, which ends its trials, too."""
    yield
    kill_started()


def test_workers_of_a_population_have_a_number_of_members() -> None:
    executor = parse_executor("population:8(exact=true)")
    assert isinstance(executor, PopulationExecutor)
    assert vars(executor) == vars(PopulationExecutor(8, exact=True))
    for text in ("population:0", "population:x", "population(exact=2)", "population(size=2)"):
        with pytest.raises(ConfigurationError, match="give"):
            parse_executor(text)


def test_populations_are_called_by_the_numbers_of_their_trials() -> None:
    assert format_numbers([3]) == "3"
    assert format_numbers([0, 1, 2, 3]) == "0-3"
    assert format_numbers([5, 1, 0, 7, 8]) == "0-1+5+7-8"


def test_a_member_has_its_values_without_those_of_the_others_and_of_all() -> None:
    values = {
        "loss": 2.0,
        "loss/std": 1.0,
        "loss[0]": 1.0,
        "loss[1]": 3.0,
        "loss[10]": 9.0,
        "rate/default": [0.1, 0.2],
        "frozen": 0.0,
        "batch_loss": 2.0,
    }
    assert take_values(values, 1) == {"loss": 3.0, "rate/default": 0.2}


@pytest.mark.full
def test_trials_vary_in_numbers_of_the_optimizer_arrays_and_seeds() -> None:
    factory = load_experiment(str(INJECTED))
    members = [
        build_member(factory, [f"lr={lr}", f"scale={scale}"]) for lr, scale in ((0.1, 1), (0.2, 2))
    ]
    vary = find_variation(members)
    assert {name: np.asarray(values).tolist() for name, values in vary.items()} == {
        "learning_rate": [np.float32(0.1), np.float32(0.2)],
        "scale": [1, 2],
    }
    # Weights of other seeds are those that the population makes itself.
    members = [build_member(factory, [f"seed={seed}"]) for seed in (0, 1)]
    assert find_variation(members) == {} and [member.seed for member in members] == [0, 1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("baked=0.5", "in the module.baked"),
        ("steps=8", "in the settings of its engine"),
        ("hidden=0.5", "differ in nothing that a population can vary"),
    ],
)
def test_trials_that_differ_in_more_than_numbers_are_an_error(override: str, message: str) -> None:
    name = override.partition("=")[0]
    default = {"baked": "0.0", "steps": "6", "hidden": "0.0"}[name]
    factory = load_experiment(str(INJECTED))
    first = build_member(factory, [f"{name}={default}"])
    with pytest.raises(ConfigurationError) as caught:
        find_variation([first, build_member(factory, [override])])
        check_is_seen(factory, first, (f"{name}={default}", override))
    assert message in str(caught.value) and "take local:N" in str(caught.value)


OF_ALL = ("batch_loss", "loss_average")
"""What a population logs of all its members together, and a run alone of itself."""
RATES = "lr=0.1,0.05,1e30,0.2"


@pytest.mark.full
def test_four_trials_are_one_population_with_the_bits_of_their_runs_alone(tmp_path: Path) -> None:
    """One of them is not finite, and has failed (7S8)."""
    arguments = [RATES, "--sampler", "grid", "--workers"]
    run_sweep(tmp_path / "local", *arguments, "local:2", program=INJECTED)
    run_sweep(tmp_path, *arguments, "population:4(exact=true)", program=INJECTED)
    trials = list_trials(tmp_path / "sweep")
    assert [trial.state for trial in trials] == ["complete", "complete", "fail", "complete"]
    assert trials[2].error == "NonFiniteError: not finite at step 2 (exit code 1)"
    assert len(list((tmp_path / "sweep").glob("population-*.log"))) == 1
    for trial, other in zip(trials, list_trials(tmp_path / "local" / "sweep"), strict=True):
        assert (trial.params, trial.state) == (other.params, other.state)
        if trial.state == "complete":
            assert trial.values == other.values
            missing = {f"train/{name}": other.metrics[f"train/{name}"] for name in OF_ALL}
            assert trial.metrics | missing == other.metrics
            lines, other_lines = (map(loads, read_records(t.run_dir)) for t in (trial, other))
            for line, other_line in zip(lines, other_lines, strict=True):
                for name in OF_ALL:
                    other_line["values"].pop(name, None)
                assert line == other_line
            assert RunDirectory(trial.run_dir).is_complete
            manifests = [RunDirectory(t.run_dir).read_manifest() for t in (trial, other)]
            assert manifests[0]["configuration"] == manifests[1]["configuration"]


@pytest.mark.slow
def test_members_together_differ_from_their_runs_alone_by_rounding(tmp_path: Path) -> None:
    arguments = ["lr=0.1,0.05,0.2,0.3", "--sampler", "grid", "--workers"]
    run_sweep(tmp_path / "local", *arguments, "local:2", program=INJECTED)
    run_sweep(tmp_path, *arguments, "population:4", program=INJECTED)
    for trial, other in zip(
        list_trials(tmp_path / "sweep"), list_trials(tmp_path / "local" / "sweep"), strict=True
    ):
        assert trial.state == "complete"
        np.testing.assert_allclose(trial.values or [], other.values or [], rtol=1e-5)


@pytest.mark.slow
def test_a_population_whose_driver_is_killed_is_resumed(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.mkdir()
    arguments = [RATES, "--sampler", "grid", "--workers", "population:4(exact=true)"]
    driver = start_sweep(tmp_path, *arguments, program=INJECTED, hold=hold)
    population = RunDirectory(tmp_path / "sweep" / "population-0-3")
    wait_for(lambda: population.list_checkpoints() and list(hold.iterdir()))
    driver.kill()
    driver.wait()
    (hold / "go").touch()
    run_sweep(tmp_path, *arguments, program=INJECTED)
    trials = list_trials(tmp_path / "sweep")
    assert [trial.state for trial in trials] == ["complete", "complete", "fail", "complete"]
    assert population.num_attempts == 2
    steps = [json.loads(line)["step"] for line in read_records(trials[0].run_dir)]
    assert steps == sorted(steps) and steps[-1] == 6


@pytest.mark.slow
def test_ctrl_c_saves_a_population_and_what_it_cannot_train_has_failed(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.mkdir()
    arguments = ["lr=0.1,0.05", "--sampler", "grid", "--workers", "population:2"]
    driver = start_sweep(tmp_path, *arguments, program=INJECTED, hold=hold)
    population = RunDirectory(tmp_path / "sweep" / "population-0-1")
    wait_for(lambda: population.list_checkpoints() and list(hold.iterdir()))
    os.kill(driver.pid, signal.SIGINT)
    output, _ = driver.communicate(timeout=600)
    assert driver.returncode == 130 and "trial-1 is saved as far as it got" in output
    (hold / "go").touch()
    output = run_sweep(tmp_path, *arguments, program=INJECTED)
    assert "resuming trial-1" in output and population.num_attempts == 2
    arguments = ["steps=4,6", "--sampler", "grid", "--workers", "population:2"]
    run_sweep(tmp_path / "other", *arguments, program=INJECTED, code=1)
    for trial in list_trials(tmp_path / "other" / "sweep"):
        assert "in the settings of its engine" in str(trial.error)
