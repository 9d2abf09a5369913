"""Runs `eight.py`, which sees eight simulated devices, once; each of its checks is a test here."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.full

PROGRAM = Path(__file__).with_name("eight.py")
FUNCTIONS = [
    node for node in ast.parse(PROGRAM.read_text()).body if isinstance(node, ast.FunctionDef)
]
CHECKS = [function.name for function in FUNCTIONS if function.name.startswith("check_")]


@pytest.fixture(scope="module")
def reports() -> dict[str, str | None]:
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
    run = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    report: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert report["devices"] == 8
    assert list(report["reports"]) == CHECKS
    return report["reports"]


@pytest.mark.parametrize("check", CHECKS)
def test_on_eight_devices(reports: dict[str, str | None], check: str) -> None:
    assert reports[check] is None, reports[check]
