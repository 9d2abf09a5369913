"""When checkpoints are written, which stay, and what becomes of a save that fails."""

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite._src.data.resume_hints import get_resume_hint
from fulgurite.errors import CheckpointError, ConfigurationError, NonFiniteError
from fulgurite_checkpoint import Checkpointer
from fulgurite_checkpoint.format import list_entries
from trained import (
    NET,
    ZEROS,
    Act,
    Counting,
    Killed,
    Scores,
    counting,
    engine,
    kill,
    regression,
    steps_in,
)


def weights_in(run: Path, step: Any = "latest", **options: Any) -> float:
    """The weight in a checkpoint of `Counting`, which is minus its step."""
    observed: list[float] = []
    look = Act(fg.AtStart(), lambda run: observed.append(float(run.state.module.weight)))
    start = engine(run / "look", Checkpointer(99, **options), look, steps=1, log_every=None)
    start.fit(Counting, ZEROS, init_from=fg.CheckpointRef(run, step), resume="never")
    return observed[0]


# --- when -----------------------------------------------------------------------------------------


def test_exactly_n_updates_and_a_checkpoint_at_the_end(tmp_path: Path) -> None:
    observed: list[float] = []
    look = Act(2, lambda run: observed.append(float(run.state.module.weight)), "evaluate")
    result = counting(tmp_path, look, every=3, max_to_keep=None)
    assert (float(result.module.weight), observed) == (-5, [-2, -4])
    assert steps_in(tmp_path) == [3, 5]
    assert weights_in(tmp_path) == -5


def test_a_checkpoint_is_complete_when_fit_returns_and_not_saved_twice(tmp_path: Path) -> None:
    requested: list[int] = []

    class Told:
        @fg.hookimpl
        def on_save(self, run: fg.Run, step: int) -> None:
            requested.append(step)

    counting(tmp_path, Told(), every=5)
    assert (requested, steps_in(tmp_path)) == ([5], [5])


@pytest.mark.full
@pytest.mark.parametrize("background", [True, False])
def test_later_save_of_the_same_step_replaces_the_earlier(tmp_path: Path, background: bool) -> None:
    """One before an action of the step, one after it: what the action changed must be in it."""

    def double(run: fg.Run) -> fg.ReplaceState:
        run.save()
        return fg.ReplaceState(
            run.state.replace(
                module=eqx.tree_at(lambda m: m.weight, run.state.module, jnp.float32(7))
            )
        )

    counting(tmp_path, Act(fg.At(4), double), steps=4, every=4, async_save=background)
    assert steps_in(tmp_path) == [4]
    assert weights_in(tmp_path) == 7


@pytest.mark.full
def test_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    counting(tmp_path / "run", every=1)
    engine(tmp_path / "trial", Checkpointer(1), fast_dev_run=2).fit(Counting, ZEROS)
    assert not (tmp_path / "trial").exists()


# --- which stay -----------------------------------------------------------------------------------


def test_last_three_are_kept_and_the_run_resumes_from_the_last(tmp_path: Path) -> None:
    counting(tmp_path)
    assert steps_in(tmp_path) == [3, 4, 5]
    observed: list[int] = []
    look = Act(fg.At(6), lambda run: observed.append(run.step))
    assert float(counting(tmp_path, look, steps=6, resume="auto").module.weight) == -6
    assert (observed, steps_in(tmp_path)) == ([6], [4, 5, 6])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-4",
        "step-5",
        "step-6",
    ]


@pytest.mark.full
def test_keep_period_checkpoints_are_never_deleted(tmp_path: Path) -> None:
    counting(tmp_path, steps=8, max_to_keep=1, keep_period=3)
    assert steps_in(tmp_path) == [3, 6, 8]


NAN = float("nan")


@pytest.mark.parametrize(
    ("scores", "mode", "best", "stay"),
    [
        ((0.36, 0.36), "max", 1, [1, 2]),
        pytest.param((NAN, 0.5, 1.0), "max", 3, [3], marks=pytest.mark.full),
        pytest.param((0.5, NAN, 0.25), "max", 1, [1, 3], marks=pytest.mark.full),
        ((0.5, NAN, 0.75, 0.25, 0.25), "min", 4, [4, 5]),
    ],
)
def test_the_best_is_strictly_better_and_never_nan(
    tmp_path: Path, scores: tuple[float, ...], mode: Any, best: int, stay: list[int]
) -> None:
    options: dict[str, Any] = {"monitor": "test/score", "mode": mode}
    counting(tmp_path, Scores(scores), steps=len(scores), max_to_keep=1, **options)
    assert steps_in(tmp_path) == stay
    assert weights_in(tmp_path, "best") == -best


