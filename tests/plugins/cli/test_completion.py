"""What the Tab key completes, in a real shell."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPLETE = """
eval "$(fulgurite completion bash)"
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_fulgurite 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""
ARGUMENTS = "import jax\ndef experiment(steps: int = 3, rate: float = 0.1):\n    raise SystemExit\n"
CONFIG = """
import jax
from fulgurite_config import L

def experiment():
    cfg = L(steps=3, part=L(size=1))
    width = 4
    plugins = ["jsonl", L("fulgurite_stopping:EarlyStopping", "loss", patience=3)]
    cfg.engine = L("fulgurite:Engine", steps=cfg.ref.steps, plugins=plugins)
    cfg.model = L.partial("net:Net", width=width)
    cfg.aux.names = L(here="$(touch pwned)")
    cfg.engine.seed = 3
    return cfg
"""

RETURNED = "def experiment():\n    part: Any = L(size=1)\n    return L(steps=3, part=part)\n"


def complete(folder: Path, *line: str) -> list[str]:
    """Return what bash offers for the last word of a command line, split as bash does."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"PATH": path, "HOME": str(folder)}
    command = ["bash", "--norc", "-c", COMPLETE, "bash", "fulgurite", *line]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | variables, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a program of each kind; none can be imported, as jax is broken there."""
    (tmp_path / "arguments.py").write_text(ARGUMENTS)
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "returned.py").write_text(RETURNED)
    (tmp_path / "jax.py").write_text("raise SystemExit('imported')")
    return tmp_path


@pytest.mark.full
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("e", {"evaluate", "explain", "export"}),
        ("fit arguments.py st", {"steps="}),
        ("fit --run a arguments.py r", {"rate="}),
        ("fit 'arguments.py' r", {"rate="}),
        ("fit ~/arguments.py r", {"rate="}),
        ("fit config.py part", {"part.size="}),
        ("fit returned.py ", {"steps=", "part.size="}),
        ("fit returned.py --print ", {"steps=", "part.size="}),
        ("fit returned.py --run ", set[str]()),
        ("evaluate --st", {"--step"}),
        ("launch --profile a evaluate config.py --gr", {"--group"}),
        ("config ", {"diff"}),
        ("nothing --", set[str]()),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("fit arguments.py ", {"steps=", "rate="}),
                ("fit arguments.py rate = ", set[str]()),
                ("fit arguments.py --pr", {"--preempted-exit-code", "--print"}),
                ("fit con", set[str]()),
                ("fit config.py m", {"model.width="}),
                ("evaluate config.py aux", {"aux.names.here="}),
                (
                    "explain config.py en",
                    {
                        "engine.steps=",
                        "engine.plugins=",
                        "engine.plugins[1].patience=",
                        "engine.seed=",
                    },
                ),
                ("predict --al", {"--allow"}),
                ("runs --s", {"--show", "--sort"}),
                ("launch --prof", {"--profile", "--profiles"}),
                ("launch arguments.py --sw", {"--sweep"}),
                ("config diff --j", {"--json"}),
            )
        ),
    ],
)
def test_bash_completes(line: str, words: set[str], folder: Path) -> None:
    assert set(complete(folder, *line.split(" "))) == words
    assert not (folder / "pwned").exists()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_all_options_of_fit(folder: Path) -> None:
    options = set(complete(folder, "fit", "arguments.py", "--"))
    assert {"--run", "--config", "--from", "--sweep", "--jobs", "--resume", "--help"} <= options
    assert all(option.startswith("--") for option in options)
