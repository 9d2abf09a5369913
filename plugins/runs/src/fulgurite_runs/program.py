"""Which program a run executes: its file, the distribution that it belongs to, and its commit."""

import os
import subprocess
import sys
import sysconfig
import tomllib
from functools import cache
from importlib.metadata import distributions, packages_distributions
from pathlib import Path
from typing import Any

GIT_TIMEOUT = 2.0
"""Seconds after which a git command is given up; the manifest then holds no commit."""
# In bytes; reading TOML takes up to 100 times as much memory.
_MAX_PROJECT_SIZE = 2**20
# Set within hooks of git: with them it would not look at the program's own repository.
_OTHER_REPOSITORY = {
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
}

_SCOPES_OF_REPOSITORY = ("local", "worktree")
"""What git calls the settings that come with a repository, and not from the user."""


def describe_program(file: str | None) -> dict[str, Any]:
    """Return what is known of a program, as JSON; what cannot be found out is None.

    It has the keys `file` (its name without the folder), `distribution` and `version` (of the
    installed package that the file is in, or of the project whose `pyproject.toml` is the nearest
    above it), and `git`: the `commit` of the working tree that the file is in, and whether it
    is `dirty`, because a tracked file has changed or the program itself is not tracked. Addresses
    of remotes, which may hold secrets, are not read.

    Args:
        file: the program; that of this process if None.
    """
    path = _find_file(file)
    if path is None:
        return {"file": None, "distribution": None, "version": None, "git": None}
    distribution, version = _find_package(path) or _find_project(path) or (None, None)
    return {
        "file": path.name,
        "distribution": distribution,
        "version": version,
        "git": read_git(path),
    }


def format_program(program: dict[str, Any]) -> str:
    """Return a program as a line for people: `train.py of digits 0.1, commit 1a2b3c4d (changed)`.

    Args:
        program: what `describe_program` returned, perhaps read from a file.
    """
    text = str(program.get("file") or "no file")
    if program.get("distribution"):
        text += f" of {program['distribution']} {program.get('version') or '(not installed)'}"
    commit = format_commit(program)
    return f"{text}, commit {commit}" if commit else f"{text}, in no git repository"


def format_commit(program: dict[str, Any]) -> str:
    """Return the first digits of a program's commit, and whether files have changed since; an empty
    text if there is none."""
    git = program.get("git")
    if not isinstance(git, dict):
        return ""
    dirty = git.get("dirty")
    changed = ""
    if dirty is True:
        changed = " (changed)"
    elif dirty is None:
        changed = " (perhaps changed)"
    return f"{str(git.get('commit'))[:8]}{changed}"


@cache
def find_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    first = next(iter(distributions(name=distribution)), None)
    return None if first is None else first.version


def read_git(path: Path) -> dict[str, Any] | None:
    """Return `commit` and `dirty` of the git working tree that a file is in.

    Args:
        path: the file.

    Returns:
        None if the file is in no working tree, the tree has no commit, or git is missing or does
        not answer in time. `dirty` is None if only that question was not answered. Filters of the
        repository's own configuration are not run, so a file that one of them changes is dirty;
        changes within submodules do not count.
    """
    commit = _ask_git(path.parent, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    changes = _read_changes(path.parent)
    tracked_file = _ask_git(path.parent, "ls-files", "--", path.name)
    is_answered = changes is not None and tracked_file is not None
    is_dirty = bool(changes) or not tracked_file
    return {"commit": commit, "dirty": is_dirty if is_answered else None}


def _read_changes(folder: Path) -> str | None:
    """Return what git says of changed files in a working tree, without running what the tree names;
    None if it does not answer, or cannot be asked without."""
    listing = _ask_git(folder, "config", "--list", "--null", "--show-scope", "--name-only")
    if listing is None:
        return None
    words = listing.split("\0")
    options: list[str] = []
    for scope, name in zip(words[::2], words[1::2], strict=False):
        if scope in _SCOPES_OF_REPOSITORY and name.startswith("filter."):
            driver = name.rpartition(".")[0]
            if "=" in driver or not driver.isascii():  # an option may not name it
                return None
            for setting in ("clean=", "process=", "required=false"):
                options += ["-c", f"{driver}.{setting}"]
    # A submodule has settings of its own, so no git is started in one.
    command = ["status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty"]
    return _ask_git(folder, *options, *command)


def _ask_git(folder: Path, *arguments: str) -> str | None:
    """Return what a git command prints, and None if it fails, is missing or takes too long."""
    environment = {
        name: value for name, value in os.environ.items() if name not in _OTHER_REPOSITORY
    }
    environment["GIT_OPTIONAL_LOCKS"] = "0"  # only read, also where that means to look again
    # The name of a file may look like a pattern: `a[1].py`, `:a.py`.
    environment["GIT_LITERAL_PATHSPECS"] = "1"
    # A clone that lacks files would fetch them, by a command that its settings name.
    environment["GIT_ALLOW_PROTOCOL"] = "none"
    # The repository's settings could name a program that git would start.
    command = ["git", "-c", "core.fsmonitor=false", *arguments]
    try:
        answer = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_TIMEOUT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.decode(errors="replace").strip()


def _find_file(file: str | None) -> Path | None:
    """Return the path of the program, or None where there is no file, as in a notebook."""
    name = file or getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        path = None if name is None else Path(name).resolve()
        return path if path is not None and path.is_file() else None
    except (OSError, ValueError):
        return None


def _find_project(path: Path) -> tuple[str, str | None] | None:
    """Return name and version of the project whose `pyproject.toml` is the nearest above a file."""
    for folder in path.parents:
        file = folder / "pyproject.toml"
        if not file.is_file():
            continue
        try:
            if file.stat().st_size > _MAX_PROJECT_SIZE:
                return None
            project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
            name = project.get("name")
            version = project.get("version")
        except (OSError, ValueError, AttributeError, RecursionError):
            return None
        if not isinstance(name, str):
            return None
        return name, version if isinstance(version, str) else find_version(name)
    return None


def _find_package(path: Path) -> tuple[str, str | None] | None:
    """Return name and version of the installed distribution that a file belongs to."""
    for kind in ("purelib", "platlib"):
        folder = Path(sysconfig.get_path(kind)).resolve()
        if not path.is_relative_to(folder):
            continue
        package = path.relative_to(folder).parts[0].removesuffix(".py")
        names = packages_distributions().get(package)
        return (names[0], find_version(names[0])) if names else None
    return None
