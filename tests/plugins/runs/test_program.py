"""The program in a run's manifest: its distribution, its commit, versions of packages."""

import json
import subprocess
from pathlib import Path

import pytest
from fulgurite_checkpoint.listing import list_runs
from fulgurite_cli import build_experiment, explain, load_experiment
from fulgurite_runs import RunDirectory, program
from fulgurite_runs.program import describe_program, format_commit, format_program

PROGRAM = """
import fulgurite as fg
from fulgurite_cli import Experiment
from fulgurite_runs import RunPlugin
from fulgurite_testing import TinyModel, tiny_data


def experiment(steps: int = 1) -> Experiment:
    engine = fg.Engine(steps=steps, plugins=[RunPlugin()], autoload=False)
    return Experiment(engine, TinyModel, tiny_data())
"""


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with a program, one commit, and a secret in the address of its remote."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train_x10.py").write_text(PROGRAM)
    (folder / "pyproject.toml").write_text('[project]\nname = "digits"\nversion = "1.2"\n')
    git(folder, "init", "-q")
    git(folder, "remote", "add", "origin", "https://user:hunter2@example.org/digits.git")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "Begin")
    return folder


def test_manifest_has_versions_and_the_commit_of_the_program(project: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "a"
    experiment = load_experiment(str(project / "train_x10.py"))
    built = build_experiment(experiment, run_dir=str(run_dir))
    built.engine.run_dir = run_dir
    built.engine.fit(built.model, built.data)
    manifest = RunDirectory(run_dir).read_manifest()
    commit = git(project, "rev-parse", "HEAD")
    assert manifest["program"] == {
        "file": "train_x10.py",
        "distribution": "digits",
        "version": "1.2",
        "git": {"commit": commit, "dirty": False},
    }
    assert {"jax", "jaxlib", "orbax-checkpoint", "python"} <= set(manifest["versions"])
    assert all(manifest["versions"].values())
    [plugin] = manifest["plugins"]
    assert {"distribution", "version"} <= set(plugin)
    assert "hunter2" not in json.dumps(manifest) and "example.org" not in json.dumps(manifest)
    assert list_runs(run_dir.parent)[0].commit == commit[:8]
    assert f"program: train_x10.py of digits 1.2, commit {commit[:8]}\n" in explain(built.engine)


def test_changes_and_untracked_programs_are_dirty(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As within a hook of git, which would otherwise answer for another repository.
    monkeypatch.setenv("GIT_DIR", str(project / "elsewhere"))
    file = project / "train_x10.py"
    (project / "notes.txt").touch()
    assert describe_program(str(file))["git"]["dirty"] is False  # an untracked file is not a change
    # The second one is a pattern that the tracked file fits.
    for name in ("new.py", "train_x1[0].py"):
        new = project / name
        new.touch()
        assert describe_program(str(new))["git"]["dirty"] is True
    file.write_text(PROGRAM + "# changed\n")
    description = describe_program(str(file))
    assert description["git"]["dirty"] is True
    assert format_program(description).endswith(" (changed)")


@pytest.mark.parametrize("driver", ["evil", "a=b", "größe"])
@pytest.mark.parametrize("command", ["clean", "process"])
def test_a_repository_starts_nothing_when_its_state_is_read(
    driver: str, command: str, project: Path, tmp_path: Path
) -> None:
    (project / ".gitattributes").write_text(f"*.py filter={driver}\n")
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "Filter")
    (project / "train_x10.py").write_text(PROGRAM.replace("tiny", "TINY"))  # of the same size
    settings = tmp_path / "settings"
    # git reads what is included as if it stood in the repository's own file.
    git(project, "config", "include.path", str(settings))
    subprocess.run(
        [
            "git",
            "config",
            "-f",
            settings,
            f"filter.{driver}.{command}",
            f"touch {tmp_path}/ran; cat",
        ],
        check=True,
    )
    description = describe_program(str(project / "train_x10.py"))["git"]
    assert description["dirty"] is (True if driver == "evil" else None)
    assert not (tmp_path / "ran").exists()
    subprocess.run(["git", "status", "--porcelain"], cwd=project, capture_output=True)
    assert (tmp_path / "ran").exists() or not driver.isascii()


def test_without_git_the_commit_is_none(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = tmp_path / "alone.py"
    alone.touch()
    assert describe_program(str(alone)) == {
        "file": "alone.py",
        "distribution": None,
        "version": None,
        "git": None,
    }
    assert describe_program(str(tmp_path / "missing.py"))["file"] is None
    monkeypatch.setattr(program, "GIT_TIMEOUT", 0.0)
    assert describe_program(str(project / "train_x10.py"))["git"] is None
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "")
    assert describe_program(str(project / "train_x10.py"))["git"] is None


def test_installed_program_has_its_distribution() -> None:
    description = describe_program(pytest.__file__)
    assert (description["distribution"], description["version"]) == ("pytest", pytest.__version__)


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 5000, "project = 3", "x", '[project]\nname = "a"\n' + "#" * 2**20]
)
def test_a_project_that_cannot_be_read_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "pyproject.toml").write_text(text)
    description = describe_program(str(tmp_path / "train.py"))
    assert description["file"] == "train.py"
    assert description["distribution"] is None


@pytest.mark.parametrize(
    ("dirty", "text"),
    [(True, "0a (changed)"), (False, "0a"), (None, "0a (perhaps changed)"), ([], "0a"), (1, "0a")],
)
def test_what_a_manifest_says_of_changes_may_be_anything(dirty: object, text: str) -> None:
    assert format_commit({"git": {"commit": "0a", "dirty": dirty}}) == text
