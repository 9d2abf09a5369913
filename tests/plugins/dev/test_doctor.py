"""`fulgurite doctor` tells what is here, and finds what is wrong."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from fulgurite.command import main


def test_what_is_here_is_told_and_nothing_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = main(["doctor", str(tmp_path / "new")]), capsys.readouterr().out
    assert (code, out.splitlines()[-1]) == (0, "Nothing is wrong."), out
    lines = out.splitlines()
    assert f"jax {version('jax')}" in lines
    assert any(line.startswith("devices: ") and "cpu" in line for line in lines)
    assert any(line.startswith("compilation cache: ") for line in lines)


def test_broken_entry_points_versions_and_directories_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        info = tmp_path / f"sick{number}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: sick{number}\nVersion: 1.0\n"
            "Requires-Dist: jax<0.1\nRequires-Dist: not-to-be-found\nRequires-Dist: absent; extra == 'more'\n"
        )
        (info / "entry_points.txt").write_text(
            "[fulgurite.plugins]\nsick = sick_module:Sick\n[fulgurite.commands]\nill%d = sick_module:ill\n" % number  # noqa: UP031
        )
    (tmp_path / "sick_module.py").write_text("raise RuntimeError('not today')\n")
    (tmp_path / "file").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sick_module", raising=False)
    assert main(["doctor", str(tmp_path / "file" / "runs")]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wrong: ")]
    assert f"wrong: sick1 1.0 needs jax<0.1, and {version('jax')} is installed" in wrong
    assert "wrong: sick2 1.0 needs not-to-be-found, which is not installed" in wrong
    assert not any("absent" in line for line in wrong)
    assert any("the plugin name 'sick' is claimed by sick" in line for line in wrong)
    assert sum("cannot be imported from 'sick_module:Sick': RuntimeError: not today" in line for line in wrong) == 2
    assert any("'ill1' of fulgurite.commands (sick1) cannot be imported: RuntimeError" in line for line in wrong)
    assert any("nothing can be written into" in line and "is no directory" in line for line in wrong)
