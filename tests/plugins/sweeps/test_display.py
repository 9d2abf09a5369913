"""What a sweep shows while it runs."""

import io
import json
import math
from pathlib import Path

import pytest
from fulgurite_runs import dumps
from fulgurite_sweeps import Sweep, describe_sweep
from fulgurite_sweeps.display import View, choose_trials, show_sweep
from fulgurite_sweeps.journal import SweepDirectory
from fulgurite_sweeps.progress import read_progress
from fulgurite_sweeps.status import read_standing
from instant_executor import PROGRAM, InstantExecutor, compute_quadratic
from optuna.distributions import CategoricalDistribution
from rich.console import Console


def run_grid(folder: Path, *rates: float) -> SweepDirectory:
    sweep = Sweep(folder, PROGRAM, {"lr": list(rates)}, ["test/loss"])
    executor = InstantExecutor(
        lambda arguments: 3 if arguments["lr"] == "0.3" else compute_quadratic(arguments)
    )
    sweep.run(sampler="grid", executor=executor, tell=lambda _: None)
    return SweepDirectory(folder)


def test_a_terminal_shows_a_table_of_the_trials(tmp_path: Path) -> None:
    directory = run_grid(tmp_path, 0.1, 0.5, 0.3)
    console = Console(file=io.StringIO(), width=120, height=20, force_terminal=False)
    console.print(View(directory, console).build())
    assert isinstance(console.file, io.StringIO)
    title, header, *rows = console.file.getvalue().splitlines()
    assert title.startswith(f"{tmp_path}: 2 complete, 1 fail, 0:0")
    assert header.split() == ["trial", "state", "step", "lr", "test/loss"]
    assert [row.split() for row in rows] == [
        ["trial-0", "complete", "8", "0.1", f"{4.5 * 0.9**16:.6g}"],
        ["trial-1", "complete", "8", "0.5", f"{4.5 * 0.5**16:.6g}"],
        ["trial-2", "fail", "-", "0.3", "-"],
    ]


def test_where_there_is_no_room_the_best_and_the_newest_are_shown(tmp_path: Path) -> None:
    directory = run_grid(tmp_path, 0.1, 0.5, 0.2, 0.4, 0.3)
    standing = read_standing(directory, directory.load())
    assert [trial.number for trial in choose_trials(standing, 3)] == [1, 3, 4]


def test_the_status_of_a_trial_that_was_cut_off_says_how_far_it_is(tmp_path: Path) -> None:
    """By the end of its records."""
    records = [
        {"kind": "scalars", "source": "test", "step": 2, "values": {"loss": 2.0}},
        {"kind": "scalars", "source": "test", "step": 4, "values": {"loss": 1.0}},
        {"kind": "text", "source": "test", "step": 5, "values": {"message": "loss"}},
        {"kind": "scalars", "source": "train", "step": 6, "values": {"loss": 0.5}},
    ]
    directory = run_grid(tmp_path, 0.1)
    for _ in range(2):  # the second has no records
        directory.load().study.ask({"lr": CategoricalDistribution(["0.1"])})
    path = tmp_path / "trial-1" / "records.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"kind": "sc')
    rows = [line.split() for line in describe_sweep(tmp_path).splitlines()[3:5]]
    assert rows == [
        ["trial-1", "stopped", "6", "0.1", "1"],
        ["trial-2", "stopped", "-", "0.1", "-"],
    ]


def test_a_loss_that_diverged_is_the_newest_value_and_integers_are_values(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records = [
        {"step": 1, "source": "test", "values": {"loss": 1.0, "errors": 3}},
        {"step": 2, "source": "test", "values": {"loss": math.nan}},
    ]
    path.write_text("".join(f"{dumps(record)}\n" for record in records))
    step, values = read_progress(path, {"test/loss", "test/errors"})
    assert step == 2 and math.isnan(values["test/loss"]) and values["test/errors"] == 3


def test_a_pipe_gets_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run_grid(tmp_path, 0.1)
    long = "trial-0 has ended: " + "test/loss=0.834 " * 20
    with show_sweep(directory) as tell:
        tell(long)
        tell("a\x1bb")
    assert capsys.readouterr().out.splitlines() == [long, "a\\u001bb"]
