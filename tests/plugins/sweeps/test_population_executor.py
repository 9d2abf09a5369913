"""Trials as members of a population: the numbers of each, and what a population cannot train."""

import functools
import json
import os
import signal
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite_cli import IN_USE, Experiment, load_experiment, run
from fulgurite_population import Population
from fulgurite_runs import RunDirectory, dumps, loads
from fulgurite_sweeps import (
    Job,
    Sweep,
    TrialResult,
    TrialSettings,
    list_trials,
    population_executor,
    read_result,
)
from fulgurite_sweeps.comparison import find_difference
from fulgurite_sweeps.members import VARIABLE, format_numbers, take_values
from fulgurite_sweeps.population import (
    build_member,
    build_members,
    check_is_seen,
    find_variation,
    name_an_array,
)
from fulgurite_sweeps.population_executor import PopulationExecutor
from fulgurite_sweeps.trial import describe_variables
from fulgurite_sweeps.workers import parse_executor
from instant_executor import PROGRAM, InstantExecutor
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
        with pytest.raises(ConfigurationError, match="give|has no argument 'size'"):
            parse_executor(text)


def test_populations_are_called_by_the_numbers_of_their_trials() -> None:
    assert format_numbers([3]) == "3"
    assert format_numbers([0, 1, 2, 3]) == "0-3"
    assert format_numbers([5, 1, 0, 7, 8]) == "0-1+5+7-8"


def test_a_member_has_its_values_without_those_of_the_others_and_of_all() -> None:
    """In the form in which records hold them, with the mean of a metric of two numbers."""
    line = dumps(
        {
            "loss": 2.0,
            "loss/std": 1.0,
            "loss[0]": 1.0,
            "loss[1]": 3.0,
            "loss[10]": 9.0,
            "recall": np.array([0.5, 0.7]),
            "recall[0]": np.array([0.4, 0.6]),
            "recall[1]": np.array([0.6, 0.8]),
            "learning_rate/default": np.array([0.1, 0.2]),
            "learning_rate/other": 0.5,
            "frozen": 0.0,
            "batch_loss": 2.0,
        }
    )
    part = take_values(loads(line), 1)
    assert part.pop("recall").tolist() == [0.6, 0.8]
    assert part == {"loss": 3.0, "learning_rate/default": 0.2, "learning_rate/other": 0.5}


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


sgd = optax.inject_hyperparams(optax.sgd)


class Pair(fg.Module):
    """Two numbers with the losses x²/2 and y²/2, random keys, and one of several optimizers."""

    x: jax.Array
    y: jax.Array
    key: jax.Array
    lr: float
    optimizer: str

    def __init__(self, lr: float, optimizer: str, noise: int) -> None:
        self.x, self.y = jnp.ones(()), jnp.ones(())
        self.key = jax.random.key(noise)
        self.lr = lr
        self.optimizer = optimizer

    def training_step(self, batch: Any, ctx: Any) -> fg.Output:
        return fg.Output((self.x**2 + self.y**2) / 2 * batch["x"].mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        if self.optimizer == "schedule":
            return sgd(optax.linear_schedule(self.lr, 0.0, 10))
        if self.optimizer == "chain":
            return optax.chain(sgd(self.lr), sgd(self.lr / 10))
        parts: dict[Hashable, Any] = {"a": sgd(self.lr), "b": sgd(self.lr / 10)}
        return optax.multi_transform(parts, label_pair)


def label_pair(pair: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "a" if path[0].name == "x" else "b", pair
    )


def make_pair(
    lr: float = 0.1, optimizer: str = "parts", noise: int = 0, seed: int = 0
) -> Experiment:
    engine = fg.Engine(steps=2, seed=seed, autoload=False)
    data = [{"x": np.ones(2, np.float32)}] * 2
    return Experiment(engine, lambda key: Pair(lr, optimizer, noise), data)


def test_rates_of_several_optimizers_vary_each_for_itself() -> None:
    """By hand: the numbers shrink by 1 - lr and by 1 - lr/10 at each of two steps."""
    members, vary = build_members(make_pair, [["lr=0.1"], ["lr=0.2"]])
    assert sorted(vary) == ["a/learning_rate", "b/learning_rate"]
    population = Population(seeds=[0, 0], vary=vary)
    built = make_pair()
    engine = fg.Engine(steps=2, plugins=[population], autoload=False)
    module = engine.fit(population.stack(members[0].model), built.data).module.members
    np.testing.assert_allclose(module.x, [0.9**2, 0.8**2], rtol=1e-6)
    np.testing.assert_allclose(module.y, [0.99**2, 0.98**2], rtol=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer=chain", "lr=0.2"], "several hyperparameters 'learning_rate' that are not eq"),
        (["optimizer=schedule", "lr=0.2"], "computes 'learning_rate' by a schedule"),
        (["optimizer=parts", "noise=1"], "the random keys in the module.key differ"),
    ],
)
def test_what_a_population_cannot_tell_apart_is_an_error(words: list[str], message: str) -> None:
    members = [build_member(make_pair, words[:1]), build_member(make_pair, words)]
    with pytest.raises(ConfigurationError, match=message) as caught:
        find_variation(members)
    assert "take local:N" in str(caught.value)


