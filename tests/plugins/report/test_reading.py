"""What the files of a run say, and where they are damaged, copied or written to."""

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import fulgurite as fg
import numpy as np
import optax
import pytest
from fulgurite_checkpoint import Checkpointer
from fulgurite_checkpoint.comparing import compare_runs
from fulgurite_checkpoint.listing import list_runs
from fulgurite_logging import JSONLLogger, iter_records, iter_telemetry
from fulgurite_report import ReportError, Run, find_runs
from fulgurite_report.curves import Curve
from fulgurite_report.differences import list_differences
from run_files import make_manifest, make_telemetry, write_run


def read(path: Path) -> Run:
    run = Run(path)
    run.refresh()
    return run


class Line(fg.Module):
    slope: np.ndarray

    def training_step(self, batch, ctx):
        return fg.Output(((self.slope * batch["x"] - batch["y"]) ** 2).mean())

    def configure_optimizers(self):
        return optax.sgd(0.1)


def fit_line(path: Path, steps: int) -> None:
    x = np.linspace(0, 1, 8, dtype=np.float32)
    data = fg.ArrayData({"x": x, "y": 2 * x}, 4)
    checkpointer = Checkpointer(every=10, monitor="train/loss")
    engine = fg.Engine(
        steps=steps,
        log_every=5,
        run_dir=path,
        plugins=[JSONLLogger(), checkpointer],
        autoload=False,
    )
    engine.fit(Line(np.zeros((), np.float32)), data)


@pytest.mark.full
def test_a_run_reads_as_the_readers_of_other_distributions_read_it(tmp_path: Path) -> None:
    """The files are parsed a second time, so that nothing imports jax."""
    fit_line(tmp_path / "a", 20)
    fit_line(tmp_path / "b", 30)
    runs = [read(tmp_path / name) for name in "ab"]
    for run in runs:
        (row,) = list_runs(run.path)
        assert (run.state, run.checkpoints[-1].step) == (row.state, row.step)
        assert run.checkpoints[-1].metrics == row.metrics
        metric, value, step, mode = row.best or ("", 0.0, 0, "")
        assert run.monitor == (metric, mode)
        assert run.curves[metric].find_best(mode) == (step, value)
        assert {
            (f"{record.source}/{name}", record.step): value
            for record in [*iter_records(run.path), *iter_telemetry(run.path)]
            if record.kind == "scalars"
            for name, value in record.values.items()
        } == {
            (name, step): value
            for name, curve in run.curves.items()
            for step, value in zip(curve.steps, curve.values, strict=True)
        }
    metrics = set(runs[0].curves)
    expected = {row[0] for row in compare_runs(tmp_path / "a", tmp_path / "b")} - metrics
    assert {name for name, _ in list_differences(runs)} == expected


def test_numbers_of_every_form_are_read(tmp_path: Path) -> None:
    values = {
        "loss": 0.5,
        "count": 3,
        "huge": 10**400,
        "bad": {"$float": "nan"},
        "many": {"$array": [1, 2.5, {"$float": "inf"}], "dtype": "float32", "shape": [3]},
        "text": "none",
    }
    run = read(write_run(tmp_path, records=[("train", 1, values)]))
    numbers = {name: curve.last for name, curve in run.curves.items()}
    assert math.isnan(numbers.pop("train/bad"))
    assert numbers == {
        "train/loss": 0.5,
        "train/count": 3.0,
        "train/huge": math.inf,
        "train/many[0]": 1.0,
        "train/many[1]": 2.5,
        "train/many[2]": math.inf,
    }


def test_damaged_lines_are_passed_over_and_the_first_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, records=[("train", 1, {"loss": 1.0})])
    with open(tmp_path / "records.jsonl", "a") as file:
        file.write('{"kind": "scalars", "source": "train", "step": "2", "values": {"loss": 1}}\n')
        file.write("not JSON\n")
        file.write('{"kind": "scalars", "source": "train", "step": 3, "values": {"loss": 3}}\n')
        file.write('{"kind": "scalars", "source"')
    run = read(tmp_path)
    assert list(run.curves["train/loss"].steps) == [1, 3]
    (problem,) = run.problems
    assert problem.startswith("records.jsonl, line 2: no record")


