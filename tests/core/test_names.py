"""Names say what they hold: the idioms that CONTRIBUTING forbids do not come back."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    *("one", "made", "given", "found", "own", "told", "kept", "seen", "asked", "gap", "fix"),
    *("parsed", "restored", "completed", "measured", "computed", "explained", "described"),
}
FILES = sorted(
    path
    for pattern in ("core/src", "plugins/*/src", "examples")
    for folder in ROOT.glob(pattern)
    for path in folder.rglob("*.py")
)
PENDING = {
    "plugins/dev/src/fulgurite_dev/doctor.py",
    "plugins/dev/src/fulgurite_dev/new_plugin.py",
    "plugins/optimizers/src/fulgurite_optimizers/clip.py",
    "plugins/optimizers/src/fulgurite_optimizers/constraints.py",
    "plugins/optimizers/src/fulgurite_optimizers/finalize.py",
    "plugins/optimizers/src/fulgurite_optimizers/freeze.py",
    "plugins/optimizers/src/fulgurite_optimizers/gradients.py",
    "plugins/optimizers/src/fulgurite_optimizers/metrics.py",
    "plugins/optimizers/src/fulgurite_optimizers/microbatches.py",
    "plugins/optimizers/src/fulgurite_optimizers/multi_optimizer.py",
    "plugins/optimizers/src/fulgurite_optimizers/plateau.py",
    "plugins/optimizers/src/fulgurite_optimizers/update.py",
    "plugins/progress/src/fulgurite_progress/line.py",
    "plugins/progress/src/fulgurite_progress/screen.py",
    "plugins/progress/src/fulgurite_progress/summary.py",
    "plugins/sharding/src/fulgurite_sharding/distributed.py",
    "plugins/sharding/src/fulgurite_sharding/launch.py",
    "plugins/sharding/src/fulgurite_sharding/plugin.py",
    "plugins/sharding/src/fulgurite_sharding/strategy.py",
    "plugins/testing/src/fulgurite_testing/bits.py",
    "plugins/testing/src/fulgurite_testing/check.py",
    "plugins/testing/src/fulgurite_testing/host.py",
    "plugins/testing/src/fulgurite_testing/memory.py",
    "plugins/testing/src/fulgurite_testing/processes.py",
    "plugins/testing/src/fulgurite_testing/runs.py",
    "plugins/testing/src/fulgurite_testing/subject.py",
    "plugins/testing/src/fulgurite_testing/together.py",
    "plugins/testing/src/fulgurite_testing/traces.py",
    "plugins/testing/src/fulgurite_testing/watched.py",
    "plugins/wandb/src/fulgurite_wandb/backend.py",
    "plugins/wandb/src/fulgurite_wandb/plugin.py",
}
"""Files that still have such names; the list only shrinks."""


def find_forbidden(path: Path) -> list[str]:
    """Return the forbidden names of variables, arguments and functions in a file."""
    offences = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef):
            name = node.name
        else:
            continue
        if name.lstrip("_") in FORBIDDEN:
            offences.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    return offences


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_say_what_they_hold(path: Path) -> None:
    offences = find_forbidden(path)
    if str(path.relative_to(ROOT)) not in PENDING:
        assert not offences
