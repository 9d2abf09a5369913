"""Profiles of `fulgurite launch`: where and how a program is started (K25)."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_sharding.launch import launch
from fulgurite_sharding.profiles import read_profile

PROFILES = """
[profiles.cluster]
nodes = 4
devices = 8
command = ["env", "WHERE=there", "--", "run{nodes}x{devices}"]
environment = {FULGURITE_DISTRIBUTED = "auto heartbeat=30", NCCL_DEBUG = "WARN of it"}

[profiles.side]
command = ["srun", "--ntasks=1"]
environment = {JAX_PLATFORMS = "cpu"}
groups = ["slow", "final"]

[profiles.local]
processes = 1
environment = {MODE = "slow"}

[profiles.here]
processes = 2
devices = 3
environment = {MODE = "fast"}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a program and profiles, on a machine without GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    (tmp_path / "fulgurite.toml").write_text(PROFILES)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def test_a_command_is_filled_in(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(["--profile", "cluster", "--print", "train.py", "lr=0.1", "--run", "runs/a"]) == 0
    assert capsys.readouterr().out == (
        "FULGURITE_DISTRIBUTED='auto heartbeat=30' NCCL_DEBUG='WARN of it' "
        "env WHERE=there -- run4x8 fulgurite fit train.py lr=0.1 --run runs/a\n"
    )


def test_what_a_terminal_obeys_is_printed_as_escapes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = '[profiles.a]\ncommand = ["srun", "\\u001b]0;title\\u0007"]\n'
    (folder / "fulgurite.toml").write_text(profile)
    assert launch(["--profile", "a", "--print", "train.py"]) == 0
    assert r"srun '\u001b]0;title\u0007' fulgurite" in capsys.readouterr().out


def test_processes_here_get_variables_and_devices(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--profile", "here", "--print", "train.py"]
    assert launch(arguments) == 0
    worker = shlex.join([sys.executable, "-P", "-m", "fulgurite_sharding.worker", "train.py"])
    assert capsys.readouterr().out == f"MODE=fast JAX_NUM_CPU_DEVICES=3 {worker}\n" * 2
    assert launch(["--processes", "1", *arguments]) == 0
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(
    ("environment", "variables"),
    [
        (
            'JAX_PLATFORMS = "cpu"',
            ["JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2", "JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2"],
        ),
        (
            'CUDA_VISIBLE_DEVICES = "3,4,5,6"',
            [f"CUDA_VISIBLE_DEVICES={part}" for part in ("3,4", "5,6")],
        ),
    ],
)
def test_the_environment_of_a_profile_says_which_devices_there_are(
    environment: str,
    variables: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    profile = f"[profiles.here]\nprocesses = 2\ndevices = 2\nenvironment = {{{environment}}}\n"
    (folder / "fulgurite.toml").write_text(profile)
    assert launch(["--profile", "here", "--print", "train.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(f" {sys.executable}")[0] for line in lines] == variables


@pytest.mark.parametrize(
    ("options", "command"),
    [
        (["--profile", "side"], ["predict", "train.py", "--run", "r"]),
        ([], ["evaluate", "--run", "r", "--group", "slow"]),
        ([], ["evaluate", "--run", "r", "--group=final"]),
    ],
)
def test_a_profile_evaluates_and_predicts_also_for_groups_that_name_it(
    options: list[str], command: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch([*options, "--print", *command]) == 0
    started = shlex.join(["srun", "--ntasks=1", "fulgurite", *command])
    assert capsys.readouterr().out == f"JAX_PLATFORMS=cpu {started}\n"


def test_a_profile_without_a_command_evaluates_here(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(["--profile", "local", "--print", "evaluate", "--run", "r"]) == 0
    here = shlex.join([sys.executable, "-P", "-m", "fulgurite_cli", "evaluate", "--run", "r"])
    assert capsys.readouterr().out == f"MODE=slow {here}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "--run", "r"], "give --profile NAME, which says where to evaluate"),
        (
            ["evaluate", "--run", "r", "--group", "quick"],
            "there is no profile for the group 'quick': write groups = ['quick'] into one",
        ),
        (
            ["--profile", "here", "predict", "--run", "r"],
            "profile 'here' in fulgurite.toml: processes is 2, and fulgurite predict is one",
        ),
        (["--profile", "cluster", "evaluate", "--run", "r"], "nodes is 4, and fulgurite evaluate"),
    ],
)
def test_an_evaluation_is_one_process_of_a_profile(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        launch(arguments)
    assert message in capsys.readouterr().err


def test_a_group_has_one_profile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (folder / "fulgurite.toml").open("a") as profiles:
        profiles.write("[profiles.other]\ngroups = ['slow']\n")
    with pytest.raises(SystemExit, match="2"):
        launch(["evaluate", "--run", "r", "--group", "slow"])
    assert "side and other are profiles for the group 'slow'" in capsys.readouterr().err


@pytest.mark.full
def test_the_command_takes_the_place_of_the_launcher(folder: Path) -> None:
    (folder / "starter").write_text('#!/bin/sh\necho "$WORD: $@"\nexit 7\n')
    (folder / "starter").chmod(0o755)
    (folder / "other.toml").write_text(
        '[profiles.x]\ncommand = ["./starter"]\nenvironment = {WORD = "started"}\n'
    )
    program = "import sys; from fulgurite_sharding.launch import launch; launch(sys.argv[1:])"
    arguments = ["--profiles", "other.toml", "--profile", "x", "train.py", "a=1"]
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert (run.returncode, run.stdout) == (7, "started: fulgurite fit train.py a=1\n"), run.stderr
    assert run.stderr == ""


def test_what_a_profile_that_nobody_named_starts_is_told_before(folder: Path) -> None:
    (folder / "fulgurite.toml").write_text(
        '[profiles.x]\ncommand = ["true"]\nenvironment = {WORD = "a b"}\ngroups = ["slow"]\n'
    )
    program = "import sys; from fulgurite_sharding.launch import launch; launch(sys.argv[1:])"
    command = ["evaluate", "--run", "r", "--group", "slow"]
    run = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True)
    assert run.returncode == 0
    started = f"WORD='a b' true fulgurite {shlex.join(command)}"
    line = f"profile 'x' in fulgurite.toml is for this group. It starts: {started}\n"
    assert run.stderr == line


def test_profiles_may_be_in_pyproject(folder: Path) -> None:
    (folder / "fulgurite.toml").unlink()
    (folder / "pyproject.toml").write_text("[tool.fulgurite.profiles.small]\nprocesses = 1\n")
    profile, where = read_profile("small", None)
    assert profile.processes == 1 and where == "profile 'small' in pyproject.toml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[profiles.smal]", r"other.toml has no profile 'small'. Did you mean 'smal'\?"),
        ("[profiles.small]\nnode = 2", r"unknown key 'node'. Did you mean 'nodes'\?"),
        ("[profiles.small]\nprocesses = 0", "processes is 0; give an integer above 0"),
        ("[profiles.small]\ncommand = 'srun'", "command is 'srun'; give a list of words"),
        ("[profiles.small]\ngroups = 'slow'", "groups is 'slow'; give a list of names"),
        ("[profiles.small]\nenvironment = {A = 1}", "give a table of strings"),
        ("[profiles.small]\nnodes = 2", "nodes is 2, but nothing starts processes on other"),
        ("profiles = 3", "profiles is 3; give a table for each"),
        ("[profiles", "other.toml cannot be read: "),
        ("a = '\udcff'", "other.toml is not UTF-8 from byte 5 on"),
        ("a = " + "[" * 5000, "other.toml cannot be read: "),
        ("#" * 2**20 + "x", r"other.toml has more than 1,048,576 bytes"),
        (f"profiles = [{{{'a.' * 2000}a = 1}}]", "give a table for each"),
    ],
)
def test_a_mistake_in_a_profile_is_named(text: str, message: str, folder: Path) -> None:
    (folder / "other.toml").write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigurationError, match=message):
        read_profile("small", Path("other.toml"))


def test_further_mistakes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "other.toml").write_text('[profiles.x]\ncommand = ["srun-which-is-not-there"]\n')
    (folder / "empty.toml").write_text('[profiles.x]\ncommand = ["srun", "--n={nodes}"]\n')
    for file, message in (
        ("other.toml", "there is no program 'srun-which-is-not-there' on this machine"),
        ("empty.toml", "'--n={nodes}' in command cannot be filled in: 'nodes'. Set it in"),
    ):
        with pytest.raises(SystemExit, match="2"):
            launch(["--profiles", file, "--profile", "x", "train.py"])
        assert message in capsys.readouterr().err
    (folder / "fulgurite.toml").unlink()
    with pytest.raises(ConfigurationError, match=r"write \[profiles.x\] into fulgurite.toml"):
        read_profile("x", None)
