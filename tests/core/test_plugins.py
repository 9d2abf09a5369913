"""Registration, order, clashes, and blame: what the plugin manager promises whatever the hooks
do."""

import re
from dataclasses import dataclass, field
from functools import partial
from inspect import isfunction
from typing import Any, cast

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite._src.plugins.strategy import PluginShardingStrategy
from fulgurite.errors import ConfigurationError, FulguriteError, ModelError, PluginError, SaveError
from fulgurite.plugins import find_hookspecs, hookspecs
from models import Act, Counting, numbers


def engine(*plugins: Any, **settings: Any) -> fg.Engine:
    return fg.Engine(plugins=plugins, autoload=False, **settings)


def names(*plugins: Any) -> list[str]:
    """The plugins of an engine in the order in which their hooks are called."""
    return list(engine(*plugins).plugins.plugins)


def plugin(name: str, /, **members: Any) -> Any:
    """A plugin of a class made on the spot; functions among its members become implementations of
    hooks."""
    marked = {
        key: fg.hookimpl(value) if isfunction(value) else value for key, value in members.items()
    }
    return type(name, (), {"plugin_name": name, **marked})()


def evaluate(run: fg.Run) -> None:
    run.evaluate("test")


# --- registration ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """Compared by `==`, which two that hold arrays cannot be."""

    values: np.ndarray
    instance: str | None = None

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        run.log_scalars("weights", {"sum": float(self.values.sum())})


def test_two_instances_that_hold_arrays_both_register() -> None:
    both = engine(Weights(np.ones(3)), Weights(np.zeros(3)), steps=1)
    assert list(both.plugins.plugins) == ["weights", "weights:2"]
    assert list(both.fit(Counting(), numbers([0])).history["weights/sum"]) == [3.0, 0.0]


def test_equal_plugins_are_registered_separately() -> None:
    assert names(Act(1, None, "log", "a"), Act(1, None, "log", "b")) == ["act:a", "act:b"]
    assert names(plugin("same"), plugin("same")) == ["same", "same:2"]


def test_instance_may_set_its_name() -> None:
    assert names(Weights(np.ones(1), "left"), Weights(np.ones(1), "right")) == [
        "weights:left",
        "weights:right",
    ]


def test_two_plugins_of_the_same_name_are_an_error() -> None:
    with pytest.raises(PluginError, match="two plugins are called 'weights:left'"):
        engine(Weights(np.ones(1), "left"), Weights(np.zeros(1), "left"))


def test_the_same_instance_twice_is_an_error() -> None:
    instance = Weights(np.ones(1))
    with pytest.raises(PluginError, match="same instance of plugin 'weights' is given twice"):
        engine(instance, instance)


def test_a_name_comes_from_the_class() -> None:
    class MeanSquaredNorm: ...

    class Other:
        plugin_name = "other_name"

    assert names(MeanSquaredNorm(), Other()) == ["mean_squared_norm", "other_name"]


def test_a_class_is_not_an_instance() -> None:
    with pytest.raises(
        ConfigurationError, match=r"Weights is a class: pass an instance, Weights\(\.\.\.\)"
    ):
        engine(Weights)


@pytest.mark.parametrize("value", [42, None, print, ["rng"]])
def test_invalid_plugin_is_an_error(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"a plugin is an instance with hooks.*, not "):
        engine(value)


@pytest.mark.parametrize("plugins", ["rng", {"rng": {}}, Weights(np.ones(1)), 42])
def test_plugins_are_a_list(plugins: Any) -> None:
    with pytest.raises(ConfigurationError, match="plugins is a list such as"):
        fg.Engine(plugins=plugins)


def test_a_misspelt_hook_is_an_error_with_a_hint() -> None:
    with pytest.raises(
        PluginError, match=r"plugin 'careless'.*'on_fit_strat'.*Did you mean 'on_fit_start'\?"
    ):
        engine(plugin("careless", on_fit_strat=lambda self, run: None))


def test_a_method_called_like_a_hook_must_be_marked() -> None:
    class Careless:
        def on_fit_start(self, run: fg.Run) -> None: ...

    with pytest.raises(
        PluginError, match=r"plugin 'careless'.*hook 'on_fit_start': mark it with @fg.hookimpl"
    ):
        engine(Careless())


def test_class_method_called_like_a_hook_must_be_marked() -> None:
    class Careless:
        @classmethod
        def on_fit_start(cls, run: fg.Run) -> None: ...

    with pytest.raises(
        PluginError, match=r"plugin 'careless'.*hook 'on_fit_start': mark it with @fg.hookimpl"
    ):
        engine(Careless())


