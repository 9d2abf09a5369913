"""Each way of combining the answers of several plugins to a hook, without an engine."""

import copy
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import fulgurite as fg
import jax.numpy as jnp
import optax
import pytest
from fulgurite.errors import PluginError
from fulgurite.plugins import Combine, PluginManager, RegisteredPlugin


@dataclass(frozen=True)
class Named:
    name: str


class Specifications:
    """One hook for each `Combine`."""

    @fg.hookspec("event")
    def on_call(self, step: int, value: int) -> Any: ...

    @fg.hookspec("event", Combine.EACH)
    def on_each(self, mine: str, value: int) -> Any: ...

    @fg.hookspec("build", Combine.EXCLUSIVE)
    def only_one(self) -> Any: ...

    @fg.hookspec("build", Combine.BY_NAME, list[Named])
    def list_items(self) -> Any: ...

    @fg.hookspec("build", Combine.MERGE, dict)
    def make_entries(self, mine: str) -> Any: ...

    @fg.hookspec("traced", Combine.FOLD)
    def change(self, value: int, mine: str) -> Any: ...

    @fg.hookspec("build", Combine.CHAIN, optax.GradientTransformation)
    def transform(self, mine: float) -> Any: ...

    @fg.hookspec("traced", Combine.WRAP)
    def around(self, call: Any, left: str, right: str, mine: str) -> Any: ...


METHODS = {
    "call": "on_call",
    "each": "on_each",
    "ask": "only_one",
    "collect_by_name": "list_items",
    "merge": "make_entries",
    "fold": "change",
    "chain": "transform",
    "wrap": "around",
}


def plugin(name: str, **hooks: Any) -> Any:
    """A plugin of a class made on the spot, whose members become implementations of hooks."""
    marked = {hook: fg.hookimpl(function) for hook, function in hooks.items()}
    return type(name, (), {"plugin_name": name, **marked})()


def manage(*plugins: Any) -> PluginManager:
    return PluginManager(plugins, hookspecs=Specifications, autoload=False)


def give_name(plugin: RegisteredPlugin) -> dict[str, Any]:
    return {"mine": plugin.name}


def get_names(answers: Any) -> list[tuple[str, Any]]:
    return [(plugin.name, answer) for plugin, answer in answers]


def test_call_gives_all_plugins_the_same_arguments_and_keeps_answers_of_none() -> None:
    plugins = manage(
        plugin("a", on_call=lambda self, value: value + 1),
        plugin("b", on_call=lambda self: None),
        plugin("c", on_call=lambda self, step: step),
    )
    answers = plugins.hooks.on_call.call(7, step=8, value=1)
    assert get_names(answers) == [("a", 2), ("b", None), ("c", 8)]
    assert [entry.name for entry in plugins.hooks["on_call"].plugins] == ["a", "b", "c"]


def test_contexts_are_entered_in_order_and_left_in_reverse() -> None:
    events: list[str] = []

    def make(name: str) -> Any:
        @contextmanager
        def context(self: Any, value: int) -> Any:
            events.append(f"enter {name} {value}")
            yield
            events.append(f"leave {name}")
            if name == "a":
                raise OSError("on purpose")

        return plugin(name, on_call=context)

    plugins = manage(make("a"), plugin("none", on_call=lambda self: None), make("b"))
    with pytest.raises(OSError, match="on purpose") as caught, ExitStack() as stack:
        plugins.hooks.on_call.enter_contexts(stack, 3, step=3, value=5)
    assert events == ["enter a 5", "enter b 5", "leave b", "leave a"]
    assert caught.value.__notes__[0].endswith("hook on_call, step 3")
    assert caught.value.__notes__[0].startswith("plugin 'a'")


def test_a_guard_handles_the_failure_of_one_plugin_or_leaves_it_out() -> None:
    def fail(self: Any, value: int) -> int:
        raise OSError("on purpose")

    def answer(self: Any, value: int) -> int:
        return value

    failures: list[tuple[str, str, str]] = []

    @contextmanager
    def keep_failure(plugin: RegisteredPlugin) -> Any:
        try:
            yield
        except OSError as error:
            failures.append((plugin.name, str(error), error.__notes__[0]))

    def guard(plugin: RegisteredPlugin) -> Any:
        return None if plugin.name == "out" else keep_failure(plugin)

    names = ("broken", "whole", "out", "last")
    plugins = manage(
        *(
            plugin(name, on_call=fail if name == "broken" else answer, on_each=answer)
            for name in names
        )
    )
    answers = plugins.hooks.on_call.call(3, guard=guard, step=3, value=1)
    assert get_names(answers) == [("whole", 1), ("last", 1)]
    [(name, message, note)] = failures
    assert (name, message) == ("broken", "on purpose")
    assert note.startswith("plugin 'broken'") and note.endswith("hook on_call, step 3")
    answers = plugins.hooks.on_each.each(per_plugin=give_name, guard=guard, value=2)
    assert get_names(answers) == [("broken", 2), ("whole", 2), ("last", 2)]