def test_only_what_is_new_is_read_until_the_run_is_cut_back(tmp_path: Path) -> None:
    write_run(tmp_path, records=[("train", step, {"loss": 1.0}) for step in (1, 2)])
    run = read(tmp_path)
    assert run.num_records == 2
    write_run(tmp_path, records=[("train", 3, {"loss": 2.0})])
    run.refresh()
    assert run.num_records == 3
    assert list(run.curves["train/loss"].steps) == [1, 2, 3]
    # A second attempt continues from step 1, and soon has as many records as there were.
    first_line = (tmp_path / "records.jsonl").read_text().splitlines(keepends=True)[0]
    (tmp_path / "records.jsonl").write_text(first_line)
    write_run(
        tmp_path,
        records=[("train", step, {"loss": 7.0}) for step in range(2, 6)],
        state="running",
        attempt=2,
    )
    run.refresh()
    assert list(run.curves["train/loss"].values) == [1.0, 7.0, 7.0, 7.0, 7.0]
    assert run.state == "running"


def test_results_of_evaluators_in_other_processes_are_among_the_curves(tmp_path: Path) -> None:
    run = write_run(tmp_path, records=[("train", 10, {"loss": 1.0})])
    commits = {}
    for folder in ("checkpoints/step-10", "checkpoints/step-20", "superseded/2/step-30"):
        (run / folder).mkdir(parents=True)
        (run / folder / "COMMIT").write_text(json.dumps({"name": folder}))
        commits[folder] = hashlib.sha256((run / folder / "COMMIT").read_bytes()).hexdigest()
    results = [("step-20", 20, 0.5), ("step-10", 10, 0.9), ("step-20", 20, 0.25)]
    lines = [
        {"evaluator": "side", "step": step, "commit": commits[f"checkpoints/{name}"],
         "metrics": {"loss": value}}
        for name, step, value in results
    ]  # fmt: skip
    old = {"commit": commits["superseded/2/step-30"], "metrics": {"loss": 9.0}}
    lines.append({"evaluator": "side", "step": 30, **old})
    (run / "evaluations").mkdir()
    (run / "evaluations" / "group.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    curve = read(run).curves["side/loss"]
    assert list(zip(curve.steps, curve.values, strict=True)) == [(10, 0.9), (20, 0.25)]


def test_attempts_have_their_times_and_what_was_done_again_counts_once(tmp_path: Path) -> None:
    telemetry = [make_telemetry(step, 100.0 + step, {"rate": 1.0}) for step in (0, 10, 20)]
    telemetry += [
        make_telemetry(step, 200.0 + step, {"rate": 2.0}, attempt=2) for step in (10, 20, 30)
    ]
    write_run(tmp_path, telemetry=telemetry)
    write_run(tmp_path, attempt=2)
    run = read(tmp_path)
    first, second = run.attempts
    assert (first.began, first.seconds, first.last_step) == (100.0, 20.0, 20)
    assert (second.began, second.first_step, second.last_step) == (210.0, 10, 30)
    assert list(run.curves["train/rate"].values) == [1.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("step", [2**70, 10.5, "10", True, None])
def test_a_step_that_is_none_is_damage_and_no_curve(tmp_path: Path, step: Any) -> None:
    records = [("train", step, {"loss": 1.0}), ("train", 20, {"error": 2.0})]
    run = read(write_run(tmp_path, records=records))
    assert list(run.curves) == ["train/error"] and run.step == 20
    assert [problem.partition(": ")[0] for problem in run.problems] == ["records.jsonl, line 1"]


def test_a_link_to_a_run_is_no_other_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run-1", "run-2"):
        write_run(tmp_path / name, records=[("train", 10, {"loss": 1.0})])
    (tmp_path / "latest").symlink_to("run-2")
    monkeypatch.chdir(tmp_path)
    assert [run.name for run in find_runs(["."])] == ["run-1", "run-2"]
    assert [run.name for run in find_runs(["run-1", tmp_path / "run-1"])] == ["run-1"]
    assert [run.name for run in find_runs(["latest"])] == ["latest"]


def test_results_of_a_file_that_was_replaced_are_gone(tmp_path: Path) -> None:
    write_run(tmp_path)
    file = tmp_path / "evaluations" / "group.jsonl"
    file.parent.mkdir()

    def write(*losses: float) -> None:
        results = [
            {"evaluator": "side", "step": step, "commit": "x", "metrics": {"loss": loss}}
            for step, loss in enumerate(losses, 1)
        ]
        file.write_text("".join(json.dumps(result) + "\n" for result in results))

    write(1.0, 2.0)
    run = read(tmp_path)
    write(3.0)
    run.refresh()
    assert list(run.curves["side/loss"].values) == [3.0]


def test_a_value_of_telemetry_takes_no_exact_one_back(tmp_path: Path) -> None:
    # As of an evaluation that ran by the clock before it was made to run by steps.
    exact = [("test", step, {"loss": step / 100}) for step in (100, 200, 300)]
    by_clock = [
        make_telemetry(step, 1e9 + step, {"loss": -1.0}) | {"source": "test"}
        for step in (50, 150, 200, 400)
    ]
    run = read(write_run(tmp_path, records=exact, telemetry=by_clock))
    curve = run.curves["test/loss"]
    assert list(zip(curve.steps, curve.values, strict=True)) == [
        (50, -1.0), (100, 1.0), (150, -1.0), (200, 2.0), (300, 3.0), (400, -1.0)
    ]  # fmt: skip


@pytest.mark.parametrize("state", ["complete", "running", "stopped", "killed"])
def test_state_is_that_of_the_lock(tmp_path: Path, state: str) -> None:
    assert read(write_run(tmp_path, state=state)).state == state
    (row,) = list_runs(tmp_path)
    assert row.state == state


def test_a_directory_of_runs_is_read_as_all_of_them(tmp_path: Path) -> None:
    for name in ("lr=2", "lr=1"):
        write_run(tmp_path / "sweep" / name)
    write_run(tmp_path / "other" / "lr=1")
    assert [run.name for run in find_runs([tmp_path / "sweep"])] == ["lr=1", "lr=2"]
    names = [run.name for run in find_runs([tmp_path / "sweep", tmp_path / "other" / "lr=1"])]
    assert len(set(names)) == 3
    with pytest.raises(ReportError, match="is not a run and holds none"):
        find_runs([tmp_path])
    with pytest.raises(ReportError, match="there is no directory"):
        find_runs([tmp_path / "nowhere"])


def test_differences_leave_out_what_is_equal_and_runs_that_have_not_begun(tmp_path: Path) -> None:
    write_run(tmp_path / "a", manifest=make_manifest(lr=0.1, width=8))
    write_run(tmp_path / "b", manifest=make_manifest(lr=0.2, width=8))
    (tmp_path / "c").mkdir()
    runs = [read(tmp_path / name) for name in "abc"]
    assert list_differences(runs) == [("lr", ["0.1", "0.2", ""])]


def test_a_curve_is_thinned_to_the_extremes_of_its_parts() -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=100_000)
    values[777] = 50.0
    values[55_555] = -50.0
    values[99] = np.nan
    curve = Curve("exact")
    for step, value in enumerate(values.tolist(), 1):
        curve.add(step, value)
    steps, thinned = curve.thin(1000)
    assert 500 < len(steps) <= 1100
    assert np.all(np.diff(steps) > 0)
    np.testing.assert_array_equal(thinned, values[steps - 1])
    assert {1, 100, 778, 55_556, 100_000} <= set(steps.tolist())
    # In windows of five parts of equal width the extremes are those of all values.
    for start in range(0, 100_000, 5_000):
        inside = (steps > start) & (steps <= start + 5_000)
        window = values[start : start + 5_000]
        assert np.nanmax(thinned[inside]) == np.nanmax(window)
        assert np.nanmin(thinned[inside]) == np.nanmin(window)


def test_a_short_curve_stays_whole() -> None:
    curve = Curve("exact")
    for step in range(10):
        curve.add(step, float(step))
    steps, values = curve.thin(10)
    assert steps.tolist() == values.tolist() == list(range(10))


def test_nothing_imports_jax(tmp_path: Path) -> None:
    write_run(tmp_path / "run", records=[("train", 1, {"loss": 1.0})])
    code = (
        "import sys; from fulgurite_report.command import report, watch; "
        "assert report(sys.argv[1:2] + ['-o', sys.argv[2]]) == 0; assert watch(sys.argv[1:2]) == 0; "
        "assert not {'jax', 'fulgurite'} & set(sys.modules)"
    )
    arguments = [str(tmp_path / "run"), str(tmp_path / "page.html")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)


def test_a_manifest_that_says_nothing_is_no_error(tmp_path: Path) -> None:
    for content in ("", "[]", "{", json.dumps({"settings": 3, "plugins": {}, "model": 1})):
        write_run(tmp_path)
        (tmp_path / "attempts" / "1").write_text(content)
        run = read(tmp_path)
        assert run.planned_steps is None
        assert list_differences([run, run]) == []
