"""What the command line says of a mistake."""

from pathlib import Path

import pytest
from fulgurite_cli.command import main

PROGRAM = """from fulgurite_config import L

def experiment():
    cfg = L()
    cfg.parts = [{call}]
    cfg.engine = L("fulgurite:Engine", steps=3)
    cfg.model = L(dict)
    return cfg
"""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("L('fulgurite:Engine', steps=-3)", "error: steps is -3; it must be a positive"),
        ("L('decimal:Decimul')", "error: decimal:Decimul does not exist: decimal has no"),
        ("L('nopackage.x:f')", "error: nopackage.x:f cannot be imported: No module named"),
    ],
)
@pytest.mark.parametrize("command", ["fit", "explain"])
def test_a_failing_call_is_named_with_its_path_and_line(
    command: str, call: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(call=call))
    with pytest.raises(SystemExit, match="2"):
        main([command, str(program)])
    error, place = capsys.readouterr().err.splitlines()
    assert error.startswith(message)
    name = call.split("'")[1]
    assert place == (f"at parts[0] of the configuration: {name}, written in {program}:5")


def test_the_place_of_a_call_stands_below_the_traceback_of_its_module(
    tmp_path: Path,
) -> None:
    (tmp_path / "raising_at_import.py").write_text("1 / 0")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(call="L('raising_at_import:f')"))
    with pytest.raises(ZeroDivisionError) as caught:
        main(["fit", str(program)])
    notes = caught.value.__notes__
    assert any(note.startswith("at parts[0] of the configuration: raising_at") for note in notes)
