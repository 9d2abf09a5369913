"""`fulgurite population`: a member becomes an ordinary checkpoint."""

import json
from pathlib import Path

import fulgurite as fg
import numpy as np
import pytest
from fulgurite_checkpoint import Checkpointer
from fulgurite_cli.command import main
from populations import Point

PROGRAM = str(Path(__file__).with_name("program.py"))


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, float]:
    capsys.readouterr()
    assert main(["evaluate", PROGRAM, "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)["metrics"]


@pytest.mark.full
def test_a_member_is_written_as_a_run_that_evaluate_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = str(tmp_path / "run"), str(tmp_path / "member")
    assert main(["fit", PROGRAM, "--run", run]) == 0
    command = ["population", PROGRAM, "--run", run, "--out", out]
    assert main([*command, "--member", "2"]) == 2
    assert "there is no member 2: choose from 0 to 1" in capsys.readouterr().err
    assert main([*command, "--member", "1"]) == 0
    of_population = evaluate(capsys, "--run", run)
    of_member = evaluate(capsys, "alone=true", "--run", out)
    assert of_member["loss"] == of_population["loss[1]"]
    np.testing.assert_allclose(of_member["loss"], 0.512**2 / 2, rtol=1e-6)
    engine = fg.Engine(steps=1, plugins=[Checkpointer(every=9, directory=tmp_path / "other")])
    state = engine.load_weights(Point, out)
    np.testing.assert_allclose(state.module.p, 0.512, rtol=1e-6)
    assert int(state.step) == 3
    assert main(["runs", str(tmp_path)]) == 0
    assert main([*command, "--member", "1"]) == 1
    assert "already exists: choose another path" in capsys.readouterr().err
    again = ["population", PROGRAM, "alone=true", "--run", out, "--member", "0", "--out", run + "2"]
    assert main(again) == 2
    assert "trained a Point and no population" in capsys.readouterr().err