class OfAClass:
    @classmethod
    @fg.hookimpl
    def after_update(cls, module: Any, plugin_state: Any) -> Any:
        return replaced(module, plugin_state)


class MarkedOutside:
    @cast(Any, fg.hookimpl)
    @classmethod
    def after_update(cls, module: Any, plugin_state: Any) -> Any:
        return replaced(module, plugin_state)


class Static:
    @staticmethod
    @fg.hookimpl
    def after_update(module: Any, plugin_state: Any) -> Any:
        return replaced(module, plugin_state)


class Jitted:
    @partial(jax.jit, static_argnums=0)
    @fg.hookimpl
    def after_update(self, module: Any, plugin_state: Any) -> Any:
        return replaced(module, plugin_state)


class OfEquinox(eqx.Module):
    weight: float = 7.0

    @fg.hookimpl
    def after_update(self, module: Any, plugin_state: Any = None) -> Any:
        return replaced(module, plugin_state, self.weight)


def replaced(module: Any, plugin_state: Any, weight: float = 7.0) -> Any:
    return eqx.tree_at(lambda module: module.weight, module, jnp.float32(weight)), plugin_state


@pytest.mark.variants("full")
@pytest.mark.parametrize("kind", [OfAClass, MarkedOutside, Static, Jitted, OfEquinox])
def test_marked_methods_of_every_kind_are_called(kind: Any) -> None:
    assert float(engine(kind(), steps=2).fit(Counting(), numbers([0])).module.weight) == 7


def test_marked_non_method_is_an_error() -> None:
    class Careless:
        @property
        @fg.hookimpl
        def on_fit_start(self) -> None: ...

    with pytest.raises(
        PluginError, match=r"plugin 'careless'.*marks 'on_fit_start', which is not a method"
    ):
        engine(Careless())


def test_field_called_like_a_hook_is_not_a_hookimpl() -> None:
    @dataclass
    class Scheduler:
        schedule: tuple[int, ...] = (1, 2)
        save: bool = True

    assert names(Scheduler()) == ["scheduler"]


def test_argument_unknown_to_the_hook_is_an_error() -> None:
    with pytest.raises(
        PluginError,
        match=r"plugin 'careless'.*takes 'records' in 'log_record'; the hook gives: record",
    ):
        engine(plugin("careless", log_record=lambda self, records: None))


def test_arguments_may_be_left_out() -> None:
    observed: list[Any] = []
    methods = {
        "on_fit_start": lambda self: observed.append("start"),
        "on_evaluate_end": lambda self, metrics: observed.append(metrics),
        "register_evaluations": lambda self: [fg.Evaluation("test", numbers([1]))],
    }
    engine(plugin("brief", **methods), Act(fg.At(2), evaluate), steps=2).fit(
        Counting(), numbers([0])
    )
    assert observed == ["start", {"updates": 2.0}]


@pytest.mark.parametrize("option", ["tryfirst", "trylast", "wrapper", "hookwrapper"])
def test_options_of_pluggy_that_would_be_ignored_are_errors(option: str) -> None:
    class Pushy:
        @cast(Any, fg.hookimpl)(**{option: True})
        def on_fit_start(self, run: fg.Run) -> Any:
            yield

    with pytest.raises(
        PluginError, match=f"'pushy'.*'on_fit_start' with {option}.*`before` and `after`"
    ):
        engine(Pushy())


class Generator:
    @fg.hookimpl
    def log_record(self, record: Any) -> Any:
        yield record


class Coroutine:
    @fg.hookimpl
    async def log_record(self, record: Any) -> None: ...


class Positional:
    @fg.hookimpl
    def log_record(self, record: Any, /) -> None: ...


