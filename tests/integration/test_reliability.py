"""The table of faults in docs/reliability.md is complete, and every row names a test that is there."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "reliability.md").read_text()
FAULTS_TEXT, _, OTHERS_TEXT = TEXT.partition("\n## What others wrote\n")


def read_rows(text: str) -> list[list[str]]:
    """Return the cells of the rows of the table in a text, without those of its head."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][1:]


ROWS = read_rows(FAULTS_TEXT)
# What is not the user's own is refused, and nothing is lost.
ROWS_OF_OTHERS = read_rows(OTHERS_TEXT)

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


def check_test(cell: str) -> None:
    match = re.fullmatch(r"`(tests/\S+\.py)::(test_\w+)`", cell)
    assert match is not None, cell
    tree = ast.parse((ROOT / match[1]).read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert match[2] in names


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_row_says_what_happens_what_is_lost_and_which_test_shows_it(row: list[str]) -> None:
    assert len(row) == 4 and all(row)
    check_test(row[3])


@pytest.mark.parametrize("row", ROWS_OF_OTHERS, ids=lambda row: row[0])
def test_every_row_of_what_others_wrote_says_what_happens_and_names_its_test(
    row: list[str],
) -> None:
    assert len(row) == 3 and all(row)
    check_test(row[2])
