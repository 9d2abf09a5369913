"""The table of faults in docs/reliability.md is complete, and every row names a test that is there."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "reliability.md").read_text().splitlines()
    if line.startswith("| ") and not line.endswith("| test |")
]

# What anyone would ask about, by a word of its row.
FAULTS = (
    "killed at any moment",
    "killed in a save",
    "SIGTERM",
    "interrupted",
    "data source that never answers",
    "evaluation never answers",
    "logger that hangs",
    "disk that hangs",
    "full disk, for records",
    "full disk, for checkpoints",
    "cannot be written",
    "is deleted",
    "another run begins",
    "two processes",
    "machine of the owner died",
    "network",
    "clocks",
    "damaged",
    "hostile",
    "records that are missing",
    "several processes dies",
    "launcher dies",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_has_a_row(fault: str) -> None:
    assert [row for row in ROWS if fault in row[0]], fault


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_row_says_what_happens_what_is_lost_and_which_test_shows_it(row: list[str]) -> None:
    # What others wrote costs nothing, so that table has no column for it.
    assert len(row) in (3, 4) and all(row)
    match = re.fullmatch(r"`(tests/\S+\.py)::(test_\w+)`", row[-1])
    assert match is not None, row[-1]
    tree = ast.parse((ROOT / match[1]).read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert match[2] in names
