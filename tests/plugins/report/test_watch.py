"""Runs in the terminal."""

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

import pytest
from fulgurite_report import Run
from fulgurite_report.command import watch
from fulgurite_report.plot import Line, draw
from fulgurite_report.view import View
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
        "run", "state", "step", "steps/s", "left", "time", "goodput", "latest", "best",
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


def test_a_pipe_gets_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    telemetry = [make_telemetry(1, 1e9, {"message": "hello"}, kind="text")]
    run = write_run(tmp_path / "a", records=[("train", 20, {"loss": 0.5})], telemetry=telemetry)
    assert watch([str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step 1  note: hello",
        "step 20/100  train/loss 0.5",
        "complete",
    ]
    assert watch([str(tmp_path / "nowhere")]) == 2
    with pytest.raises(SystemExit):
        watch([str(run), "--every", "0"])


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
def test_q_ends_the_view_of_a_run_that_continues(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", records=[("train", 10, {"loss": 0.5})], state="running")
    with watch_in_terminal(str(run)) as (terminal, process):
        wait_for(terminal, lambda text: "10/100" in text)
        os.write(terminal, b"q")
        assert process.wait(PATIENCE) == 0