class Anything:
    @fg.hookimpl
    def log_record(self, **record: Any) -> None: ...


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            Generator,
            "does nothing when called: a hook is a plain function, not a generator and not async",
        ),
        (Coroutine, "'log_record' does nothing when called"),
        (Positional, "takes 'record' in 'log_record'; the hook gives: record, by name"),
        (Anything, "takes 'record' in 'log_record'; the hook gives: record, by name"),
    ],
)
def test_a_method_that_could_not_be_called_as_a_hook_is_an_error(method: Any, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        engine(method())


def test_an_implementation_may_have_another_name_than_its_hook() -> None:
    observed: list[int] = []

    class Renamed:
        @fg.hookimpl(specname="on_fit_start")
        def begin(self, run: fg.Run) -> None:
            observed.append(run.step)

    engine(Renamed(), steps=1).fit(Counting(), numbers([0]))
    assert observed == [0]


def test_two_implementations_of_one_hook_in_one_plugin_are_an_error() -> None:
    class Double:
        @fg.hookimpl(specname="on_fit_start")
        def begin(self, run: fg.Run) -> None: ...

        @fg.hookimpl
        def on_fit_start(self, run: fg.Run) -> None: ...

    with pytest.raises(PluginError, match=r"'double'.*on_fit_start"):
        engine(Double())


def test_hooks_are_looked_up_on_the_class() -> None:
    observed: list[str] = []

    class Base:
        @fg.hookimpl
        def on_fit_start(self, run: fg.Run) -> None:
            observed.append(type(self).__name__)

    class Derived(Base):
        def __init__(self) -> None:
            self.inner = Base()
            self.on_fit_end = Base().on_fit_start

        @property
        def costly(self) -> None:
            raise AssertionError("a property was evaluated")

    engine(Derived(), steps=1).fit(Counting(), numbers([0]))
    assert observed == ["Derived"]


# --- hooks that plugins bring ---------------------------------------------------------------------


class Specifications:
    @fg.hookspec("event")
    def on_doubling(self, run: fg.Run, size: int) -> None:
        """A size has doubled."""


@dataclass(frozen=True)
class Doubling:
    """Brings a hook and calls it after every power of two of updates."""

    hookspecs = Specifications
    instance: str | None = None

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("tell", fg.At(1, 2, 4), self.tell)]

    def tell(self, run: fg.Run) -> None:
        run.engine.plugins.hooks.on_doubling.call(run.step, run=run, size=2 * run.step)


def test_a_hook_that_does_not_exist_is_told_the_one_that_shares_a_word() -> None:
    for name in ("log_scalars", "log_text"):
        with pytest.raises(PluginError, match="is not a hook. Did you mean 'log_record'"):
            engine(plugin("logger", **{name: lambda self: None}))


def test_a_plugin_without_hooks_is_told_in_a_message() -> None:
    class Unmarked:
        def log_scalars(self, record: Any) -> None: ...

    class Optional:
        @fg.hookimpl(optionalhook=True)
        def on_something(self) -> None: ...

    (message,) = engine(Unmarked(), Optional(), Doubling()).plugins.messages
    assert message == (
        "plugin 'unmarked' (Unmarked) has no hook, so that it does nothing: mark its methods with "
        "@fg.hookimpl"
    )


def test_a_plugin_brings_hooks_that_others_implement() -> None:
    observed: list[int] = []
    listener = plugin("listener", on_doubling=lambda self, size: observed.append(size))
    engine(listener, Doubling(), steps=5).fit(Counting(), numbers([0]))
    assert observed == [2, 4, 8]


def test_a_hook_that_a_plugin_brings_is_checked_and_blamed_like_the_others() -> None:
    with pytest.raises(
        PluginError, match=r"takes 'length' in 'on_doubling'; the hook gives: run, size"
    ):
        engine(Doubling(), plugin("listener", on_doubling=lambda self, length: None))
    failing = plugin("listener", on_doubling=lambda self, size: 1 / (size - 4))
    with pytest.raises(ZeroDivisionError) as caught:
        engine(Doubling(), failing, steps=5).fit(Counting(), numbers([0]))
    assert noted(caught.value)[0].startswith("plugin 'listener'")
    assert noted(caught.value)[0].endswith("hook on_doubling, step 2")


def test_hook_of_an_inactive_plugin_is_unknown() -> None:
    with pytest.raises(PluginError, match="'on_doubling', which is not a hook"):
        engine(plugin("listener", on_doubling=lambda self, size: None))


def test_two_instances_bring_their_hooks_once() -> None:
    assert names(Doubling("a"), Doubling("b")) == ["doubling:a", "doubling:b"]


def test_a_plugin_cannot_redefine_a_hook() -> None:
    class Redefinitions:
        @fg.hookspec("event")
        def register_actions(self) -> None:
            """Something else."""

    with pytest.raises(PluginError, match=r"Redefinitions.*'register_actions'"):
        engine(plugin("greedy", hookspecs=Redefinitions))


@pytest.mark.parametrize("specifications", [3, type("Empty", (), {}), "hooks"])
def test_hookspecs_without_a_hook_are_an_error(specifications: Any) -> None:
    with pytest.raises(PluginError, match="specifies no hook: mark functions"):
        engine(plugin("greedy", hookspecs=specifications))


def test_inherited_specifications_are_specifications() -> None:
    assert (
        engine(plugin("more", hookspecs=type("More", (Specifications,), {})))
        .plugins.hooks["on_doubling"]
        .metadata.kind
        == "event"
    )


