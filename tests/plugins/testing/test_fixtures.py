"""The fixtures, and that pytest does not pay for them where nobody uses them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fulgurite_testing import InMemoryCheckpointer

LIGHT = """
import sys

def test_nothing_heavy_is_imported():
    assert "fulgurite_testing.fixtures" in sys.modules
    assert not {"jax", "fulgurite", "equinox", "numpy"} & sys.modules.keys()

def test_a_fixture_imports_what_it_needs(tiny_engine):
    assert {"jax", "fulgurite"} <= sys.modules.keys()
"""


@pytest.mark.full
def test_pytest_starts_without_jax_and_fulgurite(tmp_path: Path) -> None:
    (tmp_path / "test_light.py").write_text(LIGHT)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:jaxtyping",
        str(tmp_path),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout
    assert "2 passed" in ran.stdout


def test_run_with_returns_the_result_and_messages(run_with: Any, record_events: Any) -> None:
    other = record_events()
    other.__dict__["instance"] = "other"
    result, events = run_with(other, steps=4)
    assert int(result.state.step) == 4
    assert events.list_hooks() == other.list_hooks() == ["on_fit_start", "on_fit_end"]
    assert [(record.source, record.step) for record in events.list_exact_records()] == [
        ("train", 2),
        ("train", 4),
    ]
    assert events.events[-1].step == 4 and events.events[-1].arguments == {"result": result}
    np.testing.assert_array_equal(
        result.history["train/loss"],
        [record.values["loss"] for record in events.list_exact_records()],
    )


@pytest.mark.full
def test_run_with_resumes_a_run(run_with: Any, tmp_path: Path) -> None:
    memory = InMemoryCheckpointer()
    run_with(memory, steps=4)
    result, events = run_with(InMemoryCheckpointer(memory.checkpoints), resume="latest")
    assert int(result.state.step) == 8
    assert [record.step for record in events.list_exact_records()] == [6, 8]


def test_the_tiny_engine_takes_settings(tiny_engine: Any) -> None:
    engine = tiny_engine(steps=3, seed=5)
    assert (engine.steps, engine.seed, list(engine.plugins.plugins)) == (3, 5, [])
