"""Installed plugins: found by name, autoloaded within limits, switched off, and named when they are
broken."""

import importlib
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from textwrap import dedent

import fulgurite as fg
import fulgurite._src.plugins.selection as discovery
import pytest
from fulgurite.errors import ConfigurationError, PluginError
from models import Counting, numbers

GROUPS = ("fulgurite.plugins", "fulgurite.autoload")
LOGGER = """
    import fulgurite as fg

    class Logger:
        def __init__(self, label="plain"):
            self.label = label

        @fg.hookimpl
        def log_record(self, record):
            pass
"""
EVENTS = """
    import fulgurite as fg

    class Failing:
        @fg.hookimpl
        def on_fit_start(self, run):
            raise OSError("no room")
"""
Install = Callable[..., None]

ROOT = Path(__file__).parents[2]


def clear_caches() -> None:
    discovery.find_installed_plugins.cache_clear()
    discovery.get_distribution.cache_clear()
    discovery._read_packages.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts distributions on the path that exist for one test; plugins that are really installed are
    hidden."""
    modules: list[str] = []

    def install(
        distribution: str,
        source: str = "",
        plugins: tuple[str, ...] = (),
        autoload: tuple[str, ...] = (),
        version: str = "1.0",
    ) -> None:
        module = distribution.replace("-", "_")
        folder = tmp_path / distribution
        info = folder / f"{module}-{version}.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(dedent(source))
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        groups = [
            f"[{group}]\n" + "\n".join(entries)
            for group, entries in zip(GROUPS, (plugins, autoload), strict=True)
        ]
        (info / "entry_points.txt").write_text("\n".join(groups))
        monkeypatch.syspath_prepend(folder)
        clear_caches()
        importlib.invalidate_caches()
        modules.append(module)

    for name in {
        entry.dist.name for group in GROUPS for entry in entry_points(group=group) if entry.dist
    }:
        # The first distribution of a name on the path is the one that counts, and this one offers
        # nothing.
        install(name)
    modules.clear()
    monkeypatch.delenv("FULGURITE_PLUGINS", raising=False)
    monkeypatch.delenv("FULGURITE_AUTOLOAD", raising=False)
    yield install
    clear_caches()
    for module in modules:
        sys.modules.pop(module, None)


def active(engine: fg.Engine) -> dict[str, str]:
    return {name: registered.activation for name, registered in engine.plugins.plugins.items()}


# --- by name --------------------------------------------------------------------------------------


def test_an_installed_plugin_is_active_when_it_is_named_and_not_before(install: Install):
    install("acme-loggers", LOGGER, ("acme = acme_loggers:Logger",))
    assert active(fg.Engine()) == {}
    assert "acme_loggers" not in sys.modules
    assert active(fg.Engine(plugins=["acme"])) == {"acme": "named"}


def test_a_named_plugin_gets_its_arguments(install: Install):
    install("acme-loggers", LOGGER, ("acme = acme_loggers:Logger",))
    engine = fg.Engine(plugins=[{"acme": {"label": "fine"}}])
    assert engine.plugins.plugins["acme"].plugin.label == "fine"


def test_arguments_that_a_plugin_does_not_take_are_an_error_that_names_it(install: Install):
    install("acme-loggers", LOGGER, ("acme = acme_loggers:Logger",), version="2.3")
    with pytest.raises(PluginError, match=r"plugin 'acme' \(acme-loggers 2\.3\).*colour"):
        fg.Engine(plugins=[{"acme": {"colour": "red"}}])


@pytest.mark.parametrize("written", [{"acme": 3}, {"acme": {}, "other": {}}, {}])
def test_a_plugin_with_arguments_is_written_in_one_way(install: Install, written: dict):
    install("acme-loggers", LOGGER, ("acme = acme_loggers:Logger",))
    with pytest.raises(ConfigurationError, match=r"\{'name': \{'argument': value\}\}"):
        fg.Engine(plugins=[written])


def test_a_name_that_is_not_installed_is_an_error_with_a_hint(install: Install):
    install("acme-loggers", LOGGER, ("acme = acme_loggers:Logger",))
    with pytest.raises(PluginError, match=r"no plugin 'amce' is installed. Did you mean 'acme'\?"):
        fg.Engine(plugins=["amce"])


def test_unknown_plugin_names_the_distribution_that_provides_it():
    available = discovery.find_installed_plugins()
    with pytest.raises(
        PluginError,
        match="no plugin 'jsonl' is installed. fulgurite-logging brings it, .*/logging$",
    ):
        discovery.find_plugin("jsonl", {})
    with pytest.raises(PluginError, match="no plugin 'mine' is installed. There are: .*"):
        discovery.find_plugin("mine", available)


def test_the_core_knows_the_plugins_of_every_distribution_of_this_workspace():
    """What is not installed cannot be asked, so it keeps a list; contrib/ is not in it."""
    names = {}
    for path in (ROOT / "plugins").glob("*/pyproject.toml"):
        groups = tomllib.loads(path.read_text())["project"].get("entry-points", {})
        if "fulgurite.plugins" in groups:
            names[path.parent.name] = set(groups["fulgurite.plugins"])
    known = discovery._KNOWN_DISTRIBUTIONS
    assert {folder: set(names) for folder, names in known.items()} == names
    for folder, names_of_folder in names.items():
        for name in names_of_folder:
            with pytest.raises(PluginError, match=f"fulgurite-{folder} brings it"):
                discovery.find_plugin(name, {})


def test_naming_a_plugin_twice_is_an_error(install: Install):
    install("acme-loggers", LOGGER, ("acme = acme_loggers:Logger",))
    with pytest.raises(PluginError, match="'acme' is listed twice"):
        fg.Engine(plugins=["acme", {"acme": {"label": "other"}}])


def test_instance_has_the_name_of_its_entry_point(install: Install):
    install("acme-loggers", LOGGER, ("acme = acme_loggers:Logger",))
    plugin = importlib.import_module("acme_loggers").Logger()
    assert active(fg.Engine(plugins=[plugin])) == {"acme": "given"}


def test_environment_adds_and_removes_plugins(install: Install, monkeypatch: pytest.MonkeyPatch):
    install("acme-loggers", LOGGER, ("acme = acme_loggers:Logger", "other = acme_loggers:Logger"))
    monkeypatch.setenv("FULGURITE_PLUGINS", "acme, -other")
    assert active(fg.Engine(plugins=["other"])) == {"acme": "named"}
    assert active(fg.Engine(plugins=["acme"])) == {"acme": "named"}


def test_environment_does_not_add_a_plugin_passed_by_the_program(
    install: Install, monkeypatch: pytest.MonkeyPatch
):
    install("acme-loggers", LOGGER, ("acme = acme_loggers:Logger",))
    logger = importlib.import_module("acme_loggers").Logger()
    monkeypatch.setenv("FULGURITE_PLUGINS", "acme, acme")
    assert active(fg.Engine(plugins=[logger])) == {"acme": "given"}
    assert active(fg.Engine(plugins=[{"acme": {}}])) == active(fg.Engine()) == {"acme": "named"}


def test_a_name_from_the_environment_must_be_installed(
    install: Install, monkeypatch: pytest.MonkeyPatch
):
    install("acme-loggers", LOGGER, ("acme = acme_loggers:Logger",))
    monkeypatch.setenv("FULGURITE_PLUGINS", "amce")
    with pytest.raises(PluginError, match=r"no plugin 'amce' is installed. Did you mean 'acme'\?"):
        fg.Engine()


def test_removal_applies_to_instances(install: Install):
    install("acme-loggers", LOGGER, ("acme = acme_loggers:Logger",))
    plugin = importlib.import_module("acme_loggers").Logger()
    assert active(fg.Engine(plugins=[plugin, "-acme"])) == {}


def test_removing_an_absent_plugin_is_fine_unless_misspelt(install: Install):
    install("acme-loggers", LOGGER, ("acme = acme_loggers:Logger",))
    assert active(fg.Engine(plugins=["-tensorboard"])) == {}
    with pytest.raises(PluginError, match=r"'-amce'.*Did you mean 'acme'\?"):
        fg.Engine(plugins=["-amce"])
    engine = fg.Engine(plugins=["-foobar", "-tensorboard", "-acme"], autoload=False)
    assert engine.plugins.messages == [
        "'-foobar' has no effect: no plugin of that name is installed or listed"
    ]


def test_a_name_that_shares_a_word_with_a_plugin_is_told_that_one(install: Install):
    install("acme-clips", LOGGER, ("acme_clipping = acme_clips:Logger",))
    for name in ("clipping", "-clipping"):
        with pytest.raises(PluginError, match="Did you mean '[a-z]+_clip(ping)?'"):
            fg.Engine(plugins=[name], autoload=False)


# --- autoload -------------------------------------------------------------------------------------


def test_package_may_ask_to_be_autoloaded(install: Install):
    install(
        "acme-loggers",
        LOGGER,
        ("acme = acme_loggers:Logger", "more = acme_loggers:Logger"),
        ("acme = acme_loggers:Logger",),
    )
    assert active(fg.Engine()) == {"acme": "autoload"}
    assert active(fg.Engine(plugins=["acme"])) == {"acme": "named"}


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        ({"plugins": ["-acme"]}, {}),
        ({"autoload": False}, {}),
        ({}, {"FULGURITE_PLUGINS": "-acme"}),
        ({}, {"FULGURITE_AUTOLOAD": "0"}),
        ({}, {"FULGURITE_AUTOLOAD": "other,another"}),
    ],
)
def test_each_switch_disables_autoload_before_the_import(
    install: Install, monkeypatch: pytest.MonkeyPatch, arguments: dict, environment: dict
):
    install(
        "acme-loggers", LOGGER, ("acme = acme_loggers:Logger",), ("acme = acme_loggers:Logger",)
    )
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert active(fg.Engine(**arguments)) == {}
    assert "acme_loggers" not in sys.modules


def test_allow_list_admits_only_the_names_on_it(install: Install, monkeypatch: pytest.MonkeyPatch):
    offered = (
        "acme = acme_loggers:Logger",
        "more = acme_loggers:Logger",
        "most = acme_loggers:Logger",
    )
    install("acme-loggers", LOGGER, offered, offered)
    monkeypatch.setenv("FULGURITE_AUTOLOAD", "acme, most")
    assert active(fg.Engine()) == {"acme": "autoload", "most": "autoload"}


def test_disabling_autoload_keeps_named_plugins(install: Install, monkeypatch: pytest.MonkeyPatch):
    install(
        "acme-loggers", LOGGER, ("acme = acme_loggers:Logger",), ("acme = acme_loggers:Logger",)
    )
    monkeypatch.setenv("FULGURITE_AUTOLOAD", "0")
    assert active(fg.Engine(plugins=["acme"], autoload=False)) == {"acme": "named"}


CHANGING = {
    "build": "register_rng_streams",
    "traced": "transform_batch",
    "persistence": "get_host_state",
}


@pytest.mark.parametrize(("kind", "hook"), CHANGING.items())
def test_autoloaded_plugin_that_changes_results_is_an_error(install: Install, kind: str, hook: str):
    source = (
        f"import fulgurite as fg\nclass Eager:\n    @fg.hookimpl\n    def {hook}(self): return "
        "None\n"
    )
    install("acme-eager", source, ("eager = acme_eager:Eager",), ("eager = acme_eager:Eager",))
    with pytest.raises(PluginError, match=f"plugin 'eager'.*autoloaded.*{kind} hook '{hook}'"):
        fg.Engine()
    assert active(fg.Engine(plugins=["eager"])) == {"eager": "named"}


def test_events_and_loggers_may_be_autoloaded_together(install: Install):
    entries = ("acme = acme_both:Logger", "failing = acme_both:Failing")
    install("acme-both", dedent(LOGGER) + dedent(EVENTS), entries, entries)
    assert active(fg.Engine()) == {"acme": "autoload", "failing": "autoload"}


STREAMS = """
    import fulgurite as fg

    class Rng:
        @fg.hookimpl
        def register_rng_streams(self):
            return [fg.RngStream("noise", train=True)]
