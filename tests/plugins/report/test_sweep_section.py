"""The section of the page about a sweep, from a file written by hand."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import pytest
from fulgurite_report import Run
from fulgurite_report.run import find_runs
from fulgurite_report.sweep_section import add_sweeps
from run_files import HOSTILE, make_manifest, write_run


def write_sweep(folder: Path, **changes: Any) -> list[Run]:
    """Write a sweep of four trials, and return its runs."""
    trials = [
        ("trial-0", "complete", {"lr": 0.001, "optimizer": "adam"}, [3.0]),
        ("trial-1", "complete", {"lr": 0.1, "optimizer": "sgd", "momentum": 0.5}, [1.0]),
        ("trial-2", "pruned", {"lr": 0.01, "optimizer": "sgd", "momentum": 0.25}, [2.0]),
        ("trial-10", "fail", {"lr": 0.1, "optimizer": "adam"}, None),
    ]
    content = {
        "objectives": [["test/loss", "minimize"]],
        "axes": [
            {"name": "lr", "low": 0.001, "high": 0.1, "log": True},
            {"name": "optimizer", "choices": ["adam", "sgd"]},
            {"name": "momentum", "low": 0, "high": 1, "log": False},
        ],
        "trials": [
            {"run": name, "state": state, "params": params, "values": values, "violations": []}
            for name, state, params, values in trials
        ],
        "best": "trial-1",
        "front": ["trial-1"],
        "command": "fulgurite fit digits.py lr=0.1 --run sweep-trial-1",
        "importances": {"lr": 0.75, "optimizer": 0.25},
    }
    for name, *_ in trials:
        write_run(folder / name, manifest=make_manifest())
    (folder / "sweep.json").write_text(json.dumps(content | changes))
    return find_runs([folder])


def build(runs: list[Run]) -> Element:
    main = Element("main")
    add_sweeps(main, runs)
    return main


def read_text(main: Element) -> str:
    return " ".join(text for text in main.itertext() if text)


def test_each_trial_is_a_line_through_its_values(tmp_path: Path) -> None:
    runs = write_sweep(tmp_path)
    assert [run.name for run in runs] == ["trial-0", "trial-1", "trial-2", "trial-10"]
    main = build(runs)
    paths = {path.get("class"): path for path in main.iter("path")}
    # From the bottom, 280, to the top, 40: 0.001, 0.01 and 0.1 are 0, 1/2 and 1 of the axis.
    assert paths["complete"].get("d") == "M90 280.0L260 280.0M600 280.0"  # the worst; no momentum
    assert paths["pruned"].get("d") == "M90 160.0L260 40.0L430 220.0L600 160.0"
    assert paths["best"].get("d") == "M90 40.0L260 40.0L430 160.0L600 40.0"
    assert list(main.iter("path"))[-1] is paths["best"]
    strengths = [float(paths[name].get("stroke-opacity", "")) for name in ("complete", "best")]
    assert strengths == [0.15, 1.0]
    assert paths["pruned"].get("data-run") == "2"
    text = read_text(main)
    assert "trial-2, pruned: test/loss 2, lr=0.01, optimizer=sgd, momentum=0.25" in text
    marks = [element.text for element in main.iter("text")]
    assert marks == ["lr", "0.001", "0.1", "optimizer", "adam", "sgd", "momentum", "0", "1",
                     "test/loss", "3", "1"]  # fmt: skip


def test_the_best_trial_its_command_and_importances_are_shown(tmp_path: Path) -> None:
    main = build(write_sweep(tmp_path))
    text = read_text(main)
    assert "The best is trial-1, complete: test/loss 1, lr=0.1, optimizer=sgd" in text
    assert [element.text for element in main.iter("pre")] == [
        "fulgurite fit digits.py lr=0.1 --run sweep-trial-1"
    ]
    assert [element.text for element in main.iter("figcaption")] == ["lr 75%", "optimizer 25%"]
    assert [bar.get("width") for bar in main.iter("rect")] == ["750.0", "250.0"]


def test_a_sweep_that_has_just_begun_says_what_is_missing(tmp_path: Path) -> None:
    text = read_text(build(write_sweep(tmp_path, trials=[], best=None, importances={})))
    assert "No trial is complete yet" in text and "There are no importances" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"axes": [{"name": "lr", "low": 0.0, "high": 1.0, "log": True}]},
        {"axes": [{"name": "lr", "low": 2.0, "high": 1.0, "log": False}]},
        {"axes": {}, "objectives": [["test/loss"]]},
        {"trials": [{}]},
        {"importances": []},
        {"trials": None},
    ],
)
def test_a_damaged_file_is_told_and_the_page_is_written(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    text = read_text(build(write_sweep(tmp_path, **changes)))
    assert "sweep.json cannot be read" in text and "start the sweep again" in text


def test_hostile_names_are_shown_as_text(tmp_path: Path) -> None:
    from fulgurite_report import write_report

    write_sweep(tmp_path, command=HOSTILE, importances={HOSTILE: 1.0})
    write_report([tmp_path], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert HOSTILE not in page and page.count("<script") == 3
    assert re.search(r'href="#sweep"', page)


def test_runs_that_are_no_trials_have_no_such_section(tmp_path: Path) -> None:
    assert len(build([Run(write_run(tmp_path / "a"))])) == 0
