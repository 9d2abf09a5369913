"""A checkpoint whose small files were edited, with hashes that fit: the run resumes from it or from
the one before and ends with the bits and records of an undisturbed run, or says what is wrong."""

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import pytest
from edits import (
    CHECKPOINT_FILES,
    EDITS,
    VALUES,
    Edit,
    Place,
    edit_file,
    set_value,
    update_hashes,
)
from fulgurite.errors import FulguriteError
from fulgurite_averaging import EMA, Average
from fulgurite_checkpoint import Checkpointer
from fulgurite_checkpoint.files import DamagedError
from fulgurite_checkpoint.format import list_entries
from fulgurite_checkpoint.restoring import read_checkpoint
from fulgurite_evaluators import Evaluator
from fulgurite_logging import CSVLogger, JSONLLogger
from fulgurite_stopping import EarlyStopping, SpikeDetection, TimeLimit
from hypothesis import given, settings, strategies as st
from trained import NET, Act, Counting, regression


def train(run: Path, *more: Any, resume: Any = None) -> fg.FitResult:
    plugins = [
        Checkpointer(1, max_to_keep=2, monitor="test/loss", mode="min"),
        Evaluator("test", regression(shuffle=False), every=2),
        EarlyStopping("test/loss", patience=50),
        SpikeDetection(factor=100.0),
        TimeLimit("1h"),
        Average(EMA(0.9)),
        JSONLLogger(),
        CSVLogger(),
        *more,
    ]
    engine = fg.Engine(run_dir=run, steps=5, log_every=1, plugins=plugins, autoload=False)
    return engine.fit(NET, regression(), resume=resume)


