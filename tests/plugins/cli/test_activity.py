"""What a user who waits is told before a fit begins."""

import os
import re
import subprocess
import sys
import threading
from io import StringIO
from pathlib import Path

import pytest
from fulgurite_cli import activity
from fulgurite_cli.activity import show_activity

PROGRAM = """
import sys

sys.stdin.readline()

def load():
    sys.stdin.readline()
    sys.exit(3)

def experiment(steps: int = 1):
    import fulgurite as fg
    from fulgurite_cli import Experiment
    sys.stdin.readline()
    return Experiment(fg.Engine(steps=steps), lambda key: None, load)
"""


class Counted(StringIO):
    """A stream that sets `is_full` once it has a number of lines."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.is_full = threading.Event()
        self._number = number

    def flush(self) -> None:
        if len(self.getvalue().splitlines()) >= self._number:
            self.is_full.set()


def test_what_lasts_is_told_with_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Counted(3)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(activity, "DELAY", 0.0)
    monkeypatch.setattr(activity, "FIRST_INTERVAL", 0.0)
    threads = threading.active_count()
    with show_activity("loading the data"):
        assert stream.is_full.wait(60)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loading the data"
    assert all(re.fullmatch(r"loading the data \d+ s", line) for line in lines[1:])
    assert threading.active_count() == threads


def test_what_is_over_at_once_and_other_processes_are_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(activity, "DELAY", 3600.0)
    with show_activity("importing"):
        pass
    monkeypatch.setattr(activity, "DELAY", 0.0)
    monkeypatch.setenv("FULGURITE_DISTRIBUTED", "1")
    threads = threading.active_count()
    with show_activity("importing"):
        assert threading.active_count() == threads
    assert capsys.readouterr().err == ""


@pytest.mark.full
def test_a_program_says_what_it_waits_for_before_its_fit(tmp_path: Path) -> None:
    """Each part waits for a line of input, which it gets once it was named."""
    program = tmp_path / "waiting.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-P", "-m", "fulgurite_cli", "fit", str(program)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "FULGURITE_COMPILATION_CACHE": "off"},
    ) as process:
        assert process.stdin is not None and process.stderr is not None
        for part in (f"importing {program}", "building the experiment", "loading the data"):
            for line in process.stderr:
                if line == f"{part}\n":
                    break
            else:
                raise AssertionError(f"{part} was not told")
            process.stdin.write("\n")
            process.stdin.flush()
        process.stderr.read()
    assert process.returncode == 3
