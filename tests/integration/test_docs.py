"""The code in the README and in docs/ runs, and the names and links in the pages lead somewhere."""

import ast
import html
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONTRIB_READMES = sorted(ROOT.glob("contrib/*/README.md"))
READMES = [*sorted(ROOT.glob("plugins/*/README.md")), *CONTRIB_READMES]
GENERATED = {"hooks.md"}  # its blocks are signatures
# The address of files outside of docs/ in the pages of the site.
REPOSITORY = "https://github.com/fulgurite/fulgurite/blob/main/"
DOTTED_NAME = re.compile(r"`((?:fg|fulgurite\w*)(?:\.\w+)+)")
FILES = {"fulgurite.toml"}
ENTRY_POINT_GROUPS = {"fulgurite.commands", "fulgurite.plugins", "fulgurite.families"}


def iter_blocks(page: Path) -> Iterator[str]:
    """Yield the Python blocks of a page, each after as many empty lines as precede it in the page,
    so that a traceback shows the page's line numbers."""
    text = page.read_text()
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield "\n" * text.count("\n", 0, block.start(1)) + block[1]


class PageRunner:
    """Runs the blocks of a page in one namespace and notes which of their functions were called.

    Attributes:
        uncalled: the functions that no block has called yet.
    """

    def __init__(self, page: str, namespace: dict[str, Any]) -> None:
        self.page = page
        self.namespace = namespace
        self.uncalled: set[str] = set()
        namespace["_called"] = self.uncalled.discard

    def run(self, block: str) -> None:
        """Run a block; each function of it begins with a statement that notes the call."""
        tree = ast.parse(block, self.page)
        for function in tree.body:
            if isinstance(function, ast.FunctionDef):
                self.uncalled.add(function.name)
                note = ast.parse(f"_called({function.name!r})").body[0]
                for node in ast.walk(note):
                    ast.copy_location(node, function.body[0])
                function.body.insert(1 if ast.get_docstring(function) else 0, note)
        exec(compile(tree, self.page, "exec"), self.namespace)


def find_file(page: Path, link: str) -> Path | None:
    """Return the file of this project that a link leads to; None if it leads elsewhere."""
    link = link.partition("#")[0]
    if link.startswith(REPOSITORY):
        return ROOT / link.removeprefix(REPOSITORY)
    return None if "://" in link else page.parent / link


def collect_siblings(folder: Path) -> set[str]:
    """Return the folders of a distribution and of the siblings that it needs, as pip takes them."""
    members = [ROOT / "core", *ROOT.glob("plugins/*"), *ROOT.glob("contrib/*")]
    projects = [member / "pyproject.toml" for member in members]
    folders = {
        tomllib.loads(project.read_text())["project"]["name"]: project.parent
        for project in projects
        if project.exists()
    }
    waiting, collected = [folder], set()
    while waiting:
        project = tomllib.loads((waiting.pop() / "pyproject.toml").read_text())["project"]
        collected.add(f"./{folders[project['name']].relative_to(ROOT)}")
        names = {re.split(r"[^\w-]", requirement)[0] for requirement in project["dependencies"]}
        waiting += [folders[name] for name in names & folders.keys()]
    return collected


def expand_braces(command: str) -> str:
    """Return a command with `./plugins/{a,b}` as `./plugins/a ./plugins/b`, as a shell has it."""
    return re.sub(
        r"(\S+)\{(.+?)\}",
        lambda match: " ".join(f"{match[1]}{name}" for name in match[2].split(",")),
        command,
    )


def find_object(name: str) -> Any:
    """Return the module, or the attribute of one, that a dotted name leads to."""
    first, *parts = name.split(".")
    path = "fulgurite" if first == "fg" else first
    target: Any = import_module(path)
    for part in parts:
        path += f".{part}"
        target = getattr(target, part) if hasattr(target, part) else import_module(path)
    return target


# Their blocks train for three seconds and more each, and are run by `pytest -m slow`. So do those of README.md, the
# tutorial and the page on writing a plugin, which are run for every change.
LONG_PAGES = {
    *("averaging", "comparing", "contrib", "data", "debugging", "ensembles", "evaluation"),
    *("export", "fine-tuning", "gan", "language-models", "logging", "metrics", "optimization"),
    *("population", "precision", "pretrained", "reinforcement-learning", "sampling", "seeing"),
    *("sharding", "sources-and-stages", "sweeps", "text", "weights"),
}


