"""What the core does for several processes: it connects them first, and keeps what they agreed
on."""

import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import fulgurite as fg
import pytest
from fulgurite.command import main as command
from models import Act, Counting, Evaluating, numbers

GROUP = "fulgurite.distributed"
PROGRAM = """
import fulgurite as fg
import joiner
import numpy as np
from models import Counting

joiner.calls.append("program")

def experiment() -> fg.Experiment:
    joiner.calls.append("experiment")
    return fg.Experiment(fg.Engine(steps=2, autoload=False), Counting(), [np.zeros(1, np.float32)])
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Installs a distribution whose module `joiner` connects processes; gives a program that
    imports it."""

    def install(distribution: str, body: str | None = None) -> str:
        info = tmp_path / distribution / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        )
        if body is not None:
            (info / "entry_points.txt").write_text(f"[{GROUP}]\n{distribution} = joiner:connect\n")
            (tmp_path / distribution / "joiner.py").write_text(
                f"calls = []\ndef connect():\n    {body}\n"
            )
        monkeypatch.syspath_prepend(tmp_path / distribution)
        importlib.invalidate_caches()
        program = tmp_path / "program.py"
        program.write_text(PROGRAM)
        return str(program)

    for name in {entry.dist.name for entry in entry_points(group=GROUP) if entry.dist}:
        install(
            name
        )  # the first distribution of a name on the path counts, and this one offers nothing
    monkeypatch.setenv("FULGURITE_DISTRIBUTED", "auto")
    yield install
    for name in ("joiner", "program"):
        sys.modules.pop(name, None)


def test_processes_are_connected_before_the_program_is_imported(
    install: Callable[..., str],
) -> None:
    program = install("acme", "calls.append('connected')")
    assert command(["fit", program]) == 0
    # `fg.main` connects as well, for programs that are run without the command; that does nothing
    # then
    assert sys.modules["joiner"].calls == ["connected", "program", "connected", "experiment"]


def test_without_the_variable_nothing_is_connected(
    install: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FULGURITE_DISTRIBUTED")
    assert command(["fit", install("acme", "calls.append('connected')")]) == 0
    assert sys.modules["joiner"].calls == ["program", "experiment"]


@pytest.mark.parametrize("error", ["ConfigurationError", "ProcessError"])
def test_a_process_that_cannot_be_connected_ends(
    install: Callable[..., str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program = install("acme", f"from fulgurite.errors import {error}; raise {error}('nobody came')")
    with pytest.raises(SystemExit, match="2"):
        command(["fit", program])
    assert "error: nobody came" in capsys.readouterr().err
    assert "program" not in sys.modules


def test_what_connects_processes_must_be_one_package(
    install: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    program = install("nothing")
    with pytest.raises(SystemExit, match="2"):
        command(["fit", program])
    assert "install fulgurite-sharding" in capsys.readouterr().err
    install("acme", "pass")
    install("other", "pass")
    with pytest.raises(SystemExit, match="2"):
        command(["fit", program])
    assert "uninstall all but one" in capsys.readouterr().err


class Once(fg.ProcessSync):
    """Says once, at step 4, that all stop."""

    def __init__(self) -> None:
        self.said = False

    def reduce_requests(self, step: int, requests: frozenset[str]) -> frozenset[str]:
        if step < 4 or self.said:
            return frozenset()
        self.said = True
        return frozenset({"stop:preempted"})


class Agreeing:
    """Gives one consensus."""

    def __init__(self) -> None:
        self.one = Once()

    @fg.hookimpl
    def consensus(self) -> fg.ProcessSync:
        return self.one


def test_what_was_agreed_on_holds_through_an_evaluation() -> None:
    """An evaluation asks between its batches; that the answer is nothing new then takes nothing
    back."""
    spec = fg.Evaluator("test", numbers([0], [0]))
    evaluating = Evaluating(spec, trigger=4)
    result = fg.Engine(steps=9, plugins=[Agreeing(), evaluating], autoload=False).fit(
        Counting(), numbers([0])
    )
    assert (result.stop_reason, int(result.state.step)) == ("preempted", 4)
    assert not evaluating.told


@pytest.mark.parametrize("fuse", [1, 4])
def test_an_action_may_ask_to_stop(fuse: int) -> None:
    asking = Act(3, lambda run: run.request_stop("enough"))
    result = fg.Engine(steps=9, plugins=[asking], autoload=False, steps_per_execution=fuse).fit(
        Counting(), numbers([0])
    )
    assert result.stop_reason == "enough"
    assert 3 <= int(result.state.step) < 9
