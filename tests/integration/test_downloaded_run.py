"""What the commands print of a run that somebody else wrote is text, whatever it holds."""

import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from fulgurite.errors import FulguriteError
from fulgurite_cli.command import main

# Sets the title of a window, rings, begins a sequence in one character, goes back in the line,
# and turns the order of text.
HOSTILE = "a\x1b]0;title\x07\x9b31m\r\u202eb\u2066\u2028"
NOT_ENCODABLE = "a\ud800b"
PROGRAM = """
import fulgurite as fg
from fulgurite_cli import Experiment
from fulgurite_testing import TinyModel, tiny_data

def experiment(title: str = "", rate: float = 1.0) -> Experiment:
    plugins = ["jsonl", "checkpoints"]
    engine = fg.Engine(steps=2, log_every=1, plugins=plugins, autoload=False)
    return Experiment(engine, TinyModel, tiny_data())
"""
DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def list_obeyed(text: str) -> list[str]:
    """Return the characters of a text that a terminal obeys, by the Unicode database."""
    return [
        character
        for character in text
        if character not in "\n\t"
        and (
            unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
            or unicodedata.bidirectional(character) in DIRECTIONS
        )
    ]


def write_hostile_text(value: Any, hostile: str) -> Any:
    """Return JSON with the hostile text in each string and each name but those that have a
    meaning."""
    if isinstance(value, dict):
        return {
            name
            if name in ("configuration", "program", "file", "step", "kind")
            else name + hostile
            if name in ("title", "loss", "jax", "TinyModel")
            else name: write_hostile_text(item, hostile)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [write_hostile_text(item, hostile) for item in value]
    return value + hostile if isinstance(value, str) and value not in KEPT else value


KEPT = ("scalars", "train", "program.py")


@pytest.fixture(params=[HOSTILE, NOT_ENCODABLE], ids=["hostile", "not_encodable"])
def hostile(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(hostile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a program, a run of it, and a copy of the run that somebody has edited."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("program.py").write_text(PROGRAM)
    for name in ("mine", "theirs"):
        main(["fit", "program.py", f"title={name}", "--run", f"runs/{name}"])
    files = [*Path("runs/theirs/attempts").iterdir(), Path("runs/theirs/records.jsonl")]
    files += Path("runs/theirs/checkpoints").glob("*/*.json")
    for file in files:
        text = file.read_text()
        pieces = text.splitlines() if file.suffix == ".jsonl" else [text]
        lines = [write_hostile_text(json.loads(piece), hostile) for piece in pieces]
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return tmp_path


COMMANDS = [
    ["runs", "runs"],
    ["runs", "runs", "--csv"],
    ["compare", "runs/mine", "runs/theirs"],
    ["checkpoints", "runs/theirs"],
    ["checkpoints", "show", "runs/theirs"],
    ["checkpoints", "show", "runs/theirs", "--json"],
    ["checkpoints", "diff", "runs/mine", "runs/theirs"],
    ["config", "diff", "runs/mine", "runs/theirs"],
    ["fit", "program.py", "--from", "runs/theirs", "--print"],
    ["plot", "runs/theirs", "--metric", "none", "--out", "x.png"],
    ["evaluate", "--run", "runs/theirs"],
    ["evaluate", "program.py", "--run", "runs/theirs", "--json"],
    ["fit", "program.py", "--run", "runs/theirs"],
]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nothing_that_a_terminal_obeys_is_printed_of_a_run(
    folder: Path, hostile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    output = {}
    for command in COMMANDS:
        try:
            main(command)
        except SystemExit:
            pass
        except FulguriteError as error:  # what Python prints of one that no command catches
            print(error, *getattr(error, "__notes__", []))
        captured = capsys.readouterr()
        output[" ".join(command)] = captured.out + captured.err
    assert {name: list_obeyed(text) for name, text in output.items() if list_obeyed(text)} == {}
    # The hostile text was there to be printed.
    escapes = ("\\u001b", "\\x1b", "\\ud800")
    assert sum(any(escape in text for escape in escapes) for text in output.values()) > 5


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_arguments_that_are_no_finite_numbers_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("program.py").write_text(PROGRAM)
    for rate in ("nan", "-inf"):
        main(["fit", "program.py", f"rate={rate}", "--run", f"runs/rate={rate}"])
    capsys.readouterr()
    main(["runs", "runs"])
    assert [row.split()[-1] for row in capsys.readouterr().out.splitlines()] == (
        ["rate", "-inf", "nan"]
    )
    assert main(["compare", "runs/rate=nan", "runs/rate=-inf"]) == 1
    for option in ("--from=runs/rate=nan", "--config=runs/rate=nan/attempts/1"):
        with pytest.raises(SystemExit, match="0"):
            main(["fit", "program.py", option, "--print"])
        assert "rate=nan " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "program.py", "--run", "runs", "--sweep", "rate=nan,-inf"])
    assert "0 of 2 runs to do" in capsys.readouterr().out
