"""`fulgurite plot`: pictures of what was logged, and errors for files that hold something else."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_cli import command
from fulgurite_logging import LONGEST_LINE
from fulgurite_logging.plot import load_series, main


def logged(run: Path, factor: float = 1.0) -> Path:
    """A run with a loss that falls, one of another source, and a torn line at the end."""
    run.mkdir()
    rows = [
        ("train", step, {"loss": factor / step, "accuracy": 1 - 1 / step}) for step in range(1, 50)
    ]
    rows += [
        (
            "test",
            50,
            {"loss": {"$float": "nan"}, "table": {"$array": [1], "dtype": "int8", "shape": [1]}},
        )
    ]
    texts = [json.dumps({"kind": "text", "source": "train", "step": 1, "values": {"loss": 3}})]
    texts += [json.dumps(dict(kind="scalars", source=a, step=b, values=c)) for a, b, c in rows]
    (run / "records.jsonl").write_text("\n".join([*texts, '{"kind":"sca']))
    return run


def test_series_are_the_single_numbers(tmp_path: Path) -> None:
    curves = load_series(logged(tmp_path / "a"))
    assert list(curves) == ["train/loss", "train/accuracy", "test/loss"]
    assert curves["train/loss"] == (list(range(1, 50)), [1 / step for step in range(1, 50)])
    assert curves["test/loss"][0] == [50] and np.isnan(curves["test/loss"][1])


def test_an_integer_that_is_larger_than_any_float_is_infinite(tmp_path: Path) -> None:
    values = {"a": 10**400, "b": -(10**400)}
    record = {"kind": "scalars", "source": "train", "step": 1, "values": values}
    (tmp_path / "records.jsonl").write_text(f"{json.dumps(record)}\n")
    series = load_series(tmp_path)
    assert series == {"train/a": ([1], [np.inf]), "train/b": ([1], [-np.inf])}


def test_results_of_standalone_evaluators_are_drawn(tmp_path: Path) -> None:
    run, commits = logged(tmp_path / "a"), {}
    for name in ("checkpoints/step-8", "superseded/1/step-8", "superseded/1/step-9"):
        (run / name).mkdir(parents=True)
        (run / name / "COMMIT").write_text(name)
        commits[name] = hashlib.sha256(name.encode()).hexdigest()
    rows = [
        (8, commits["checkpoints/step-8"], 0.5),
        (8, commits["superseded/1/step-8"], 0.7),
        (9, commits["superseded/1/step-9"], 0.9),
        (4, "removed since", 0.25),
    ]
    lines = [
        json.dumps(dict(evaluator="slow", step=a, commit=b, metrics={"accuracy": c}))
        for a, b, c in rows
    ]
    (run / "evaluations").mkdir()
    (run / "evaluations" / "side.jsonl").write_text("\n".join([*lines, '{"eval']))
    assert load_series(run)["slow/accuracy"] == ([4, 8], [0.25, 0.5])
    (run / "evaluations" / "side.jsonl").write_text("{}\n")
    with pytest.raises(ConfigurationError, match="side.jsonl, line 1: no result: 'evaluator'"):
        load_series(run)


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_a_picture_is_written(tmp_path: Path, kind: str) -> None:
    runs = [str(logged(tmp_path / "a")), str(logged(tmp_path / "b", 2.0))]
    out = tmp_path / f"loss.{kind}"
    assert (
        command.main(
            [
                "plot",
                *runs,
                "--metric",
                "loss",
                "--metric",
                "train/accuracy",
                "--out",
                str(out),
                "--log",
            ]
        )
        == 0
    )
    assert out.read_bytes()[:4] in (b"\x89PNG", b"%PDF", b"<?xm")
    if kind == "svg":
        assert all(
            f"<!-- {label} -->" in out.read_text()
            for label in ("a train/loss", "b train/accuracy", "a test/loss")
        )


def test_names_are_texts_and_settings_of_the_current_directory_start_no_tex(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.Popen", pytest.fail)
    Path("matplotlibrc").write_text("text.usetex: True\n")
    matplotlib.rcParams["text.usetex"] = True  # as if it had been read when matplotlib was imported
    try:
        values = {"a $\\frac$": 1.0}
        record = {"kind": "scalars", "source": "train", "step": 1, "values": values}
        Path("records.jsonl").write_text(f"{json.dumps(record)}\n")
        assert main([".", "--metric", "a $\\frac$", "--out", "a.svg"]) == 0
        assert matplotlib.rcParams["text.usetex"]
    finally:
        matplotlib.rcParams["text.usetex"] = False
    assert Path("a.svg").stat().st_size > 1000


def test_mistakes_are_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = str(logged(tmp_path / "a")), str(tmp_path / "a.png")
    for arguments, message in (
        ([run, "--metric", "los", "--out", out], "has no metric 'los'. Did you mean"),
        ([str(tmp_path / "none"), "--out", out], "there is no "),
        (
            [run, "--out", str(tmp_path / "a.doc")],
            "is not a kind of picture that can be written: choose one of",
        ),
        ([run, "--out", str(tmp_path / "none" / "a.png")], "No such file or directory"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        b"no json",
        b"[1]",
        b'{"kind":"scalars","source":"a","values":{}}',
        b'{"kind":"scalars","source":"a","step":"1","values":{}}',
        b'{"kind":"scalars","source":"a","step":-1,"values":{}}',
        b'{"kind":"scalars","source":"a","step":' + b"9" * 400 + b',"values":{"loss":1}}',
        b'{"kind":"scalars","source":"a","step":1,"values":[]}',
        b'{"kind":"scalars","source":"a","step":1,"values":{"x":{"$array":[1,2],"dtype":"f4","shape":[3]}}}',
        b'{"kind":"scalars","source":"a","step":1,"values":{"x":{"$array":[1],"dtype":"no","shape":[1]}}}',
        b"[" * 100_000,
        b"\xff",
        b"x" * (LONGEST_LINE + 1),
    ],
    ids=range(12),
)
def test_invalid_line_is_an_error_naming_it(
    tmp_path: Path, line: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "records.jsonl").write_bytes(
        b'{"kind":"text","source":"a","step":1,"values":{}}\n' + line + b"\n"
    )
    assert main([str(tmp_path), "--out", str(tmp_path / "a.png")]) == 2
    assert "records.jsonl, line 2: " in capsys.readouterr().err


def test_missing_matplotlib_is_an_error_saying_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([str(logged(tmp_path / "a")), "--out", str(tmp_path / "a.png")]) == 2
    assert "pip install 'fulgurite-logging[plot]'" in capsys.readouterr().err
