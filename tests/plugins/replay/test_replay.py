"""A step of a run is executed again, operation by operation, as it was."""

import shutil
import textwrap
from pathlib import Path
from typing import Any

import fulgurite as fg
import numpy as np
import pytest
from fulgurite.errors import ConfigurationError, NonFiniteError
from fulgurite_checkpoint import Checkpointer
from fulgurite_checkpoint.commands import compare
from fulgurite_cli import build_experiment, load_experiment
from fulgurite_logging import iter_records
from fulgurite_replay import Recorded, Replay, ReplayHint, replay
from fulgurite_replay.commands import bisect, fork as fork_command, replay as replay_command, verify
from fulgurite_testing import TinyModel, tiny_data
from replayed import Jitter

PROGRAM = Path(__file__).parent / "replayed.py"


def build(run_dir: Path, *overrides: str) -> Recorded:
    experiment = build_experiment(load_experiment(str(PROGRAM)), overrides, run_dir=str(run_dir))
    experiment.engine.run_dir = str(run_dir)
    return Recorded(experiment.engine, experiment.model, experiment.data, run_dir)


@pytest.fixture(scope="module")
def failed_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NonFiniteError]:
    """Return a run that ends at step 38, whose batch has a negative weight, and its error."""
    path = tmp_path_factory.mktemp("replay") / "run"
    recorded = build(path)
    with pytest.raises(NonFiniteError) as caught:
        recorded.engine.fit(recorded.model, recorded.data)
    return path, caught.value


@pytest.mark.full
def test_the_error_names_the_command_and_what_to_call(
    failed_run: tuple[Path, NonFiniteError], capsys: pytest.CaptureFixture[str]
) -> None:
    path, error = failed_run
    assert error.step == 38
    (note,) = [note for note in error.__notes__ if "which operation made it" in note]
    command, _, *lines = note.splitlines()
    assert command == f"To see which operation made it: fulgurite replay {path} --step 38"
    # What it says for Python runs as it stands.
    recorded = build(path)
    names = {"engine": recorded.engine, "model": recorded.model, "data": recorded.data}
    exec(textwrap.dedent("\n".join(lines)), names)
    assert "step 38: the loss is not finite" in capsys.readouterr().out


