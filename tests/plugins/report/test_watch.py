"""Runs in the terminal."""

import math
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import resolve_mode
from fulgurite_report import ReportError, Run
from fulgurite_report.command import watch
from fulgurite_report.curves import Curve
from fulgurite_report.growing import GrowingCurve
from fulgurite_report.lines_of_runs import LinePrinter
from fulgurite_report.modes import HIGHER_IS_BETTER, LOWER_IS_BETTER, find_mode
from fulgurite_report.plot import Line, draw
from fulgurite_report.view import View
from fulgurite_report.watching import WatchedRuns
from rich.console import Console, ConsoleDimensions
from run_files import make_manifest, make_telemetry, write_run

PATIENCE = 60.0


def render(view: View) -> list[str]:
    console = Console(width=100, height=24, record=True, file=StringIO())
    console.print(view.build(ConsoleDimensions(100, 24)))
    return [line.rstrip() for line in console.export_text().splitlines()]


def read(path: Path) -> Run:
    run = Run(path)
    run.refresh()
    return run


def test_two_points_are_a_diagonal_of_dots() -> None:
    lines = draw([Line([0, 10], [0.0, 1.0], "red")], 15, 2).plain.splitlines()
    assert lines == ["         1 ⠀⠀⡠⠊", "         0 ⡠⠊⠀⠀", "           0 10"]


def test_what_cannot_be_drawn_is_left_out() -> None:
    assert draw([Line([1], [float("nan")], "red")], 20, 2).plain == "no number that can be drawn"
    lines = [Line([0, 1, 2], [-1.0, 0.01, 100.0], "red")]
    text = draw(lines, 20, 3, log=True).plain.splitlines()
    assert [line[:10].strip() for line in text[:3]] == ["100", "1", "0.01"]


def test_the_view_has_steps_rates_best_values_and_messages(tmp_path: Path) -> None:
    telemetry = [
        make_telemetry(50, 1e9, {"steps_per_second": 4.0}),
        make_telemetry(50, 1e9, {"message": "a\nb\x1b[2J"}, kind="text"),
        make_telemetry(50, 1e9, {"goodput": 0.75}) | {"source": "goodput"},
    ]
    records = [("test", step, {"loss": 1 / step, "accuracy": 0.5}) for step in (25, 50)]
    first = write_run(tmp_path / "a", records=records, telemetry=telemetry, state="running")
    second = write_run(tmp_path / "b", records=[("test", 9, {"loss": 3.0})], state="killed")
    view = View([read(first), read(second)])
    lines = render(view)
    assert lines[0].split() == [
        "run", "state", "step", "steps/s", "left", "run", "time", "goodput", "latest", "best",
    ]  # fmt: skip
    assert "running  50/100        4  12.5 s" in lines[1]
    assert "75.0%" in lines[1]
    assert lines[1].endswith("0.02  0.02 at 50")
    assert lines[2].split() == ["b", "killed", "9/100", "3", "3", "at", "9"]
    assert "test/loss" in lines
    assert "a step 50: a b\\u001b[2J" in lines
    view.press("\t")
    assert "test/accuracy" in render(view)
    view.press("l")
    assert "test/accuracy, logarithmic" in render(view)


@pytest.mark.parametrize(
    ("metric", "best"),
    [
        ("test/f1", "0.75 at 200"),
        ("test/top_5_accuracy", "0.75 at 200"),
        ("test/mse", "0.25 at 100"),
        ("test/temperature", ""),  # who knows?
    ],
)
def test_the_best_value_is_the_larger_or_smaller_one_as_the_name_says(
    tmp_path: Path, metric: str, best: str
) -> None:
    name = metric.removeprefix("test/")
    values = {100: 0.25, 200: 0.75, 300: 0.5}
    records = [("test", step, {name: value}) for step, value in values.items()]
    run = read(write_run(tmp_path, records=records))
    header, row = render(View([run], metric))[:2]
    assert row[header.index("latest") + len("latest") :].strip() == best


@pytest.mark.parametrize("words", [LOWER_IS_BETTER, HIGHER_IS_BETTER], ids=["min", "max"])
def test_names_of_metrics_say_here_what_they_say_where_checkpoints_are_chosen(
    words: set[str],
) -> None:
    for word in words:
        name = f"test/{word}_at_5"
        assert find_mode(name) == resolve_mode(name, None, "a test")
        # Neither can tell of the opposite of a metric, such as that of scikit-learn.
        assert find_mode(f"test/neg_{word}") is None
        with pytest.raises(ConfigurationError, match="cannot be inferred"):
            resolve_mode(f"test/neg_{word}", None, "a test")


