"""The sentences at the top of a page: which run is the best, which is slow and why, and the cost."""

import json
from pathlib import Path

from fulgurite_report.findings import list_findings
from fulgurite_report.run import Run
from fulgurite_report.timing import find_parts
from run_files import make_manifest, make_telemetry, write_run


def read_run(
    folder: Path,
    name: str,
    *,
    losses: list[float],
    seconds: dict[str, float],
    mode: str = "min",
    devices: dict[str, object] | None = None,
) -> Run:
    """Return a run with an evaluation every 10 steps.

    Args:
        folder: in which it is written.
        name: of the run.
        losses: of the evaluations.
        seconds: by the buckets of `Goodput`; none are logged if it is empty.
        mode: by which checkpoints are chosen.
        devices: of the manifest.
    """
    values = {f"{bucket}_seconds": value for bucket, value in seconds.items()}
    telemetry = [make_telemetry(10 * len(losses), 1e9, values) | {"source": "goodput"}]
    path = write_run(
        folder / name,
        records=[("test", 10 * number, {"loss": loss}) for number, loss in enumerate(losses, 1)],
        telemetry=telemetry if seconds else [],
        manifest=make_manifest() | {"devices": devices or {"kind": "H100", "count": 2}},
    )
    step = 10 * len(losses)
    checkpoint = path / "checkpoints" / f"step-{step}"
    checkpoint.mkdir(parents=True)
    commit = {"step": step, "attempt": 1, "metrics": {}, "wall_time": 1e9, "timings": {}}
    (checkpoint / "COMMIT").write_text(json.dumps(commit | {"monitor": ["test/loss", mode]}))
    run = Run(path, name)
    run.refresh()
    return run


def test_the_best_the_slowest_and_the_cost_are_said(tmp_path: Path) -> None:
    runs = [
        read_run(tmp_path, "a", losses=[0.5, 0.4], seconds={"steps": 10.0, "start": 70.0}),
        read_run(
            tmp_path, "b", losses=[0.6, 0.3], seconds={"steps": 12.0, "data": 28.0, "start": 5.0}
        ),
        read_run(
            tmp_path, "c", losses=[0.2, 0.9], seconds={"steps": 16.0, "data": 2.0, "down": 500.0}
        ),
    ]
    findings = list_findings(runs)
    assert [(finding.text, finding.run) for finding in findings] == [
        ("best test/loss: 0.2 at step 10, c", 2),
        (
            "slowest: b, 2 s a step, of which 1.4 s waiting for data; a takes 500 ms, of which "
            "0 ms waiting for data (without starting and compiling)",
            1,
        ),
        # 80 + 45 + 18 seconds: nothing runs while a run is down.
        ("cost: 2 min 23 s of run time on 2 x H100", None),
    ]


def test_a_run_that_was_resumed_is_not_slow_because_of_what_it_restored(tmp_path: Path) -> None:
    runs = []
    for name, seconds in (("whole", 0.0), ("resumed", 30.0)):
        run = read_run(tmp_path, name, losses=[0.5, 0.4], seconds={})
        commit = run.path / "checkpoints" / "step-20" / "COMMIT"
        timings = {"dispatch": 4.0, "checkpoints.restore_checkpoint": seconds}
        commit.write_text(json.dumps(json.loads(commit.read_text()) | {"timings": timings}))
        runs.append(Run(run.path, name))
        runs[-1].refresh()
    assert find_parts(runs[1]) == {"steps": 4.0, "restoring": 30.0}
    assert not [finding.text for finding in list_findings(runs) if "slowest" in finding.text]


def test_a_run_that_began_at_a_later_step_is_as_fast_as_one_from_the_start(tmp_path: Path) -> None:
    runs = []
    for name, start_step in (("whole", 0), ("fork", 10_000)):
        step = start_step + 100
        path = write_run(
            tmp_path / name,
            telemetry=[make_telemetry(step, 1e9, {"steps_seconds": 50.0}) | {"source": "goodput"}],
            manifest=make_manifest() | {"start_step": start_step},
        )
        runs.append(Run(path, name))
        runs[-1].refresh()
    assert not [finding.text for finding in list_findings(runs) if "slowest" in finding.text]


def test_the_best_may_be_the_largest_and_devices_are_told_apart(tmp_path: Path) -> None:
    runs = [
        read_run(tmp_path, "a", losses=[0.5, 0.4], seconds={"steps": 10.0}, mode="max"),
        read_run(
            tmp_path,
            "b",
            losses=[0.6, 0.3],
            seconds={"steps": 11.0},
            mode="max",
            devices={"kind": "cpu", "count": 1},
        ),
    ]
    assert [finding.text for finding in list_findings(runs)] == [
        "best test/loss: 0.6 at step 10, b",
        "cost: 10 s of run time on 2 x H100, 11 s of run time on 1 x cpu",
    ]
    assert [finding.text for finding in list_findings(runs[1:])] == [
        "cost: 11 s of run time on 1 x cpu"
    ]


def test_what_is_not_known_is_not_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    empty = Run(tmp_path / "empty", "empty")
    empty.refresh()
    other = read_run(tmp_path, "a", losses=[0.5], seconds={}, mode="min")
    assert list_findings([empty]) == []
    assert list_findings([empty, other]) == []