def test_the_function_of_a_plugin_is_found_by_the_plugin() -> None:
    def answer(self: Any, value: int) -> int:
        return value + 1

    plugins = manage(plugin("a", on_call=answer, on_each=answer), plugin("b", on_each=answer))
    first, second = plugins.hooks.on_each.plugins
    function = plugins.hooks.on_call.get_function(first)
    assert function is not None and function(value=1) == 2
    assert plugins.hooks.on_call.get_function(second) is None


def test_each_gives_a_plugin_its_own_arguments_or_leaves_it_out() -> None:
    plugins = manage(
        *(plugin(name, on_each=lambda self, mine, value: f"{mine}{value}") for name in "abc")
    )

    def get_arguments(plugin: RegisteredPlugin) -> dict[str, Any] | None:
        return None if plugin.name == "b" else give_name(plugin)

    hook = plugins.hooks.on_each
    assert get_names(hook.each(per_plugin=get_arguments, value=1)) == [("a", "a1"), ("c", "c1")]
    answers = hook.each(
        per_plugin=give_name, accept=lambda plugin, answer: (plugin.name, answer), value=2
    )
    assert get_names(answers)[0] == ("a", ("a", "a2"))


def test_what_accept_raises_names_the_plugin() -> None:
    def refuse(plugin: RegisteredPlugin, answer: Any) -> Any:
        raise ValueError(answer)

    plugins = manage(plugin("careless", change=lambda self, value: value + 1))
    with pytest.raises(ValueError, match="2") as caught:
        plugins.hooks.change.fold("value", 1, 4, accept=refuse)
    (note,) = caught.value.__notes__
    assert note.startswith("plugin 'careless'") and note.endswith("hook change, step 4")


def test_ask_returns_the_one_answer_with_its_plugin() -> None:
    silent = plugin("silent", only_one=lambda self: None)
    speaker = plugin("speaker", only_one=lambda self: 3)
    assert manage().hooks.only_one.ask() is None
    assert manage(silent).hooks.only_one.ask() is None
    answer = manage(silent, speaker).hooks.only_one.ask()
    assert answer is not None and (answer[0].name, answer[1]) == ("speaker", 3)
    both = manage(speaker, plugin("other", only_one=lambda self: 0))
    with pytest.raises(PluginError, match="hook only_one takes one answer, but 'speaker' and"):
        both.hooks.only_one.ask()


def test_the_owner_of_an_exclusive_hook_is_known_without_a_call() -> None:
    def fail(self: Any) -> None:
        raise AssertionError

    first, second = (plugin(name, only_one=fail) for name in ("first", "second"))
    assert manage().hooks.only_one.get_owner() is None
    owner = manage(first).hooks.only_one.get_owner()
    assert owner is not None and owner.plugin is first
    with pytest.raises(PluginError, match="'first' and 'second' each implement it"):
        manage(first, second).hooks.only_one.get_owner()


def test_items_are_collected_by_name_and_may_be_shared() -> None:
    shared = Named("shared")
    first = plugin("first", list_items=lambda self: [shared, Named("x")])
    second = plugin("second", list_items=lambda self: [shared])
    silent = plugin("silent", list_items=lambda self: None)
    items = manage(first, silent, second).hooks.list_items.collect_by_name()
    assert items == {"shared": shared, "x": Named("x")}
    third = plugin("third", list_items=lambda self: [Named("x")])
    with pytest.raises(PluginError, match="the Named 'x' comes from both 'first' and 'third'"):
        manage(first, third).hooks.list_items.collect_by_name()


def test_dictionaries_are_merged_and_a_name_twice_names_both_plugins() -> None:
    def make_entries(self: Any, mine: str) -> dict[str, int]:
        return {mine: len(mine)}

    plugins = manage(
        plugin("a", make_entries=make_entries),
        plugin("none", make_entries=lambda self: None),
        plugin("bb", make_entries=make_entries),
    )
    hook = plugins.hooks.make_entries
    assert hook.merge(per_plugin=give_name) == {"a": 1, "bb": 2}
    with pytest.raises(PluginError, match="the make_entries entry 'x' comes from both 'a' and"):
        hook.merge(mine="x")
    with pytest.raises(PluginError, match="the word 'x' comes from both 'a' and 'bb'"):
        hook.merge(mine="x", what="word")