@pytest.mark.full
def test_replay_names_operation_line_numbers_and_example(
    failed_run: tuple[Path, NonFiniteError],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, _ = failed_run
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    out = tmp_path / "batch.npz"
    arguments = [str(path), "--program", str(PROGRAM), "--step", "38", "--out", str(out)]
    assert replay_command(arguments) == 1
    text = capsys.readouterr().out
    lines = PROGRAM.read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "jnp.sqrt" in text)
    expected = [
        "replayed from step 30",
        "step 38: the loss is not finite",
        "NaN made by sqrt in the forward pass",
        f"{PROGRAM}:{line}, in Weighted.training_step",
        "input 0: batch.weight: float32[8] in [-1, ",
        "the first example concerned has the index 5 of 8",
        "the batch is data[37]",
    ]
    positions = [text.index(part) for part in expected]
    assert positions == sorted(positions)
    with np.load(out) as batch:
        assert batch["batch.weight"][5] == -1 and batch["batch.x"].shape == (8, 3)
    assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_look_at_indices_alone_says_nothing_of_numbers(
    failed_run: tuple[Path, NonFiniteError],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, _ = failed_run
    arguments = [str(path), "--program", str(PROGRAM), "--step", "38", "--check", "index"]
    assert replay_command([*arguments, "--out", str(tmp_path / "batch.bin")]) == 0
    head, line, written = capsys.readouterr().out.splitlines()
    assert (head, written) == ("replayed from step 30", f"batch: {tmp_path / 'batch.bin'}")
    assert line == (
        "step 38: no index is outside of an array. The step is not finite: replay it without "
        "--check index"
    )
    with np.load(tmp_path / "batch.bin") as batch:
        assert batch["batch.weight"][5] == -1
    finite = Replay(step=3, start=0, checks_numbers=False)
    assert str(finite).endswith("\nstep 3: no index is outside of an array")


@pytest.mark.parametrize("policy", ["skip", "ignore"])
def test_step_that_the_run_did_not_end_at_is_found_without_its_number(
    tmp_path: Path, policy: str
) -> None:
    data = tiny_data()
    batches = [{name: array[:4].copy() for name, array in data.arrays.items()} for _ in range(8)]
    batches[5]["x"][2] = np.nan

    def make_engine() -> fg.Engine:
        saving = Checkpointer(every=4, max_to_keep=None)
        settings: dict[str, Any] = {"on_nonfinite": policy, "run_dir": str(tmp_path / "run")}
        return fg.Engine(steps=8, log_every=4, autoload=False, plugins=[saving], **settings)

    make_engine().fit(TinyModel, batches)
    shutil.rmtree(tmp_path / "run/checkpoints/step-8")
    result = replay(Recorded(make_engine(), TinyModel, batches, tmp_path / "run"))
    assert (result.start, result.step, result.examination.example) == (4, 6, (2, 4))


@pytest.mark.full
def test_the_replayed_records_are_those_of_the_run(
    failed_run: tuple[Path, NonFiniteError],
) -> None:
    path, _ = failed_run
    result = replay(build(path), 35)
    assert result.examination.is_clean and not result.failed_when_compiled
    assert str(result) == "replayed from step 30\nstep 35 is finite here"
    recorded = [record.values for record in iter_records(path) if record.step == 35]
    assert [record.values for record in result.records] == recorded
    assert "loss" in recorded[0]


def test_the_first_bad_step_is_found_without_its_number(
    failed_run: tuple[Path, NonFiniteError],
) -> None:
    path, _ = failed_run
    result = replay(build(path))
    assert (result.start, result.step) == (30, 38)
    with pytest.raises(ConfigurationError, match="step 38 is not finite already"):
        replay(build(path), 40)
    with pytest.raises(ConfigurationError, match="there is no step 0"):
        replay(build(path), 0)


@pytest.mark.full
def test_a_step_before_the_first_checkpoint_is_replayed_from_the_begin(
    failed_run: tuple[Path, NonFiniteError],
) -> None:
    path, _ = failed_run
    result = replay(build(path), 5)
    assert (result.start, result.step) == (0, 5) and result.examination.is_clean
    recorded = [record.values for record in iter_records(path) if record.step == 5]
    assert [record.values for record in result.records] == recorded


@pytest.mark.full
def test_steps_that_are_not_as_recorded_are_told(failed_run: tuple[Path, NonFiniteError]) -> None:
    path, _ = failed_run
    recorded = build(path)
    recorded.data[32]["y"] += 1  # the batch of step 33
    result = replay(recorded, 35)
    assert result.difference is not None and result.difference.step == 33
    assert "the steps before it are not as recorded (step 33: train/batch_loss is " in str(result)


@pytest.mark.full
def test_run_without_a_checkpointer_is_replayed_from_the_begin(tmp_path: Path) -> None:
    recorded = build(tmp_path / "run")
    plugins = ["jsonl", Jitter(), ReplayHint()]
    engine = fg.Engine(steps=50, run_dir=str(tmp_path / "run"), autoload=False, plugins=plugins)
    with pytest.raises(NonFiniteError):
        engine.fit(recorded.model, recorded.data)
    result = replay(Recorded(engine, recorded.model, recorded.data, tmp_path / "run"))
    assert (result.start, result.step) == (0, 38)
    assert result.examination.culprit is not None


def test_program_without_an_experiment_is_told_what_it_lacks(
    failed_run: tuple[Path, NonFiniteError],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, _ = failed_run
    (tmp_path / PROGRAM.name).write_text("engine = ...")
    monkeypatch.chdir(tmp_path)
    assert replay_command([str(path), "--step", "38"]) == 2
    text = capsys.readouterr().err
    assert "replayed.py defines no function `experiment`" in text
    assert f"print(replay(Recorded(engine, model, data, {str(path)!r}), step=N))" in text


@pytest.mark.full
def test_verify_and_bisect_are_commands(
    failed_run: tuple[Path, NonFiniteError], capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = failed_run
    assert verify([str(path), "20:30", "--program", str(PROGRAM)]) == 0
    # A checkpoint, a digest and ten records.
    assert "steps 21 to 30 are as recorded (1 digest, 1 checkpoint, 10 records)" in (
        capsys.readouterr().out
    )
    assert verify([str(path), "20-30", "--program", str(PROGRAM)]) == 2
    assert "'20-30' are not steps: give A:B" in capsys.readouterr().err
    assert bisect([str(path), str(path)]) == 0
    assert "equal at all 3 steps" in capsys.readouterr().out


@pytest.mark.full
def test_a_fork_continues_from_any_step_with_other_settings(
    failed_run: tuple[Path, NonFiniteError],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, _ = failed_run
    new = tmp_path / "new"
    arguments = [str(path), "is_bad=false", "--step", "35", "--out", str(new)]
    with pytest.warns(UserWarning, match="the argument is_bad was True and is False"):
        assert fork_command([*arguments, "--program", str(PROGRAM)]) == 0
    assert f"{new}: step 50" in capsys.readouterr().out
    # The run without the bad batch, from its beginning.
    whole = build(tmp_path / "whole", "is_bad=false")
    whole.engine.fit(whole.model, whole.data)
    expected = [record.values for record in iter_records(tmp_path / "whole") if record.step > 35]
    assert [record.values for record in iter_records(new) if record.step > 35] == expected
    assert compare([str(path), str(new)]) == 1
    table = capsys.readouterr().out
    assert "origin.step" in table and "is_bad" in table
    other = [str(path), "--step", "36", "--out", str(new), "--program", str(PROGRAM)]
    assert fork_command(other) == 2
    assert "holds a run: give a new directory for the fork" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*may not be exact. data was")
def test_a_fork_without_the_bad_batch_trains_to_the_end(
    failed_run: tuple[Path, NonFiniteError],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, _ = failed_run
    new = tmp_path / "new"
    arguments = [str(path), "--step", "35", "--out", str(new), "--program", str(PROGRAM)]
    assert fork_command([*arguments, "--skip-batch", "38"]) == 0
    assert f"{new}: step 50" in capsys.readouterr().out
    assert compare([str(path), str(new)]) == 1
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "skipped_batches" in line]
    assert row.split()[0] == "origin.skipped_batches" and "38" in row
    assert fork_command([*arguments, "--skip-batch", "30"]) == 2
    assert "fork before it, at step 29" in capsys.readouterr().err
