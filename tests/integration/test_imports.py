"""What is imported before it is used."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What some distribution needs for a part of what it does.
LIST = """
import sys

HEAVY = {
    "IPython", "PIL", "google", "grain", "huggingface_hub", "matplotlib", "mlflow", "orbax",
    "pandas", "rich", "safetensors", "tensorboard", "tensorstore", "torch", "wandb",
}
known: set[str] = set()

def tell(label: str) -> None:
    heavy = HEAVY & sys.modules.keys() - known
    known.update(heavy)
    print(label, *sorted(heavy))
"""

DISTRIBUTIONS = """
import importlib
import jax, equinox, optax
tell("jax")
for name in sys.argv[1:]:
    importlib.import_module(name)
    tell(name)
import fulgurite as fg
from fulgurite.plugins import find_installed_plugins
for name, entries in find_installed_plugins().items():
    for entry in entries:
        entry.load()
        tell(name)
fg.Engine(steps=1, run_dir="unused", plugins=["jsonl", "csv", "checkpoints", "tensorboard"])
tell("an engine")
"""


def list_imports(program: str, *arguments: str) -> list[str]:
    """Return the lines that a program prints in a process of its own."""
    command = [sys.executable, "-c", LIST + program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.full
def test_importing_a_distribution_imports_nothing_that_is_not_used_yet() -> None:
    paths = [*ROOT.glob("plugins/*/src/*/__init__.py"), *ROOT.glob("contrib/*/src/*/__init__.py")]
    names = sorted(path.parent.name for path in paths)
    lines = list_imports(DISTRIBUTIONS, *names)
    assert lines[1 : len(names) + 1] == names
    assert [line for line in lines[:-1] if " " in line] == []
    assert lines[-1] == "an engine"