def test_an_optional_implementation_waits_for_the_plugin_that_brings_its_hook() -> None:
    called: list[str] = []

    class Optional:
        @fg.hookimpl(optionalhook=True)
        def on_announcement(self, text: str) -> None:
            called.append(text)

    specs = type("Specs", (), {"on_announcement": fg.hookspec("event")(lambda self, text: None)})
    assert "on_announcement" not in engine(Optional()).plugins.hooks
    both = engine(Optional(), plugin("brings", hookspecs=specs))
    both.plugins.hooks.on_announcement.call(text="hello")
    assert called == ["hello"]


def test_add_hookspecs_adds_hooks_that_nobody_implements_yet() -> None:
    manager = engine().plugins
    manager.add_hookspecs(Specifications)
    assert manager.hooks.on_doubling.metadata.kind == "event"
    assert manager.hooks.on_doubling.plugins == ()


# --- order ----------------------------------------------------------------------------------------


def test_ties_go_by_registration() -> None:
    assert names(plugin("b"), plugin("a"), plugin("c")) == ["b", "a", "c"]


def test_after_and_before_move_a_plugin_no_further_than_they_must() -> None:
    assert names(plugin("a", after=("c",)), plugin("b"), plugin("c"), plugin("d")) == [
        "b",
        "c",
        "a",
        "d",
    ]
    assert names(plugin("a"), plugin("b"), plugin("c", before=("a",))) == ["b", "c", "a"]


def test_required_plugin_comes_first() -> None:
    assert names(plugin("a", requires=("weights",)), plugin("b", provides=("weights",))) == [
        "b",
        "a",
    ]


def test_a_name_without_instance_means_all_instances() -> None:
    left, right = Weights(np.ones(1), "left"), Weights(np.ones(1), "right")
    assert names(plugin("a", after=("weights",)), left, right) == [
        "weights:left",
        "weights:right",
        "a",
    ]
    assert names(plugin("a", after=("weights:left",)), left, right) == [
        "weights:left",
        "a",
        "weights:right",
    ]


def test_after_an_inactive_plugin_has_no_effect() -> None:
    assert names(plugin("a", after=("absent",), before=("also_absent",)), plugin("b")) == ["a", "b"]


def test_a_missing_requirement_is_an_error_with_a_hint() -> None:
    with pytest.raises(
        PluginError,
        match=(
            r"'a' requires 'wieghts', but no active plugin has or provides that name. Did you mean"
            r" 'weights'\?"
        ),
    ):
        engine(plugin("a", requires=("wieghts",)), Weights(np.ones(1)))


def test_a_cycle_is_an_error_that_names_all_of_it() -> None:
    with pytest.raises(PluginError, match="cannot be ordered") as caught:
        engine(
            plugin("one", after=("two",)),
            plugin("two", after=("three",)),
            plugin("three", after=("one",)),
            plugin("four"),
        )
    assert all(name in str(caught.value) for name in ("one", "two", "three"))
    assert "four" not in str(caught.value)


@pytest.mark.parametrize("key", ["provides", "requires", "after", "before"])
def test_string_instead_of_a_tuple_of_names_is_an_error(key: str) -> None:
    with pytest.raises(PluginError, match=rf"a\.{key} must be a tuple of names, not 'weights'"):
        engine(plugin("a", **{key: "weights"}))


def test_hooks_are_called_in_this_order() -> None:
    calls: list[str] = []

    def on_fit_start(self: Any, run: fg.Run) -> None:
        calls.append(type(self).__name__)

    first, second, third = (
        {"on_fit_start": on_fit_start, **order}
        for order in ({"after": ("c",)}, {}, {"before": ("b",)})
    )
    engine(plugin("a", **first), plugin("b", **second), plugin("c", **third), steps=1).fit(
        Counting(), numbers([0])
    )
    assert (
        calls
        == ["c", "a", "b"]
        == names(plugin("a", **first), plugin("b", **second), plugin("c", **third))
    )


# --- exclusive hooks ------------------------------------------------------------------------------

EXCLUSIVE = {
    "sharding_strategy": lambda self: fg.SingleDevice(),
    "make_update_rule": lambda self, optimizers: fg.GradientUpdate(next(iter(optimizers.values()))),
    "configure_optimizers": lambda self: {"default": fg.OptimizerSpec(optax.sgd(1.0))},
    "save_checkpoint": lambda self, run: None,
    "restore_checkpoint": lambda self, resume: None,
}