def test_fold_hands_a_value_on_and_none_leaves_it() -> None:
    plugins = manage(
        plugin("a", change=lambda self, value, mine: [*value, mine]),
        plugin("none", change=lambda self: None),
        plugin("b", change=lambda self, value, mine: [*value, mine]),
    )
    assert plugins.hooks.change.fold("value", [], per_plugin=give_name) == ["a", "b"]
    assert manage().hooks.change.fold("value", 5) == 5


def test_fold_hands_on_what_accept_returns() -> None:
    taken: list[str] = []

    def accept(plugin: RegisteredPlugin, answer: tuple[int, str]) -> int:
        taken.append(f"{plugin.name} {answer[1]}")
        return answer[0]

    plugins = manage(*(plugin(name, change=lambda self, value: (value + 1, "x")) for name in "ab"))
    assert plugins.hooks.change.fold("value", 1, accept=accept) == 3
    assert taken == ["a x", "b x"]


def test_chain_applies_transformations_in_order_and_keeps_their_places() -> None:
    def add(self: Any, mine: float) -> optax.GradientTransformation:
        def add_to(updates: Any, params: Any) -> Any:
            return updates + mine

        return optax.stateless(add_to)

    plugins = manage(
        plugin("adds", transform=add),
        plugin("none", transform=lambda self: None),
        plugin("scales", transform=lambda self: optax.scale(2.0)),
    )
    chained: Any = plugins.hooks.transform.chain(mine=3.0)
    state = chained.init(jnp.zeros(()))
    updates, _ = chained.update(jnp.ones(()), state)
    assert float(updates) == 8
    # The identity that is always there, and one place for each plugin.
    assert len(state) == 4


def test_wrap_puts_the_first_plugin_outermost() -> None:
    def around(self: Any, call: Any, left: str, right: str, mine: str) -> str:
        return f"{mine}({call(left + '.', right=right)})"

    def join(left: str, right: str) -> str:
        return left + right

    plugins = manage(plugin("a", around=around), plugin("b", around=around))
    wrapped = plugins.hooks.around.wrap(join, per_plugin=give_name)
    assert wrapped("l", "r") == "a(b(l..r))"
    assert manage().hooks.around.wrap(join) is join
    with pytest.raises(TypeError, match="missing a required argument: 'right'"):
        wrapped("l")


def test_an_answer_with_keys_of_several_types_is_an_error() -> None:
    plugins = manage(plugin("careless", on_call=lambda self: {"state": {"a": 1, 3: 2}}))
    with pytest.raises(
        PluginError, match=r"hook on_call returned .*'a': 1, 3: 2.*make them strings"
    ) as caught:
        plugins.hooks.on_call.call(1, step=1, value=1)
    assert caught.value.__notes__[0].startswith("plugin 'careless'")


@pytest.mark.parametrize(
    ("combine", "method", "answer", "match"),
    [
        (Combine.BY_NAME, "collect_by_name", 3, "a list or None, not 3"),
        (Combine.BY_NAME, "collect_by_name", [3], "3 has no name"),
        (Combine.MERGE, "merge", [1], r"a dict or None, not \[1\]"),
        (Combine.CHAIN, "chain", 3, "a GradientTransformation or None, not 3"),
    ],
)
def test_an_answer_that_cannot_be_combined_names_the_plugin(
    combine: Combine, method: str, answer: Any, match: str
) -> None:
    class Unchecked:
        @fg.hookspec("build", combine)
        def give(self) -> Any: ...

    plugins = PluginManager(
        [plugin("careless", give=lambda self: answer)], hookspecs=Unchecked, autoload=False
    )
    with pytest.raises(PluginError, match=f"hook give.*{match}") as caught:
        getattr(plugins.hooks.give, method)()
    assert caught.value.__notes__[0].startswith("plugin 'careless'")
    good = plugin("good", give=lambda self: [Named("x")])
    if combine is Combine.BY_NAME:
        plugins = PluginManager([good], hookspecs=Unchecked, autoload=False)
        assert plugins.hooks.give.collect_by_name() == {"x": Named("x")}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_does_not_match_the_hook_is_an_error(method: str) -> None:
    hooks = manage().hooks
    arguments = {"fold": ("value", 1), "wrap": (give_name,)}.get(method, ())
    for right_method, hook in METHODS.items():
        if right_method != method:
            expected = f"call it by plugins.hooks.{hook}.{right_method}\\("
            with pytest.raises(PluginError, match=expected):
                getattr(hooks[hook], method)(*arguments)
    getattr(hooks[METHODS[method]], method)(*arguments)


