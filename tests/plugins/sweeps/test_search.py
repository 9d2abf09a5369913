"""What a sweep asks for, and what it remembers, without processes."""

import math
from pathlib import Path
from typing import Any

import cmaes
import numpy as np
import optuna
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_runs import Lock
from fulgurite_sweeps import Constraint, Sweep, describe_sweep, list_trials
from fulgurite_sweeps.cma_es import CmaEsSampler
from fulgurite_sweeps.journal import Journal, SweepDirectory
from instant_executor import PROGRAM, InstantExecutor, compute_quadratic
from optuna.trial import TrialState


def ignore(text: str) -> None:
    """Tell nothing."""


def make_sweep(folder: Path, space: Any = None, objectives: Any = ("test/loss",)) -> Sweep:
    return Sweep(folder, PROGRAM, space or {"lr": "log(0.01,0.9)"}, objectives)


def run(sweep: Sweep, num_trials: int | None = None, **options: Any) -> InstantExecutor:
    executor = options.pop("executor", None) or InstantExecutor(compute_quadratic)
    assert sweep.run(num_trials, executor=executor, tell=ignore, **options) == []
    return executor


def test_a_grid_has_exactly_the_points_of_the_product_in_order(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, ["steps=8", "lr=0.1,0.5", "width,bad=(1,no),(2,nan)"])
    executor = run(sweep, sampler="grid", executor=InstantExecutor(compute_quadratic, num_slots=3))
    assert executor.list_arguments() == [
        ("steps=8", f"lr={lr}", f"width={width}", f"bad={bad}")
        for lr in ("0.1", "0.5")
        for width, bad in (("1", "no"), ("2", "nan"))
    ]
    assert [trial.values for trial in sweep.trials] == [[4.5 * 0.9**16]] * 2 + [[4.5 * 0.5**16]] * 2
    # Once more there is nothing to do.
    assert (
        run(
            make_sweep(tmp_path, ["steps=8", "lr=0.1,0.5", "width,bad=(1,no),(2,nan)"]),
            sampler="grid",
        ).jobs
        == []
    )


@pytest.mark.parametrize(
    "sampler",
    [
        "random",
        pytest.param("tpe", marks=pytest.mark.full),
        pytest.param("qmc", marks=pytest.mark.full),
        "cmaes(popsize=4)",
    ],
)
def test_a_sweep_in_pieces_has_the_trials_of_one_at_once(tmp_path: Path, sampler: str) -> None:
    """A driver that is started again does not draw again what an earlier one has drawn."""
    space = {"lr": "log(0.01,0.9)", "width": "int(1,1000)"}
    whole = run(make_sweep(tmp_path / "whole", space), 5, sampler=sampler).list_arguments()
    parts: list[Any] = []
    for count in (2, 3, 5):
        parts += run(make_sweep(tmp_path / "parts", space), count, sampler=sampler).list_arguments()
    assert parts == whole
    assert len(set(whole)) == 5
    other = run(make_sweep(tmp_path / "other", space), 5, sampler=sampler, seed=1)
    assert other.list_arguments() != whole


