"""Standalone evaluators and all loggers: each evaluation is once in each of them (K3)."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from fulgurite_evaluators import read_results
from fulgurite_runs.json_codec import loads
from fulgurite_tensorboard import read_events
from fulgurite_wandb import read_run

pytestmark = pytest.mark.full

PROGRAM = Path(__file__).with_name("standalone_program.py")
COMMAND = (
    sys.executable,
    "-c",
    "import sys; from fulgurite_cli.command import main; sys.exit(main())",
)


def start(command: str, run: Path, *arguments: str, kill: str = "") -> subprocess.Popen[bytes]:
    # Not a pipe, which wandb's own process would hold open after a kill.
    with open(run.with_suffix(f".{command}"), "w") as output:
        return subprocess.Popen(
            [*COMMAND, command, str(PROGRAM), "--run", str(run), *arguments],
            env={**os.environ, "KILL_EVALUATION": kill},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def evaluate(run: Path, kills: Sequence[str]) -> None:
    """Run the evaluating process, killed at each of these places and started again."""
    for kill in (*kills, ""):
        process = start("evaluate", run, "--group", "side", "--timeout", "60", kill=kill)
        try:
            code = process.wait(120)
        finally:
            process.kill()
        assert code == (-signal.SIGKILL if kill else 0), run.with_suffix(".evaluate").read_text()


@pytest.mark.slow
def test_each_evaluation_is_once_in_every_logger_though_the_process_is_killed_K3(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    training = start("fit", run)
    try:
        evaluate(run, ["logged 10", "evaluating 20", "logged 30"])
        assert training.wait(60) == 0, run.with_suffix(".fit").read_text()
    finally:
        training.kill()

    results = {(record.evaluator, record.step): record.metrics for record in read_results(run)}
    assert list(results) == [("last", 40), *[("slow", step) for step in (10, 20, 30, 40)]]
    expected = sorted(
        (step, f"{evaluator}/{name}", value)
        for (evaluator, step), metrics in results.items()
        for name, value in metrics.items()
    )
    folder = run / "evaluations" / "side"
    for logged in (read_jsonl(folder), read_tensorboard(folder), read_wandb(folder)):
        assert [entry[:2] for entry in sorted(logged)] == [entry[:2] for entry in expected]
        for entry, (_, _, value) in zip(sorted(logged), expected, strict=True):
            assert entry[2] == pytest.approx(value, rel=1e-6)
    lines = (folder / "records.csv").read_text().splitlines()
    assert [int(line.partition(",")[0]) for line in lines[1:]] == [10, 20, 30, 40, 40]
    # What training logs is in its own files, without the evaluations.
    assert {source for _, source, _ in read_jsonl(run)} == {"train/loss", "train/norm"}


def read_jsonl(folder: Path) -> list[tuple[int, str, float]]:
    records = [loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return [
        (record["step"], f"{record['source']}/{name}", value)
        for record in records
        if record["kind"] == "scalars"
        for name, value in record["values"].items()
        if name not in ("batch_loss", "loss_average")
    ]


def read_tensorboard(folder: Path) -> list[tuple[int, str, float]]:
    return [
        (event.step, f"{split}/{value.tag}", value.simple_value)
        for split in ("slow", "last")
        for file in sorted((folder / "tensorboard" / split).glob("*tfevents*"))
        for _, event in read_events(file)
        for value in event.summary.value
        if value.HasField("simple_value")
    ]


def read_wandb(folder: Path) -> list[tuple[int, str, float]]:
    scalars = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in read_run(file):
            if record.HasField("run"):
                assert (record.run.run_group, record.run.job_type) == ("run", "evaluation")
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if name.startswith(("slow/", "last/")) and not name.endswith("weight"):
                    scalars.append((record.history.step.num, name, loads(item.value_json)))
    return scalars