def test_trials_that_are_the_same_or_differ_in_seeds_are_members_whatever_computes_a_rate() -> None:
    for seeds in ((0, 0), (0, 1)):
        overrides = [["optimizer=schedule", f"seed={seed}"] for seed in seeds]
        members, vary = build_members(make_pair, overrides)
        assert vary == {}
    vary = name_an_array(members)
    assert vary == {"x": [1.0, 1.0]}
    stacked: Any = Population(seeds=(0, 0), vary=vary).stack(members[0].model)(key=None)
    assert stacked.members.x.tolist() == [1.0, 1.0]


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def apply(self, x: Any) -> Any:
        return x * self.factor


def test_a_function_that_is_made_again_is_the_same() -> None:
    scaled = Scaled(2.0)
    assert find_difference(scaled.apply, scaled.apply, []) is None
    assert find_difference(scaled.apply, Scaled(2.0).apply, []) is not None
    gelu = [functools.partial(jax.nn.gelu, approximate=flag) for flag in (False, False, True)]
    assert find_difference(gelu[0], gelu[1], []) is None
    assert find_difference(gelu[0], gelu[2], []) == "the module.keywords['approximate']"
    assert find_difference(gelu[0], functools.partial(jax.nn.relu), []) == "the module.func"


def make_jobs(folder: Path, *rates: float) -> list[Job]:
    """Return trials 0, 1 and so on with these rates."""
    settings = TrialSettings(str(folder), 0, ["test/loss"])
    jobs = []
    for number, rate in enumerate(rates):
        run_dir = folder / f"trial-{number}"
        words = [f"lr={rate}"]
        command = ["python", "-m", "fulgurite_cli", "fit", "pair.py", *words, "--run", str(run_dir)]
        environment = describe_variables(settings)
        log = folder / f"trial-{number}.log"
        jobs.append(Job(number, command, environment, log, run_dir, tuple(words)))
    return jobs


def write_population(folder: Path, results: list[dict[str, Any]] | None) -> None:
    """Write what a population of trials 0 and 1 leaves, which has ended if there are results."""
    settings = {
        "program": "pair.py",
        "numbers": [0, 1],
        "overrides": [["lr=0.1"], ["lr=0.2"]],
        "is_exact": True,
    }
    (folder / "population-0-1.json").write_text(json.dumps(settings))
    run = RunDirectory(folder / "population-0-1")
    with run.lock():
        run.start_attempt(dumps({"configuration": {}}))
        if results is not None:
            records = [
                {"kind": "scalars", "source": "test", "step": step, "values": {"loss[1]": 1 / step}}
                for step in (2, 4, 6)
            ]
            (run.path / "records.jsonl").write_text("".join(dumps(r) + "\n" for r in records))
            (run.path / "members.json").write_text(dumps(results))
            run.mark_complete()