def test_a_call_with_other_arguments_than_the_hook_has_is_an_error_of_the_caller() -> None:
    plugins = manage(
        plugin(
            "innocent",
            on_call=lambda self, value: value,
            change=lambda self, value: value,
            around=lambda self, call, left: call(left),
        )
    )
    hooks = plugins.hooks
    listed = r".*; its arguments are: step, value$"
    with pytest.raises(PluginError, match="without 'value', which plugin 'innocent'" + listed):
        hooks.on_call.call(1, step=1)
    with pytest.raises(
        PluginError, match="hook on_call was called with 'vaule'" + listed
    ) as caught:
        hooks.on_call.call(1, value=1, vaule=2)
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(PluginError, match="with 'text'" + listed):
        hooks.on_call.enter_contexts(ExitStack(), text="x", value=1)
    with pytest.raises(PluginError, match="'worth'.*; its arguments are: value, mine$"):
        hooks.change.fold("worth", 5)
    with pytest.raises(PluginError, match="'side'.*; its arguments are: call, left, right, mine$"):
        hooks.around.wrap(lambda side: side)(1)


def test_each_combine_has_a_method() -> None:
    combines = {hook.metadata.combine for hook in manage().hooks.values()}
    assert combines == {*Combine}


def test_time_is_booked_to_host_hooks_only() -> None:
    plugins = manage(
        plugin("a", on_call=lambda self: None, change=lambda self: None, only_one=lambda self: 1)
    )
    plugins.hooks.on_call.call(step=1, value=1)
    plugins.hooks.on_call.call(step=2, value=1)
    plugins.hooks.only_one.ask()
    plugins.hooks.change.fold("value", 1)
    assert plugins.timings.calls == {"a.on_call": 2, "a.only_one": 1}


def test_time_is_booked_to_the_timings_of_the_present_fit() -> None:
    plugins = manage(plugin("a", on_call=lambda self: None))
    first = plugins.timings
    plugins.timings = fg.Timings()
    plugins.hooks.on_call.call(step=1, value=1)
    assert not first.calls and plugins.timings.calls == {"a.on_call": 1}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("events",), "kind is 'events'; choose 'build', 'traced', "),
        ((3,), "kind is 3"),
        (("event", "FOLD"), r"combine is 'FOLD'; choose one of Combine\.ALL"),
        (("event", Combine.ALL, "int"), "returns is 'int'; it must be a class"),
        (("event", Combine.ALL, 3), "returns is 3; it must be a class"),
        (("event", Combine.ALL, Any), "it must be a class"),
        (("event", Combine.ALL, int | str), "it must be a class"),
        (("event", Combine.ALL, list["int"]), "it must be a class"),
        (("build", Combine.MERGE, list), r"Combine\.MERGE combines answers of the class dict"),
        (("build", Combine.BY_NAME, dict), r"Combine\.BY_NAME combines answers of the class list"),
        ((lambda self: None,), r'write @fg\.hookspec\("event"\)'),
    ],
)
def test_a_specification_that_says_what_cannot_be_is_an_error(arguments: Any, match: str) -> None:
    with pytest.raises(PluginError, match=match):
        fg.hookspec(*arguments)
    fg.hookspec("event", Combine.MERGE, dict[str, Any])


@pytest.mark.parametrize("name", ["items", "get", "add"])
def test_a_hook_with_the_name_of_a_method_of_dictionaries_is_an_error(name: str) -> None:
    specifications = type("Hidden", (), {name: fg.hookspec("event")(lambda self: None)})
    with pytest.raises(PluginError, match=f"Hidden specifies the hook '{name}', which"):
        PluginManager([], hookspecs=specifications, autoload=False)


def test_an_unknown_hook_is_an_error_with_the_closest_name() -> None:
    hooks = manage().hooks
    with pytest.raises(AttributeError, match="no hook 'on_cal'. Did you mean 'on_call'"):
        _ = hooks.on_cal
    assert "on_cal" not in hooks and hooks.get("on_cal") is None
    assert list(copy.copy(hooks)) == list(hooks)


def test_loggers_are_called_on_the_first_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loggers:
        @fg.hookspec("logger", Combine.EACH)
        def write(self) -> Any: ...

    logger = plugin("logger", write=lambda self: 1)
    plugins = PluginManager([logger], hookspecs=Loggers, autoload=False)
    assert len(plugins.hooks.write.each()) == 1
    monkeypatch.setattr("jax.process_index", lambda: 1)
    assert plugins.hooks.write.each() == [] and plugins.hooks.write.plugins == ()
    assert plugins.get_hook_names(plugins.plugins["logger"]) == {"write"}
