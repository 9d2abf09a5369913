"""The examples are programs that run."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> list[str]:
    """The lines that an example prints to stdout."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def test_digits():
    *progress, last = run("digits.py", "steps=500", "width=64")
    shown = [re.fullmatch(r"step +(\d+)  loss (\d\.\d{4})  accuracy ([01]\.\d{3})", line) for line in progress]
    assert all(shown)
    steps, losses, accuracies = zip(*(match.groups() for match in shown if match), strict=True)
    assert steps == ("200", "400", "500")
    assert float(losses[0]) > float(losses[1]) > float(losses[2])
    assert float(accuracies[0]) < float(accuracies[1]) < float(accuracies[2])
    found = re.fullmatch(r"test accuracy ([01]\.\d{4})", last)
    assert found and float(found[1]) > 0.9


@pytest.mark.slow
def test_gan(tmp_path):
    *progress, last = run("gan.py", f"folder={tmp_path}")
    assert len(progress) == 15
    found = ast.literal_eval(last)
    assert found["classes"] == 10
    assert found["confidence"] > 0.8
    assert found["relative"] < 0.1
    for step in (1000, 2000, 3000):
        assert (tmp_path / f"step-{step}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_wgan_gp():
    *progress, last = run("wgan_gp.py")
    assert len(progress) == 8
    found = ast.literal_eval(last)
    assert found["modes"] == 8
    assert found["near"] > 0.8


def test_every_example_is_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"digits.py", "gan.py", "wgan_gp.py"}