def interrupt(run: fg.Run) -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five steps that ended at the fourth one, after the checkpoint of the third one."""
    run = tmp_path_factory.mktemp("edited") / "run"
    with pytest.raises(KeyboardInterrupt):
        train(run, Act(fg.At(4), interrupt))
    return run


def collect_result(run: Path, result: fg.FitResult) -> list[bytes]:
    """Return the bits of a state and the exact records."""
    arrays = [array for array in jax.tree.leaves(result.module) if eqx.is_array(array)]
    records = [(run / name).read_bytes() for name in ("records.jsonl", "records.csv")]
    return [np.asarray(array).tobytes() for array in arrays] + records


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    return collect_result(run, train(run))


def is_known_to_plugin_alone(name: str, place: Place) -> bool:
    """Return whether an edited value is one that no other value of a checkpoint tells."""
    return name == "host-0.json" and place[0] == "host_states"


def forge(checkpoint: Path, name: str, place: Place, new_value: Any) -> None:
    """Put a value into a file of a checkpoint, with hashes that fit."""
    content = json.loads((checkpoint / name).read_text())
    set_value(reduce(getitem, place[:-1], content), place[-1], new_value)
    (checkpoint / name).write_text(json.dumps(content))
    update_hashes(checkpoint)


@pytest.mark.parametrize(
    "num_examples",
    [
        pytest.param(4, marks=pytest.mark.full),
        pytest.param(1_000, marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_from_an_edited_checkpoint_or_says_why_not(
    trained_run: Path, undisturbed: list[bytes], num_examples: int, tmp_path: Path
) -> None:
    run = tmp_path / "run"

    # The few are the same in every run of the suite.
    is_soak = num_examples > 100

    @settings(max_examples=num_examples, deadline=None, database=None, derandomize=not is_soak)
    @given(
        name=st.sampled_from(CHECKPOINT_FILES),
        place=st.integers(0, 10_000),
        edit=st.sampled_from(EDITS),
        new_value=st.sampled_from(VALUES),
    )
    def check(name: str, place: int, edit: Edit, new_value: Any) -> None:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(trained_run, run)
        checkpoint = run / "checkpoints" / "step-3"
        edited_place = edit_file(checkpoint / name, place, edit, new_value)
        print(name, edited_place, edit.__name__, repr(new_value))
        update_hashes(checkpoint)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = train(run, resume="auto")
            except FulguriteError as error:
                assert "checkpoint" in str(error)
                return
        assert np.isfinite(result.metrics["train"]["loss"])
        if is_known_to_plugin_alone(name, edited_place):
            return  # such as the time that was used, of which an hour ends the run
        assert int(result.state.step) == 5
        messages = [*result.messages, *(str(warning.message) for warning in caught)]
        is_reported = any(
            "step-3" in text or "the checkpoint was saved" in text for text in messages
        )
        if not is_reported:
            assert collect_result(run, result) == undisturbed

    check()


@pytest.mark.variants("full")
@pytest.mark.parametrize(
    ("name", "place", "new_value", "reason"),
    [
        ("host-0.json", ("data_position", "batch"), -3, "data_position.batch is -3"),
        ("index.json", ("step_range", "start"), 10**30, "step_range.start is 1000"),
        ("manifest.json", ("settings", "steps"), True, "settings.steps is True"),
        (
            "manifest.json",
            ("plugins", 0),
            {"$array": [1], "dtype": "int8", "shape": [1]},
            "plugins is",
        ),
        ("manifest.json", ("settings",), [1], "settings is [1]"),
        ("history.json", ("records",), 1, "history is 1"),
        ("host-0.json", ("data_position",), None, "data_position is null; it must be that after"),
        ("host-0.json", ("data_position", "epoch"), 5, "data_position is epoch 5, batch 3; after"),
        ("host-0.json", ("data_position", "batch"), 10**6, "must be epoch 0, batch 3"),
        ("host-0.json", ("data_position", "batch"), 2, "must be epoch 0, batch 3"),
        ("index.json", ("step_range", "start"), 2, "step_range.stop is 5 at step 3, where a fit"),
        ("index.json", ("step_range", "stop"), 3, "step_range.stop is 3 at step 3, where a fit"),
        ("index.json", ("step_range", "stop"), 2, "step_range.stop is 2, before step 3"),
        ("index.json", ("step_range", "epoch_ends"), [4], "not later than step 3"),
        ("index.json", ("pending_actions",), ["epoch_end"], "no epoch ends at 3"),
        ("index.json", ("pending_actions",), ["log", "log"], "an action twice"),
        ("index.json", ("weights_only",), True, "weights_only is true, and there are arrays"),
        ("index.json", ("metrics", "test", "loss"), "low", "metrics.test.loss is 'low'"),
        ("COMMIT", ("timings", "train"), 10**400, "timings.train is 1000"),
        ("COMMIT", ("wall_time",), 1e300, "wall_time is 1e+300"),
    ],
)
def test_a_value_that_is_never_written_is_damage_that_names_file_and_field(
    trained_run: Path, tmp_path: Path, name: str, place: Place, new_value: Any, reason: str
) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-3"
    shutil.copytree(trained_run / "checkpoints" / "step-3", checkpoint)
    forge(checkpoint, name, place, new_value)
    (entry,) = list_entries(tmp_path)
    with pytest.raises(DamagedError) as caught:
        read_checkpoint(entry, "full")
    assert str(caught.value).startswith(f"{checkpoint / name} was not written by ")
    assert reason in str(caught.value)


@pytest.mark.parametrize(("setting", "reason"), [("steps", "9 steps"), ("epochs", "epochs is 9")])
def test_a_length_that_does_not_fit_the_range_is_damage(
    trained_run: Path, tmp_path: Path, setting: str, reason: str
) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-3"
    shutil.copytree(trained_run / "checkpoints" / "step-3", checkpoint)
    forge(checkpoint, "manifest.json", ("settings", setting), 9)
    (entry,) = list_entries(tmp_path)
    with pytest.raises(DamagedError, match=reason):
        read_checkpoint(entry, "full")


@pytest.mark.full
def test_the_checkpoint_before_one_of_another_position_is_used(
    trained_run: Path, undisturbed: list[bytes], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    checkpoint = run / "checkpoints" / "step-3"
    forge(checkpoint, "host-0.json", ("data_position", "epoch"), 5)
    message = r"host-0\.json was not written.*data_position is epoch 5.*step 2 is used instead"
    with pytest.warns(UserWarning, match=message):
        result = train(run, resume="auto")
    assert collect_result(run, result) == undisturbed


@pytest.mark.full
def test_a_pending_action_that_was_not_due_is_reported(trained_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    checkpoint = run / "checkpoints" / "step-3"
    pending = ["evaluator:test.evaluate", "nobody.acts"]
    forge(checkpoint, "index.json", ("pending_actions",), pending)
    message = (
        "pending_actions of index.json has evaluator:test.evaluate, which is not due at step 3; "
        "nobody.acts, which no plugin schedules"
    )
    with pytest.warns(UserWarning, match=message):
        train(run, resume="auto")


class Pages:
    """Epochs of these lengths, which nobody knows before, again and again."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths
        self.page = 0
        self.line = 0

    def __iter__(self) -> Iterator[Any]:
        while self.line < self.lengths[self.page % len(self.lengths)]:
            self.line += 1
            yield np.zeros(1, np.float32)
        self.page += 1
        self.line = 0

    def get_state(self) -> Any:
        return [self.page, self.line]

    def set_state(self, state: Any) -> None:
        self.page, self.line = state