ENDED: dict[str, Any] = {
    "step": 6,
    "metrics": {"test/loss": 1 / 6},
    "error": None,
    "configuration": {"lr": 0.2},
}


def poll_once(executor: PopulationExecutor, job: Job) -> int | None:
    return executor.start(job).poll()


def test_a_trial_whose_population_has_ended_gets_what_it_left_there(tmp_path: Path) -> None:
    """However many members a population of this driver has, and if the others were told before."""
    write_population(tmp_path, [ENDED, ENDED])
    job = make_jobs(tmp_path, 0.1, 0.2)[1]
    assert poll_once(PopulationExecutor(4), job) == 0
    assert read_result(job.run_dir) == TrialResult(6, {"test/loss": 1 / 6})
    assert RunDirectory(job.run_dir).is_complete
    steps = [json.loads(line)["step"] for line in read_records(job.run_dir)]
    assert steps == [2, 4, 6] and not (tmp_path / "trial-0").exists()


def test_a_member_that_failed_is_not_trained_again(tmp_path: Path) -> None:
    """It has begun a run, as a trial alone has, with the records from before it failed."""
    failed = ENDED | {"step": 4, "error": "NonFiniteError: not finite at step 4"}
    write_population(tmp_path, [ENDED, failed])
    job = make_jobs(tmp_path, 0.1, 0.2)[1]
    assert poll_once(PopulationExecutor(2), job) == 1
    run = RunDirectory(job.run_dir)
    assert run.num_attempts == 1 and not run.is_complete
    assert [json.loads(line)["step"] for line in read_records(job.run_dir)] == [2]
    assert job.log.read_text() == "error: NonFiniteError: not finite at step 4\n"


def test_a_population_that_was_cut_off_is_resumed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], Any]] = []

    class Running:
        def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
            started.append((command, json.loads(environment[VARIABLE])))

        def poll(self) -> None:
            return None

    monkeypatch.setattr(population_executor, "SweptRun", Running)
    write_population(tmp_path, None)
    jobs = make_jobs(tmp_path, 0.1, 0.2, 0.3, 0.4)
    executor = PopulationExecutor(3)
    # The last of them is started before the one that was put in line.
    running = [executor.start(jobs[number]) for number in (1, 3, 2)]
    assert [job.poll() for job in running] == [None] * 3
    assert [command[-1] for command, _ in started] == [
        str(tmp_path / "population-0-1"),
        str(tmp_path / "population-2-3"),
    ]
    assert [settings["overrides"] for _, settings in started] == [
        [["lr=0.1"], ["lr=0.2"]],
        [["lr=0.3"], ["lr=0.4"]],
    ]
    assert [settings["is_exact"] for _, settings in started] == [True, False]
    # The driver of the last two is killed: they are in that population from now on.
    assert PopulationExecutor(1).start(jobs[3]).poll() is None
    assert started[2] == started[1]


def test_what_is_left_of_a_population_and_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    write_population(tmp_path, [ENDED, ENDED])
    (job,) = make_jobs(tmp_path, 0.5)
    with pytest.raises(CheckpointError, match="has trained a trial-0 with lr=0.1.*earlier sweep"):
        PopulationExecutor(2).start(job)
    (tmp_path / "population-0-1" / "members.json").write_bytes(b"")
    jobs = make_jobs(tmp_path, 0.1, 0.2)
    with pytest.raises(CheckpointError, match=r"members.json cannot be read .*Delete .*-0-1: its"):
        poll_once(PopulationExecutor(2), jobs[0])
    (tmp_path / "population-0-1.json").write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"population-0-1.json cannot be read"):
        PopulationExecutor(2).start(jobs[0])


