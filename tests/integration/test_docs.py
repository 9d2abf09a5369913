"""What the README and the pages in docs/ show runs, and what they link to is there."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import fulgurite
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = {"api.md", "hooks.md"}  # its blocks are signatures
HERE = (  # what pages of the site call a file outside of docs/
    "https://github.com/fulgurite/fulgurite/blob/main/"
)


def blocks(page: Path) -> Iterator[str]:
    """The Python blocks of a page, each with so many empty lines before it that a traceback shows
    the page's lines."""
    text = page.read_text()
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield "\n" * text.count("\n", 0, block.start(1)) + block[1]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in GENERATED], ids=lambda page: page.stem
)
def test_python_blocks_of_a_page_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    namespace = ModuleType(f"page_{page.stem}".replace("-", "_"))
    monkeypatch.setitem(sys.modules, namespace.__name__, namespace)
    for block in blocks(page):
        exec(compile(block, page, "exec"), namespace.__dict__)


def test_python_blocks_are_extracted():
    assert len(list(blocks(ROOT / "README.md"))) == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files(page: Path):
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())
    missing = [
        link for link in links if (file := _file(page, link)) is not None and not file.exists()
    ]
    assert not missing
    outside = [link for link in links if page.parent.name == "docs" and link.startswith("../")]
    assert not outside, f"the site has the pages of docs/ alone: write {HERE}..."


def _file(page: Path, link: str) -> Path | None:
    """What a link leads to, if it is a file of this project."""
    link = link.partition("#")[0]
    if link.startswith(HERE):
        return ROOT / link.removeprefix(HERE)
    return None if "://" in link else page.parent / link


def test_the_reference_of_names_is_up_to_date():
    spec = importlib.util.spec_from_file_location("generate_api", ROOT / "docs" / "generate_api.py")
    assert spec and spec.loader
    spec.loader.exec_module(generator := importlib.util.module_from_spec(spec))
    written = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert written == generator.page(), "run python docs/generate_api.py"
    for name, one in vars(fulgurite).items():
        if isinstance(one, type) and one.__module__.startswith("fulgurite."):
            assert f"\n### {name}\n" in written


def test_the_site_is_built_without_a_warning(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement
    made = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=env)
    assert made.returncode == 0, made.stderr
    for page in (ROOT / "docs").glob("*.md"):
        assert (tmp_path / ("" if page.stem == "index" else page.stem) / "index.html").is_file()
