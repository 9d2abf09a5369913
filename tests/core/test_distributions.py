"""A distribution imports what its pyproject declares, and dependencies between ours are few."""

import ast
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from itertools import pairwise
from pathlib import Path

import fulgurite as fg
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
CORE = "fulgurite"
# The core's dependencies may be imported by whoever depends on the core.
CORE_PACKAGES = {"equinox", "fulgurite", "jax", "jaxtyping", "numpy", "optax", "pluggy"}
STANDALONE = {"fulgurite-config", "fulgurite-export", "fulgurite-report"}
"""What can be used without the core; the half of `fulgurite-export` that writes asks for it."""
FACES = {"fulgurite", "fulgurite.errors", "fulgurite.metrics", "fulgurite.plugins"}
"""What others import of the core; other distributions are imported by their top level."""
PUBLIC_MODULES = {"fulgurite_logging.media"}
"""Namespaces at the top level of a distribution: `from fulgurite_logging import media`."""
PYTHON_BLOCK = re.compile(r"^ *```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
MAX_DEPTH = 3
"""Core <- runs, metrics, losses <- logging, cli, checkpoint, evaluators <- tensorboard, wandb, keys."""


@dataclass(frozen=True)
class Member:
    """A distribution of this workspace.

    Attributes:
        name: of the distribution.
        source: the folder of its package.
        required: the names of its dependencies.
        optional: the names of the dependencies of its extras.
    """

    name: str
    source: Path
    required: frozenset[str]
    optional: frozenset[str]


def read_members() -> dict[str, Member]:
    """Read the pyproject of every distribution of this workspace."""
    members = {}
    for pattern in ("core", "plugins/*", "contrib/*"):
        for path in sorted(ROOT.glob(f"{pattern}/pyproject.toml")):
            project = tomllib.loads(path.read_text())["project"]
            extras = project.get("optional-dependencies", {}).values()
            (init,) = path.parent.glob("src/*/__init__.py")
            members[project["name"]] = Member(
                project["name"],
                init.parent,
                parse_names(project["dependencies"]),
                parse_names([requirement for extra in extras for requirement in extra]),
            )
    return members


def parse_names(requirements: list[str]) -> frozenset[str]:
    """Return the names of the distributions that requirements ask for."""
    return frozenset(canonicalize_name(Requirement(text).name) for text in requirements)


MEMBERS = read_members()
PACKAGES = {member.source.name: member.name for member in MEMBERS.values()}
PLUGINS = sorted(MEMBERS.keys() - {CORE})


@cache
def list_installed() -> Mapping[str, list[str]]:
    """Return the distributions of each package that is installed, which takes seconds: the files of all are read."""
    return packages_distributions()


@pytest.mark.parametrize("name", PLUGINS)
def test_distribution_declares_what_it_imports(name: str) -> None:
    """As a dependency or under an extra. What the core depends on comes with the core."""
    member = MEMBERS[name]
    undeclared = set()
    for path, line, package in iter_imports(member.source):
        # One that is not installed, such as torch, has the name of its package.
        others = list_installed().get(package, [package])
        distributions = [PACKAGES[package]] if package in PACKAGES else others
        names = {canonicalize_name(distribution) for distribution in distributions}
        is_free = package in CORE_PACKAGES | sys.stdlib_module_names or names == {name}
        if not is_free and not names & (member.required | member.optional):
            undeclared.add(f"{path.relative_to(ROOT)}:{line}: {package}")
    assert not undeclared


def iter_users() -> Iterator[tuple[str, str, str]]:
    """Yield the name, the code and the package of everything that imports ours: distributions,
    examples, the templates of new plugins, and the Python blocks of pages."""
    for member in MEMBERS.values():
        if member.name != CORE:
            for path in sorted(member.source.rglob("*.py")):
                yield str(path.relative_to(ROOT)), path.read_text(), member.source.name
    for path in sorted(ROOT.glob("examples/*.py")):
        yield str(path.relative_to(ROOT)), path.read_text(), ""
    for path in sorted(ROOT.glob("plugins/dev/src/fulgurite_dev/templates/**/*.py.txt")):
        yield str(path.relative_to(ROOT)), path.read_text().replace("$", ""), ""
    pages = [
        path
        for pattern in ("*.md", "docs/*.md", "*/*.md", "*/*/*.md")
        for path in ROOT.glob(pattern)
    ]
    for path in sorted({*pages} - {ROOT / "docs" / "hooks.md"}):  # its blocks are signatures
        for block in PYTHON_BLOCK.findall(path.read_text(encoding="utf-8")):
            yield str(path.relative_to(ROOT)), textwrap.dedent(block), ""


def iter_private_imports(code: str, package: str = "") -> Iterator[str]:
    """Yield what code imports of ours that is not public: a module of the core that is not one of
    its faces, a module within another distribution, or a name with an underscore. `fg.name` counts
    as an import.

    Args:
        code: the text of a module.
        package: the package that the module belongs to, whose own modules it may import.
    """
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            imports = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports = [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in {"fg", CORE}:
            imports = [(CORE, node.attr)]
        else:
            continue
        for module, name in imports:
            top = module.partition(".")[0]
            if top in PACKAGES and top != package and not is_public(module, name):
                yield f"line {node.lineno}: {module}.{name}".rstrip(".")


def is_public(module: str, name: str) -> bool:
    """Return whether a module of ours, and a name in it, may be imported by others.

    Args:
        module: as it is imported, such as `fulgurite.plugins`.
        name: imported from it; empty for the module itself.
    """
    top, _, inner = module.partition(".")
    if (inner and module not in FACES) or name.startswith("_"):
        return False
    if inner or not name or f"{top}.{name}" in FACES | PUBLIC_MODULES:
        return True
    if top == CORE:
        return name in fg.__all__
    path = MEMBERS[PACKAGES[top]].source / name
    return not path.is_dir() and not path.with_suffix(".py").exists()


def test_others_import_faces_and_top_levels_alone() -> None:
    private = [
        f"{user}, {imported}"
        for user, code, package in iter_users()
        for imported in iter_private_imports(code, package)
    ]
    assert not private


def test_all_who_import_ours_are_read() -> None:
    names = [name for name, _, _ in iter_users()]
    for part in (
        "plugins/keys/src",
        "contrib/sam/src",
        "examples/",
        "templates/",
        "docs/",
        "README.md",
    ):
        assert any(part in name for name in names), part


def test_private_imports_are_found() -> None:
    code = (
        "import fulgurite as fg\n"
        "from fulgurite import metrics\n"
        "from fulgurite.errors import DataError\n"
        "from fulgurite_logging import FileLogger, media\n"
        "from fulgurite_keys.paths import build_path\n"
        "from fulgurite._src.fit.run import Run\n"
        "import fulgurite_logging.files\n"
        "from fulgurite import _src\n"
        "from fulgurite_runs import json_codec\n"
        "def f():\n    from fulgurite_logging.media import Image\n"
        "fg.metrics.Mean\n"
        "fg.tree.paths\n"
    )
    assert list(iter_private_imports(code, "fulgurite_keys")) == [
        "line 6: fulgurite._src.fit.run.Run",
        "line 7: fulgurite_logging.files",
        "line 8: fulgurite._src",
        "line 9: fulgurite_runs.json_codec",
        "line 11: fulgurite_logging.media.Image",
        "line 13: fulgurite.tree",
    ]


@pytest.mark.parametrize("name", PLUGINS)
def test_plugin_depends_on_the_core(name: str) -> None:
    assert (CORE in MEMBERS[name].required) == (name not in STANDALONE)


def test_dependencies_between_distributions_have_no_circle_and_are_at_most_three_deep() -> None:
    # Whoever depends on a distribution does not get its extras, so they make no chain longer.
    chains = [
        chain
        for name in MEMBERS
        for chain in iter_chains((name,))
        if all(after in MEMBERS[before].required for before, after in pairwise(chain[1:]))
    ]
    assert max(len(chain) - 1 for chain in chains) <= MAX_DEPTH, max(chains, key=len)


def test_the_page_of_the_architecture_has_every_distribution_at_its_depth() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    _, _, table = page.partition("| depth | distributions |")
    rows = dict(re.findall(r"^\| (\d)[^|]*\|(.*)$", table, re.MULTILINE))
    for name in MEMBERS:
        row = rows[str(get_depth(name))]
        assert f"`{name}`" in row, f"{name} is at depth {get_depth(name)}"


def get_depth(name: str) -> int:
    """Return the length of the longest chain of dependencies of ours below a distribution."""
    if name == CORE:
        return 0
    siblings = MEMBERS[name].required & MEMBERS.keys()
    return max((1 + get_depth(sibling) for sibling in siblings), default=0)


def test_core_depends_on_no_other_distribution_of_ours() -> None:
    """Its extras `train` and `all` only collect them; the core imports none."""
    core = MEMBERS[CORE]
    assert not core.required & MEMBERS.keys()
    assert not {package for _, _, package in iter_imports(core.source)} & (PACKAGES.keys() - {CORE})


def iter_chains(chain: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the chains of dependencies that begin with `chain`; those of extras count as well."""
    member = MEMBERS[chain[-1]]
    # Extras of the core collect distributions of ours, and nothing in the core uses them.
    needed = member.required if member.name == CORE else member.required | member.optional
    siblings = sorted(needed & MEMBERS.keys())
    if not siblings:
        yield chain
    for sibling in siblings:
        assert sibling not in chain, f"a circle: {' -> '.join((*chain, sibling))}"
        yield from iter_chains((*chain, sibling))


def iter_imports(folder: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield the file, line and top-level package of every import, inside functions too."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield path, node.lineno, alias.name.partition(".")[0]
            elif isinstance(node, ast.ImportFrom):
                yield path, node.lineno, (node.module or "").partition(".")[0]


def test_extra_all_of_the_core_and_the_sources_of_uv_list_every_distribution() -> None:
    core = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text())["project"]
    extras = core["optional-dependencies"]
    assert parse_names(extras["all"]) == set(PLUGINS)
    assert parse_names(extras["train"]) < set(PLUGINS)
    sources = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["sources"]
    assert sources.keys() == MEMBERS.keys()


def test_every_distribution_carries_the_license_as_a_file() -> None:
    """A link to the root's would lead out of an sdist, which installers refuse to unpack."""
    for member in MEMBERS.values():
        file = member.source.parents[1] / "LICENSE"
        assert not file.is_symlink(), file
        assert file.read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_every_distribution_says_that_it_is_typed() -> None:
    assert not [
        name for name, member in MEMBERS.items() if not (member.source / "py.typed").exists()
    ]


def test_all_distributions_have_one_version() -> None:
    files = [member.source.parents[1] / "pyproject.toml" for member in MEMBERS.values()]
    versions = {tomllib.loads(file.read_text())["project"]["version"] for file in files}
    assert len(versions) == 1
    assert f"\nversion: {versions.pop()}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_distribution_marks_its_frames_as_ours() -> None:
    """So that tracebacks leave them out."""
    for member in MEMBERS.values():
        init = (member.source / "__init__.py").read_text()
        assert "\n__tracebackhide__ = True\n" in init, member.name
