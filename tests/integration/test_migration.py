"""The tables for those who come from another system: none of its capabilities is left out, and
every name is there."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PARITY = ROOT.parent / "shared" / "spec" / "parity.md"
PAGES = {"L": "from-lightning", "K": "from-kauldron", "B": "from-bobbin", "G": "from-gomlx"}
NAME = re.compile(r"`((?:fg|fulgurite\w*)(?:\.\w+)+)`")


def rows(page: str) -> list[list[str]]:
    """The cells of the page's rows: id, there, here, where."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    return [
        line.strip("| ").split(" | ")
        for line in text.splitlines()
        if re.match(r"\| [A-Z]\d+ ", line)
    ]


def found(name: str) -> Any:
    """What a dotted name leads to: a module, or an attribute of one."""
    parts = (
        name.replace("fg.", "fulgurite.", 1).split(".")
        if name.startswith("fg.")
        else name.split(".")
    )
    thing: Any = import_module(parts[0])
    for at, part in enumerate(parts[1:], 2):
        try:
            thing = getattr(thing, part)
        except AttributeError:
            thing = import_module(".".join(parts[:at]))
    return thing


@pytest.mark.parametrize("page", PAGES.values())
def test_every_documented_name_exists(page: str):
    for name in NAME.findall(" ".join(here for _, _, here, *_ in rows(page))):
        assert found(name) is not None


@pytest.mark.parametrize(("letter", "page"), PAGES.items())
def test_every_row_says_where_it_is_or_that_it_is_planned(letter: str, page: str):
    for number, (identity, there, here, *where) in enumerate(rows(page), 1):
        assert identity == f"{letter}{number}"
        assert there and (where or "planned" in here), (
            f"{identity} says neither where it is nor that it is planned"
        )


@pytest.mark.skipif(
    not PARITY.exists(), reason="the list of capabilities is not beside this checkout"
)
@pytest.mark.parametrize(("letter", "page"), PAGES.items())
def test_every_capability_has_a_row(letter: str, page: str):
    wanted = re.findall(rf"^\| ({letter}\d+) \|", PARITY.read_text(), re.MULTILINE)
    assert wanted and [identity for identity, *_ in rows(page)] == wanted


def test_missing_name_is_detected():
    with pytest.raises(ModuleNotFoundError):
        found("fg.Engine.fitted")
