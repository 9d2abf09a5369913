"""Sweeps from the command line."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_cli import SecretStr, load_experiment, run
from fulgurite_cli.sweeping import plan_sweep
from fulgurite_runs import RunDirectory

PROGRAM = """
import json
import sys
import types
from pathlib import Path

# Stands in for a training: what is tested here is which runs there are.
def experiment(rate: float = 1.0, width: int = 1, run_dir: str = ""):
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "starts").open("a") as file:
        file.write(f"{rate} {width}\\n")
    if width == 3 and not (folder / "failed").exists():
        (folder / "failed").touch()
        sys.exit(7)
    (folder / "COMPLETE").touch()
    (folder / "attempts").mkdir(exist_ok=True)
    config = {"rate": rate, "width": width}
    (folder / "attempts" / "1").write_text(json.dumps({"configuration": config}))
    sys.exit(0)
"""


MODULE = """
import fulgurite as fg
from fulgurite_cli import run
from fulgurite_config import L
from .parts import Net

def make_data():
    return [1.0] * 10

def experiment():
    cfg = L(rate=0.5)
    plugins = [L("fulgurite_checkpoint:Checkpointer", every=2)]
    cfg.engine = L(fg.Engine, steps=2, plugins=plugins)
    cfg.model = L.partial(Net, rate=cfg.ref.rate)
    cfg.data = L(make_data)
    return cfg

if __name__ == "__main__":
    run(experiment)
"""
PARTS = """
import fulgurite as fg, jax, jax.numpy as jnp, optax

class Net(fg.Module):
    weight: jax.Array
    rate: float

    def __init__(self, rate: float, *, key):
        self.weight = jnp.ones(())
        self.rate = rate

    def training_step(self, batch, ctx):
        return fg.Output(self.weight * batch)

    def configure_optimizers(self):
        return optax.sgd(self.rate)