def name_page(page: Path) -> str:
    return page.parent.name if page in CONTRIB_READMES else page.stem


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if name_page(page) in LONG_PAGES else [])
        for page in [*PAGES, *CONTRIB_READMES]
        if page.name not in GENERATED
    ],
    ids=name_page,
)
def test_python_blocks_of_a_page_run_one_after_the_other(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    namespace = ModuleType(f"page_{page.stem}".replace("-", "_"))
    monkeypatch.setitem(sys.modules, namespace.__name__, namespace)
    runner = PageRunner(str(page), namespace.__dict__)
    for block in iter_blocks(page):
        runner.run(block)
    assert not runner.uncalled, f"{page.name} defines what none of its blocks calls"


def test_function_that_no_block_of_a_page_calls_is_detected():
    runner = PageRunner("page.md", {})
    runner.run("def f():\n    'Fail.'\n    return missing\n\n@str\ndef g(): h()\n")
    runner.run("def h():\n    return 1\n\nassert f.__doc__ == 'Fail.'\n")
    assert runner.uncalled == {"f", "g", "h"}
    runner.run("h()")
    assert runner.uncalled == {"f", "g"}


def test_blocks_of_the_readme_are_recognized():
    assert len(list(iter_blocks(ROOT / "README.md"))) == 2


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=lambda page: str(page.relative_to(ROOT)))
def test_dotted_names_in_a_page_exist(page: Path):
    names = {*DOTTED_NAME.findall(page.read_text())}
    for name in sorted(names - ENTRY_POINT_GROUPS - FILES):
        assert find_object(name) is not None


def test_a_dotted_name_that_does_not_exist_is_detected():
    with pytest.raises(ModuleNotFoundError):
        find_object("fg.Engine.fitted")


@pytest.mark.parametrize("readme", READMES, ids=lambda page: page.parent.name)
def test_readme_of_a_plugin_installs_it_with_its_siblings(readme: Path):
    """No index has them, so `pip install fulgurite-NAME` would fail."""
    text = readme.read_text()
    assert "pip install fulgurite-" not in text and "pip install 'fulgurite-" not in text
    command = re.search(r"^pip install ([^#\n]+)  # from the root of a clone", text, re.MULTILINE)
    assert command and set(command[1].split()) == collect_siblings(readme.parent)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_install_what_they_name_with_its_siblings(page: Path):
    text = page.read_text()
    assert not re.findall(r"pip install '?fulgurite-\w+", text)
    for command in re.findall(r"^pip install (.+)  # from the root of a clone", text, re.MULTILINE):
        folders = {word for word in expand_braces(command).split() if word.startswith("./")}
        needed = {name for folder in folders for name in collect_siblings(ROOT / folder)}
        assert needed <= folders, page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files(page: Path):
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())
    files = {link: find_file(page, link) for link in links}
    assert not [link for link, file in files.items() if file is not None and not file.exists()]
    outside = [link for link in links if page.parent.name == "docs" and link.startswith("../")]
    assert not outside, f"the site holds the pages of docs/ only: write {REPOSITORY}..."


def test_api_reference_names_every_package():
    named = {line.removeprefix("::: ").partition(".")[0] for line in list_reference()}
    packages = {file.parent.name for file in ROOT.glob("*/*/src/*/__init__.py")}
    assert named == packages | {"fulgurite"}


def iter_public_names(module: ModuleType) -> Iterator[str]:
    """Yield what a module exports: its `__all__`, or what it or its own modules define."""
    if hasattr(module, "__all__"):
        yield from module.__all__
        return
    for name, value in vars(module).items():
        package = module.__name__.partition(".")[0]
        defined_in = getattr(value, "__module__", None) or ""
        is_own = defined_in == module.__name__ or (
            module.__name__ == package and defined_in.startswith(f"{package}.")
        )
        if is_own and not name.startswith("_"):
            yield name


def list_reference() -> list[str]:
    """Return the lines of docs/api.md in whose place the site shows the docstrings of a module."""
    lines = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("::: ")]


