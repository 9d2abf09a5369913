"""All loggers at once, killed and resumed: what is read back from each is the same, each step
once."""

import csv
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fulgurite_runs.json_codec import loads
from fulgurite_tensorboard import read_events
from fulgurite_wandb import read_run

pytestmark = pytest.mark.full

PROGRAM = Path(__file__).with_name("loggers_program.py")
Scalars = list[tuple[int, str, float]]


def run(folder: Path, kill: int = 0) -> None:
    ran = subprocess.run(
        [sys.executable, PROGRAM, folder, str(kill)], capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == (-signal.SIGKILL if kill else 0), ran.stderr
    assert "gets no more records" not in ran.stderr, ran.stderr  # of a logger that failed


def jsonl(folder: Path) -> Scalars:
    records = [loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return [
        (record["step"], f"{record['source']}/{name}", value)
        for record in records
        if record["kind"] == "scalars"
        for name, value in record["values"].items()
    ]


def table(folder: Path) -> Scalars:
    with open(folder / "records.csv", newline="") as file:
        return [
            (int(row["step"]), name, float(cell))
            for row in csv.DictReader(file)
            for name, cell in row.items()
            if name != "step" and cell
        ]


def tensorboard(folder: Path) -> Scalars:
    return [
        (event.step, f"{split}/{value.tag}", value.simple_value)
        for split in ("train", "test")
        for file in sorted((folder / "tensorboard" / split).glob("*tfevents*"))
        for _, event in read_events(file)
        for value in event.summary.value
    ]


def wandb(folder: Path) -> Scalars:
    return [
        (record.history.step.num, item.key or "/".join(item.nested_key), loads(item.value_json))
        for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"))
        for record in read_run(file)
        if record.HasField("history")
        for item in record.history.item
        if not (item.key or item.nested_key[0]).startswith("_")
    ]


def exact(scalars: Scalars) -> list[tuple[int, str]]:
    """Steps and names without telemetry, sorted; one that is there twice is there twice."""
    return sorted(
        (step, name) for step, name, _ in scalars if not name.endswith("steps_per_second")
    )


@pytest.mark.slow
@pytest.mark.parametrize("kills", [pytest.param((), marks=pytest.mark.slow), (13, 28)])
def test_every_logger_holds_each_step_once(kills: tuple[int, ...], tmp_path: Path):
    for kill in (*kills, 0):
        run(tmp_path, kill)
    tables = {
        "jsonl": jsonl(tmp_path),
        "csv": table(tmp_path),
        "tensorboard": tensorboard(tmp_path),
    }
    tables["wandb"] = wandb(tmp_path)
    expected = exact(tables["jsonl"])
    logged = sorted({*range(3, 41, 3), 40})
    assert [step for step, name in expected if name == "train/loss"] == logged
    assert [step for step, name in expected if name == "test/loss"] == [8, 16, 24, 32, 40]
    for logger, scalars in tables.items():
        assert exact(scalars) == expected, logger
        values = {(step, name): value for step, name, value in scalars}
        for step, name, value in tables["jsonl"]:
            assert values[step, name] == pytest.approx(value, rel=1e-6), (logger, step, name)