@pytest.mark.parametrize("hook", EXCLUSIVE)
def test_two_answers_to_an_exclusive_hook_are_an_error_naming_both(hook: str) -> None:
    """Before the first step: nobody finds out after hours that nothing was saved."""
    started: list[int] = []
    answer = {hook: EXCLUSIVE[hook]}
    watcher = plugin("watcher", on_fit_start=lambda self: started.append(1))
    with pytest.raises(PluginError, match=rf"hook {hook}.*'left' and 'right'"):
        engine(plugin("left", **answer), plugin("right", **answer), watcher, steps=1).fit(
            Counting(),
            numbers([0]),
            resume=fg.CheckpointRef("nowhere") if hook == "restore_checkpoint" else None,
        )
    assert not started


def test_none_is_no_answer_to_an_exclusive_hook() -> None:
    strategy = fg.SingleDevice()
    left = plugin("left", sharding_strategy=lambda self: None)
    right = plugin("right", sharding_strategy=lambda self: strategy)
    sharding = engine(left, right).sharding
    assert isinstance(sharding, PluginShardingStrategy) and sharding.strategy is strategy


# --- answers that are merged ----------------------------------------------------------------------

STREAM = {"register_rng_streams": lambda self: [fg.RngStream("noise", train=True)]}
EVALUATOR = {"register_evaluations": lambda self: [fg.Evaluation("test", numbers([0]))]}
TERM = {"loss_terms": lambda self, module: {"l2": jnp.sum(module.weight**2)}}
VIEW = {"module_views": lambda self, state: {"averaged": state.module}}


def test_two_plugins_that_declare_one_random_stream_clash() -> None:
    with pytest.raises(PluginError, match="RngStream 'noise' comes from both 'left' and 'right'"):
        engine(plugin("left", **STREAM), plugin("right", **STREAM))


def test_two_plugins_may_share_a_random_stream() -> None:
    """One object says that it is meant."""
    stream = fg.RngStream("noise", train=True)
    shared = {"register_rng_streams": lambda self: [stream]}
    both = engine(plugin("left", **shared), plugin("right", **shared))
    assert both.make_rng_streams(jax.random.key(0)).streams["noise"] is stream


def test_two_plugins_that_declare_one_evaluator_clash() -> None:
    with pytest.raises(PluginError, match="Evaluation 'test' comes from both 'left' and 'right'"):
        engine(plugin("left", **EVALUATOR), plugin("right", **EVALUATOR))


def test_one_plugin_that_declares_an_evaluator_twice_clashes_with_itself() -> None:
    twice = plugin(
        "twice", register_evaluations=lambda self: EVALUATOR["register_evaluations"](self) * 2
    )
    with pytest.raises(PluginError, match=r"Evaluation 'test'.*'twice'"):
        engine(twice)


def test_two_plugins_that_add_one_loss_term_clash() -> None:
    with pytest.raises(PluginError, match="loss term 'l2' comes from both 'left' and 'right'"):
        engine(plugin("left", **TERM), plugin("right", **TERM), steps=1).fit(
            Counting(), numbers([0])
        )


def test_a_plugins_loss_term_clashes_with_the_modules() -> None:
    with pytest.raises(
        ModelError, match=r"loss term 'loss' comes twice in Counting\.training_step: plugin 'left'"
    ):
        engine(plugin("left", loss_terms=lambda self: {"loss": jnp.float32(0)}), steps=1).fit(
            Counting(), numbers([0])
        )


def test_two_plugins_with_the_same_view_clash() -> None:
    both = engine(plugin("left", **VIEW), plugin("right", **VIEW), steps=1)
    with pytest.raises(
        PluginError, match="module_views entry 'averaged' comes from both 'left' and 'right'"
    ):
        both.get_module_view(both.init_state(Counting(), numbers([0])), "averaged")


# --- answers that cannot be used ------------------------------------------------------------------

WRONG = {
    "register_evaluations": lambda self: ["test"],
    "register_rng_streams": lambda self: ["noise"],
    "register_actions": lambda self: fg.ScheduledAction("look", 1, trouble),
    "sharding_strategy": lambda self: "everywhere",
    "configure_optimizers": lambda self: optax.sgd(1.0),
    "make_update_rule": lambda self: optax.sgd(1.0),
    "gradient_transform": lambda self: 0.5,
    "module_views": lambda self, state: state.module,
    "loss_terms": lambda self: 0.5,
    "step_metrics": lambda self: ["norm"],
    "after_update": lambda self, module: module,
}
NO_ANSWERS: list[tuple[str, Any, str]] = [
    (
        "register_evaluations",
        [fg.ScheduledAction("test", 1, evaluate)],
        "hook register_evaluations: return a list of Eval",
    ),
    (
        "register_rng_streams",
        [fg.ScheduledAction("test", 1, evaluate)],
        "hook register_rng_streams: return a list of RngStream",
    ),
    (
        "configure_optimizers",
        {"default": optax.sgd(1.0)},
        "hook configure_optimizers of careless returned dict; return .* a dict of fg.OptimizerSpec",
    ),
    ("configure_optimizers", {}, "hook configure_optimizers of careless returned dict"),
    ("loss_terms", {1: 2.0}, "plugin 'careless' gave 1 as the name of a loss term"),
    (
        "loss_terms",
        {"a": "x"},
        "the loss term 'a' of Counting is 'x': a loss is one floating-point number",
    ),
    ("loss_terms", {"a": None}, "the loss term 'a' of Counting is None"),
    ("loss_terms", {"a": jnp.int32(2)}, r"the loss term 'a' of Counting is int32\[\]"),
    ("module_views", {3: None}, "plugin 'careless' gave 3 as the name of a module_views entry"),
]


