"""A program that is one of several processes is connected with the others before it is imported."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fulgurite_cli.command import main

PROGRAM = """
import fulgurite as fg
import fulgurite_sharding
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite_cli import Experiment

fulgurite_sharding.calls.append("program")

class Net(fg.Module):
    weight: jax.Array

    def training_step(self, batch, ctx):
        return fg.Output(self.weight * 1.0)

    def configure_optimizers(self):
        return optax.sgd(1.0)

def experiment() -> Experiment:
    fulgurite_sharding.calls.append("experiment")
    model = Net(jnp.zeros(()))
    return Experiment(fg.Engine(steps=2, autoload=False), model, [np.zeros(1, np.float32)])
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    """The path of a program that notes when it is imported and called."""
    (tmp_path / "connected_program.py").write_text(PROGRAM)
    return str(tmp_path / "connected_program.py")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Put a package in the place of fulgurite-sharding whose function runs the given statement."""

    def install(statement: str) -> None:
        package = tmp_path / "fulgurite_sharding"
        package.mkdir()
        (package / "__init__.py").write_text(
            f"calls = []\n\ndef initialize_distributed():\n    {statement}\n"
        )
        monkeypatch.syspath_prepend(tmp_path)

    loaded = [name for name in sys.modules if name.partition(".")[0] == "fulgurite_sharding"]
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("FULGURITE_DISTRIBUTED", "auto")
    yield install
    for name in ("fulgurite_sharding", "connected_program"):
        sys.modules.pop(name, None)


def test_processes_are_connected_before_the_program_is_imported(
    install: Callable[[str], None], program: str
) -> None:
    install("calls.append('connected')")
    assert main(["fit", program]) == 0
    # `run` connects as well, for programs that are started without the command; here it does
    # nothing, because the processes are connected.
    calls = sys.modules["fulgurite_sharding"].calls
    assert calls == ["connected", "program", "connected", "experiment"]


def test_without_the_variable_nothing_is_connected(
    install: Callable[[str], None], program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FULGURITE_DISTRIBUTED")
    install("calls.append('connected')")
    assert main(["fit", program]) == 0
    assert sys.modules["fulgurite_sharding"].calls == ["program", "experiment"]


@pytest.mark.parametrize("error", ["ConfigurationError", "ProcessError"])
def test_failure_to_connect_ends_the_process_with_exit_code_2(
    install: Callable[[str], None], program: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    install(f"from fulgurite.errors import {error}; raise {error}('nobody came')")
    with pytest.raises(SystemExit, match="2"):
        main(["fit", program])
    assert "error: nobody came" in capsys.readouterr().err
    assert "connected_program" not in sys.modules


def test_missing_sharding_package_is_an_error_that_names_it(
    install: Callable[[str], None],
    program: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "fulgurite_sharding", None)
    with pytest.raises(SystemExit, match="2"):
        main(["fit", program])
    assert "install fulgurite-sharding" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "fulgurite_sharding")
