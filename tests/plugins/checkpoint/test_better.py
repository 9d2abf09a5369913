"""The best checkpoint by a comparison of the program's own."""

import shutil
from functools import reduce
from pathlib import Path
from typing import Any

import fulgurite as fg
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite_checkpoint import Checkpointer, load
from fulgurite_checkpoint.format import list_entries
from fulgurite_checkpoint.listing import list_checkpoints, list_runs
from trained import Act, Counting, Killed, Scores, counting, kill, steps_in

NAN = float("nan")
SCORES = (10.0, 9.5, 8.8, NAN, 8.6, 7.5, 7.4)


def is_smaller_by_one(metrics: Any, best: Any) -> bool:
    """Not transitive: 8.8 is better than 10.0, and not better than 9.5, which is not better than
    10.0."""
    return metrics["test"]["score"] < best["test"]["score"] - 1


def choose_by_hand(scores: tuple[float, ...]) -> list[int]:
    """The step of the best checkpoint after each step, where all are compared in their order."""

    def choose(best: list[int], step: int) -> list[int]:
        previous = best[-1] if best else None
        if previous is None:
            return [step]
        return [*best, step if scores[step - 1] < scores[previous - 1] - 1 else previous]

    return reduce(choose, range(1, len(scores) + 1), [])


def train(run: Path, scores: tuple[float, ...], *plugins: Any, **options: Any) -> fg.FitResult:
    options = {"monitor": "test/score", "better": is_smaller_by_one, "max_to_keep": 2, **options}
    steps = options.pop("steps", len(scores))
    return counting(run, Scores(scores), *plugins, steps=steps, **options)


def load_best_step(run: Path) -> int:
    return -int(load(run, step="best", model=Counting()).weight)


@pytest.mark.full
def test_each_checkpoint_records_the_best_by_a_comparison_of_all_before(tmp_path: Path) -> None:
    result = train(tmp_path, SCORES, keep_period=1)
    commits = [entry.commit for entry in list_entries(tmp_path)]
    assert [commit and commit.best for commit in commits] == choose_by_hand(SCORES)
    assert {commit and commit.better for commit in commits} == {"is_smaller_by_one"}
    message = "the best checkpoint is that with the best metrics by is_smaller_by_one"
    assert any(message in str(entry) for entry in result.messages)


@pytest.mark.full
def test_the_best_is_exact_though_others_were_removed_and_the_run_was_killed(
    tmp_path: Path,
) -> None:
    killed = tmp_path / "killed"
    with pytest.raises(Killed):
        train(killed, SCORES, Act(fg.At(4), kill), on_exception=False)
    # Compared among themselves, 9.5 would be the best of those that are left.
    assert steps_in(killed) == [2, 3] and load_best_step(killed) == choose_by_hand(SCORES)[2] == 3
    # With the scores from the fourth step on.
    with pytest.warns(UserWarning, match="scores was"):
        train(killed, SCORES[3:], steps=5, resume="auto")
    assert steps_in(killed) == [3, 4, 5] and load_best_step(killed) == choose_by_hand(SCORES)[4]
    with pytest.warns(UserWarning, match="scores was"):
        train(killed, SCORES[5:], steps=7, resume="auto")
    train(tmp_path / "whole", SCORES)
    for run in (killed, tmp_path / "whole"):
        assert steps_in(run) == [6, 7] and load_best_step(run) == choose_by_hand(SCORES)[-1] == 6
    # Commands read what is recorded, and call nothing.
    marks = {row.step: row.marks for row in list_checkpoints(str(killed))}
    assert marks == {6: ("best",), 7: ("latest",)}
    (row,) = list_runs(killed)
    assert row.best == ("test/score", 7.5, 6, "is_smaller_by_one")


@pytest.mark.full
def test_another_comparison_begins_with_all_checkpoints_that_are_left(tmp_path: Path) -> None:
    def is_larger(metrics: Any, best: Any) -> bool:
        return metrics["test"]["score"] > best["test"]["score"]

    train(tmp_path, (3.0, 5.0, 4.0), max_to_keep=3)
    assert load_best_step(tmp_path) == 1
    with pytest.warns(UserWarning, match="scores was"):
        train(tmp_path, (4.5,), steps=4, better=is_larger, resume="auto", max_to_keep=1)
    assert steps_in(tmp_path) == [2, 4] and load_best_step(tmp_path) == 2
    # A mode compares the values of those that are there.
    with pytest.warns(UserWarning, match="scores was"):
        train(tmp_path, (6.0,), steps=5, better=None, mode="min", resume="auto", max_to_keep=1)
    assert steps_in(tmp_path) == [4, 5] and load_best_step(tmp_path) == 4


@pytest.mark.full
def test_a_best_checkpoint_that_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    train(tmp_path, (3.0, 5.0, 4.0))
    shutil.rmtree(tmp_path / "checkpoints" / "step-1")
    with pytest.raises(CheckpointError, match="is that of step 1, which is gone: put it back"):
        load_best_step(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "min"}, "better replaces mode='min'"),
        ({"monitor": None}, "name it, such as monitor='test/loss'"),
        ({"better": 3}, "Checkpointer: better"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(
    options: dict[str, Any], message: str
) -> None:
    arguments = {"every": 1, "monitor": "test/score", "better": is_smaller_by_one, **options}
    with pytest.raises(ConfigurationError, match=message):
        Checkpointer(**arguments)


def test_a_comparison_that_cannot_be_one_is_refused_at_the_first_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="step 1 are better than themselves: compare by >"):
        train(tmp_path / "equal", (1.0, 2.0), better=lambda metrics, best: metrics == best)
    with pytest.raises(TypeError) as caught:
        train(tmp_path / "values", (1.0, 2.0), better=lambda value, best: value < best)
    notes = " ".join(caught.value.__notes__)
    assert "gets the metrics of two checkpoints, such as 'score' in metrics['test']" in notes


@pytest.mark.full
@pytest.mark.parametrize("every", [7, 20])
def test_the_end_tells_once_how_many_evaluations_the_best_is_chosen_from(
    tmp_path: Path, every: int
) -> None:
    """Of those at 15, 30, 45 and 60, the last alone is at a saved step; with 20 the last step is
    saved by the trigger and at the end."""
    options: dict[str, Any] = {"every": every, "monitor": "test/score", "mode": "max"}
    scores = (0.9, 0.5, 0.3, 0.1)
    result = counting(tmp_path / "apart", Scores(scores, 15), steps=60, **options)
    (message,) = [message for message in result.messages if "evaluations of" in message]
    assert message.startswith("1 of 4 evaluations of test/score were at a saved step")
    options["every"] = 5
    result = counting(tmp_path / "together", Scores(scores, 15), steps=60, **options)
    assert not any("evaluations of" in message for message in result.messages)
