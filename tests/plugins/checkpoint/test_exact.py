"""Going on from a checkpoint: the same bits as if nothing had happened."""

import json
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import fulgurite as fg
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite_checkpoint import Checkpointer, SaveError
from fulgurite_runs import RunDirectory
from fulgurite_testing import assert_same_bits
from trained import (
    NET,
    ZEROS,
    Act,
    Average,
    Counting,
    Killed,
    Scores,
    counting,
    engine,
    kill,
    regression,
    steps_in,
)


def training(run: Path, *others: Any, **settings: Any) -> fg.Engine:
    """Logs at 3, 6, 9, 12, saves at 5 and 10 and at the end."""
    checkpoints = Checkpointer(fg.Every(5) | fg.EverySeconds(1000), on_exception=False)
    return engine(
        run, checkpoints, Average(), *others, **{"steps": 12, "seed": 3, "log_every": 3, **settings}
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> fg.FitResult:
    return training(tmp_path_factory.mktemp("whole")).fit(NET, regression())


@pytest.mark.full
@pytest.mark.parametrize(
    "killed_at", [4, *(pytest.param(at, marks=pytest.mark.slow) for at in (8, 11))]
)
def test_a_resumed_run_ends_with_the_same_bits(
    whole: fg.FitResult, tmp_path: Path, killed_at: int
) -> None:
    """BatchNorm, dropout, Adam, a plugin's slice, shuffled data; killed twice."""
    for at in (killed_at, killed_at + 1):
        with pytest.raises(Killed):
            training(tmp_path, Act(fg.At(at), kill)).fit(NET, regression(), resume="auto")
    resumed = training(tmp_path).fit(NET, regression(), resume="auto")
    assert_same_bits(resumed.state, whole.state)
    assert resumed.metrics["train"] == whole.metrics["train"]
    assert resumed.history.records == whole.history.records
    assert RunDirectory(tmp_path).is_complete


@pytest.mark.full
def test_fused_steps_resume_to_the_same_bits(tmp_path: Path) -> None:
    whole = training(tmp_path / "whole", steps_per_execution=4).fit(NET, regression())
    with pytest.raises(Killed):
        training(tmp_path / "killed", Act(fg.At(7), kill), steps_per_execution=4).fit(
            NET, regression()
        )
    assert_same_bits(
        training(tmp_path / "killed", steps_per_execution=4)
        .fit(NET, regression(), resume="auto")
        .state,
        whole.state,
    )


@dataclass(frozen=True, eq=False)
class Logger:
    """Keeps the steps of exact records; can be rewound."""

    instance: str = "kept"
    steps: list[int] = field(default_factory=list)

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind != "text":
            return
        if record.stream == "exact":
            self.steps.append(record.step)

    @fg.hookimpl
    def flush_logger(self, step: int) -> Any:
        return future(len(self.steps))

    @fg.hookimpl
    def rewind_logger(self, position: int) -> None:
        del self.steps[position:]


def future(position: Any = None, error: Exception | None = None) -> Future[Any]:
    result: Future[Any] = Future()
    result.set_exception(error) if error else result.set_result(position)
    return result


@pytest.mark.full
@pytest.mark.parametrize(
    "answer",
    [
        lambda: future(error=OSError("disk full")),
        pytest.param(lambda: 1 / 0, marks=pytest.mark.slow),
        pytest.param(lambda: None, marks=pytest.mark.slow),
        pytest.param(lambda: future(object()), marks=pytest.mark.slow),
    ],
)
def test_logger_without_a_position_prevents_a_checkpoint_only_if_required(
    tmp_path: Path, answer: Any
) -> None:
    class Careless(Logger):
        positions: ClassVar[list[Any]] = []
        required: ClassVar[bool] = False

        @fg.hookimpl
        def flush_logger(self, step: int) -> Any:
            return answer()

        @fg.hookimpl
        def rewind_logger(self, position: Any) -> None:
            self.positions.append(position)

    with pytest.warns(
        UserWarning, match=r"logger 'careless:kept' \(.*\) cannot say where its records end"
    ):
        counting(tmp_path / "a", Careless(), steps=4)
        counting(tmp_path / "a", Careless(), resume="auto")
    assert [list(names) for names in Careless.positions] == [["failed"]]
    Careless.required = True
    with (
        pytest.warns(UserWarning, match="could not be written"),
        pytest.raises(SaveError, match="logger 'careless:kept'"),
    ):
        counting(tmp_path / "b", Careless(), every=100, on_exception=False)


def test_host_state_that_is_not_json_is_an_error_naming_the_plugin(tmp_path: Path) -> None:
    class Holding:
        @fg.hookimpl
        def get_host_state(self) -> Any:
            return {"seen": {1, 2}}

    with pytest.raises(
        ConfigurationError,
        match="plugin 'holding', hook get_host_state: set cannot be written as JSON",
    ):
        counting(tmp_path / "a", Holding())


@pytest.mark.full
def test_loggers_are_rewound_only_for_a_checkpoint_of_the_same_run(
    tmp_path: Path,
) -> None:
    logger, say = Logger(), Act(1, lambda run: run.log_text("act", {"at": str(run.step)}))
    with pytest.raises(Killed):
        counting(tmp_path / "a", logger, say, Act(fg.At(4), kill), every=2, on_exception=False)
    assert logger.steps == [1, 2, 3, 4] or logger.steps == [1, 2, 3]
    counting(tmp_path / "a", logger, say, every=2, resume="auto")
    assert logger.steps == [1, 2, 3, 4, 5]
    counting(tmp_path / "b", logger, say, resume=tmp_path / "a" / "checkpoints" / "step-2")
    assert logger.steps == [1, 2, 3, 4, 5, 3, 4, 5]


@pytest.mark.full
@pytest.mark.filterwarnings("default:.*scores. scores was")
def test_host_states_and_metrics_survive_and_a_complete_run_can_be_extended(
    tmp_path: Path,
) -> None:
    class Patience:
        state_version = 2
        count = 0

        @fg.hookimpl
        def get_host_state(self) -> Any:
            return {"count": self.count, "best": float("nan")}

        @fg.hookimpl
        def set_host_state(self, state: Any, version: int) -> None:
            self.count, self.version = state["count"], version

    first, second, step_ranges = Patience(), Patience(), []
    first.count = 7
    counting(tmp_path, first, Scores((0.25,), fg.At(2)), steps=2)
    look = Act(
        fg.AtEnd(), lambda run: step_ranges.append((run.step_range.stop, run.metrics["test"]))
    )
    assert RunDirectory(tmp_path).is_complete
    again = counting(tmp_path, second, Scores((), fg.At(99)), look, steps=2, resume="auto")
    assert (second.count, second.version, int(again.state.step), step_ranges) == (7, 2, 2, [])
    longer = counting(tmp_path, second, Scores((), fg.At(99)), look, steps=4, resume="auto")
    assert (float(longer.module.weight), step_ranges) == (-4, [(4, {"score": 0.25})])


def test_a_stop_request_saves_where_it_stops(tmp_path: Path) -> None:
    import os
    import signal

    interrupt = Act(fg.At(3), lambda run: os.kill(os.getpid(), signal.SIGTERM))
    result = counting(tmp_path, interrupt, every=100)
    stopped = int(result.state.step)
    assert result.stop_reason == "SIGTERM" and stopped in (3, 4)
    assert steps_in(tmp_path) == [stopped]
    assert not RunDirectory(tmp_path).is_complete
    assert float(counting(tmp_path, every=100, resume="auto").module.weight) == -5


@pytest.mark.full
@pytest.mark.parametrize(
    "phase",
    [
        "evaluate",
        pytest.param("act", marks=pytest.mark.slow),
        pytest.param("save", marks=pytest.mark.slow),
    ],
)
def test_actions_after_one_that_saves_are_not_lost(tmp_path: Path, phase: Any) -> None:
    """The run is killed after a save that an action of step 4 asked for, and before any other."""

    def records(name: str, *others: Any) -> bytes:
        plugins = (
            Act(fg.At(4), fg.Run.save, phase),
            Act(4, said, "decide"),
            Act(fg.At(4), said, "save"),
            "jsonl",
            *others,
        )
        checkpoints = Checkpointer(99, async_save=False, on_exception=False)
        with suppress(Killed):
            engine(tmp_path / name, checkpoints, *plugins, steps=6, log_every=2).fit(
                Counting, ZEROS, resume="auto"
            )
        return (tmp_path / name / "records.jsonl").read_bytes()

    def said(run: fg.Run) -> None:
        run.log_text("said", {"at": str(run.step)})

    whole = records("whole")
    records("killed", Act(fg.At(5), kill))
    assert steps_in(tmp_path / "killed") == [4]
    assert records("killed") == whole


@pytest.mark.full
def test_a_fit_that_would_end_before_its_checkpoint_is_an_error(tmp_path: Path) -> None:
    counting(tmp_path, max_to_keep=None)
    with pytest.raises(CheckpointError, match="step 5 is past step 3, where"):
        counting(tmp_path, steps=3, resume="auto")
    assert RunDirectory(tmp_path).is_complete
    assert float(counting(tmp_path, steps=3, resume=2).module.weight) == -3

    def fit(epochs: int, resume: Any) -> fg.FitResult:
        return engine(tmp_path / "epochs", Checkpointer(2), epochs=epochs).fit(
            Counting, ZEROS * 3, resume=resume
        )

    fit(4, None)
    with pytest.raises(CheckpointError, match="step 12 is past step 6"):
        fit(2, "auto")
    assert int(fit(5, "auto").state.step) == 15


@pytest.mark.full
def test_fast_dev_run_starts_from_the_checkpoint_of_the_run(tmp_path: Path) -> None:
    counting(tmp_path)
    trial = engine(tmp_path, Checkpointer(1), fast_dev_run=2).fit(Counting, ZEROS, resume="auto")
    assert (float(trial.module.weight), steps_in(tmp_path)) == (-7, [3, 4, 5])


@pytest.mark.full
def test_state_older_than_the_newest_checkpoint_is_an_error(tmp_path: Path) -> None:
    """The records of the steps that it takes again would be there twice."""
    first = counting(tmp_path, "jsonl", steps=3)
    trainer = engine(tmp_path, Checkpointer(1), "jsonl", steps=2, log_every=1)
    earlier = first.state.replace(step=first.state.step - 1)
    with pytest.raises(CheckpointError, match=r"newest of step 3.*'never'"):
        trainer.fit(data=ZEROS, state=earlier)
    trainer.fit(data=ZEROS, state=earlier, resume="never")
    assert steps_in(tmp_path) == [3, 4]
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3, 4]
    assert (tmp_path / "superseded" / "2" / "step-3").is_dir()


@pytest.mark.full
def test_a_finished_run_that_starts_again_keeps_its_checkpoint_and_its_reason(
    tmp_path: Path,
) -> None:
    stop = Act(fg.At(3), lambda run: fg.StopTraining("it is good enough"), "decide")

    def fit(**options: Any) -> fg.FitResult:
        return counting(tmp_path, stop, resume="auto", max_to_keep=None, **options)

    assert fit(steps=5).stop_reason == "it is good enough"
    commit = tmp_path / "checkpoints" / "step-3" / "COMMIT"
    before = commit.stat().st_mtime_ns, commit.read_bytes()
    again = fit(steps=5)
    assert again.stop_reason == "it is good enough"
    assert int(again.state.step) == 3
    assert (commit.stat().st_mtime_ns, commit.read_bytes()) == before
    # Asked for more, it continues.
    longer = fit(steps=6)
    assert (longer.stop_reason, int(longer.state.step)) == (None, 6)
