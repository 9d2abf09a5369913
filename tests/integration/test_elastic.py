"""A checkpoint does not remember on how many devices it was written, nor how they were laid out
(X6)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.full

PROGRAM = Path(__file__).with_name("elastic.py")


def train(run: Path, layout: str, devices: int, steps: int) -> dict[str, Any]:
    command = [sys.executable, PROGRAM, run, layout, devices, steps]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A run of 10 steps, fully sharded over 8 devices; what it found; and what one of 20 steps
    did."""
    folder = tmp_path_factory.mktemp("elastic")
    return (
        folder / "run",
        train(folder / "run", "fsdp", 8, 10),
        train(folder / "whole", "fsdp", 8, 20),
    )


@pytest.mark.parametrize(
    ("layout", "devices", "parts"),
    [
        ("fsdp", 4, [[16, 16]] * 2),
        pytest.param("tensor", 4, [[16, 16]] * 2, marks=pytest.mark.slow),
        pytest.param("data", 2, [[64, 16]] * 2, marks=pytest.mark.slow),
        pytest.param("fsdp", 1, [[64, 16]] * 2, marks=pytest.mark.slow),
    ],
)
def test_run_on_eight_devices_resumes_on_fewer(
    saved: tuple[Path, dict[str, Any], dict[str, Any]],
    tmp_path: Path,
    layout: str,
    devices: int,
    parts: list[list[int]],
) -> None:
    run, before, uninterrupted = saved
    assert before["ended"]["parts"] == [[8, 16]] * 2
    shutil.copytree(run, tmp_path / "run")
    resumed = train(tmp_path / "run", layout, devices, 20)
    assert resumed["began"] == {"step": 10, "bits": before["ended"]["bits"], "parts": parts}
    assert resumed["ended"]["parts"] == parts
    np.testing.assert_allclose(
        resumed["losses"], uninterrupted["losses"][-len(resumed["losses"]) :], rtol=1e-4
    )
    assert len(resumed["losses"]) in (10, 20)