class Shown:
    """Keeps what loggers are told of the best checkpoint, and how often one is saved."""

    def __init__(self) -> None:
        self.best: list[tuple[int, float]] = []
        self.saved: list[int] = []

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind != "config":
            return
        if record.source == "checkpoints":
            assert record.stream == "telemetry"
            best = record.values["best"]
            assert Path(best["path"], "COMMIT").is_file()
            assert best["metric"] == "test/score"
            self.best.append((best["step"], best["value"]))

    @fg.hookimpl
    def on_save(self, run: fg.Run, step: int) -> None:
        self.saved.append(step)


@pytest.mark.full
@pytest.mark.parametrize("background", [True, False])
def test_loggers_are_told_where_the_best_is(tmp_path: Path, background: bool) -> None:
    shown = Shown()
    options: dict[str, Any] = {"monitor": "test/score", "mode": "max", "async_save": background}
    counting(tmp_path, Scores((0.5, 0.9, 0.9, 0.7, 1.0)), shown, max_to_keep=1, **options)
    assert shown.best == [(1, 0.5), (2, pytest.approx(0.9)), (5, 1.0)]
    assert shown.saved == [1, 2, 3, 4, 5]
    again = Shown()
    with pytest.warns(UserWarning, match="scores was"):
        scores = Scores((0.5, 0.9, 0.9, 0.7, 1.0, 0.3))
        counting(tmp_path, scores, again, steps=6, max_to_keep=1, resume="auto", **options)
    assert again.best == [(5, 1.0)]


@pytest.mark.variants("full")
@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [
        ("min", (2.0, float("-inf"), -3.0, NAN, -3.0), 3),
        ("max", (NAN, float("inf"), -3.0, -2.0, float("-inf")), 4),
        ("max", (0.9, 0.9, 0.9), 1),
        ("min", (-5.0, -5.1, -5.0), 2),
    ],
)
def test_the_best_is_a_finite_number(
    tmp_path: Path, mode: Any, values: tuple[float, ...], best: int
) -> None:
    """With infinities too: an early stopper calls them not finite."""
    steps = len(values)
    counting(tmp_path, Scores(values), steps=steps, max_to_keep=1, monitor="test/score", mode=mode)
    assert steps_in(tmp_path) == sorted({best, steps})


@pytest.mark.full
def test_the_best_survives_a_restart(tmp_path: Path) -> None:
    counting(tmp_path, Scores((0.5, 0.9)), steps=2, max_to_keep=1, monitor="test/score", mode="max")
    with pytest.warns(UserWarning, match="scores was"):
        counting(
            tmp_path,
            Scores((0.7, 0.8)),
            steps=4,
            max_to_keep=1,
            monitor="test/score",
            mode="max",
            resume="auto",
        )
    assert steps_in(tmp_path) == [2, 4]


@pytest.mark.full
def test_only_metrics_of_the_very_step_count(tmp_path: Path) -> None:
    counting(
        tmp_path,
        Scores((0.5, 0.4), fg.At(2, 3)),
        steps=4,
        max_to_keep=None,
        monitor="test/score",
        mode="max",
    )
    assert [entry.get_metric("test/score") for entry in list_entries(tmp_path)] == [
        None,
        0.5,
        pytest.approx(0.4),
        None,
    ]
    with pytest.raises(CheckpointError, match=r"'test/loss'.*There is: test/score"):
        weights_in(tmp_path, "best", monitor="test/loss")
    counting(tmp_path / "nan", Scores((NAN,)), steps=1)
    with pytest.raises(
        CheckpointError, match=r"'test/score' is not a finite number in any checkpoint"
    ):
        weights_in(tmp_path / "nan", "best", monitor="test/score", mode="max")


@pytest.mark.full
def test_missing_monitored_metric_is_reported(tmp_path: Path) -> None:
    with pytest.warns(UserWarning) as warned:
        counting(tmp_path / "name", Scores((0.5, 0.4)), steps=2, monitor="test/scroe", mode="max")
    assert ["which 'test' does not measure" in str(warning.message) for warning in warned] == [
        True,
        False,
    ]
    assert "Did you mean 'score'" in str(warned[0].message)
    with pytest.warns(
        UserWarning, match="no checkpoint of .* has the metric 'tset/score'.*There is: test/score"
    ):
        counting(tmp_path / "source", Scores((0.5, 0.4)), steps=2, monitor="tset/score", mode="max")