def test_a_pipe_gets_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    telemetry = [make_telemetry(1, 1e9, {"message": "hello"}, kind="text")]
    run = write_run(tmp_path / "a", records=[("train", 20, {"loss": 0.5})], telemetry=telemetry)
    assert watch([str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step 1  note: hello",
        "step 20/100  train/loss 0.5",
        "complete",
    ]
    assert watch([str(run), "--metric", "test/other"]) == 0
    (tmp_path / "file").touch()
    assert watch([str(tmp_path / "file")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        watch([str(run), "--every", "0"])


def test_what_is_not_there_is_waited_for_and_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep").mkdir()
    watched = WatchedRuns([tmp_path / "a", tmp_path / "sweep"])
    printer = LinePrinter()
    for _ in range(2):
        watched.refresh()
        printer.print_new(watched.runs, watched.waiting)
        assert not watched.is_over()
    assert capsys.readouterr().out.splitlines() == [
        f"waiting for {tmp_path / 'a'}, which is not there yet",
        f"waiting for a run in {tmp_path / 'sweep'}",
    ]
    write_run(tmp_path / "a", records=[("train", 10, {"loss": 0.5})])
    write_run(tmp_path / "sweep" / "lr=1", records=[("train", 20, {"loss": 0.25})], state="running")
    watched.refresh()
    printer.print_new(watched.runs, watched.waiting)
    assert capsys.readouterr().out.splitlines() == [
        "a  step 10/100  train/loss 0.5",
        "a  complete",
        "lr=1  step 20/100  train/loss 0.25",
        "lr=1  running",
    ]
    assert not watched.is_over()
    # The next run of the folder may be starting, where all of them have ended.
    write_run(tmp_path / "sweep" / "lr=1")
    watched.refresh()
    assert not watched.waiting and not watched.is_over()
    write_run(tmp_path / "sweep" / "lr=0", records=[("train", 5, {"loss": 2.0})])
    watched.refresh()
    assert [run.name for run in watched.runs] == ["a", "lr=0", "lr=1"]


def test_runs_that_have_all_ended_are_not_waited_for(tmp_path: Path) -> None:
    write_run(tmp_path / "sweep" / "lr=1")
    for path in (tmp_path / "sweep", tmp_path / "sweep" / "lr=1"):
        watched = WatchedRuns([path])
        watched.refresh()
        assert watched.is_over()


def test_the_view_waits_for_the_metric_that_it_was_asked_for(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "run", state="running"))
    view = View([run], "test/loss")
    assert "no metric test/loss yet" in render(view)
    write_run(tmp_path / "run", records=[("train", 1, {"loss": 1.0}), ("test", 1, {"loss": 2.0})])
    run.refresh()
    assert "test/loss" in render(view)
    with pytest.raises(ReportError, match="no run has a metric test/other; there are test/loss"):
        View([run], "test/other")


def test_of_many_runs_those_that_run_are_in_the_table(tmp_path: Path) -> None:
    runs = [
        read(write_run(tmp_path / f"r{number}", state="running" if number == 99 else "killed"))
        for number in range(100)
    ]
    lines = render(View(runs))
    assert [line.split()[0] for line in lines[1:14]] == [
        *(f"r{n}" for n in range(11)),
        "r99",
        "and",
    ]
    assert "and 88 more" in lines


def test_a_curve_that_grows_has_its_best_value_and_its_extremes() -> None:
    values = np.random.default_rng(0).normal(size=5000).tolist()
    values[3210] = -9.0
    values[17] = math.nan
    curve = Curve("exact")
    growing = GrowingCurve(curve)
    for step, value in enumerate(values):
        curve.add(step, value)
        if step % 7 == 0:
            steps, points = growing.get_points(100)
            assert len(steps) <= 300
            assert (steps[0], steps[-1], points[-1]) == (0, step, value) or step == 17
            finite = [value for value in values[: step + 1] if not math.isnan(value)]
            for mode, choose in (("min", min), ("max", max)):
                best = choose(finite)
                assert growing.find_best(mode) == (values.index(best), best)
    steps, points = growing.get_points(100)
    assert points[steps.index(3210)] == -9.0
    # A second attempt continues from step 3000, before the smallest value.
    curve.add(3000, 0.5)
    assert growing.get_points(100)[0][-1] == 3000
    assert growing.find_best("min") == (
        values.index(min(values[:17] + values[18:3000])),
        min(values[:17] + values[18:3000]),
    )


@contextmanager
def watch_in_terminal(*arguments: str) -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    """Yield a terminal in which runs are watched, and the process."""
    ours, theirs = pty.openpty()
    code = "import sys; from fulgurite_report.command import watch; sys.exit(watch(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--every", "0.1"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
    )
    os.close(theirs)
    try:
        yield ours, process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def wait_for(terminal: int, is_there: Callable[[str], bool]) -> None:
    """Wait until what a terminal has shown is as it should be."""
    shown = b""
    deadline = time.monotonic() + PATIENCE
    while not is_there(shown.decode(errors="replace")):
        assert time.monotonic() < deadline, shown.decode(errors="replace")
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                shown += os.read(terminal, 1 << 16)
            except OSError:  # the process has ended
                time.sleep(0.05)


@pytest.mark.full
def test_a_terminal_shows_what_is_new_until_the_run_ends(tmp_path: Path) -> None:
    records = [("train", 10, {"loss": 0.5, "accuracy": 0.25})]
    run = write_run(tmp_path / "a", records=records, state="running")
    with watch_in_terminal(str(run)) as (terminal, process):
        wait_for(terminal, lambda text: "10/100" in text and "train/loss" in text)
        write_run(run, records=[("train", 20, {"loss": 0.125})], state="running")
        wait_for(terminal, lambda text: "20/100" in text and "0.125" in text)
        os.write(terminal, b"\t")
        wait_for(terminal, lambda text: "train/accuracy" in text)
        write_run(run, manifest=make_manifest(), state="complete")
        wait_for(terminal, lambda text: "complete" in text)
        assert process.wait(PATIENCE) == 0


@pytest.mark.full
def test_q_ends_the_view_of_a_run_that_begins_later_and_continues(tmp_path: Path) -> None:
    with watch_in_terminal(str(tmp_path / "a")) as (terminal, process):
        wait_for(terminal, lambda text: "waiting for" in text)
        write_run(tmp_path / "a", records=[("train", 10, {"loss": 0.5})], state="running")
        wait_for(terminal, lambda text: "10/100" in text)
        os.write(terminal, b"q")
        assert process.wait(PATIENCE) == 0
