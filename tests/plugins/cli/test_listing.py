"""`fulgurite plugins --all` and `fulgurite plugins NAME`: what is in a plugin, and its
configuration."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fulgurite.plugins import find_installed_plugins
from fulgurite_cli.command import main

PLUGIN = """
from dataclasses import dataclass, field
import fulgurite as fg

class Extra:
    @fg.hookspec("event")
    def on_extra(self, run): "Something further."

class Base:
    \"\"\"Attributes:
        required: whether it must work.
    \"\"\"

@dataclass
class Demo(Base):
    \"\"\"Shows what a plugin has.

    Attributes:
        often: how often,
            in steps.
        names: of things.
    \"\"\"

    often: int
    names: list[str] = field(default_factory=lambda: ["a"])
    required: bool = False
    hookspecs = Extra

    @fg.hookimpl
    def init_plugin_state(self): ...
    @fg.hookimpl
    def sharding_strategy(self): ...
    @fg.hookimpl
    def get_host_state(self): ...
    @fg.hookimpl(specname="on_extra")
    def extra(self): ...
"""


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution with a plugin, and one whose plugin cannot be imported."""
    info = tmp_path / "demo_dist-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: demo-dist\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(
        "[fulgurite.plugins]\ndemo = demo_listed:Demo\nbroken = demo_broken:Broken\n"
    )
    (tmp_path / "demo_listed.py").write_text(PLUGIN)
    (tmp_path / "demo_broken.py").write_text("import nowhere_to_be_found")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("demo_listed", "demo_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    find_installed_plugins.cache_clear()
    yield
    find_installed_plugins.cache_clear()


def list_plugins(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main(["plugins", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_listing_all_shows_hooks_state_and_errors(
    demo: None, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = list_plugins(capsys, "--all")
    by_name = {row["name"]: row for row in rows}
    assert code == 1
    assert by_name["demo"] == {
        "name": "demo",
        "distribution": "demo-dist 1.5",
        "autoload": False,
        "active": None,
        "object": "demo_listed:Demo",
        "hooks": {
            "on_extra": "event",
            "get_host_state": "persistence",
            "sharding_strategy": "build",
            "init_plugin_state": "build",
        },
        "exclusive": ["sharding_strategy"],
        "state": ["device", "host"],
        "error": None,
    }
    assert "cannot be imported from 'demo_broken:Broken'" in by_name["broken"]["error"]
    main(["plugins", "--all"])
    text = capsys.readouterr().out
    assert "    exclusive: sharding_strategy\n    state: device, host\n" in text
    assert "    error: plugin 'broken' (demo-dist 1.5) cannot be imported" in text


def test_listing_one_plugin_shows_its_configuration(
    demo: None, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told_of = list_plugins(capsys, "demo")
    assert (code, told_of["doc"]) == (0, "Shows what a plugin has.")
    assert told_of["fields"] == [
        {"name": "often", "type": "int", "default": None, "doc": "how often, in steps."},
        {"name": "names", "type": "list[str]", "default": "['a']", "doc": "of things."},
        {"name": "required", "type": "bool", "default": "False", "doc": "whether it must work."},
    ]
    assert main(["plugins", "demo"]) == 0
    assert (
        "  often: int\n      how often, in steps.\n  names: list[str] = ['a']\n"
        in capsys.readouterr().out
    )


def test_listing_shows_plugin_factories_too(
    demo: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = tmp_path / "demo_dist-1.5.dist-info" / "entry_points.txt"
    points.write_text(
        points.read_text()
        + "made = demo_listed:made\nodd = demo_listed:Odd\nvalue = demo_listed:value\n"
    )
    more = "def made(often: int = 3):\n    'Makes one.'\nclass Odd:\n    hookspecs = 3\nvalue = 3\n"
    (tmp_path / "demo_listed.py").write_text(PLUGIN + more)
    find_installed_plugins.cache_clear()
    code, told_of = list_plugins(capsys, "made")
    assert (code, told_of["doc"], told_of["fields"][0]["default"]) == (0, "Makes one.", "3")
    rows = {row["name"]: row for row in list_plugins(capsys, "--all")[1]}
    assert (rows["made"]["hooks"], rows["odd"]["hooks"]) == ({}, {})
    assert (
        "an entry point names a class, or a function that makes a plugin" in rows["value"]["error"]
    )


def test_listing_a_broken_or_unknown_name_is_an_error(
    demo: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "broken"]) == 1
    assert "error: plugin 'broken' (demo-dist 1.5)" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["plugins", "demos"])
    assert stop.value.code == 2
    assert "no plugin 'demos' is installed. Did you mean 'demo'?" in capsys.readouterr().err


def test_listing_respects_the_environment(
    demo: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULGURITE_PLUGINS", "demo,-rng")
    active = {row["name"]: row["active"] for row in list_plugins(capsys)[1]}
    assert (active["demo"], active["rng"]) == ("FULGURITE_PLUGINS", None)