@pytest.mark.parametrize(("code", "num_starts"), [(1, 1), (IN_USE, 4)])
def test_a_resumed_trial_that_fails_is_started_again_only_if_its_directory_was_in_use(
    tmp_path: Path, code: int, num_starts: int
) -> None:
    """It has failed before it had begun, as a member of a population does and a program that cannot
    be imported."""

    class Killed(InstantExecutor):
        def start(self, job: Job) -> Any:
            raise KeyboardInterrupt

    sweep = Sweep(tmp_path, PROGRAM, {"lr": "0.1,0.2"}, ["test/loss"])
    messages: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        sweep.run(1, sampler="grid", executor=Killed(lambda arguments: 0), tell=messages.append)
    executor = InstantExecutor(lambda arguments: code)
    sweep.run(1, sampler="grid", executor=executor, tell=messages.append)
    assert len(executor.jobs) == num_starts
    assert messages[-1] == f"trial-0 failed: exit code {code}"


def test_a_run_whose_directory_is_in_use_ends_with_a_code_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def make() -> Experiment:
        built = make_pair()
        engine = fg.Engine(steps=1, run_dir=tmp_path, plugins=["jsonl"], autoload=False)
        return Experiment(engine, built.model, built.data)

    with RunDirectory(tmp_path).lock(), pytest.raises(SystemExit) as ended:
        run(make, [])
    assert ended.value.code == 75 and "is in use by" in capsys.readouterr().err


OF_ALL = ("batch_loss", "loss_average")
"""What a population logs of all its members together, and a run alone of itself."""
RATES = "lr=0.1,1e30,0.2"


@pytest.mark.slow
def test_three_trials_are_one_population_with_the_bits_of_their_runs_alone(tmp_path: Path) -> None:
    """One of them is not finite, and has failed (7S8)."""
    arguments = [RATES, "--sampler", "grid", "--workers"]
    run_sweep(tmp_path / "local", *arguments, "local:2", program=INJECTED)
    run_sweep(tmp_path, *arguments, "population:3(exact=true)", program=INJECTED)
    trials = list_trials(tmp_path / "sweep")
    assert [trial.state for trial in trials] == ["complete", "fail", "complete"]
    assert trials[1].error == "NonFiniteError: not finite at step 2 (exit code 1)"
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
    arguments = [RATES, "--sampler", "grid", "--workers", "population:3(exact=true)"]
    driver = start_sweep(tmp_path, *arguments, program=INJECTED, hold=hold)
    population = RunDirectory(tmp_path / "sweep" / "population-0-2")
    wait_for(lambda: population.list_checkpoints() and list(hold.iterdir()))
    driver.kill()
    driver.wait()
    (hold / "go").touch()
    run_sweep(tmp_path, *arguments, program=INJECTED)
    trials = list_trials(tmp_path / "sweep")
    assert [trial.state for trial in trials] == ["complete", "fail", "complete"]
    assert population.num_attempts == 2
    steps = [json.loads(line)["step"] for line in read_records(trials[0].run_dir)]
    assert steps == sorted(steps) and steps[-1] == 6


@pytest.mark.slow
def test_ctrl_c_saves_a_population(tmp_path: Path) -> None:
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


@pytest.mark.full
def test_what_a_population_cannot_train_is_refused_before_the_first_trial(tmp_path: Path) -> None:
    arguments = ["lr=0.1,0.05", "steps=int(4,6)", "--trials", "2", "--workers", "population:2"]
    output = run_sweep(tmp_path, *arguments, program=INJECTED, code=2)
    assert "trials of this sweep cannot be members of one population" in output
    assert "in the settings of its engine" in output and "Traceback" not in output
    assert list_trials(tmp_path / "sweep") == []


def test_a_pruner_is_refused_by_a_population_before_the_first_trial(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, INJECTED, {"lr": "log(0.01,0.1)"}, ["test/loss"])
    with pytest.raises(ConfigurationError, match="end together: leave the pruner out"):
        sweep.run(2, pruner="median", executor=PopulationExecutor(2))
    assert sweep.trials == []
