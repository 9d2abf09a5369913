"""The command `fulgurite`."""

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import fulgurite as fg
import pytest
from fulgurite_cli.command import main
from fulgurite_cli.listing import list_plugins
from fulgurite_cli.programs import find_program

RUN = """
import sys
from fulgurite_cli.command import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
heavy = sorted({'equinox', 'jax', 'numpy', 'optax'} & sys.modules.keys())
print(f"code {code}, heavy: {heavy}", file=sys.stderr)
"""
LIGHT = "code 0, heavy: []\n"

PROGRAM = '''
import beside
import jax.numpy as jnp
import optax
import fulgurite as fg
from fulgurite_cli import Experiment
from fulgurite_runs import RunPlugin

class Net(fg.Module):
    weight: object

    def __init__(self, *, key):
        self.weight = jnp.zeros(())

    def training_step(self, batch, ctx):
        return fg.Output(self.weight * 1)

    def configure_optimizers(self):
        return optax.sgd(1.0)

class Report(RunPlugin):
    @fg.hookimpl
    def on_fit_end(self, run, result):
        where = run.run_dir.path.name if run.run_dir else None
        print("updates", -float(result.module.weight), where, beside.NAME)

def experiment(steps: int = 3):
    """Counts updates."""
    engine = fg.Engine(steps=steps, plugins=[Report()])
    return Experiment(engine, model=Net, data=[jnp.ones((1, 1))])

if __name__ == "__main__":
    raise SystemExit("the file was run, not imported")
'''


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program's path, with a module beside it that it imports."""
    (tmp_path / "program_of_a_test.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    monkeypatch.setattr(sys, "path", [*sys.path])
    return str(tmp_path / "program_of_a_test.py")


@pytest.fixture
def packages(tmp_path: Path) -> dict[str, str]:
    """Variables under which a distribution offers a plugin and commands; its modules show that they
    are imported."""
    info = tmp_path / "demo_dist-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: demo-dist\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(
        "[fulgurite.plugins]\ndemo = demo_plugin:Demo\n"
        "[fulgurite.autoload]\ndemo = demo_plugin:Demo\n"
        "[fulgurite.commands]\ngreet = demo_commands:greet\nnothing = demo_commands:nothing\n"
    )
    (tmp_path / "demo_plugin.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "demo_commands.py").write_text(
        "print('imported')\n"
        "def greet(arguments):\n"
        "    '''Greet\n    somebody.\n\n    With what follows.\n    '''\n"
        "    print('hello', *arguments)\n    return 5\n"
        "def nothing(arguments):\n    pass\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "FULGURITE_AUTOLOAD": "rng,demo"}


def exit_code(*arguments: str) -> int | str | None:
    """What the shell would see of the command, in this process."""
    try:
        return main(arguments)
    except SystemExit as stop:
        return stop.code


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; the last line of stderr tells its exit code and what it
    imported."""
    environment = os.environ | variables
    command = [sys.executable, "-c", RUN, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def test_version():
    done = run("--version")
    assert (done.stdout, done.stderr) == (f"fulgurite {version('fulgurite')}\n", LIGHT)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_help_names_the_commands_and_imports_nothing(
    arguments: list[str], packages: dict[str, str]
):
    done = run(*arguments, **packages)
    assert done.stderr == LIGHT
    assert "imported" not in done.stdout
    _, _, lines = done.stdout.partition("commands; ")
    commands = {name: " ".join(words) for name, *words in map(str.split, lines.splitlines()[1:])}
    assert commands["fit"] == "Train the experiment of a program"
    assert commands["greet"] == "Greet somebody"
    assert [name for name, description in commands.items() if not description] == ["nothing"]


def test_plugins_are_listed_without_importing_them(packages: dict[str, str]):
    done = run("plugins", **packages)
    assert done.stderr == LIGHT
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
    assert rows["demo"] == ["demo", "demo-dist", "1.5", "active:", "autoload", "demo_plugin:Demo"]
    assert rows["rng"][1:] == [
        "fulgurite-rng",
        version("fulgurite-rng"),
        "active:",
        "autoload",
        "fulgurite_rng:Rng",
    ]


def test_plugins_are_listed_as_json(packages: dict[str, str]):
    done = run("plugins", "--json", **packages)
    assert done.stderr == LIGHT
    assert {
        "name": "demo",
        "distribution": "demo-dist 1.5",
        "autoload": True,
        "active": "autoload",
        "object": "demo_plugin:Demo",
    } in json.loads(done.stdout)


def test_distributions_add_commands(packages: dict[str, str]):
    done = run("greet", "you", "--loud", **packages)
    assert (done.stdout, done.stderr) == ("imported\nhello you --loud\n", "code 5, heavy: []\n")
    assert run("nothing", **packages).stderr == LIGHT


def test_duplicate_command_is_an_error(packages: dict[str, str], tmp_path: Path):
    dist = tmp_path / "other-2.0.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 2.0\n")
    (dist / "entry_points.txt").write_text("[fulgurite.commands]\nfit = demo_commands:greet\n")
    done = run("fit", "--help", **packages)
    assert "code 2" in done.stderr
    assert (
        "error: other 2.0 adds a command 'fit', which already exists: uninstall one of them"
        in done.stderr
    )
    assert "code 0" in run("plugins", **packages).stderr


def test_an_unknown_command_ends_with_2():
    done = run("fitt")
    assert "invalid choice: 'fitt'" in done.stderr
    assert done.stderr.endswith("code 2, heavy: []\n")


@pytest.mark.full
def test_fit_runs_the_experiment_of_a_file(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert exit_code("fit", program) == 0
    assert capsys.readouterr().out == "updates 3.0 None beside\n"
    assert exit_code("fit", program, "steps=2", "--run", str(tmp_path / "a")) == 0
    assert capsys.readouterr().out == "updates 2.0 a beside\n"


def test_fit_shows_the_help_of_a_program(program: str, capsys: pytest.CaptureFixture[str]):
    assert exit_code("fit", program, "--help") == 0
    out = capsys.readouterr().out
    assert " ".join(out.split()).startswith(f"usage: fulgurite fit {program} [")
    assert "Counts updates." in out and "steps=3  (int)" in out


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_of_fit(option: str, capsys: pytest.CaptureFixture[str]):
    assert exit_code("fit", option) == 0
    assert capsys.readouterr().out.startswith("usage: fulgurite fit")


def test_fit_without_a_program_ends_with_2(capsys: pytest.CaptureFixture[str]):
    assert exit_code("fit") == 2
    assert "usage: fulgurite fit" in capsys.readouterr().err


def test_a_program_may_come_after_options_and_lie_below_a_name_with_an_equals_sign(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    below = tmp_path / "lr=1" / Path(program).name
    below.parent.mkdir()
    below.write_text(Path(program).read_text())
    for arguments in (
        ["--run", "a", program, "steps=2"],
        ["steps=2", "--resume", "never", program],
        [str(below), "steps=2"],
        ["steps=2", str(below)],
    ):
        assert exit_code("fit", *arguments, "--print") == 0
        assert capsys.readouterr().out == "steps=2  # command line\n"
    assert exit_code("fit", "--run", "a", "steps=2") == 2
    assert "the following arguments are required: PROGRAM" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--run", "--init-from", "--preempted-exit-code", "--jobs"])
def test_an_option_that_is_given_twice_is_an_error(
    option: str, program: str, capsys: pytest.CaptureFixture[str]
):
    assert exit_code("fit", program, option, "2", option, "3", "--print") == 2
    assert f"{option} is given twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "plugins",
        "plugins jsonl --json",
        "completion bash",
        "completion words f",
        pytest.param("config diff a.json b.json", marks=pytest.mark.full),
        pytest.param("doctor", marks=pytest.mark.full),
    ],
)
def test_a_reader_of_a_command_may_stop_reading(line: str, tmp_path: Path):
    (tmp_path / "a.json").write_text('{"rate": 1}')
    (tmp_path / "b.json").write_text('{"rate": 2}')
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fulgurite_cli", *line.split()]
    done = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == ("diff" in line, "")


def test_what_an_output_has_no_characters_for_is_escaped(tmp_path: Path):
    (tmp_path / "a.json").write_text('{"name": "\u00e9"}')
    (tmp_path / "b.json").write_text("{}")
    command = [sys.executable, "-m", "fulgurite_cli", "config", "diff", "a.json", "b.json"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ('name: "\\xe9" -> (nothing)\n', "")


def test_explain_says_that_its_program_is_missing(capsys: pytest.CaptureFixture[str]):
    assert exit_code("explain") == 2
    assert capsys.readouterr().err.endswith("arguments are required: PROGRAM\n")


def test_mistakes_in_overrides_end_with_2(program: str, capsys: pytest.CaptureFixture[str]):
    assert exit_code("fit", program, "stesp=2") == 2
    assert "experiment has no argument 'stesp'. Did you mean 'steps'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent.py", None, "there is no Python file"),
        ("empty_program_of_a_test.py", "x = 1", "defines no function `experiment`"),
        ("optax.py", "x = 1", "has the name of the module 'optax', which is in use"),
        ("notes.md", "# Notes", "there is no Python file"),
        # The system refuses to look for it.
        (f"{'x' * 300}.py", None, "there is no Python file"),
    ],
)
def test_a_file_without_an_experiment_ends_with_2(
    name: str, text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert exit_code("fit", str(tmp_path / name)) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and str(tmp_path / name) in err


def test_explain_shows_what_the_engine_of_a_program_does(
    program: str, capsys: pytest.CaptureFixture[str]
):
    assert exit_code("explain", program, "steps=7") == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0] == "7 steps, seed 0, as many steps in a dispatch as fit chooses"
    assert any(row.split()[0] == "report" for row in rows if row)
    assert exit_code("explain", program, "stesp=7") == 2
    assert "experiment has no argument 'stesp'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"FULGURITE_AUTOLOAD": "0"},
        {"FULGURITE_AUTOLOAD": "rng, other"},
        {"FULGURITE_AUTOLOAD": "rng", "FULGURITE_PLUGINS": "-rng,console"},
        {"FULGURITE_PLUGINS": "rng"},
    ],
)
def test_listing_marks_active_plugins_of_an_engine(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """The listing has the rules a second time, because importing the core's imports jax."""
    for name in ("FULGURITE_AUTOLOAD", "FULGURITE_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    active = {row["name"] for row in list_plugins() if row["active"]}
    assert active == set(fg.Engine(steps=1).plugins.plugins)


LIGHT_PROGRAM = """
from fulgurite_config import L

def experiment():
    cfg = L(steps=4)
    cfg.saver = L("beside:Saver", every=2)
    cfg.optimizer = L("optax:adamw")
    cfg.engine = L("fulgurite:Engine", steps=cfg.ref.steps, plugins=[L("beside:Plugin")])
    return cfg
"""
BESIDE = """
from dataclasses import dataclass
import jax
from elsewhere import Base

class Timed:
    pass

@dataclass(frozen=True)
class Saver(Timed):
    every: int
    monitor: str = ""

# Nobody knows its arguments without importing what it inherits from.
class Plugin(Base):
    pass
"""


@pytest.mark.parametrize("text", [PROGRAM, LIGHT_PROGRAM], ids=["arguments", "configuration"])
def test_a_mistyped_override_is_answered_before_jax_is_imported(text: str, tmp_path: Path):
    file = tmp_path / "program.py"
    file.write_text(text)
    done = run("fit", str(file), "stpes=2")
    assert "Did you mean 'steps'?" in done.stderr
    assert done.stderr.endswith("code 2, heavy: []\n")


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["engine.stpes=2"], "engine has no 'stpes'. Did you mean 'steps'?"),
        (["optimizer.learnin_rate=1"], "optimizer has no 'learnin_rate'. Did you mean"),
        (["saver.evry=1"], "saver has no 'evry'. Did you mean 'every'?"),
        (["saver.run=1"], "saver has no 'run'. There is every, monitor."),
        (
            ["engine.seed=3", "optimizer.b1=0", "saver.monitor=a", "stpes=2"],
            "Did you mean 'steps'?",
        ),
        (["engine.plugins[0].any=1", "stpes=2"], "stpes matches nothing"),
    ],
)
def test_arguments_of_calls_are_known_before_jax_is_imported(
    overrides: list[str], error: str, tmp_path: Path
):
    (tmp_path / "beside.py").write_text(BESIDE)
    file = tmp_path / "program.py"
    file.write_text(LIGHT_PROGRAM)
    done = run("fit", str(file), *overrides)
    assert error in done.stderr
    assert done.stderr.endswith("code 2, heavy: []\n")


SLOW_PROGRAM = """
import os, signal

# As a library that is interrupted while it is imported.
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    raise AttributeError("partially initialized")
"""


@pytest.mark.full
def test_ctrl_c_during_imports_exits_with_130(tmp_path: Path):
    file = tmp_path / "program.py"
    file.write_text(SLOW_PROGRAM)
    # In the background of a shell the signal is ignored, and that stays so.
    program = (
        "import signal, sys; from fulgurite_cli.command import main; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "fit", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    # On a busy machine it is told before what is imported.
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "stopped by SIGINT")
    assert "Traceback" not in done.stderr


def test_a_command_leaves_the_handler_of_signals_as_it_was():
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["plugins"]) == 0
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, former)


def test_only_a_program_in_this_directory_is_the_program_of_a_run(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deploy.py").write_text("raise SystemExit('imported')")
    name = Path(program).name
    assert find_program({"program": {"file": name}}) == name
    for file in ("deploy.py", "absent.py", f"./{name}", program, None, 3):
        assert find_program({"program": {"file": file}}) is None
    assert find_program({"program": None}) is None
