"""Runs the tests of `on_eight_devices` in one process that sees eight simulated devices; each of
them is a test here."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.full

FOLDER = Path(__file__).with_name("on_eight_devices")


def iter_tests() -> Iterator[str]:
    """Yield the names of the tests, without those of their parameters."""
    for path in sorted(FOLDER.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield node.name


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What pytest printed of the failures of each test that ran."""
    report = tmp_path_factory.mktemp("eight") / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", f"--junitxml={report}"]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
    run = subprocess.run([*command, FOLDER], capture_output=True, text=True, env=environment)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    failed: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        texts = [problem.text or "" for kind in ("failure", "error") for problem in case.iter(kind)]
        failed.setdefault(case.attrib["name"].partition("[")[0], []).extend(texts)
    return failed


@pytest.mark.parametrize("name", list(iter_tests()))
def test_on_eight_devices(failures: dict[str, list[str]], name: str) -> None:
    assert not failures[name], "\n".join(failures[name])