# --- never from a state that is not finite --------------------------------------------------------


class Bad(Counting):
    """Finite until the update of step 3, where the gradient of `sqrt` at 0 is NaN under a finite
    loss, or the loss is infinite."""

    how: str = eqx.field(static=True)

    def __init__(self, how: str, *, key: Any = None) -> None:
        self.weight, self.how = jnp.zeros(()), how

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        x = self.weight + 2
        if self.how == "loss":
            return fg.Output(self.weight + jnp.where(x == 0, jnp.inf, 0.0))
        return fg.Output(self.weight + 0 * jnp.where(x > 0, jnp.sqrt(jnp.abs(x)), 0.0))


@pytest.mark.parametrize(("how", "culprit"), [("loss", "loss"), ("gradient", "gradient of weight")])
def test_nothing_is_saved_of_a_step_that_is_not_finite(
    tmp_path: Path, how: str, culprit: str
) -> None:
    with pytest.raises(NonFiniteError, match=rf"step 3: the {culprit} is not finite"):
        engine(tmp_path, Checkpointer(1), steps=5, log_every=None).fit(Bad(how), ZEROS)
    assert steps_in(tmp_path) == [1, 2]
    observed: list[int] = []
    look = Act(fg.FirstStepsAfterStart(1), lambda run: observed.append(run.step))
    with pytest.raises(NonFiniteError, match="step 3"):
        engine(tmp_path, Checkpointer(1), look, steps=5, log_every=None).fit(
            Bad(how), ZEROS, resume="auto"
        )
    assert steps_in(tmp_path) == [1, 2]


# --- exceptions and failures ----------------------------------------------------------------------


@pytest.mark.full
def test_exception_saves_where_resuming_is_exact(tmp_path: Path) -> None:
    """The failing action had emitted nothing, so that the resumed run does it again."""
    said: list[int] = []

    def say(run: fg.Run) -> None:
        said.append(run.step)
        if len(said) == 2:
            raise Killed

    with pytest.raises(Killed):
        counting(tmp_path, Act(2, say), every=99)
    assert steps_in(tmp_path) == [4]
    counting(tmp_path, Act(2, say), every=99, resume="auto")
    assert said == [2, 4, 4]


def test_an_exception_in_the_middle_of_an_action_saves_nothing(tmp_path: Path) -> None:
    def say(run: fg.Run) -> None:
        run.log_text("act", {"at": str(run.step)})
        raise Killed

    words = "nothing is saved after Killed: an action failed half way"
    with pytest.raises(Killed), pytest.warns(UserWarning, match=words):
        counting(tmp_path, Act(fg.At(4), say), every=3)
    assert steps_in(tmp_path) == [3]


