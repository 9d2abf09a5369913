"""A hostile run directory: clear errors, nothing outside of it touched, nothing imported or
executed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    program = Path(__file__).with_name("hostile.py")
    base = tmp_path_factory.mktemp("hostile")
    done = subprocess.run(
        [sys.executable, str(program), str(base)],
        env={**os.environ, "PYTHONPATH": str(program.parents[2])},  # for edits.py
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_hostile_checkpoint_is_read_correctly_or_a_checkpoint_error(report: dict[str, Any]) -> None:
    outcomes = {name: outcome["read"] for name, outcome in report.items()}
    assert {name for name, outcome in outcomes.items() if outcome == -1} == {
        "names_outside", "arrays_outside", "step_outside", "pickles", "large", "pipe", "linked_arrays", "deep",
        "bomb", "no_positions", "boolean_step", "negative_batch", "boolean_batch", "fraction_of_a_batch",
        "negative_epoch", "endless_range", "late_start", "no_states", "no_settings", "no_versions", "no_metrics", "cast_array",
    }  # fmt: skip
    assert outcomes.pop("linked_step") == -2
    for name in ("plugins_outside", "linked_folder", "other_dtype", "huge_array"):
        assert outcomes[name].startswith("CheckpointError"), name
    assert all(outcome["warnings"] for name, outcome in report.items() if outcome["read"] == -1)


def test_reading_writes_imports_and_executes_nothing(report: dict[str, Any]) -> None:
    for name, outcome in report.items():
        assert outcome["events"] == [], name
        assert not outcome["executed"], name


def test_resuming_a_hostile_run_touches_nothing_outside(report: dict[str, Any]) -> None:
    for name, outcome in report.items():
        assert outcome["untouched"], name
        assert outcome["trained"] == -4 or outcome["trained"].startswith("CheckpointError"), name
