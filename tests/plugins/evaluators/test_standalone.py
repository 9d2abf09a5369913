"""Standalone evaluators: processes that follow a run, and what is left of them in its directory."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fulgurite as fg
import pytest
from evaluated import notes, until
from fulgurite.errors import CheckpointError
from fulgurite_cli import build_experiment, load_experiment, run as train
from fulgurite_cli.command import main as fulgurite
from fulgurite_evaluators import EvaluationRecord, read_results
from fulgurite_runs import RunDirectory

pytestmark = pytest.mark.full

PROGRAM = str(Path(__file__).with_name("program.py"))
EVERY = [10, 20, 30, 40]


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`fulgurite ARGUMENTS` in a process of its own, which does not outlive the block."""
    command = [
        sys.executable,
        "-c",
        "import sys; from fulgurite_cli.command import main; sys.exit(main())",
        *arguments,
    ]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def trainer(run: Path):
    return process("fit", PROGRAM, f"run={run}", "--run", str(run))


def follower(run: Path, group: str = "slow"):
    return process("evaluate", PROGRAM, "--run", str(run), "--group", group)


def ended(running: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and output of a process, once it has ended."""
    output, _ = running.communicate(timeout=240)
    return running.returncode, output


def steps(run: Path, evaluator: str = "slow") -> list[int]:
    """The steps of the results of an evaluator."""
    return [record.step for record in read_results(run) if record.evaluator == evaluator]


def lines(run: Path, group: str = "slow") -> list[dict]:
    """Every line that a group wrote."""
    return [
        json.loads(line)
        for line in (run / "evaluations" / f"{group}.jsonl").read_text().splitlines()
    ]


def close(run: Path, *gates: str) -> None:
    for name in gates:
        (run.parent / name).touch()


def open_gate(run: Path, name: str) -> None:
    (run.parent / name).unlink()


def waits_at(run: Path, name: str) -> None:
    """Waits until a process waits at a gate."""
    until(lambda: f"waits at {name}" in notes(run))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    train(load_experiment(PROGRAM), [f"run={run}", "size=3", "scales=2,5", "--run", str(run)])
    return run


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path) -> Path:
    """A complete run of 40 steps, with a checkpoint every 10."""
    run = Path(shutil.copytree(trained_once, tmp_path / "run"))
    manifest = run / "attempts" / "1"
    manifest.write_text(manifest.read_text().replace(str(trained_once), str(run)))
    return run


def evaluate(run: Path, *arguments: str) -> int:
    """`fulgurite evaluate` in this process."""
    return fulgurite(["evaluate", PROGRAM, "--run", str(run), *arguments])


# --- real processes -------------------------------------------------------------------------------


def test_killed_follower_continues_where_it_stopped(run: Path) -> None:
    close(run, "train-25", "train-40", "slow-20", "slow-40")
    with follower(run) as first, trainer(run) as training:
        waits_at(
            run, "train-25"
        )  # 10 and 20 are saved; the follower begins before the run or after any of them
        waits_at(run, "slow-20")
        first.kill()
    assert set(steps(run)) <= {10}
    with open(run / "evaluations" / "slow.jsonl", "a") as file:
        file.write(
            '{"evaluator": "slow", "step"'
        )  # what a process that is killed while it writes may leave
    open_gate(run, "slow-20")
    with trainer(run) as training, follower(run) as second:
        until(
            lambda: 20 in steps(run)
        )  # before there is a newer one, for which it would be skipped
        open_gate(run, "train-25")
        open_gate(run, "train-40")
        waits_at(run, "slow-40")
        assert second.poll() is None and ended(training)[0] == 0
        assert steps(run, "last") == []  # the run is complete, its last checkpoint is not done
        open_gate(run, "slow-40")
        code, output = ended(second)
        assert code == 0, output
        witnessed = notes(run, second.pid)
    written = [(record["evaluator"], record["step"]) for record in lines(run)]
    assert len(written) == len(set(written)) and {("slow", 20), ("slow", 40), ("last", 40)} <= set(
        written
    )
    assert set(written) <= {("slow", step) for step in EVERY} | {("last", 40)}
    assert re.search(r"^last  step 40  loss -\d+\.\d+  updates \d+", output, re.MULTILINE)
    # No record, no event, no training data.
    assert set(witnessed) <= {
        f"{what} {step}" for what in ("restores", "evaluates slow") for step in EVERY
    } | {
        "waits at slow-40",
        "evaluates last 40",
    }
    # Twice where `slow` began before the run was complete, for which `last` waits.
    assert witnessed.count("restores 40") in (1, 2)


@pytest.mark.slow
def test_follower_survives_a_killed_and_resumed_trainer(run: Path) -> None:
    close(run, "train-25")
    with follower(run) as following:
        with trainer(run) as training:
            waits_at(run, "train-25")
            until(lambda: 20 in steps(run))
            training.kill()
        open_gate(run, "train-25")
        with trainer(run) as training:
            assert ended(training)[0] == 0
        code, output = ended(following)
        assert code == 0, output
    assert "starts" in notes(run) and notes(run).count("starts") == 2
    written = [(record["evaluator"], record["step"]) for record in lines(run)]
    assert len(written) == len(set(written)) and {("slow", 20), ("slow", 40), ("last", 40)} <= set(
        written
    )
    losses = {
        record.step: record.metrics["loss"]
        for record in read_results(run)
        if record.evaluator == "slow"
    }
    assert losses[20] - losses[40] == pytest.approx(20)


# --- which checkpoints ----------------------------------------------------------------------------


def test_complete_run_has_its_last_checkpoint_evaluated_once(trained: Path) -> None:
    assert evaluate(trained, "--group", "slow") == 0
    assert [(record["evaluator"], record["step"]) for record in lines(trained)] == [
        ("slow", 40),
        ("last", 40),
    ]
    first = read_results(trained)
    # A path with an equals sign is a program, too.
    program = trained / "size=1" / "program.py"
    program.parent.mkdir()
    program.symlink_to(PROGRAM)
    command = ["evaluate", str(program), "--run", str(trained), "--group", "slow"]
    assert fulgurite(command) == 0
    assert read_results(trained) == first and len(lines(trained)) == 2
    assert notes(trained).count("restores 40") == 1


def test_new_checkpoint_of_the_same_step_is_evaluated_again_and_supersedes(trained: Path) -> None:
    assert evaluate(trained, "--group", "slow") == 0
    commit = trained / "checkpoints" / "step-40" / "COMMIT"
    commit.write_text(commit.read_text() + "\n")
    assert evaluate(trained, "--group", "slow") == 0
    assert len(lines(trained)) == 4
    newest = read_results(trained)
    assert [(record.evaluator, record.step) for record in newest] == [("last", 40), ("slow", 40)]
    assert (
        {record.commit for record in newest}
        == {lines(trained)[-1]["commit"]}
        != {lines(trained)[0]["commit"]}
    )
    assert all(isinstance(record, EvaluationRecord) for record in newest)


def test_results_of_superseded_checkpoints_are_not_read(trained: Path) -> None:
    assert evaluate(trained, "--group", "slow") == 0
    assert {record.step for record in read_results(trained)} == {40}
    RunDirectory(trained).start_attempt(step=20)
    assert read_results(trained) == [] and len(lines(trained)) == 2
    shutil.copytree(trained / "superseded" / "2" / "step-40", trained / "checkpoints" / "step-40")
    assert {record.step for record in read_results(trained)} == {40}, (
        "training came to the same again"
    )


def test_checkpoint_deleted_during_restore_is_skipped(trained: Path) -> None:
    close(trained, "restore-40")
    with follower(trained) as following:
        waits_at(trained, "restore-40")
        shutil.rmtree(trained / "checkpoints" / "step-40")
        open_gate(trained, "restore-40")
        code, output = ended(following)
    assert code == 0, output
    assert [(record["evaluator"], record["step"]) for record in lines(trained)] == [
        ("slow", 30),
        ("last", 30),
    ]


def test_checkpoint_that_cannot_be_restored_is_reported_and_fails_the_process(
    trained: Path, capsys
) -> None:
    (trained / "checkpoints" / "step-40" / "arrays.npz").write_bytes(b"damaged")
    assert evaluate(trained, "--group", "slow") == 1
    assert "slow, last  step 40  cannot be restored" in capsys.readouterr().out
    assert lines(trained) == []


def test_failing_evaluator_does_not_stop_the_others(trained: Path, capsys) -> None:
    assert evaluate(trained, "--group", "mixed") == 1
    output = capsys.readouterr().out
    assert "broken  step 40  failed:" in output and "ValueError: this evaluator is broken" in output
    assert [(record["evaluator"], record["step"]) for record in lines(trained, "mixed")] == [
        ("sound", 40)
    ]
    assert notes(trained).count("restores 40") == 1


# --- whom it waits for ----------------------------------------------------------------------------


def test_run_that_never_begins_is_an_error(tmp_path: Path, capsys) -> None:
    assert evaluate(tmp_path / "run", "--group", "slow", "--timeout", "0.1") == 1
    assert "no run began in" in (error := capsys.readouterr().err) and "within 0.1 s" in error
    assert not (tmp_path / "run").exists()


def test_trainer_without_heartbeat_is_an_error(trained: Path, capsys) -> None:
    (trained / "COMPLETE").unlink()
    os.utime(trained / "lock", (1, os.stat(trained / "lock").st_mtime - 100))
    assert evaluate(trained, "--group", "slow", "--idle-timeout", "50") == 1
    assert "is not complete, and its trainer (attempt 1, process" in capsys.readouterr().err
    assert [(record["evaluator"], record["step"]) for record in lines(trained)] == [("slow", 40)]


def test_one_process_for_each_group(trained: Path, capsys) -> None:
    close(trained, "slow-40")
    with follower(trained) as following:
        waits_at(trained, "slow-40")
        assert evaluate(trained, "--group", "slow") == 1
        assert f"is in use by attempt 1, process {following.pid}" in capsys.readouterr().err
        assert evaluate(trained, "--group", "mixed") == 1  # another one, whose evaluator is broken
        following.send_signal(signal.SIGKILL)
        following.wait()
    open_gate(trained, "slow-40")
    assert evaluate(trained, "--group", "slow") == 0


def test_results_that_cannot_be_written_are_an_error(trained: Path, capsys) -> None:
    (trained / "evaluations").mkdir()
    (trained / "evaluations" / "slow.jsonl").symlink_to(trained / "elsewhere")
    assert evaluate(trained, "--group", "slow") == 1
    assert "error: the results of group 'slow' cannot be kept in" in capsys.readouterr().err
    assert not (trained / "elsewhere").exists()


def test_unknown_group_is_an_error(trained: Path, capsys) -> None:
    assert evaluate(trained, "--group", "slwo") == 2
    assert "no evaluator is in the group 'slwo'. Did you mean 'slow'?" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--json"], ["--output", "elsewhere"]])
def test_what_is_of_one_checkpoint_is_refused_for_a_group(
    trained: Path, option: list[str], capsys
) -> None:
    with pytest.raises(SystemExit):
        evaluate(trained, "--group", "slow", *option)
    assert f"{option[0]} is for a checkpoint" in capsys.readouterr().err


# --- one checkpoint, once -------------------------------------------------------------------------


def test_checkpoint_by_step_uses_the_arguments_of_the_run(trained: Path, capsys) -> None:
    before = sorted(path for path in trained.rglob("*"))
    experiment = build_experiment(
        load_experiment(PROGRAM), [f"run={trained}", "size=3", "scales=2,5"]
    )
    for step, number in (("latest", 40), ("best", 10), ("30", 30)):
        assert evaluate(trained, "--step", step, "--json") == (
            number > 10
        )  # `broken` fails, and stops nothing else
        output = capsys.readouterr()
        assert ("this evaluator is broken" in output.err) == (number > 10)
        results = {
            record.pop("evaluator"): record for record in map(json.loads, output.out.splitlines())
        }
        assert set(results) == {"slow", "last", "sound", "along"} | (
            {"broken"} if number == 10 else set()
        )
        assert results["slow"]["step"] == number and results["slow"]["metrics"]["scale"] == 2
        weights = fg.CheckpointRef(trained, number)
        along = experiment.engine.evaluate(
            experiment.model, experiment.engine.evaluations["along"].data, weights=weights
        )
        assert along == results["along"]["metrics"]
    assert sorted(path for path in trained.rglob("*")) == before
    assert evaluate(trained, "--step", "latest", "size=4") == 2
    assert (
        "size=4 differs from what the run was started with, size=3: leave it out"
        in capsys.readouterr().err
    )
    assert evaluate(trained, "--step", "best", "size=3", "scales=2,5") == 0


EVALUATION_PROGRAM = """
import fulgurite as fg
from evaluated import Disk, numbers
from fulgurite_cli import Experiment
from fulgurite_evaluators import Evaluator
from fulgurite_logging import JSONLLogger
from program import Drawing


def experiment(size: int = 1) -> Experiment:
    plugins = [Disk(10), Evaluator("other", numbers([0], [0])), JSONLLogger()]
    return Experiment(fg.Engine(plugins=plugins, autoload=False), lambda key: Drawing(size, key=key))
"""


def test_program_that_only_evaluates_has_a_directory_and_loggers_of_its_own_K5(
    trained: Path, tmp_path: Path, capsys
) -> None:
    program, output = tmp_path / "evaluation.py", tmp_path / "output"
    program.write_text(EVALUATION_PROGRAM)
    arguments = ["evaluate", str(program), "--run", str(trained), "--output", str(output)]
    before = sorted(path for path in trained.rglob("*"))
    for step in (20, 30):  # the second evaluation supersedes the first
        # The run has an argument `scales`, which this program does not have.
        assert fulgurite([*arguments, "--step", str(step)]) == 0, capsys.readouterr().err
        (line,) = (output / "records.jsonl").read_text().splitlines()
        record = json.loads(line)
        assert (record["source"], record["step"]) == ("other", step)
        assert f"other  step {step}  loss {record['values']['loss']:.6g}" in capsys.readouterr().out
    directory = RunDirectory(output)
    assert directory.is_complete and directory.num_attempts == 2
    assert directory.read_manifest()["evaluates"] == {"run": str(trained), "step": 30}
    assert sorted(path for path in trained.rglob("*")) == before

    assert fulgurite([*arguments[:-1], str(trained)]) == 1
    assert "is the directory of a training run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train(load_experiment(str(program)), [])
    assert "has no data to train on" in capsys.readouterr().err


def test_missing_checkpoint_is_an_error(trained: Path, tmp_path: Path, capsys) -> None:
    assert evaluate(tmp_path / "nothing", "--step", "best") == 1
    assert (
        capsys.readouterr().err
        == f"error: there is no run in {tmp_path / 'nothing'}: check the path\n"
    )
    experiment = build_experiment(load_experiment(PROGRAM), [f"run={trained}"])
    with pytest.raises(CheckpointError, match="found no checkpoint for"):
        experiment.engine.evaluate(experiment.model, [], weights=fg.CheckpointRef(tmp_path))
