"""The migration pages have a row for every capability of the other system. (`test_docs.py` checks
that the names in them exist.)"""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
SPEC = ROOT.parent / "shared" / "spec"
CAPABILITIES = (SPEC / "parity.md", SPEC / "features.md")
PAGES = {"L": "from-lightning", "K": "from-kauldron", "B": "from-bobbin", "G": "from-gomlx"}


def read_rows(page: str) -> list[list[str]]:
    """Return the cells of the page's rows: id, there, here, where."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    return [
        line.strip("| ").split(" | ")
        for line in text.splitlines()
        if re.match(r"\| [A-Z]\d+ ", line)
    ]


@pytest.mark.parametrize(("letter", "page"), PAGES.items())
def test_every_row_says_where_it_is_or_that_it_is_planned(letter: str, page: str):
    for number, (identity, there, here, *where) in enumerate(read_rows(page), 1):
        assert identity == f"{letter}{number}"
        assert there and (where or "planned" in here), (
            f"{identity} says neither where it is nor that it is planned"
        )


@pytest.mark.skipif(
    not SPEC.exists(), reason="the lists of capabilities are not beside this checkout"
)
@pytest.mark.parametrize(("letter", "page"), PAGES.items())
def test_every_capability_has_a_row(letter: str, page: str):
    capabilities = [
        identity
        for path in CAPABILITIES
        for identity in re.findall(rf"^\| ({letter}\d+) \|", path.read_text(), re.MULTILINE)
    ]
    assert capabilities and [identity for identity, *_ in read_rows(page)] == capabilities