"""


def test_fulgurite_rng_alone_may_autoload_a_build_hook(install: Install):
    install(
        "fulgurite-rng-double",
        STREAMS,
        ("streams = fulgurite_rng_double:Rng",),
        ("streams = fulgurite_rng_double:Rng",),
    )
    with pytest.raises(PluginError, match=r"'streams'.*register_rng_streams"):
        fg.Engine()


def test_the_exception_is_a_distribution_not_a_name(install: Install):
    install("acme-streams", STREAMS, ("rng = acme_streams:Rng",), ("rng = acme_streams:Rng",))
    with pytest.raises(PluginError, match=r"'rng'.*register_rng_streams"):
        fg.Engine()


def test_the_installed_fulgurite_rng_is_autoloaded(monkeypatch: pytest.MonkeyPatch):
    if not any(
        entry.dist and entry.dist.name == "fulgurite-rng"
        for entry in entry_points(group="fulgurite.autoload")
    ):
        pytest.skip("fulgurite-rng is not installed here")
    monkeypatch.delenv("FULGURITE_PLUGINS", raising=False)
    monkeypatch.setenv("FULGURITE_AUTOLOAD", "rng")
    assert active(fg.Engine()) == {"rng": "autoload"}


# --- two distributions, one name ------------------------------------------------------------------


def test_name_in_two_distributions_is_an_error_when_requested(install: Install):
    install("acme-one", LOGGER, ("acme = acme_one:Logger",), version="1.0")
    install("acme-two", LOGGER, ("acme = acme_two:Logger",), version="2.0")
    assert active(fg.Engine()) == {}
    with pytest.raises(PluginError, match="'acme'") as caught:
        fg.Engine(plugins=["acme"])
    assert "acme-one 1.0" in str(caught.value)
    assert "acme-two 2.0" in str(caught.value)


@pytest.fixture
def torn(install: Install) -> None:
    """Two distributions that both autoload `acme`."""
    for module in ("acme_one", "acme_two"):
        install(
            module.replace("_", "-"),
            LOGGER,
            (f"acme = {module}:Logger",),
            (f"acme = {module}:Logger",),
        )


def test_name_autoloaded_from_two_distributions_is_an_error(torn: None):
    with pytest.raises(
        PluginError, match=r"'acme' is claimed by acme-(one|two) 1\.0 and acme-(one|two) 1\.0"
    ):
        fg.Engine()


def test_ambiguous_name_can_be_removed(torn: None):
    assert active(fg.Engine(plugins=["-acme"])) == {}


def test_ambiguous_name_can_be_resolved_by_an_instance(torn: None):
    plugin = importlib.import_module("acme_two").Logger()
    assert active(fg.Engine(plugins=[plugin])) == {"acme": "given"}


# --- broken distributions -------------------------------------------------------------------------

BROKEN = "raise RuntimeError('needs a newer thing')"


def test_requested_plugin_that_cannot_be_imported_is_an_error(install: Install):
    install("acme-broken", BROKEN, ("broken = acme_broken:Logger",), version="0.7")
    with pytest.raises(
        PluginError,
        match=r"plugin 'broken' \(acme-broken 0\.7\).*RuntimeError: needs a newer thing",
    ):
        fg.Engine(plugins=["broken"])


@pytest.mark.parametrize("broken", [BROKEN, "raise SystemExit(3)", "Logger = 3"])
def test_autoloaded_plugin_that_cannot_be_imported_is_reported_and_the_others_load(
    install: Install, broken: str
):
    install(
        "acme-broken",
        broken,
        ("broken = acme_broken:Logger",),
        ("broken = acme_broken:Logger",),
        version="0.7",
    )
    install(
        "acme-loggers", LOGGER, ("acme = acme_loggers:Logger",), ("acme = acme_loggers:Logger",)
    )
    with pytest.warns(UserWarning, match=r"plugin 'broken' \(acme-broken 0\.7\)"):
        engine = fg.Engine(steps=1)
    assert active(engine) == {"acme": "autoload"}
    (notice,) = engine.fit(Counting(), numbers([0])).messages
    assert "plugin 'broken' (acme-broken 0.7) cannot be imported" in notice


def test_a_plugin_that_ends_the_program_when_it_is_made_is_an_error(install: Install):
    exiting = "import sys\nclass Logger:\n    def __init__(self): sys.exit(0)"
    install("acme-exiting", exiting, ("exiting = acme_exiting:Logger",), version="0.7")
    message = r"plugin 'exiting' \(acme-exiting 0\.7\) cannot be made .* SystemExit: 0"
    with pytest.raises(PluginError, match=message):
        fg.Engine(steps=1, plugins=["exiting"])


def test_invalid_entry_point_does_not_affect_others(install: Install):
    install("acme-broken", LOGGER, ("broken = not a : valid value",), version="0.7")
    install("acme-loggers", LOGGER, ("acme = acme_loggers:Logger",))
    import acme_loggers  # type: ignore[import-not-found]

    assert list(fg.Engine(plugins=[acme_loggers.Logger()]).plugins.plugins) == ["acme"]
    with pytest.raises(
        PluginError, match=r"plugin 'broken' \(acme-broken 0\.7\) cannot be imported from 'not a"
    ):
        fg.Engine(plugins=["broken"])


def test_entry_point_to_a_missing_class_is_broken(install: Install):
    install("acme-loggers", LOGGER, ("acme = acme_loggers:Loggre",), version="0.7")
    with pytest.raises(PluginError, match=r"plugin 'acme' \(acme-loggers 0\.7\).*Loggre"):
        fg.Engine(plugins=["acme"])


# --- blame ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("plugin_entry", ["by name", "as an instance"])
def test_a_failure_names_the_distribution_that_brought_the_plugin(
    install: Install, plugin_entry: str
):
    install("acme-failing", EVENTS, ("failing = acme_failing:Failing",), version="3.1")
    plugin = (
        "failing"
        if plugin_entry == "by name"
        else importlib.import_module("acme_failing").Failing()
    )
    with pytest.raises(OSError, match="no room") as caught:
        fg.Engine(steps=1, plugins=[plugin]).fit(Counting(), numbers([0]))
    assert (
        caught.value.__notes__[0]
        == "plugin 'failing' (acme-failing 3.1), hook on_fit_start, step 0"
    )
