"""Which values a sweep draws: by the seed of the sweep, each trial its own."""

import hashlib
from pathlib import Path
from typing import Any

import optuna
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_sweeps import Sweep
from fulgurite_sweeps.cma_es import CmaEsSampler
from instant_executor import PROGRAM, InstantExecutor, compute_quadratic

SPACE = {"lr": "log(0.01,0.9)", "width": "int(1,1000000)"}


def draw(folder: Path, num_trials: int | None, enqueue: Any = (), **options: Any) -> list[Any]:
    """Return the points that a sweep tries, as Optuna's journal has them."""
    sweep = Sweep(folder, PROGRAM, options.pop("space", SPACE), ["test/loss"])
    for point in enqueue:
        sweep.enqueue(**point)
    executor = InstantExecutor(compute_quadratic)
    assert sweep.run(num_trials, executor=executor, tell=lambda _: None, **options) == []
    return [trial.params for trial in sweep.trials]


def test_points_in_line_that_leave_a_value_out_each_get_their_own(tmp_path: Path) -> None:
    rates = [0.1, 0.2, 0.3, 0.4]
    points = draw(tmp_path, 6, [{"lr": rate} for rate in rates], sampler="random")
    assert [point["lr"] for point in points[:4]] == rates
    assert len({point["width"] for point in points}) == 6


@pytest.mark.parametrize("sampler", ["random(seed=3)", "tpe(seed=3)", "qmc(seed=3)"])
def test_a_seed_of_the_sampler_is_refused_since_each_trial_has_one(
    tmp_path: Path, sampler: str
) -> None:
    with pytest.raises(ConfigurationError, match="the seed is that of the sweep.* --seed 3"):
        draw(tmp_path, 1, sampler=sampler)


@pytest.mark.filterwarnings("ignore:QMCSampler is experimental")
def test_scrambled_points_are_those_of_one_sequence_of_optuna(tmp_path: Path) -> None:
    points = draw(tmp_path, 9, sampler="qmc(scramble=true)", seed=5)
    study = optuna.create_study(sampler=optuna.samplers.QMCSampler(scramble=True, seed=5))
    for point in points:
        trial = study.ask()
        drawn = {
            "lr": trial.suggest_float("lr", 0.01, 0.9, log=True),
            "width": trial.suggest_int("width", 1, 1_000_000),
        }
        assert trial.number == 0 or drawn == point  # the first is drawn at random
        study.tell(trial, 0.0)


def test_tpe_by_name_draws_what_that_of_optuna_does(tmp_path: Path) -> None:
    """Each trial against Optuna's sampler of its own seed, told by hand what was measured."""
    points = draw(tmp_path, 14, sampler="tpe(n_startup_trials=4)", space={"lr": "float(0,0.9)"})
    study = optuna.create_study()
    distributions: dict[str, Any] = {"lr": optuna.distributions.FloatDistribution(0, 0.9)}
    for number, point in enumerate(points):
        study.sampler = optuna.samplers.TPESampler(n_startup_trials=4, seed=find_seed(0, number))
        assert study.ask(distributions).params == point
        study.tell(number, compute_quadratic({"lr": str(point["lr"])})["test/loss"])
    assert max(point["lr"] for point in points) > 0.7


def find_seed(seed: int, number: int) -> int:
    """Return the seed of a trial, as `make_sampler` documents it."""
    digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def test_a_grid_tries_all_its_points_whatever_else_was_in_line(tmp_path: Path) -> None:
    space = {"lr": [0.1, 0.5], "width": [1, 2]}
    points = draw(tmp_path, None, [{"lr": 0.1}], space=space, sampler="grid")
    grid = {(lr, width) for lr in ("0.1", "0.5") for width in ("1", "2")}
    assert {tuple(point.values()) for point in points[1:]} == grid
    assert len(points) == 5 and points[0]["lr"] == "0.1"


def test_a_grid_has_no_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the sampler grid has no arguments"):
        draw(tmp_path, 1, space={"lr": [0.1, 0.5]}, sampler="grid()")


def test_a_grid_of_steps_ends_at_the_largest_number(tmp_path: Path) -> None:
    points = draw(tmp_path, None, space={"lr": "float(0,0.3,step=0.1)"}, sampler="grid")
    assert [point["lr"] for point in points] == [0.0, 0.1, 0.2, 0.3]


@pytest.mark.parametrize("options", [{"sigma0": 0}, {"sigma0": "x"}, {"popsize": 4.5}])
def test_cma_es_refuses_what_it_cannot_use_before_the_first_trial(options: Any) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        CmaEsSampler(seed=0, **options)
