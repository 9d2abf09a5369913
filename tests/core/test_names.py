"""Names say what they hold: the idioms that CONTRIBUTING forbids do not come back, neither in the
sources nor in tests, examples, pages and templates."""

import ast
import re
import textwrap
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    *("one", "made", "given", "found", "own", "told", "kept", "seen", "asked", "gap", "fix"),
    *("parsed", "restored", "completed", "measured", "computed", "explained", "described"),
}
VERBS = ("build", "check", "collect", "get", "has", "is", "test")
SOURCES = (
    *("core/src/**/*.py", "plugins/*/src/**/*.py", "contrib/*/src/**/*.py", "examples/**/*.py"),
    *("tests/**/*.py", "docs/**/*.py", "plugins/dev/src/**/*.py.txt"),
)
PAGES = ("*.md", "docs/**/*.md", "core/*.md", "plugins/*/*.md")
FILES = sorted(path for pattern in (*SOURCES, *PAGES) for path in ROOT.glob(pattern))


def iter_trees(path: Path) -> Iterator[ast.Module]:
    """Yield the parsed code of a file: all of it, or each Python block of a page.

    Blocks that only show a signature, as the generated references do, cannot be parsed.
    """
    text = path.read_text()
    if path.suffix != ".md":
        # A template holds `$NAME` where a name is filled in.
        yield ast.parse(re.sub(r"\$\{?(\w+)\}?", r"\1", text), str(path))
        return
    for block in re.findall(r"^ *```python\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        try:
            yield ast.parse(textwrap.dedent(block))
        except SyntaxError:
            continue


def is_forbidden(name: str, *, is_function: bool = False) -> bool:
    """Return whether a name is one of the forbidden words, or a function `x_of` without a verb."""
    words = name.lstrip("_").split("_")
    if is_function and len(words) > 1 and words[-1] == "of":
        return words[0] not in VERBS
    return words[0] in FORBIDDEN and len(words) == 1


def find_forbidden(path: Path) -> list[str]:
    """Return the forbidden names of variables, arguments and functions in a file."""
    offences = []
    for tree in iter_trees(path):
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                forbidden, name = is_forbidden(node.id), node.id
            elif isinstance(node, ast.arg):
                forbidden, name = is_forbidden(node.arg), node.arg
            elif isinstance(node, ast.FunctionDef):
                forbidden, name = is_forbidden(node.name, is_function=True), node.name
            else:
                continue
            if forbidden:
                offences.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    return offences


def test_names_say_what_they_hold() -> None:
    assert not list(chain.from_iterable(map(find_forbidden, FILES)))


ID = re.compile(r"^test_(?:case_)?[a-z]?\d+[a-z]?\d*_")


@pytest.mark.parametrize("name", ["test_case_40_tied", "test_2s19_blocks", "test_g6_runs"])
def test_an_id_in_the_name_of_a_test_is_detected(name: str) -> None:
    assert ID.match(name) and not ID.match("test_ids_of_64_bits")


def test_names_of_tests_say_behaviour_and_hold_no_ids() -> None:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [
        name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    ]
    assert len(names) > 1_000
    assert not [name for name in names if ID.match(name)]


def test_forbidden_names_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```python\ndef size_of(made):\n    for one in made:\n        pass\n```\n")
    names = {offence.rpartition(" ")[2] for offence in find_forbidden(page)}
    assert names == {"size_of", "made", "one"}
    assert not is_forbidden("get_hook_names", is_function=True)