@pytest.mark.variants("full")
@pytest.mark.parametrize("promises", [("exact",), ("restart",), ("exact", "restart")])
@pytest.mark.parametrize("lengths", [(2, 4, 1), pytest.param((3, 1, 2), marks=pytest.mark.slow)])
def test_no_checkpoint_of_a_run_is_taken_for_an_edited_one(
    promises: tuple[Any, ...], lengths: tuple[int, ...], tmp_path: Path
) -> None:
    """Epochs that turn out longer or shorter, data that starts over at a resume, more epochs than
    before: everything that is saved is read again. A warning would be an error."""
    steps = []
    for number in range(4):
        data = fg.DataSource(Pages(lengths), resume=promises[number % len(promises)])
        interrupting = Act(fg.At(*range(2 + 2 * number, 99)), interrupt)
        plugins = [Checkpointer(1, max_to_keep=None), interrupting]
        engine = fg.Engine(run_dir=tmp_path, epochs=3 + number, plugins=plugins, autoload=False)
        with suppress(KeyboardInterrupt):
            engine.fit(Counting, data, resume="auto")
        entries = list_entries(tmp_path)
        steps.append(entries[-1].step)
        for entry in entries:
            read_checkpoint(entry, "full")
    assert steps == [1, 3, 5, 7]


@pytest.mark.hook("check_logger_position")
@pytest.mark.full
@pytest.mark.parametrize(
    ("place", "new_value", "reason"),
    [
        (("jsonl", "records.jsonl"), 10**30, "should be lines of that run"),
        (("csv", "records.csv", "rows"), 3, "should hold 8 columns and 3 rows"),
        *(
            pytest.param(*variant, marks=pytest.mark.slow)
            for variant in (
                (("jsonl",), 10**30, "does not tell of records.jsonl"),
                (("jsonl", "records.jsonl"), -1, "which is not a size"),
                (("jsonl", "records.jsonl"), 0, "between None and 1"),
                (("csv", "records.csv", "bytes"), 0, "should hold 8 columns and 4 rows"),
                (("csv", "records.csv", "columns"), [1], r"should hold \[1\] columns and 4 rows"),
            )
        ),
    ],
)
def test_a_position_of_a_logger_that_is_never_written(
    trained_run: Path,
    undisturbed: list[bytes],
    tmp_path: Path,
    place: Place,
    new_value: Any,
    reason: str,
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    checkpoint = run / "checkpoints" / "step-3"
    forge(checkpoint, "COMMIT", ("logger_positions", 0, *place), new_value)
    message = rf"step-3/COMMIT, or what it.*logger_positions\.{place[0]}.*{reason}.*step 2 is used"
    with pytest.warns(UserWarning, match=message):
        result = train(run, resume="auto")
    assert collect_result(run, result) == undisturbed