@pytest.mark.parametrize(
    ("hook", "answer", "message"),
    NO_ANSWERS,
    ids=[f"{case[0]}-{index}" for index, case in enumerate(NO_ANSWERS)],
)
def test_invalid_items_in_an_answer_are_errors_naming_the_plugin(
    hook: str, answer: Any, message: str
) -> None:
    with pytest.raises(FulguriteError, match=message) as caught:
        wrong = engine(plugin("careless", **{hook: lambda self: answer}), steps=1)
        wrong.get_module_view(wrong.fit(Counting(), numbers([0])).state, "averaged")
    assert "careless" in f"{caught.value} {' '.join(noted(caught.value))}"


def test_failed_step_names_the_plugins_that_transformed_the_batch() -> None:
    with pytest.raises(Trouble) as caught:
        engine(plugin("careless", transform_batch=lambda self: {"y": 1}), steps=1).fit(
            Troubled, numbers([0])
        )
    assert any(
        "training step 1, its batch transformed by 'careless'," in note
        for note in caught.value.__notes__
    )


class Troubled(Counting):
    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return trouble()


def test_plugin_metric_never_replaces_a_metric_of_the_step() -> None:
    class Named(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return super().training_step(batch, ctx).replace(metrics={"norms/all": self.weight})

    with pytest.raises(ModelError, match="both give the metric 'norms/all'"):
        engine(plugin("norms", step_metrics=lambda self: {"all": 1.0}), steps=1).fit(
            Named, numbers([0])
        )


@pytest.mark.parametrize("hook", WRONG)
def test_invalid_answer_is_an_error_naming_plugin_and_hook(hook: str) -> None:
    with pytest.raises(FulguriteError) as caught:
        wrong = engine(plugin("careless", **{hook: WRONG[hook]}), steps=1)
        wrong.get_module_view(wrong.fit(Counting(), numbers([0])).state, "averaged")
    message = f"{caught.value} {' '.join(noted(caught.value))}"
    assert "plugin 'careless'" in message and hook in message


@pytest.mark.parametrize(
    "hook",
    [
        "register_evaluations",
        "register_rng_streams",
        "register_actions",
        "loss_terms",
        "step_metrics",
        "module_views",
    ],
)
def test_answer_none_equals_an_empty_answer(hook: str) -> None:
    silent = engine(plugin("silent", **{hook: lambda self: None}), steps=1)
    result = silent.fit(Counting(), numbers([0]))
    assert float(result.module.weight) == -1
    with pytest.raises(PluginError, match="no plugin provides the weights"):
        silent.get_module_view(result.state, "averaged")


# --- blame ----------------------------------------------------------------------------------------


class Trouble(Exception):
    """Raised by the plugins below."""


def trouble(*_: Any, **__: Any) -> Any:
    raise Trouble


def noted(error: BaseException) -> list[str]:
    return [note for note in getattr(error, "__notes__", []) if note.startswith("plugin ")]


BUILD = {
    "make_update_rule": lambda self, module: trouble(),
    "configure_optimizers": lambda self, module: trouble(),
    "gradient_transform": lambda self, module: trouble(),
    "init_plugin_state": lambda self, module: trouble(),
}


@pytest.mark.parametrize(
    "hook",
    ["register_rng_streams", "sharding_strategy", "register_evaluations", "register_actions"],
)
def test_a_failure_at_construction_is_blamed(hook: str) -> None:
    with pytest.raises(Trouble) as caught:
        engine(plugin("culprit", **{hook: lambda self: trouble()}))
    (note,) = noted(caught.value)
    assert note.startswith("plugin 'culprit' (") and note.endswith(f"), hook {hook}")


@pytest.mark.parametrize("hook", BUILD)
def test_a_failure_while_building_is_blamed(hook: str) -> None:
    with pytest.raises(Trouble) as caught:
        engine(plugin("culprit", **{hook: BUILD[hook]}), steps=1).fit(Counting(), numbers([0]))
    (note,) = noted(caught.value)
    assert note.startswith("plugin 'culprit' (") and f"), hook {hook}" in note


TRACED = {
    "transform_batch": lambda self, batch: trouble(),
    "loss_terms": lambda self, batch: trouble(),
    "after_update": lambda self, module: trouble(),
    "step_metrics": lambda self, output: trouble(),
}


@pytest.mark.parametrize("hook", TRACED)
def test_a_failure_inside_a_trace_is_blamed(hook: str) -> None:
    with pytest.raises(Trouble) as caught:
        engine(plugin("culprit", **{hook: TRACED[hook]}), steps=1).fit(Counting(), numbers([0]))
    (note,) = noted(caught.value)
    assert note.startswith("plugin 'culprit' (") and note.endswith(f"), hook {hook}, step 1")


STRATEGY_METHODS = (
    "check_processes",
    "mesh_context",
    "shard_state",
    "shard_batch",
    "get_batch_spec",
    "constrain_params",
    "constrain_output",
    "put_on_mesh",
    "process_shard",
    "check_batch",
    "check_same",
    "shard_eval_batch",
    "align_batches",
    "replicate",
    "describe",
)


@pytest.mark.parametrize("method", STRATEGY_METHODS)
def test_failure_inside_a_sharding_strategy_names_its_plugin_and_method(method: str) -> None:
    """Its methods are called long after the hook returned it, some of them while tracing."""
    strategy = type("Failing", (fg.SingleDevice,), {method: trouble})()
    sharded = engine(plugin("culprit", sharding_strategy=lambda self: strategy), steps=1)
    with pytest.raises(Trouble) as caught:
        result = sharded.fit(Counting(), numbers([0]))
        sharded.evaluate(result.state, numbers([0]))
        sharded.explain_sharding(np.zeros(2))
    (note,) = noted(caught.value)
    assert note.startswith("plugin 'culprit' (")
    assert note.endswith(f"), hook sharding_strategy, {method}")


def test_every_method_of_a_sharding_strategy_names_its_plugin_on_failure() -> None:
    # `raise_on_any_process` raises the failure of something else.
    methods = fg.ShardingStrategy.__abstractmethods__ - {"raise_on_any_process"}
    assert methods == {*STRATEGY_METHODS}


@pytest.mark.variants("full")
@pytest.mark.parametrize("hook", TRACED)
def test_a_failure_in_a_later_trace_is_blamed_with_its_step(hook: str) -> None:
    """Step 3 is the first with a batch of two, which is traced again."""

    def fails_on_two(self: Any, ctx: fg.Context, **arguments: Any) -> Any:
        if sizes[-1] == 2:
            raise Trouble
        return {
            "transform_batch": arguments.get("batch"),
            "after_update": (arguments.get("module"), None),
        }.get(hook, {})

    sizes: list[int] = []

    class Watcher:
        @fg.hookimpl
        def transform_batch(self, batch: Any) -> Any:
            sizes.append(len(batch))
            return batch

    implementations = {
        "transform_batch": lambda self, batch, ctx: fails_on_two(self, ctx, batch=batch),
        "loss_terms": lambda self, ctx: fails_on_two(self, ctx),
        "after_update": lambda self, module, ctx: fails_on_two(self, ctx, module=module),
        "step_metrics": lambda self, ctx: fails_on_two(self, ctx),
    }
    with pytest.raises(Trouble) as caught:
        engine(Watcher(), plugin("culprit", **{hook: implementations[hook]}), steps=4).fit(
            Counting(), numbers([0], [0], [0, 0])
        )
    (note,) = noted(caught.value)
    assert note.endswith(f"), hook {hook}, step 3")


def replace_state(run: fg.Run) -> fg.ReplaceState:
    return fg.ReplaceState(run.state)


# The step at which an event of the fit below is called first.
EVENT_STEPS = {
    "on_fit_start": 0,
    "on_compile": 0,
    "on_epoch_end": 2,
    "on_replace_state": 3,
    "on_evaluate_end": 3,
    "on_fit_end": 4,
}
NOT_CALLED = {"on_save", "on_restore", "on_exception"}
# From the specifications, so that a new event is tested too.
EVENTS = sorted(
    name
    for name, hook in find_hookspecs(hookspecs).items()
    if hook.kind == "event" and hook.returns is None and name not in NOT_CALLED
)


@pytest.mark.parametrize("hook", EVENTS)
def test_a_failure_in_an_event_ends_the_run_and_is_blamed(hook: str) -> None:
    errors: list[BaseException] = []
    culprit = plugin(
        "culprit",
        **{hook: lambda self: trouble()},
        on_exception=lambda self, exception: errors.append(exception),
    )
    with pytest.raises((Trouble, SaveError)) as caught:
        engine(
            culprit,
            Act(fg.At(3), evaluate, "evaluate"),
            Act(fg.At(3), replace_state, instance="replacing"),
            plugin("test", **EVALUATOR),
            steps=4,
            steps_per_execution=1,
        ).fit(Counting(), numbers([0], [0]))
    error: BaseException = caught.value
    if isinstance(error, SaveError):  # training had ended
        assert hook == "on_fit_end" and error.__cause__ is not None
        error = error.__cause__
    note = noted(error)[0]
    step = EVENT_STEPS.get(hook, r"\d+")
    assert re.fullmatch(rf"plugin 'culprit' \(.+\), hook {hook}, step {step}", note)
    assert errors == [error]


def test_a_failure_in_an_action_is_blamed() -> None:
    with pytest.raises(Trouble) as caught:
        engine(Act(fg.At(3), trouble, instance="third"), steps=4).fit(Counting(), numbers([0]))
    (note,) = noted(caught.value)
    assert note.startswith("plugin 'act:third' (") and note.endswith("), action act, step 3")


def test_a_failure_in_host_state_is_blamed() -> None:
    saver = Act(fg.At(3), lambda run: snapshots.append(run.snapshot()), "save")
    snapshots: list[fg.Snapshot] = []
    with pytest.raises(Trouble) as caught:
        engine(saver, plugin("culprit", get_host_state=lambda self: trouble()), steps=4).fit(
            Counting(), numbers([0])
        )
    # The end of the first epoch is an action, before which the host states are kept.
    assert noted(caught.value)[0].endswith("), hook get_host_state, step 1")


def test_a_failure_of_the_checkpointer_is_blamed() -> None:
    with pytest.raises(SaveError) as caught:
        engine(plugin("culprit", save_checkpoint=lambda self, run: trouble()), steps=4).fit(
            Counting(), numbers([0])
        )
    assert isinstance(caught.value.__cause__, Trouble)
    assert noted(caught.value.__cause__)[0].endswith("), hook save_checkpoint, step 4")


@dataclass(frozen=True, eq=False)
class Witness:
    """Told of the exception, and perhaps raising one of its plugin_state."""

    instance: str
    errors: list[tuple[str, BaseException]] = field(default_factory=list)
    raises: bool = False

    @fg.hookimpl
    def on_exception(self, run: fg.Run, exception: BaseException) -> None:
        self.errors.append((self.instance, exception))
        if self.raises:
            raise ValueError(f"{self.instance} fails as well")


@pytest.mark.hook("on_exception")
@pytest.mark.parametrize("cause", [Trouble(), KeyboardInterrupt()])
def test_on_exception_is_called_for_all_whatever_the_others_do(cause: BaseException) -> None:
    def fail(run: fg.Run) -> None:
        raise cause

    errors: list[tuple[str, BaseException]] = []
    witnesses = [Witness("a", errors), Witness("b", errors, raises=True), Witness("c", errors)]
    with pytest.raises(type(cause)) as caught:
        engine(*witnesses, Act(fg.At(2), fail), steps=4).fit(Counting(), numbers([0]))
    assert errors == [("a", cause), ("b", cause), ("c", cause)]
    further = [note for note in caught.value.__notes__ if "ValueError" in note]
    assert (
        len(further) == 1 and "b fails as well" in further[0] and "plugin 'witness:b'" in further[0]
    )


def test_two_plugins_that_are_named_by_an_argument_are_told_to_differ() -> None:
    @dataclass(frozen=True)
    class Named:
        name: str
        plugin_name = "named"

        @property
        def instance(self) -> str:
            return self.name

    with pytest.raises(
        PluginError, match="called 'named:val': the arguments that name a Named must differ"
    ):
        fg.Engine(plugins=[Named("val"), Named("val")], autoload=False)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("callbacks", r"plugins=\[\.\.\.\]"),
        ("max_epochs", "give epochs="),
        ("devices", "fulgurite-sharding"),
        ("validation_data", "Evaluator"),
    ],
)
def test_arguments_of_other_trainers_are_told_their_name_here(name: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Engine has no argument '{name}': .*{hint}"):
        fg.Engine(**{name: None})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no_such"):
        fg.Engine(no_such=1)  # type: ignore[call-arg]

    class WithCallbacks(fg.Engine):
        def __init__(self, callbacks: Any) -> None:
            super().__init__(plugins=callbacks, autoload=False)

    assert WithCallbacks(callbacks=[]).plugins.plugins == {}
