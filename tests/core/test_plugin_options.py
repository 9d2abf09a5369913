"""The options of plugins: declared by `fg.Plugin`, the same for any object with hooks, and an error
where they are misspelt."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import pytest
from fulgurite.errors import PluginError, StateError
from fulgurite.plugins import get_options
from models import Counting, numbers


def engine(*plugins: Any, **settings: Any) -> fg.Engine:
    return fg.Engine(plugins=plugins, autoload=False, **settings)


@dataclass(frozen=True)
class CountUpdates(fg.Plugin):
    """Counts updates, as a frozen dataclass whose instances are told apart by an argument."""

    name: str | None = None
    by: int = 1

    @property
    def instance(self) -> str | None:
        return self.name

    @fg.hookimpl
    def init_plugin_state(self) -> Any:
        return jnp.int32(0)

    @fg.hookimpl
    def after_update(self, module: Any, plugin_state: Any) -> Any:
        return module, plugin_state + self.by

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("reset", fg.At(2), self.reset)]

    def reset(self, run: fg.Run) -> fg.ReplaceState:
        count = run.state.plugin_states[self.registered_name]
        return fg.ReplaceState(run.state.with_plugin_state(self, jnp.zeros_like(count)))


class ShiftBatch(eqx.Module, fg.Plugin):
    """An Equinox module that is a plugin."""

    shift: jax.Array
    after = ("count_updates",)

    @fg.hookimpl
    def transform_batch(self, batch: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf + self.shift, batch)


def test_a_plugin_finds_and_replaces_its_state_by_its_registered_name() -> None:
    plugins = [CountUpdates("a"), CountUpdates("b", by=10)]
    result = engine(*plugins, steps=3).fit(Counting(), numbers([0]))
    assert [plugin.registered_name for plugin in plugins] == ["count_updates:a", "count_updates:b"]
    assert result.state.plugin_states == {"count_updates:a": 1, "count_updates:b": 10}
    replaced = result.state.with_plugin_state("count_updates:a", 5)
    assert replaced.plugin_states == {"count_updates:a": 5, "count_updates:b": 10}
    listed = r"; the state has those of: count_updates:a, count_updates:b"
    with pytest.raises(StateError, match=f"plugin 'count_updates' has no plugin state{listed}"):
        result.state.with_plugin_state("count_updates", 5)
    mistakes: list[Any] = [CountUpdates, object(), None, 3]
    for wrong in mistakes:
        with pytest.raises(StateError, match=f"takes an fg.Plugin or .* not .*{listed}"):
            result.state.with_plugin_state(wrong, 5)


def test_a_numbered_plugin_knows_its_number() -> None:
    plugins = [CountUpdates(), CountUpdates()]
    engine(*plugins)
    assert [plugin.registered_name for plugin in plugins] == ["count_updates", "count_updates:2"]


def test_a_plugin_without_an_engine_has_no_name() -> None:
    with pytest.raises(PluginError, match="CountUpdates is not registered yet"):
        _ = CountUpdates("a").registered_name


@pytest.mark.full
def test_a_plugin_with_another_name_in_each_engine_must_be_told_apart() -> None:
    plugin = CountUpdates()
    engines = [engine(plugin), engine(plugin)]
    assert plugin.registered_name == "count_updates"
    engines.append(engine(CountUpdates(), plugin))
    with pytest.raises(PluginError, match="'count_updates' and 'count_updates:2'"):
        _ = plugin.registered_name
    del engines[:2]
    assert plugin.registered_name == "count_updates:2"


def test_a_hook_knows_the_name_that_the_calling_engine_has_for_its_plugin() -> None:
    plugin = CountUpdates()
    engines = [engine(CountUpdates(), plugin, steps=3), engine(plugin, steps=3)]
    for training, name in zip(engines, ("count_updates:2", "count_updates"), strict=True):
        result = training.fit(Counting(), numbers([0]))
        assert result.state.plugin_states[name] == 1


def test_an_engine_that_cannot_be_built_names_no_plugin() -> None:
    plugin = CountUpdates()
    with pytest.raises(PluginError):
        engine(CountUpdates(), plugin, CountUpdates("a"), CountUpdates("a"))

    @dataclass(frozen=True)
    class Clashing:
        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("x", 1, print), fg.ScheduledAction("x", 2, print)]

    with pytest.raises(PluginError) as caught:
        engine(CountUpdates(), plugin, Clashing())
    trained = engine(plugin)
    assert plugin.registered_name == "count_updates" in trained.plugins.plugins
    assert caught.value


def test_registering_an_equinox_module_does_not_change_it_as_a_tree() -> None:
    plugin = ShiftBatch(jnp.ones(()))
    before = jax.tree.structure(plugin)
    assert list(engine(plugin, CountUpdates("a")).plugins.plugins) == [
        "count_updates:a",
        "shift_batch",
    ]
    assert plugin.registered_name == "shift_batch"
    assert jax.tree.structure(plugin) == before


def test_options_of_any_object_are_read_with_the_defaults_of_the_class() -> None:
    class Bare:
        kept_on_skip = True

    options = get_options(Bare())
    assert options.kept_on_skip
    assert (options.after, options.state_version, options.required) == ((), 1, False)
    declared = CountUpdates("a")
    assert get_options(declared) is declared


def make_plugin(base: type, **members: Any) -> Any:
    return type("Careless", (base,), members)()


@pytest.mark.parametrize("base", [object, fg.Plugin])
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("afetr", "after"),
        ("hook_specs", "hookspecs"),
        ("kept_on_skipped", "kept_on_skip"),
        ("change_results", "changes_results"),
        ("befor", "before"),
        ("aftr", "after"),
        ("affter", "after"),
        ("plugin_nmae", "plugin_name"),
        ("pluginname", "plugin_name"),
        ("instace", "instance"),
        ("state_verion", "state_version"),
        ("After", "after"),
        ("KEPT_ON_SKIP", "kept_on_skip"),
        ("keptOnSkip", "kept_on_skip"),
    ],
)
def test_a_misspelt_option_is_an_error_that_names_the_option(
    base: type, name: str, option: str
) -> None:
    with pytest.raises(PluginError, match=f"Careless has an attribute '{name}'.*'{option}'"):
        engine(make_plugin(base, **{name: ("x",)}))


def test_a_misspelt_option_in_an_instance_or_a_property_is_an_error() -> None:
    @dataclass
    class WithField:
        instence: str

    class WithProperty:
        @property
        def instanec(self) -> str:
            return "a"

    for plugin in (WithField("a"), WithProperty()):
        with pytest.raises(PluginError, match="Did you mean 'instance'"):
            engine(plugin)


def test_methods_private_and_other_names_are_not_taken_for_options() -> None:
    class Careful:
        name = "x"
        not_before = 3
        _afetr = 1
        later = 2
        plugin_states = None

        def require(self) -> None: ...

    assert list(engine(Careful()).plugins.plugins) == ["careful"]


@pytest.mark.parametrize(
    "name",
    [
        "instances",
        "distance",
        "provider",
        "provided",
        "plugin_names",
        "state_versions",
        "befores",
        "afters",
        "changed_results",
        "reacquires",
        "rafter",
    ],
)
def test_another_word_is_not_taken_for_a_misspelt_option(name: str) -> None:
    assert list(engine(make_plugin(object, **{name: 3})).plugins.plugins) == ["careless"]
    assert list(engine(make_plugin(fg.Plugin, **{name: fg.PerFit(int)})).plugins.plugins)


@pytest.mark.parametrize("base", [object, fg.Plugin])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("plugin_name", "a:b"),
        ("plugin_name", "-a"),
        ("plugin_name", 3),
        ("instance", ""),
        ("instance", 2.5),
        ("instance", True),
        ("state_version", "2"),
        ("state_version", 0),
        ("state_version", True),
    ],
)
def test_a_name_or_version_that_cannot_be_one_is_an_error(
    base: type, option: str, value: Any
) -> None:
    with pytest.raises(PluginError, match=rf"Careless\.{option} is {value!r}; it must be a "):
        engine(make_plugin(base, **{option: value}))


@pytest.mark.parametrize("base", [object, fg.Plugin])
def test_a_registered_name_of_ones_own_is_an_error(base: type) -> None:
    with pytest.raises(PluginError, match="'registered_name', .* Did you mean 'plugin_name'"):
        engine(make_plugin(base, registered_name="my"))


def test_a_flag_that_is_not_a_bool_is_an_error() -> None:
    with pytest.raises(
        PluginError, match=r"Careless\.required must be True or False, not \('x',\)"
    ):
        engine(make_plugin(fg.Plugin, required=("x",)))