"""


def experiment(rate: float = 1.0, width: int = 1) -> Any:
    raise AssertionError("a sweep builds nothing in this process")


def exit_code(*arguments: str, program: Any = experiment) -> Any:
    with pytest.raises(SystemExit) as caught:
        run(program, arguments)
    return caught.value.code


def test_a_sweep_has_a_run_for_each_combination_in_order() -> None:
    runs = plan_sweep(["a=1"], ["lr=1e-3,1e-2", "width,name=(16,small),(32,big)"])
    assert list(runs) == [
        "lr=1e-3,width=16,name=small",
        "lr=1e-3,width=32,name=big",
        "lr=1e-2,width=16,name=small",
        "lr=1e-2,width=32,name=big",
    ]
    assert runs["lr=1e-3,width=32,name=big"] == ["a=1", "lr=1e-3", "width=32", "name=big"]
    with pytest.raises(ConfigurationError, match="the sweep has lr=1 twice"):
        plan_sweep([], ["lr=1,1"])


def test_runs_of_a_sweep_are_called_what_a_folder_may_be_called() -> None:
    """Orbax takes `*`, `?` and `[` for a pattern, and `$` begins the name of a variable."""
    plan = plan_sweep([], ["**.half_life=5,10", "engine.plugins[1].*.paths=['a/b c']"])
    assert list(plan) == [
        f"half_life={value},engine.plugins.1.all.paths=._a_b_c_" for value in (5, 10)
    ]
    for name in plan_sweep([], ["label=$HOME,${x}"]):
        assert RunDirectory(name).path.name == name


def test_long_names_and_those_of_several_runs_get_a_digest(tmp_path: Path) -> None:
    long = "x" * 300
    for axis in (f"notes={long}1,{long}2", "folder=a/b,a_b", "folder=ä/b,ä_b"):
        plan = plan_sweep([], [axis])
        assert plan == plan_sweep([], [axis])
        assert [override for (override,) in plan.values()] == [
            f"{axis.partition('=')[0]}={value}" for value in axis.partition("=")[2].split(",")
        ]
        for name in plan:
            (tmp_path / f"{name}.log").touch()
    assert "folder=a_b" in plan_sweep([], ["folder=a_b,c"])


def test_print_shows_each_run_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--sweep", "rate=0.5,0.25", "--print") == 0
    lines = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if "rate" in line] == [
        *("# rate=0.5", "rate=0.5", "# rate=0.25", "rate=0.25")
    ]


def test_mistakes_in_a_sweep_end_with_2_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "sweep")
    messages = {
        "rate=1,x": "rate=x is not float",
        "rtae=1,2": "Did you mean 'rate'?",
        "rate": "is not an axis of a sweep",
    }
    for axis, message in messages.items():
        assert exit_code("--sweep", axis, "--run", folder) == 2
        assert message in capsys.readouterr().err
    assert exit_code("--sweep", "rate=1,2") == 2
    assert "give --run DIR" in capsys.readouterr().err
    assert not Path(folder).exists()


@pytest.mark.slow
def test_a_sweep_runs_what_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "program_of_a_sweep.py"
    file.write_text(PROGRAM)
    # What lies in the current directory is not imported, even if it is named like a module.
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "argparse.py").write_text("raise RuntimeError('imported')")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [*sys.path])
    program = load_experiment(str(file))
    arguments = ["rate=2", "--sweep", "width=1,3", "--jobs", "2", "--run", str(tmp_path / "sweep")]
    assert exit_code(*arguments, program=program) == 1
    assert "width=3 failed with code 7" in capfd.readouterr().err
    assert exit_code(*arguments, program=program) == 0
    assert "1 of 2 runs to do" in capfd.readouterr().out
    starts = {path.parent.name: path.read_text() for path in tmp_path.glob("sweep/*/starts")}
    assert starts == {"width=1": "2.0 1\n", "width=3": "2.0 3\n" * 2}
    # Those that are complete, but were started with something else, are started again.
    arguments[0] = "rate=3"
    assert exit_code(*arguments, program=program) == 0
    assert "2 of 2 runs to do" in capfd.readouterr().out
    # So is one whose manifest cannot be read, while the others stay what they are.
    (tmp_path / "sweep" / "width=3" / "attempts" / "1").write_text("")
    assert exit_code(*arguments, program=program) == 0
    assert "1 of 2 runs to do" in capfd.readouterr().out
    assert exit_code(*arguments, "--resume", "never", program=program) == 0
    assert "2 of 2 runs to do" in capfd.readouterr().out
    arguments[-1] += "/width=1"
    assert exit_code(*arguments, program=program) == 2
    assert "width=1 is a run: give a sweep a directory of its own" in capfd.readouterr().err


@pytest.mark.slow
def test_runs_of_a_module_of_a_package_are_run_as_it_is(tmp_path: Path) -> None:
    """The names in a configuration are then the same in all processes."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "train.py").write_text(MODULE)
    (tmp_path / "pack" / "parts.py").write_text(PARTS)
    command = [sys.executable, "-m", "pack.train", "--sweep", "rate=1,2", "--run", "sweep"]
    for count in (2, 0):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert f"{count} of 2 runs to do" in done.stdout, done.stderr
        assert done.returncode == 0


def sign_in(
    api_key: str = "", login: SecretStr | None = None, rate: float = 1.0, place: str = ""
) -> Any:
    raise AssertionError("a sweep builds nothing in this process")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep", "rate=1,2", "--sweep", "rate=3,4"], "rate is set twice"),
        (["rate=3", "--sweep", "rate=1,2"], "rate is set twice, and one of these by --sweep"),
        (["--sweep", "api_key=fi/rst,sec/ond"], "api_key is a secret"),
        (["--sweep", "login=fi/rst,sec/ond"], "login is a secret"),
        (["--sweep", "place=https://u:abc@a,https://u:abc@b"], "place is a secret"),
        (["--sweep", "rate=1,https://u:abc@b", "--print"], "rate is a secret"),
        (["--sweep", "rate=1,x"], "rate=x: rate=x is not float"),
        (["--jobs", "2"], "--jobs is for the runs of a --sweep"),
    ],
)
def test_what_a_sweep_cannot_be_is_an_error(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*arguments, "--run", str(tmp_path / "sweep"), program=sign_in) == 2
    printed = capsys.readouterr().err
    assert message in printed and "abc" not in printed
    assert not (tmp_path / "sweep").exists()