def test_user_pages_hold_no_ids_of_the_list_of_capabilities():
    """The migration tables have them, and nothing else."""
    for page in PAGES:
        for line in page.read_text().splitlines():
            if page.stem.startswith("from-"):
                line = re.sub(r"^\| [A-Z]\d+ \|", "", line)
            ids = set(re.findall(r"\b[KLBG]\d{1,2}\b", line)) - {"L1", "L2"}  # names of losses
            assert not ids, f"{page.name}: {line}"


def load_drawing() -> ModuleType:
    """Return docs/pictures/draw.py as a module."""
    file = ROOT / "docs" / "pictures" / "draw.py"
    spec = importlib.util.spec_from_file_location("draw", file)
    assert spec and spec.loader
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    return drawing


def test_pictures_are_shown_small_and_drawn_by_the_script(tmp_path: Path):
    """A page shows each picture, the script knows it, and it asks nothing of other servers."""
    drawing = load_drawing()
    files = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
    assert [file.stem for file in files] == sorted(drawing.PICTURES)
    text = "".join(page.read_text() for page in PAGES)
    for file in files:
        assert f"pictures/{file.name})" in text
        assert file.stat().st_size < 100_000
        assert "url(http" not in re.sub(r"\s", "", file.read_text())
    photographs = sorted((ROOT / "docs" / "pictures").glob("*.png"))
    assert [file.name for file in photographs] == ["report.png", "tensorboard.png", "watch.png"]
    for file in photographs:
        assert f"pictures/{file.name})" in text and file.stat().st_size < 150_000
    for name in ("cost", "step"):
        drawing.PICTURES[name](tmp_path / f"{name}.svg")
        assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_the_picture_of_the_terminal_is_what_the_train_command_shows(tmp_path: Path):
    """But for the numbers, and for the times, whose order depends on the machine."""

    def read_lines(file: Path) -> list[str]:
        texts = re.findall(r'<text [^>]*y="([^"]+)"[^>]*>([^<]*)</text>', file.read_text())
        lines: dict[str, str] = {}
        for height, text in texts:
            lines[height] = f"{lines.get(height, '')} {html.unescape(text)}"
        words = [re.sub(r"\d[\d.,]*", "#", line).split() for line in lines.values()]
        return [" ".join(line) for line in words if line]

    def read_until_times(file: Path) -> list[str]:
        lines = read_lines(file)
        return lines[: lines.index("part seconds share")]

    load_drawing().draw_terminal(tmp_path / "terminal.svg")
    lines = read_until_times(tmp_path / "terminal.svg")
    assert read_until_times(ROOT / "docs" / "pictures" / "terminal.svg") == lines
    assert any(re.match(r"step #/# loss # accuracy # .*done$", line) for line in lines)
    program = re.search(r"<!-- train-command -->(.*?)<!--", (ROOT / "README.md").read_text(), re.S)
    assert program and f"{lines[0].removeprefix('python ')}\n" in program[1]


def test_the_table_of_the_readme_holds_the_figures_of_the_chart():
    """Both come from the JSON of tests/bench/overhead.py."""
    drawing = load_drawing()
    for model, costs in drawing.read_costs().items():
        row = " | ".join(f"{costs[arm]:.2f}" for arm in drawing.ARMS)
        assert f"| {drawing.MODELS[model]} | {row} |" in (ROOT / "README.md").read_text()


def test_site_builds_without_a_warning(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement
    process = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=env)
    assert process.returncode == 0, process.stderr
    for page in (ROOT / "docs").glob("*.md"):
        folder = tmp_path if page.stem == "index" else tmp_path / page.stem
        assert (folder / "index.html").is_file()
    reference = (tmp_path / "api" / "index.html").read_text()
    for line in list_reference():
        module = importlib.import_module(line.removeprefix("::: "))
        for name in iter_public_names(module):
            if inspect.ismodule(getattr(module, name)):
                continue  # it has a place of its own: `hookspecs` is the page Hooks
            assert f'id="{module.__name__}.{name}"' in reference, f"{name} has no docstring"
    # An example is code, and the arguments of a class that defines `__new__` are its own.
    assert "<strong>Example</strong>" in reference and "\nExample:" not in reference
    assert "functions by the name of their hook" in reference