def test_cma_es_is_told_all_generations_and_asked_for_one_more(tmp_path: Path) -> None:
    """Each trial after the first against the package cmaes, told by hand."""

    def compute(arguments: dict[str, str]) -> dict[str, float]:
        x, y = float(arguments["lr"]), int(arguments["width"])
        return {"test/loss": (x - 3) ** 2 + 100 * (x - y / 100 - 1) ** 2}

    space = {"lr": "float(0,10)", "bad": ["no", "nan"], "width": "int(1,1000)"}
    sampler = CmaEsSampler(seed=3, popsize=4)
    sweep = make_sweep(tmp_path, space)
    executor = run(sweep, 10, sampler=sampler, executor=InstantExecutor(compute))
    points = [dict(word.split("=") for word in words) for words in executor.list_arguments()]
    for number in range(1, 10):
        state = cmaes.CMA(
            np.array([0.5, 0.5]),
            1 / 6,
            bounds=np.array([[0.0, 1.0]] * 2),
            seed=3,
            n_max_resampling=20,
            population_size=4,
        )
        for start in range(0, number // 4 * 4, 4):
            state.tell(
                [
                    (
                        np.array([float(point["lr"]) / 10, (int(point["width"]) - 0.5) / 1000]),
                        compute(point)["test/loss"],
                    )
                    for point in points[start : start + 4]
                ]
            )
        first, second = state.ask()
        assert float(points[number]["lr"]) == pytest.approx(10 * first)
        assert int(points[number]["width"]) == round(0.5 + 1000 * second)
    assert "optimizer" not in SweepDirectory(tmp_path).journal.read_text()  # Optuna's pickle


def test_the_sampler_chooses_only_what_the_condition_allows(tmp_path: Path) -> None:
    space = {"bad": ["no", "nan"], "lr": "log(0.01,0.9)", "width": "int(1,8) if bad=nan"}
    executor = run(make_sweep(tmp_path, space), 12)
    assert {len(arguments) for arguments in executor.list_arguments()} == {2, 3}
    for bad, _, *width in executor.list_arguments():
        assert bool(width) == (bad == "bad=nan")


def test_points_in_line_are_tried_first_and_once(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path)
    sweep.enqueue(lr=0.5)
    sweep.enqueue("lr=0.25")
    sweep.enqueue(lr=0.5)
    executor = run(sweep, 3)
    first, second, third = executor.list_arguments()
    assert (first, second) == (("lr=0.5",), ("lr=0.25",))
    assert third not in (first, second)


def test_nan_and_failures_are_failed_trials_and_never_the_best(tmp_path: Path) -> None:
    outcomes = {
        "0.1": {"test/loss": math.nan},
        "0.2": {"test/loss": 1.0},
        "0.3": {"test/accuracy": 1.0},
        "0.4": 9,
        "0.5": {"test/loss": math.inf},
    }
    sweep = make_sweep(tmp_path, {"lr": [0.1, 0.2, 0.3, 0.4, 0.5]})
    run(
        sweep, sampler="grid", executor=InstantExecutor(lambda arguments: outcomes[arguments["lr"]])
    )
    states = {trial.params["lr"]: (trial.state, trial.error) for trial in list_trials(tmp_path)}
    assert states == {
        "0.1": ("fail", "test/loss is NaN by step 8"),
        "0.2": ("complete", None),
        "0.3": ("fail", "test/loss was not measured by step 8"),
        "0.4": ("fail", "exit code 9"),
        "0.5": ("complete", None),
    }
    assert sweep.best is not None and sweep.best.params == {"lr": "0.2"}


def test_a_process_that_is_killed_again_and_again_fails_in_the_end(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, {"lr": [0.1]})
    executor = InstantExecutor(lambda _: -9)
    run(sweep, sampler="grid", executor=executor, num_retries=2)
    assert len(executor.jobs) == 3
    (trial,) = sweep.trials
    assert trial.error == "killed by SIGKILL, as if memory had run out"


def test_several_metrics_each_have_a_direction(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, {"lr": [0.1, 0.5]}, ["test/accuracy", "test/loss"])
    executor = InstantExecutor(
        lambda arguments: {"test/accuracy": float(arguments["lr"]), "test/loss": 1.0}
    )
    run(sweep, sampler="grid", executor=executor)
    assert [trial.values for trial in sweep.trials] == [[0.1, 1.0], [0.5, 1.0]]
    assert sweep.best is not None and sweep.best.params == {"lr": "0.5"}
    assert [trial.number for trial in sweep.best_trials] == [1]
    directions = SweepDirectory(tmp_path).load().study.directions
    assert [direction.name for direction in directions] == ["MAXIMIZE", "MINIMIZE"]
    with pytest.raises(ConfigurationError, match="asha compares trials by one metric"):
        run(sweep, sampler="grid", pruner="asha")


def test_the_front_holds_what_is_best_by_some_metric(tmp_path: Path) -> None:
    losses = {"0.1": (1.0, 4.0), "0.2": (2.0, 2.0), "0.3": (3.0, 3.0), "0.4": (1.0, 5.0)}
    sweep = make_sweep(tmp_path, {"lr": [0.1, 0.2, 0.3, 0.4]}, ["test/loss", "test/error"])

    def compute(arguments: dict[str, str]) -> dict[str, float]:
        return dict(zip(("test/loss", "test/error"), losses[arguments["lr"]], strict=True))

    run(sweep, sampler="grid", executor=InstantExecutor(compute))
    assert [trial.params["lr"] for trial in sweep.best_trials] == ["0.1", "0.2"]
    assert "no trial is better by all metrics than: trial-0, trial-1" in describe_sweep(tmp_path)
    # NSGA-II looks for the front.
    run(sweep, 6, sampler="nsgaii", executor=InstantExecutor(compute))


def test_a_trial_that_violates_a_constraint_is_never_the_best(tmp_path: Path) -> None:
    sweep = Sweep(
        tmp_path,
        PROGRAM,
        {"lr": [0.1, 0.2, 0.3, 0.4]},
        ["test/loss"],
        constraints=["test/size<=0.25", "test/score >= -1"],
    )

    def compute(arguments: dict[str, str]) -> dict[str, float]:
        lr = float(arguments["lr"])
        score = math.nan if lr == 0.1 else 0.0
        return {"test/loss": -lr, "test/size": lr, "test/score": score}

    run(sweep, sampler="grid", executor=InstantExecutor(compute))
    assert sweep.best is not None and sweep.best.params == {"lr": "0.2"}
    assert [set(trial.violations) for trial in sweep.trials] == [
        set(),
        set(),
        {"test/size<=0.25"},
        {"test/size<=0.25"},
    ]
    assert sweep.trials[0].error == "test/score is NaN by step 8"
    # Optuna's samplers see it.
    (constraints,) = [
        trial.constraints for trial in SweepDirectory(tmp_path).load().study.trials[3:]
    ]
    assert constraints["test/size<=0.25"] == pytest.approx(0.15)
    assert constraints["test/score>=-1.0"] == -1
    assert "trial-3 violates test/size<=0.25" in describe_sweep(tmp_path)
    for text in ("test/size<0.25", "test/size<=x", "size<=1"):
        with pytest.raises(ConfigurationError, match="write SOURCE/NAME"):
            Constraint.parse(text)


def test_a_trial_whose_driver_was_killed_while_it_asked_does_not_count(tmp_path: Path) -> None:
    """Optuna notes a trial before its values; they are asked for again, and a point in line is put
    there again."""
    sweep = make_sweep(tmp_path, {"lr": [0.1, 0.5]})
    journal = SweepDirectory(tmp_path).load()
    journal.study.enqueue_trial({"lr": "0.5"})
    journal.study.ask()
    executor = run(sweep, sampler="grid")
    assert sorted(executor.list_arguments()) == [("lr=0.1",), ("lr=0.5",)]
    assert [trial.state for trial in sweep.trials] == ["complete"] * 2
    assert not journal.study.get_trials(states=[TrialState.RUNNING])


def test_a_trial_that_ended_as_its_driver_was_killed_is_not_started_again(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, {"lr": [0.1, 0.5]})
    with pytest.raises(KeyboardInterrupt):
        sweep.run(
            sampler="grid",
            executor=InstantExecutor(compute_quadratic),
            tell=interrupt_at_end,
        )
    executor = run(sweep, sampler="grid")
    assert executor.list_arguments() == [("lr=0.5",)]
    assert [trial.values for trial in sweep.trials] == [[4.5 * 0.9**16], [4.5 * 0.5**16]]


def interrupt_at_end(text: str) -> None:
    if text.startswith("starting"):
        return
    raise KeyboardInterrupt


def make_shared_sweep(folder: Path) -> tuple[Sweep, Journal, int, Lock]:
    """Return a sweep of two points, its journal, and the number and lock of the trial that another
    driver has."""
    sweep = make_sweep(folder, {"lr": [0.1, 0.5]})
    directory = SweepDirectory(folder)
    journal = directory.load()
    for lr in ("0.1", "0.5"):
        journal.study.enqueue_trial({"lr": lr})
    number = journal.study.ask(sweep._space.distributions).number
    lock = directory.claim(number)
    assert lock is not None
    return sweep, journal, number, lock


def test_a_trial_of_a_living_driver_is_left_to_it(tmp_path: Path) -> None:
    sweep, journal, number, lock = make_shared_sweep(tmp_path)
    assert SweepDirectory(tmp_path).claim(number) is None
    lines: list[str] = []

    def tell(text: str) -> None:
        lines.append(text)
        if text.startswith("waiting"):  # the other driver ends its trial
            journal.study.tell(number, 0.25)
            lock.release()

    executor = InstantExecutor(compute_quadratic)
    sweep.run(2, executor=executor, tell=tell)
    assert executor.list_arguments() == [("lr=0.5",)]
    assert "waiting for trials of another driver: trial-0" in lines
    assert [trial.values for trial in sweep.trials] == [[0.25], [4.5 * 0.5**16]]


def test_a_driver_that_does_not_wait_ends_when_nothing_is_left_to_start(tmp_path: Path) -> None:
    sweep, _, _, lock = make_shared_sweep(tmp_path)
    lines: list[str] = []
    executor = InstantExecutor(compute_quadratic)
    sweep.run(2, executor=executor, should_wait=False, tell=lines.append)
    assert executor.list_arguments() == [("lr=0.5",)]
    assert lines[-1] == "nothing is left to start; another driver has trial-0"
    # A trial whose driver is gone is taken over as ever.
    lock.release()
    sweep.run(2, executor=executor, should_wait=False, tell=ignore)
    assert executor.list_arguments() == [("lr=0.5",), ("lr=0.1",)]
    assert [trial.state for trial in sweep.trials] == ["complete", "complete"]


def test_another_sweep_in_the_same_directory_is_an_error(tmp_path: Path) -> None:
    make_sweep(tmp_path, {"lr": "log(0.1,0.2)"}, ["test/accuracy"])
    run(make_sweep(tmp_path), 1)  # no trial of the other one was started
    for space, objective, message in (
        ({"lr": "log(0.01,0.5)"}, "test/loss", "another search space"),
        ({"lr": "log(0.01,0.9)"}, "test/score", "another list of objectives"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            make_sweep(tmp_path, space, [objective] if "loss" in objective else ["test/accuracy"])
    (tmp_path / "run" / "attempts").mkdir(parents=True)
    (tmp_path / "run" / "attempts" / "1").touch()
    with pytest.raises(ConfigurationError, match="is a run: give a sweep a directory of its own"):
        make_sweep(tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": "tqe"}, "Did you mean 'tpe'?"),
        ({"sampler": "tpe(n_startup=5)"}, "tpe has no argument 'n_startup'"),
        ({"sampler": "tpe(5)"}, "write NAME or NAME(key=value)"),
        ({"sampler": "cmaes(popsize=2)"}, "popsize is 2; a generation has"),
        ({"sampler": "cmaes"}, "this space has 1 that no condition rules out"),
        ({"sampler": "grid"}, "lr may be any number of float(0.01,0.9,log)"),
        ({"pruner": "ahsa"}, "Did you mean 'asha'?"),
        ({"pruner": "asha(min_resource=-1)"}, "cannot be used"),
        ({"num_trials": None}, "give --trials N"),
    ],
)
def test_a_search_that_cannot_be_is_an_error(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        run(make_sweep(tmp_path), **({"num_trials": 1} | options))
    assert message in str(caught.value)
    assert list_trials(tmp_path) == []


def test_a_sampler_of_optuna_can_be_handed_over(tmp_path: Path) -> None:
    executor = run(make_sweep(tmp_path), 2, sampler=optuna.samplers.RandomSampler(seed=3))
    sampled = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
    distribution = optuna.distributions.FloatDistribution(0.01, 0.9, log=True)
    expected = [sampled.ask({"lr": distribution}).params["lr"] for _ in range(2)]
    assert executor.list_arguments() == [(f"lr={value!r}",) for value in expected]


def test_the_status_names_each_trial_the_best_and_its_command(tmp_path: Path) -> None:
    folder = tmp_path / "search"
    sweep = make_sweep(folder, ["steps=8", "lr=0.1,0.5,0.4"])
    run(sweep, sampler="grid", executor=InstantExecutor(fail_with_large_rates))
    lines = describe_sweep(folder).splitlines()
    assert lines[0] == f"{folder}: 2 complete, 1 fail"
    assert lines[1].split() == ["trial", "state", "step", "lr", "test/loss"]
    assert lines[2].split() == ["trial-0", "complete", "8", "0.1", f"{4.5 * 0.9**16:.6g}"]
    assert lines[3].split() == ["trial-1", "fail", "-", "0.5", "-"]
    assert lines[5] == "trial-1 failed: exit code 3"
    assert lines[6] == "the best is trial-2; to train it again alone:"
    assert lines[7] == f"  fulgurite fit {PROGRAM} steps=8 lr=0.4 --run search-trial-2"
    with pytest.raises(ConfigurationError, match="there is no sweep in"):
        describe_sweep(tmp_path / "nothing")


def fail_with_large_rates(arguments: dict[str, str]) -> dict[str, float] | int:
    return 3 if float(arguments["lr"]) > 0.4 else compute_quadratic(arguments)
