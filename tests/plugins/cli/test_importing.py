"""What a command imports: never what merely lies in the current directory."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fulgurite as fg
import pytest
from fulgurite.plugins import find_installed_plugins
from fulgurite_cli import load_experiment, rebuild_experiment, run
from fulgurite_config import L
from fulgurite_runs import RunPlugin
from fulgurite_testing import TinyModel, tiny_data


def experiment() -> Any:
    cfg = L(engine=L(fg.Engine, steps=1, plugins=[L(RunPlugin)], autoload=False))
    cfg.model = L.partial(TinyModel)
    cfg.data = L(tiny_data)
    return cfg


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with modules that nobody asked for and a plugin that is active as
    soon as it is installed."""
    info = tmp_path / "planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fulgurite.plugins]\nplanted = planted:Planted\n"
        "[fulgurite.autoload]\nplanted = planted:Planted\n"
    )
    for name in ("planted", "optional_of_another", "wanted_of_a_test"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    find_installed_plugins.cache_clear()
    yield tmp_path
    find_installed_plugins.cache_clear()


def test_without_a_program_only_allowed_names_of_the_current_directory_are_found(
    folder: Path,
) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("wanted_of_a_test")
    run(experiment, ["engine.run_dir=run"])
    allow = ["fulgurite", "fulgurite_runs", "fulgurite_testing", __name__.partition(".")[0]]
    rebuild_experiment("run", None, [], [*allow, "wanted_of_a_test:Net"])
    assert importlib.util.find_spec("wanted_of_a_test") is not None
    assert importlib.util.find_spec("optional_of_another") is None
    assert "planted" not in find_installed_plugins()


def test_what_lies_beside_a_program_offers_no_plugins(folder: Path) -> None:
    (folder / "program_with_a_plan.py").write_text("def experiment():\n    pass\n")
    load_experiment("program_with_a_plan.py")
    assert importlib.util.find_spec("optional_of_another") is not None
    assert "planted" not in find_installed_plugins()
