"""Runs the tests of `on_eight_devices` in one process that sees eight simulated devices; each of
them is a test here, with its mark `slow` if it has one."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.full

FOLDER = Path(__file__).with_name("on_eight_devices")


def iter_tests() -> Iterator[Any]:
    """Yield the tests as pytest names them, without their parameters."""
    for path in sorted(FOLDER.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                decorators = map(ast.unparse, node.decorator_list)
                marks = [pytest.mark.slow] if "pytest.mark.slow" in decorators else []
                yield pytest.param(f"{path}::{node.name}", id=node.name, marks=marks)


@pytest.fixture(scope="module")
def failures(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """What pytest printed of the failures of each test that was selected."""
    report = tmp_path_factory.mktemp("eight") / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", f"--junitxml={report}"]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
    here = [item for item in request.session.items if item.path == Path(__file__)]
    tests = [
        str(item.callspec.params["test"]) for item in here if isinstance(item, pytest.Function)
    ]
    run = subprocess.run([*command, *tests], capture_output=True, text=True, env=environment)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    failed: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        texts = [problem.text or "" for kind in ("failure", "error") for problem in case.iter(kind)]
        failed.setdefault(case.attrib["name"].partition("[")[0], []).extend(texts)
    return failed


@pytest.mark.parametrize("test", list(iter_tests()))
def test_on_eight_devices(failures: dict[str, list[str]], test: str) -> None:
    _, _, name = test.rpartition("::")
    assert not failures[name], "\n".join(failures[name])
