"""What a distribution is tested with, without any other: `python list_alone.py FOLDER`.

Prints two lines: what to install (folders of this workspace, and requirements), and the files with
tests. What it declares is what it depends on and, for its tests, its dependency group `test`; where
it has none, the files that name another distribution of ours are left out.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

TOOLS = ["beartype", "hatchling", "hypothesis", "matplotlib", "pytest", "pytest-xdist"]
TOOLS += ["rich", "scikit-learn"]


def read_members() -> dict[str, tuple[Path, dict[str, Any]]]:
    """Return folder and pyproject of each distribution of this workspace, by name."""
    members = {}
    for pattern in ("core", "plugins/*", "contrib/*"):
        for path in sorted(Path().glob(f"{pattern}/pyproject.toml")):
            pyproject = tomllib.loads(path.read_text())
            members[pyproject["project"]["name"]] = (path.parent, pyproject)
    return members


def find_siblings(names: list[str], members: dict[str, Any]) -> set[str]:
    """Return the distributions of ours among some names, with all that they depend on.

    Args:
        names: of distributions.
        members: those of this workspace.
    """
    found: set[str] = set()
    waiting = [name for name in names if name in members]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            _, pyproject = members[name]
            needed = map(get_name, pyproject["project"]["dependencies"])
            waiting += [other for other in needed if other in members]
    return found


def get_name(requirement: str) -> str:
    """Return the name of the distribution that a requirement asks for."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def main(folder: Path) -> None:
    """Print both lines for the distribution in a folder."""
    members = read_members()
    (name,) = [name for name, (path, _) in members.items() if path == folder]
    pyproject = members[name][1]
    test_group = pyproject.get("dependency-groups", {}).get("test")
    wanted = [name, "fulgurite-testing", *map(get_name, test_group or [])]
    siblings = find_siblings(wanted, members)
    others = [text for text in test_group or [] if get_name(text) not in members]
    print(*[f"./{members[sibling][0]}" for sibling in sorted(siblings)], *TOOLS, *others)
    packages = {sibling.replace("-", "_") for sibling in siblings}
    tests = sorted(Path("tests/plugins", folder.name.replace("-", "_")).glob("test_*.py"))
    if test_group is None:
        tests = [
            test
            for test in tests
            if packages.issuperset(re.findall(r"\bfulgurite_\w+", test.read_text()))
        ]
    print(*tests)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
