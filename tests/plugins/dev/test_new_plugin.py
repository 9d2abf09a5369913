"""`fulgurite new-plugin`: what it writes installs, passes its own tests, and trains by its name."""

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import fulgurite._src.plugins.selection as selection
import pytest
from fulgurite_cli.command import main
from fulgurite_dev.new_plugin import KINDS

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[3]
TRAIN = """
import re
import sys
from importlib import import_module
from pathlib import Path

import fulgurite as fg
from fulgurite_testing import TinyModel, tiny_data
arguments = {"new_evaluator": {"data": tiny_data(), "every": 4}}
for folder in sys.argv[1:]:
    name = Path(folder).name
    print(import_module(f"fulgurite_{name}").__file__)
    settings = {"run_dir": "runs/new_logger"} if name == "new_logger" else {}
    engine = fg.Engine(steps=8, plugins=[{name: arguments.get(name, {})}], autoload=False, **settings)
    result = engine.fit(TinyModel, tiny_data())
    print(list(engine.plugins.plugins), int(result.state.step), result.failures)
    readme = Path(folder, "README.md").read_text()
    exec(re.search("```python\\n(.*?)```", readme, re.DOTALL)[1], {})
"""


@pytest.mark.parametrize("kinds", [("traced",), pytest.param(KINDS, marks=pytest.mark.slow)])
def test_new_plugins_install_pass_their_tests_and_train(
    kinds: tuple[str, ...], tmp_path: Path
) -> None:
    """In a fresh environment; what they need is taken from the environment that runs this test, which
    is on the path after the fresh one. Of what that has is nothing built."""
    folders = [str(tmp_path / f"new_{kind}") for kind in kinds]
    for kind, folder in zip(kinds, folders, strict=True):
        assert main(["new-plugin", f"new-{kind}", "--kind", kind, "--folder", folder]) == 0
        assert {path.name for path in Path(folder).iterdir()} >= {
            "pyproject.toml",
            "README.md",
            "LICENSE",
            ".github",
        }
    environment = tmp_path / "environment"
    uv = [sys.executable, "-m", "uv", "--quiet"]
    call(*uv, "venv", "--python", sys.executable, environment)
    python = next(environment.glob("*/python"))
    (site,) = environment.glob("lib/python*/site-packages")
    outer = [path for path in sys.path if path.endswith("site-packages")]
    # Not the path alone: the members of the workspace are in `.pth` files there.
    lines = [f"import site; site.addsitedir({path!r})" for path in outer]
    (site / "outer.pth").write_text("\n".join(lines))
    options = ["--no-deps", "--no-build-isolation", "--python", python]
    call(*uv, "pip", "install", *options, *folders)
    shown = call(python, "-c", TRAIN, *folders, cwd=tmp_path).splitlines()
    assert all(Path(file).is_relative_to(site) for file in shown[::2])
    assert shown[1::2] == [f"['new_{kind}'] 8 {{}}" for kind in kinds]
    # As in a clone of Fulgurite, whose options need plugins of pytest.
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '--dist=load'")
    for folder in folders:
        call(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder, cwd=tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_of_contrib_is_written_into_a_checkout(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sources and README in contrib/, tests beside those of all others; nothing else. The
    example in the README runs."""
    monkeypatch.chdir(tmp_path)
    command = ["new-plugin", "fresh-noise", "--kind", kind, "--contrib"]
    with pytest.raises(SystemExit):
        main(command)
    assert "has no contrib/README.md: run --contrib in a checkout" in capsys.readouterr().err
    (tmp_path / "contrib").mkdir()
    (tmp_path / "contrib" / "README.md").write_text("")
    assert main(command) == 0
    assert (
        "add fulgurite-fresh-noise to the extra 'all' of core/pyproject.toml"
        in capsys.readouterr().out
    )
    member = tmp_path / "contrib" / "fresh-noise"
    assert {path.name for path in member.iterdir()} == {"pyproject.toml", "README.md", "src"}
    project = tomllib.loads((member / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["fulgurite.plugins"] == {
        "fresh_noise": "fulgurite_fresh_noise:FreshNoise"
    }
    source = member / "src" / "fulgurite_fresh_noise"
    assert {path.name for path in source.iterdir()} == {"__init__.py", "plugin.py", "py.typed"}
    assert "\n__tracebackhide__ = True\n" in (source / "__init__.py").read_text()
    monkeypatch.syspath_prepend(member / "src")
    for module in ("fulgurite_fresh_noise", "fulgurite_fresh_noise.plugin"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    readme = (member / "README.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    exec(example, {})
    tests = tmp_path / "tests" / "plugins" / "fresh_noise" / "test_fresh_noise.py"
    assert "check_plugin" in tests.read_text()
    with pytest.raises(SystemExit):
        main(command)
    assert "already exists" in capsys.readouterr().err


def test_the_tests_of_a_member_of_contrib_are_run_alone_and_none_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (".ci", "core", "plugins"):
        (tmp_path / name).symlink_to(ROOT / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "contrib").mkdir()
    (tmp_path / "contrib" / "README.md").write_text("")
    assert main(["new-plugin", "fresh-noise", "--kind", "traced", "--contrib"]) == 0
    _, tests = call(python, ".ci/list_alone.py", "contrib/fresh-noise").splitlines()
    assert tests == "tests/plugins/fresh_noise/test_fresh_noise.py"
    Path(tests).unlink()
    alone = subprocess.run([".ci/alone", "contrib/fresh-noise"], capture_output=True, text=True)
    assert alone.returncode == 1
    assert "contrib/fresh-noise has no tests" in alone.stdout


def call(*command: object, cwd: Path | None = None) -> str:
    """What a command prints; an error if it fails."""
    ran = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Noise", "small letters"),
        ("9lives", "begin with a letter"),
        ("fulgurite-noise", "leave that out"),
        ("rng", "a plugin 'rng' is installed by fulgurite-rng"),
        ("testing", "fulgurite-testing is installed and would be replaced"),
        ("none", "would be called None, which means something else"),
        ("path", "would be called Path"),
    ],
)
def test_a_bad_name_is_an_error(
    name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["new-plugin", name, "--folder", str(tmp_path / "made")]
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert stop.value.code == 2
    assert why in capsys.readouterr().err


@pytest.fixture
def fresh_entry_points() -> Iterator[None]:
    """Entry points are read once a process; here they change."""
    yield
    selection.find_installed_plugins.cache_clear()


@pytest.mark.usefixtures("fresh_entry_points")
def test_taken_name_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for distribution in (
        "other",
        "fulgurite-mine",
    ):  # the second would be replaced, be it of another author or of one's own
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        )
        name = "taken" if distribution == "other" else "mine"
        (info / "entry_points.txt").write_text(f"[fulgurite.plugins]\n{name} = elsewhere:Plugin\n")
    monkeypatch.syspath_prepend(tmp_path)
    selection.find_installed_plugins.cache_clear()
    for name, source in (("taken", "other"), ("mine", "fulgurite-mine")):
        with pytest.raises(SystemExit):
            main(["new-plugin", name, "--folder", str(tmp_path / name)])
        assert (
            f"a plugin {name!r} is installed by {source} 1.0: choose another name"
            in capsys.readouterr().err
        )


def test_unwritable_target_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["new-plugin", "noise", "--folder", "/proc/none/noise"])
    assert stop.value.code == 2 and "cannot be written" in capsys.readouterr().err


def test_what_to_type_next_is_quoted_for_a_shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "it's mine"
    assert main(["new-plugin", "noise", "--folder", str(folder)]) == 0
    install, test = capsys.readouterr().out.splitlines()[1:]
    assert shlex.split(install) == ["pip", "install", "-e", f"{folder}[test]"]
    assert shlex.split(test) == ["pytest", str(folder)]


def test_existing_files_are_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["new-plugin", "noise", "--folder", str(tmp_path)])
    assert "already exists" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