@pytest.mark.variants("full")
@pytest.mark.parametrize("steps_per_execution", [1, 4])
@pytest.mark.parametrize(
    ("batch", "options", "says"),
    [
        ({"x": np.zeros(1, np.float32)}, {}, "the batch for step 4 has another structure"),
        (np.zeros(5, np.float32), {"max_compilations": 1}, "the batch for step 4"),
        (np.zeros((3, 1), np.float32), {}, "two axes are too many"),
    ],
)
def test_a_batch_that_cannot_be_trained_on_saves_the_step_before_it(
    tmp_path: Path, steps_per_execution: int, batch: Any, options: Any, says: str
) -> None:
    class Picky(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            if batch.ndim == 2:
                raise ValueError("two axes are too many")
            return super().training_step(batch, ctx)

    trained = engine(
        tmp_path, Checkpointer(99), steps=5, steps_per_execution=steps_per_execution, **options
    )
    with pytest.raises(Exception, match=says):
        trained.fit(Picky, [*ZEROS * 3, batch, *ZEROS])
    assert steps_in(tmp_path) == [3]
    result = trained.fit(Picky, [*ZEROS * 5], resume="auto")
    assert result.module.weight == -5


def test_an_exception_before_the_first_step_saves_nothing(tmp_path: Path) -> None:
    class Failing:
        @fg.hookimpl
        def on_fit_start(self) -> None:
            raise Killed

    words = "nothing is saved after Killed: no step was taken"
    with pytest.raises(Killed), pytest.warns(UserWarning, match=words):
        counting(tmp_path, Failing())
    assert steps_in(tmp_path) == []


def test_an_exception_of_the_data_saves_the_step_before_it(tmp_path: Path) -> None:
    class Data:
        def __iter__(self) -> Any:
            yield from ZEROS * 3
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        engine(tmp_path, Checkpointer(99), steps=5).fit(
            Counting, fg.DataSource(Data(), prefetch=0, resume="replay")
        )
    assert steps_in(tmp_path) == [3]


def test_without_on_exception_nothing_is_saved(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        counting(tmp_path, Act(fg.At(4), kill), every=3, on_exception=False)
    assert steps_in(tmp_path) == [3]


@pytest.mark.full
def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    counting(tmp_path, steps=2)
    for name in ("saving-step-3", "trash-step-1"):
        (tmp_path / "checkpoints" / name / "arrays").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-2").rename(tmp_path / "checkpoints" / "saving-step-2")
    counting(tmp_path, steps=4, resume="auto", max_to_keep=None)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        f"step-{n}" for n in (1, 2, 3, 4)
    ]


# --- construction ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": 0}, "0"),
        ({"max_to_keep": 0}, "max_to_keep is 0"),
        ({"keep_period": True}, "keep_period is True"),
        ({"monitor": "accuracy"}, "SOURCE/NAME"),
        ({"monitor": 3}, "SOURCE/NAME"),
        ({"directory": 3}, "3 is not a path"),
        ({"directory": ""}, "'' is not a path"),
        ({"mode": "most"}, "'max' or 'min'"),
        ({"verify": True}, "'full', 'size' or 'none'"),
        ({"on_missing_plugin": "raise"}, "'error', 'warn' or 'ignore'"),
    ],
)
def test_invalid_options_are_errors(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Checkpointer(**{"every": 1, **options})


def test_missing_run_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no place.*Engine\(run_dir="):
        counting(None)


class Stream:
    """Batches without a state."""

    def __iter__(self) -> Any:
        return iter([np.full(1, number, np.float32) for number in range(4)])


@pytest.mark.full
def test_data_without_a_state_says_what_it_promises(tmp_path: Path) -> None:
    def fit(promise: Any, **options: Any) -> fg.FitResult:
        data = fg.DataSource(Stream(), resume=promise)
        return engine(tmp_path / str(promise), Checkpointer(2), steps=5, log_every=None).fit(
            Counting, data, **options
        )

    with pytest.raises(ConfigurationError, match=r"data \(Stream\).*'replay'.*'restart'"):
        fit(None)
    for promise in ("replay", "restart"):
        fit(promise)
        assert float(fit(promise, resume=2).module.weight) == -5


class IterableDataset:
    """Stands for that of Hugging Face, which is known by its library and name."""

    __module__ = "datasets.iterable_dataset"

    def __iter__(self) -> Any:
        return iter([])


def test_what_is_known_of_a_library_is_part_of_the_error() -> None:
    assert "leaves its shuffle buffer out" in get_resume_hint(IterableDataset())
    assert get_resume_hint([]) == ""


@pytest.mark.full
def test_iterator_can_only_restart(tmp_path: Path) -> None:
    class Kept(Stream):
        def get_state(self) -> Any:
            return 0

        def set_state(self, state: Any) -> None: ...

    class Seeing(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return (
                super()
                .training_step(batch, ctx)
                .replace(metrics={"seen": fg.metrics.LastValue.from_values(batch[0])})
            )

    def fit(data: Any, resume: Any = None, **settings: Any) -> fg.FitResult:
        settings = {"steps": 2, "log_every": 1} | settings
        return engine(tmp_path, Checkpointer(2), **settings).fit(Seeing, data, resume=resume)

    with pytest.raises(ConfigurationError, match="is an iterator.*'restart'"):
        fit(iter(Stream()))
    with pytest.raises(ConfigurationError, match=r"cut off by Engine\(limit_train_batches=\)"):
        fit(fg.DataSource(Kept(), resume="exact"), limit_train_batches=3)
    fit(fg.DataSource(iter(Stream()), resume="restart"))
    resumed = fit(fg.DataSource(iter(Stream()), resume="restart"), "auto", steps=4)
    assert resumed.history["train/seen"].tolist() == [0, 1, 0, 1]


@pytest.mark.full
def test_checkpoints_may_be_outside_the_run_directory(tmp_path: Path) -> None:
    counting(tmp_path / "run", directory=tmp_path / "else", steps=2)
    assert (steps_in(tmp_path / "run"), steps_in(tmp_path / "else")) == ([], [1, 2])
    counting(tmp_path / "run", directory=tmp_path / "else", steps=3, resume="auto")
    assert steps_in(tmp_path / "else") == [1, 2, 3]


def test_signal_during_a_save_does_not_damage_it(tmp_path: Path) -> None:
    class Interrupting:
        @fg.hookimpl
        def on_save(self, run: fg.Run, step: int) -> None:
            if step == 2:
                os.kill(os.getpid(), signal.SIGINT)

    result = counting(tmp_path, Interrupting(), every=2)
    assert result.stop_reason == "SIGINT"
    assert steps_in(tmp_path)[-1] == int(result.state.step)


def test_process_that_lost_the_lock_during_a_save_commits_nothing(tmp_path: Path) -> None:
    class Taking:
        @fg.hookimpl
        def on_save(self, run: fg.Run) -> None:
            owner = json.loads((tmp_path / "lock").read_text())
            (tmp_path / "lock").write_text(json.dumps(owner | {"attempt": 2, "host": "elsewhere"}))

    with pytest.raises(CheckpointError, match="taken over by attempt 2"):
        counting(tmp_path, Taking(), every=1)
    assert list_entries(tmp_path) == []


@pytest.mark.full
def test_outside_checkpoints_of_a_fresh_start_are_set_aside(tmp_path: Path) -> None:
    """Left there, they would be the newest: those of the new run would be removed, and `auto` would
    take theirs."""
    run, elsewhere = tmp_path / "run", tmp_path / "else"
    say = Act(1, lambda run: run.log_text("said", {"at": str(run.step)}))

    def fit(steps: int, resume: Any = None) -> fg.FitResult:
        return counting(
            run, say, "jsonl", directory=elsewhere, max_to_keep=2, steps=steps, resume=resume
        )

    fit(6)
    records = (run / "records.jsonl").read_bytes()
    with pytest.warns(UserWarning, match=r"held checkpoints.*superseded"):
        fit(3, "never")
    assert (steps_in(elsewhere), float(fit(4, "auto").module.weight)) == ([2, 3], -4)
    assert sorted(path.name for path in (elsewhere / "superseded" / "1").iterdir()) == [
        "step-5",
        "step-6",
    ]
    assert (run / "superseded" / "2" / "records.jsonl").read_bytes() == records
    records = (run / "records.jsonl").read_bytes()
    fit(4, 3)
    assert (steps_in(elsewhere), (run / "records.jsonl").read_bytes()) == ([3, 4], records)
    assert [path.name for path in (elsewhere / "superseded" / "2").iterdir()] == ["step-4"]
    assert (run / "superseded" / "4" / "records.jsonl").read_bytes() == records


@pytest.mark.full
def test_checkpoints_without_a_run_are_set_aside_by_a_fresh_start(tmp_path: Path) -> None:
    for steps in (4, 2):
        fresh = engine(None, Checkpointer(1, directory=tmp_path), steps=steps, log_every=None)
        if steps == 4:
            fresh.fit(Counting, ZEROS)
            continue
        with pytest.warns(UserWarning, match="held checkpoints"):
            fresh.fit(Counting, ZEROS)
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.full
def test_a_complete_run_that_is_started_again_keeps_the_metrics_of_its_last_step(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        counting(
            tmp_path,
            Scores((0.5, 0.9)),
            steps=2,
            max_to_keep=1,
            monitor="test/score",
            mode="max",
            resume="auto",
        )
        assert [entry.get_metric("test/score") for entry in list_entries(tmp_path)] == [
            pytest.approx(0.9)
        ]


@pytest.mark.full
def test_start_without_a_step_does_not_change_the_origin_of_a_state(tmp_path: Path) -> None:
    def train_and_read_model(rate: float, steps: int) -> Any:
        start = fg.Engine(steps=steps, run_dir=tmp_path, plugins=[Checkpointer(2)], autoload=False)
        start.fit(partial(NET, rate=rate), regression(), resume="auto")
        manifest = json.loads((tmp_path / f"checkpoints/step-{steps}/manifest.json").read_text())
        assert manifest["settings"]["steps"] == steps
        return manifest["model"]

    first = train_and_read_model(0.5, 2)
    with pytest.warns(UserWarning, match=r"may not be exact: .*p=0\.1"):
        assert train_and_read_model(0.1, 2) == first
    with pytest.warns(UserWarning, match=r"may not be exact: .*p=0\.1"):
        assert train_and_read_model(0.1, 4) != first
