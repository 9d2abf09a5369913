"""What a sweep leaves for the report."""

import json
from pathlib import Path

import pytest
from fulgurite_report import write_report
from fulgurite_sweeps import Sweep
from instant_executor import PROGRAM, InstantExecutor


def test_the_report_shows_what_decides_the_metric(tmp_path: Path) -> None:
    """The loss depends on `lr` alone."""
    space = {"lr": "float(0,1)", "bad": ["no", "nan"], "width": "int(1,8) if bad=nan"}
    sweep = Sweep(tmp_path / "sweep", PROGRAM, space, ["test/loss"])
    executor = InstantExecutor(lambda arguments: {"test/loss": float(arguments["lr"])})
    sweep.run(20, sampler="random", executor=executor, tell=lambda _: None)
    summary = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert sweep.best is not None and summary["best"] == sweep.best.name
    assert summary["axes"] == [
        {"name": "lr", "low": 0.0, "high": 1.0, "log": False},
        {"name": "bad", "choices": ["no", "nan"]},
        {"name": "width", "low": 1, "high": 8, "log": False},
    ]
    assert [trial["params"]["lr"] for trial in summary["trials"]] == [
        trial.params["lr"] for trial in sweep.trials
    ]
    importances = summary["importances"]
    assert sum(importances.values()) == pytest.approx(1)
    assert max(importances, key=importances.__getitem__) == "lr" and importances["lr"] > 0.6
    for trial in sweep.trials:
        (trial.run_dir / "attempts").mkdir()
        (trial.run_dir / "attempts" / "1").write_text("{}")
    write_report([tmp_path / "sweep"], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert f"The best is {sweep.best.name}, complete: test/loss" in page
    assert page.count("<path") == 20
