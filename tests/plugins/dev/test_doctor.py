"""`fulgurite doctor` tells what is here, and finds what is wrong."""

import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import fulgurite._src.plugins.selection as selection
import jax
import pytest
from fulgurite_cli.command import main


@pytest.fixture(autouse=True)
def fresh_entry_points() -> Iterator[None]:
    """Entry points are read once a process; here they change."""
    selection.find_installed_plugins.cache_clear()
    yield
    selection.find_installed_plugins.cache_clear()


def test_doctor_reports_a_healthy_installation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = main(["doctor", str(tmp_path / "new")]), capsys.readouterr().out
    assert (code, out.splitlines()[-1]) == (0, "Nothing is wrong."), out
    lines = out.splitlines()
    assert f"jax {version('jax')}" in lines
    assert any(line.startswith("devices: ") and "cpu" in line for line in lines)
    assert any(line.startswith("compilation cache: ") for line in lines)


@pytest.mark.full
def test_doctor_reports_an_unwritable_compilation_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    (tmp_path / "file").touch()
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "file"))
        assert main(["doctor"]) == 1
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    lines = capsys.readouterr().out.splitlines()
    assert f"compilation cache: {tmp_path / 'file'}" in lines
    assert (
        f"wrong: nothing can be written into {tmp_path / 'file'}: {tmp_path / 'file'} is not a "
        f"directory" in lines
    )


@pytest.mark.full
def test_doctor_finds_what_breaks_every_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = tmp_path / "eager-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: eager\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fulgurite.plugins]\neager = eager:Eager\n[fulgurite.autoload]\neager = eager:Eager\nlost "
        "= eager:Eager\n"
        "[fulgurite.commands]\nends = eager_ends:all\n"
    )
    (tmp_path / "eager.py").write_text(
        "import fulgurite as fg\nclass Eager:\n    @fg.hookimpl\n    def loss_terms(self): return "
        "{}\n"
    )
    (tmp_path / "eager_ends.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "eager", raising=False)
    monkeypatch.setenv("FULGURITE_AUTOLOAD", "1")
    assert main(["doctor"]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wrong: ")]
    assert any(
        "every Engine fails: plugin 'eager' (Eager) is autoloaded and implements the traced hook"
        in line
        for line in wrong
    )
    assert any("'lost' of fulgurite.autoload is not a plugin" in line for line in wrong)
    assert any(
        "'ends' of fulgurite.commands (eager) cannot be imported: SystemExit: 3" in line
        for line in wrong
    )


@pytest.mark.full
def test_doctor_finds_broken_entry_points_versions_and_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        info = tmp_path / f"sick{number}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: sick{number}\nVersion: 1.0\n"
            "Requires-Dist: jax<0.1\nRequires-Dist: not-to-be-found\n"
            "Requires-Dist: for-others; sys_platform == 'none'\n"
            "Provides-Extra: more\nProvides-Extra: none\nRequires-Dist: absent>=2; extra == "
            "'more'\n"
            "Requires-Dist: numpy; extra == 'more'\nRequires-Dist: optax<0.1; extra == 'more'\n"
        )
        (info / "entry_points.txt").write_text(
            "[fulgurite.plugins]\nsick = sick_module:Sick\n[fulgurite.commands]\n"
            f"ill{number} = sick_module:ill\n"
        )
    (tmp_path / "sick_module.py").write_text("raise RuntimeError('not today')\n")
    (tmp_path / "file").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sick_module", raising=False)
    # The system refuses to look for the second one, as below a folder that may not be read.
    directories = [str(tmp_path / "file" / "runs"), str(tmp_path / ("x" * 300))]
    assert main(["doctor", *directories]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(f"into {directories[1]}: File name too long" in line for line in lines)
    assert "sick1 1.0" in lines
    assert [line for line in lines if "sick1[" in line] == [
        "extra not installed: absent; pip install 'sick1[more]'"
    ]
    assert not any("for-others" in line for line in lines)
    wrong = [line for line in lines if line.startswith("wrong: ")]
    assert f"wrong: sick1 1.0 needs optax<0.1, and {version('optax')} is installed" in wrong
    assert f"wrong: sick1 1.0 needs jax<0.1, and {version('jax')} is installed" in wrong
    assert "wrong: sick2 1.0 needs not-to-be-found, which is not installed" in wrong
    assert not any("absent" in line for line in wrong)
    assert any("the plugin name 'sick' is claimed by sick" in line for line in wrong)
    assert (
        sum(
            "cannot be imported from 'sick_module:Sick': RuntimeError: not today" in line
            for line in wrong
        )
        == 2
    )
    assert any(
        "'ill1' of fulgurite.commands (sick1) cannot be imported: RuntimeError" in line
        for line in wrong
    )
    assert any(
        "nothing can be written into" in line and "is not a directory" in line for line in wrong
    )
