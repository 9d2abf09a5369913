"""Every hook: what it does to a run, and where it is described."""

import ast
import copy
import gc
import hashlib
import importlib.util
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import fulgurite._src.hookspecs as hooks
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import (
    ConfigurationError,
    DataError,
    ModelError,
    NonFiniteError,
    PathError,
    PluginError,
    SaveError,
)
from jax.core import Tracer
from models import (
    Act,
    Counting,
    Events,
    Linear,
    assert_close,
    assert_same_bits,
    numbers,
    regression,
    trained,
)

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"

TESTED = {
    "register_rng_streams": "test_hooks.py::test_rng_streams_are_available_by_name",
    "sharding_strategy": "test_sharding_hooks.py::test_state_is_sharded_as_the_strategy_says",
    "plugin_state_sharding": "test_sharding_hooks.py::test_plugin_shards_its_own_state",
    "transform_module": "test_hooks.py::test_transform_module_is_folded_before_optimizers",
    "make_update_rule": "test_hooks.py::test_update_rule_is_the_inside_of_a_step",
    "wrap_update_rule": "test_hooks.py::test_wrap_update_rule_is_folded_over_the_rule",
    "configure_optimizers": "test_hooks.py::test_optimizers_of_a_plugin_replace_those_of_the_module",
    "register_evaluators": "test_hooks.py::test_evaluators_are_run_by_name",
    "gradient_transform": (
        "test_hooks.py::test_gradient_transforms_are_chained_before_the_optimizer"
    ),
    "init_plugin_state": "test_hooks.py::test_weight_averages_equal_numpy",
    "register_actions": "test_schedule.py::test_actions_run_by_stage_in_a_fixed_order",
    "module_views": "test_hooks.py::test_module_views_are_evaluated_by_name",
    "transform_batch": "test_hooks.py::test_transform_batch_is_folded_in_training_alone",
    "loss_terms": "test_hooks.py::test_loss_terms_are_part_of_the_loss",
    "after_update": "test_hooks.py::test_after_update_is_folded_over_the_module",
    "after_finalize": (
        "../plugins/averaging/test_averaging.py"
        "::test_an_average_is_updated_once_for_each_update_of_accumulated_gradients"
    ),
    "step_metrics": "test_hooks.py::test_step_metrics_are_prefixed_with_the_name_of_the_plugin",
    "evaluation_metrics": "test_hooks.py::test_plugins_measure_evaluations",
    "around_forward": "test_hooks.py::test_around_forward_is_nested_wherever_the_module_runs",
    "around_fit": "test_hooks.py::test_around_fit_encloses_the_start_of_a_fit_even_if_it_fails",
    "fit_context": "test_hooks.py::test_fit_context_encloses_a_fit_and_what_ends_it",
    "on_fit_start": "test_hooks.py::test_on_fit_start_and_on_fit_end_enclose_a_fit",
    "on_fit_end": "test_hooks.py::test_on_fit_start_and_on_fit_end_enclose_a_fit",
    "on_epoch_end": "test_hooks.py::test_on_epoch_end_comes_at_the_last_batch",
    "on_evaluate_end": "test_hooks.py::test_evaluators_are_run_by_name",
    "on_compile": "test_hooks.py::test_on_compile_gets_cost_and_memory",
    "on_save": "test_resume_seam.py::test_checkpointer_reports_its_saves",
    "on_restore": "test_resume_seam.py::test_a_resumed_run_ends_with_the_same_bits",
    "on_exception": "test_plugins.py::test_on_exception_is_called_for_all_whatever_the_others_do",
    "open_logger": (
        "test_loggers.py::test_logger_is_opened_before_the_first_record_and_closed_after_the_last"
    ),
    "log_record": "test_loggers.py::test_each_kind_of_record_reaches_the_loggers",
    "flush_logger": "test_resume_seam.py::test_logger_is_rewound_to_the_checkpoint",
    "check_logger_position": (
        "../plugins/checkpoint/test_edited.py::test_a_position_of_a_logger_that_is_never_written"
    ),
    "rewind_logger": "test_resume_seam.py::test_logger_is_rewound_to_the_checkpoint",
    "close_logger": (
        "test_loggers.py::test_logger_is_opened_before_the_first_record_and_closed_after_the_last"
    ),
    "get_host_state": "test_resume_seam.py::test_host_state_of_plugins_is_restored",
    "set_host_state": "test_resume_seam.py::test_host_state_of_plugins_is_restored",
    "save_checkpoint": "test_resume_seam.py::test_run_is_saved_on_request_and_at_its_end",
    "restore_checkpoint": "test_resume_seam.py::test_a_resumed_run_ends_with_the_same_bits",
}


def engine(*plugins: Any, **settings: Any) -> fg.Engine:
    return fg.Engine(plugins=plugins, autoload=False, **settings)


def plugin(name: str, /, **members: Any) -> Any:
    """A plugin of a class made on the spot; functions among its members become implementations of
    hooks."""
    marked = {
        key: fg.hookimpl(value) if callable(value) else value for key, value in members.items()
    }
    return type(name, (), {"plugin_name": name, **marked})()


# --- the reference --------------------------------------------------------------------------------


def test_every_hook_has_a_test() -> None:
    kinds = engine().plugins.hooks
    assert sorted(TESTED) == sorted(kinds)
    for hook, where in TESTED.items():
        file, _, name = where.partition("::")
        functions = [
            node.name
            for node in ast.parse((HERE / file).read_text()).body
            if isinstance(node, ast.FunctionDef)
        ]
        assert name in functions, f"{hook} is said to be tested by {where}"


def test_every_hook_has_a_docstring() -> None:
    silent = [
        name for name in engine().plugins.hooks if not (getattr(hooks, name).__doc__ or "").strip()
    ]
    assert not silent


def test_the_reference_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate_hooks", DOCS / "generate_hooks.py")
    assert spec and spec.loader
    spec.loader.exec_module(generator := importlib.util.module_from_spec(spec))
    written = (DOCS / "hooks.md").read_text(encoding="utf-8")
    assert written == generator.page(), "run python docs/generate_hooks.py"
    for hook in engine().plugins.hooks:
        assert f"\n### {hook}\n\n```python\ndef {hook}(self" in written


@pytest.mark.full
def test_every_hook_has_an_example_that_runs(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("hook_examples", DOCS / "hook_examples.py")
    assert spec and spec.loader
    spec.loader.exec_module(shown := importlib.util.module_from_spec(spec))
    data, called = regression(), set[str]()
    media = plugin(
        "shows",
        on_fit_start=lambda self, run: (run.log_media("shows", {}), run.log_config("shows", {})),
    )
    kinds = [
        shown.DataParallel,
        shown.Noise,
        shown.Recipe,
        shown.Bounds,
        shown.Averaged,
        shown.WeightDecay,
        shown.HalfPrecision,
        shown.SmallStart,
    ]
    plugins = [*(kind() for kind in kinds), shown.Patience(data, every=5), shown.Diary(), media]
    logger, saver = shown.Lines(tmp_path / "lines.txt"), shown.InMemory()

    def note(frame: Any, event: str, _: Any) -> None:
        if frame.f_code.co_filename == shown.__file__:
            called.add(frame.f_code.co_name)

    def failing(run: fg.Run) -> None:
        raise RuntimeError("on purpose")

    sys.setprofile(note)
    try:
        engine(*plugins, logger, saver, steps=10, log_every=5).fit(Linear, data)
        trainer = engine(*plugins, logger, saver, steps=20, log_every=5)
        result = trainer.fit(Linear, data, resume="latest")
        trainer.evaluate(trainer.get_module_view(result.state, "averaged"), data)
        # Only an update rule that accumulates gradients calls it, and the core has none.
        averages = result.state.plugin_states["averaged"]
        shown.Averaged().after_finalize(result.state.module, averages)
        with pytest.raises(RuntimeError, match="on purpose"):
            engine(*plugins, Act(5, failing), steps=10).fit(Linear, data)
    finally:
        sys.setprofile(None)
    assert sorted(engine().plugins.hooks.keys() - called) == []
    assert result.failures == {}
    steps = [
        line.split()[0]
        for line in (tmp_path / "lines.txt").read_text().splitlines()
        if "train" in line
    ]
    assert steps == ["5", "10", "15", "20"]


# --- build ----------------------------------------------------------------------------------------


class Drawing(Counting):
    """Logs a random number of the stream `noise` at every step."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        drawn = jax.random.uniform(ctx.key("noise"))
        return (
            super()
            .training_step(batch, ctx)
            .replace(metrics={"drawn": fg.metrics.LastValue.from_values(drawn)})
        )


def test_rng_streams_are_available_by_name() -> None:
    noise = plugin("noisy", register_rng_streams=lambda self: [fg.RngStream("noise", train=True)])
    result = engine(noise, steps=3, seed=7, log_every=1).fit(Drawing, numbers([0]))
    expected = [jax.random.uniform(by_hand(7, "noise", step, "train")).item() for step in range(3)]
    assert result.history["train/drawn"].tolist() == expected


def by_hand(seed: int, stream: str, step: int, phase: str) -> Any:
    """A key as row K9 of spec/parity.md says: the root folded with the stream's name, the step and
    the phase."""

    def word(name: str) -> int:
        return int.from_bytes(hashlib.sha1(name.encode()).digest()[:4], "big")

    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), word(stream)), step)
    return jax.random.fold_in(key, word(phase))


class Adding(fg.UpdateRule):
    """Adds 2 to the weight and counts."""

    def init(self, module: Any) -> Any:
        return jnp.zeros((), int)

    def __call__(self, forward: Any, state: fg.TrainState, batch: Any, ctx: fg.Context) -> Any:
        module = jax.tree.map(lambda weight: weight + 2, state.module)
        return state.replace(module=module, opt_state=state.opt_state + 1), forward(
            state.module, batch, ctx
        )


def test_transform_module_is_folded_before_optimizers() -> None:
    """1 * 2 + 3, less 1 in each of 2 steps; what comes later sees the dtype of the new module."""
    dtypes: set[Any] = set()

    def set_weight(module: Any, weight: Any) -> Any:
        module = copy.copy(module)
        object.__setattr__(module, "weight", weight)
        return module

    keys: dict[str, set[tuple[int, ...]]] = {"double": set(), "shy": set()}

    def note_key(name: str, key: Any) -> None:
        if not isinstance(key, Tracer):
            keys[name].add(tuple(jax.random.key_data(key).tolist()))

    def double(self: Any, module: Any, key: Any) -> Any:
        note_key("double", key)
        return set_weight(module, module.weight * 2)

    def add(self: Any, module: Any) -> Any:
        return set_weight(module, (module.weight + 3).astype(jnp.float16))

    def look(self: Any, module: Any) -> None:
        dtypes.add(module.weight.dtype)

    start = set_weight(Counting(), jnp.float32(1))
    parts = [
        plugin("double", transform_module=double),
        plugin("shy", transform_module=lambda self, module, key: note_key("shy", key)),
        plugin("add", transform_module=add),
        plugin("look", init_plugin_state=look, gradient_transform=look),
    ]
    result = engine(*parts, steps=2).fit(start, numbers([0]))
    assert (result.module.weight.dtype, dtypes) == (jnp.float16, {jnp.dtype(jnp.float16)})
    assert float(result.module.weight) == 3
    assert all(len(of_plugin) == 1 for of_plugin in keys.values()), "the same whenever it is called"
    assert keys["double"].isdisjoint(keys["shy"])


def test_update_rule_is_the_inside_of_a_step() -> None:
    names: list[list[str]] = []

    class Ruling:
        @fg.hookimpl
        def make_update_rule(self, optimizers: dict[str, fg.OptimizerSpec]) -> fg.UpdateRule:
            names.append(list(optimizers))
            return Adding()

    result = engine(Ruling(), steps=5).fit(Counting(), numbers([0]))
    assert names == [["default"]]
    assert (float(result.module.weight), int(result.state.opt_state)) == (10, 5)


class Scaling(fg.UpdateRule):
    """Updates as another rule does, times a factor; from the update after step `until` on just as
    that rule."""

    def __init__(self, update_rule: fg.UpdateRule, factor: float, until: int) -> None:
        self.update_rule, self.factor, self.until = update_rule, factor, until

    def init(self, module: Any) -> Any:
        return self.update_rule.init(module)

    def __call__(self, forward: Any, state: fg.TrainState, batch: Any, ctx: fg.Context) -> Any:
        new, output = self.update_rule(forward, state, batch, ctx)
        scaled = jax.tree.map(
            lambda old, new_leaf: old + self.factor * (new_leaf - old), state.module, new.module
        )
        return new.replace(module=scaled), output

    def for_step(self, step: Any, step_range: fg.StepRange) -> fg.UpdateRule:
        return self.update_rule.for_step(step, step_range) if int(step) >= self.until else self


def scaled(name: str, factor: float, until: int) -> Any:
    return plugin(
        name, wrap_update_rule=lambda self, update_rule: Scaling(update_rule, factor, until)
    )


def test_wrap_update_rule_is_folded_over_the_rule() -> None:
    shy = plugin("shy", wrap_update_rule=lambda self: None)
    wrapped = [scaled("double", 2.0, until=99), shy, scaled("thrice", 3.0, until=99)]
    assert float(engine(*wrapped, steps=4).fit(Counting(), numbers([0])).module.weight) == -24


class Models(Counting):
    """Two models, whose plugins act on each."""

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(2)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight.sum())

    def apply_transform(self, transform: Any, key: Any) -> Any:
        weights = [transform(Counting(), jax.random.fold_in(key, i)).weight for i in (0, 1)]
        return eqx.tree_at(lambda model: model.weight, self, jnp.stack(weights))

    def adapt_plugin_state(self, name: str, plugin_state: Any) -> Any:
        return jnp.stack([plugin_state, plugin_state]) if name == "plugin" else plugin_state


def test_a_module_of_several_models_has_a_plugin_act_on_each() -> None:
    def add(self: Any, module: Any, key: Any) -> Any:
        return eqx.tree_at(lambda model: model.weight, module, jax.random.normal(key))

    parts = [
        plugin("plugin", transform_module=add, init_plugin_state=lambda self: jnp.ones(3)),
        plugin("other", init_plugin_state=lambda self: jnp.ones(3)),
    ]
    state = engine(*parts).init_state(Models(), numbers([0]))
    weight = np.asarray(state.module.weight)
    assert weight.shape == (2,)
    assert weight[0] != weight[1]
    assert state.plugin_states["plugin"].shape == (2, 3)
    assert state.plugin_states["other"].shape == (3,)


def test_plugins_are_told_what_becomes_of_steps_that_are_not_finite_and_when_is_logged() -> None:
    answers: list[Any] = []
    asking = plugin(
        "asking",
        wrap_update_rule=lambda self, on_nonfinite: answers.append(on_nonfinite),
        register_actions=lambda self, log_trigger: answers.append(log_trigger),
    )
    engine(asking, on_nonfinite="skip", log_every=fg.Every(7)).init_state(Counting(), numbers([0]))
    engine(asking, log_every=None)
    assert answers == [fg.Every(7), "skip", None]


def test_a_rule_may_look_at_gradients_itself() -> None:
    class Blind(fg.UpdateRuleWrapper):
        def __call__(self, forward: Any, state: Any, batch: Any, ctx: Any) -> Any:
            new, output = self.update_rule(forward, state, batch, ctx)
            return new, output.replace(grads=jax.tree.map(lambda grad: grad * np.nan, output.grads))

        def rewrap(self, update_rule: Any) -> Any:
            return type(self)(update_rule)

    class Checking(Blind):
        def __init__(self, update_rule: Any) -> None:
            super().__init__(update_rule)
            self.checks_gradients = True

    blind = plugin("rule", wrap_update_rule=lambda self, update_rule: Blind(update_rule))
    checking = plugin("rule", wrap_update_rule=lambda self, update_rule: Checking(update_rule))
    with pytest.raises(NonFiniteError, match="the gradient of weight"):
        engine(blind, steps=1).fit(Counting(), numbers([0]))
    engine(checking, steps=1).fit(Counting(), numbers([0]))


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_a_rule_may_change_where_something_is_due(steps_per_execution: int) -> None:
    events = Events()
    parts = [scaled("double", 2.0, until=3), Act(fg.At(3), lambda run: None), events]
    result = engine(
        *parts, steps=5, steps_per_execution=steps_per_execution, max_compilations=1
    ).fit(Counting(), numbers([0]))
    assert float(result.module.weight) == -(2 * 3 + 2)
    assert len(events.compiled) == 2
    stepping = engine(scaled("double", 2.0, until=3), steps=5)
    state = stepping.init_state(Counting(), numbers([0]))
    for batch in numbers(*[[0.0]] * 5):
        state, _ = stepping.step(state, batch)
    assert float(state.module.weight) == -(2 * 3 + 2)


def test_a_new_rule_is_traced_while_the_function_of_the_old_one_is_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """JAX takes the trace of an equal function as long as that one is alive: until the garbage
    collector comes, if it is part of a circle, such as that of a handled exception."""
    alive: list[Any] = []
    jit, make_jaxpr = jax.jit, jax.make_jaxpr

    def keep(make: Any) -> Any:
        def make_and_keep(*arguments: Any, **options: Any) -> Any:
            alive.append(make(*arguments, **options))
            return alive[-1]

        return make_and_keep

    monkeypatch.setattr(jax, "jit", keep(jit))
    monkeypatch.setattr(jax, "make_jaxpr", keep(make_jaxpr))
    parts = [scaled("double", 2.0, until=3), Act(fg.At(3), lambda run: None)]
    result = engine(*parts, steps=5).fit(Counting(), numbers([0]))
    assert float(result.module.weight) == -(2 * 3 + 2)
    assert alive


@pytest.mark.full
def test_update_rule_that_changes_at_each_call_is_recompiled() -> None:
    """An executable knows its rule by identity, so that no later rule may get the place of an
    earlier one in memory."""
    references: list[weakref.ref[fg.UpdateRule]] = []

    class Growing(Scaling):
        def for_step(self, step: Any, step_range: fg.StepRange) -> fg.UpdateRule:
            update_rule = Growing(self.update_rule, float(step) + 1, self.until)
            references.append(weakref.ref(update_rule))
            return update_rule

    growing = plugin(
        "growing", wrap_update_rule=lambda self, update_rule: Growing(update_rule, 1.0, 99)
    )
    training = engine(growing, Act(fg.Every(1), lambda run: None), steps=4)
    assert float(training.fit(Counting(), numbers([0])).module.weight) == -(1 + 2 + 3 + 4)
    gc.collect()
    assert sum(reference() is not None for reference in references) >= 4


class Preempting(fg.ProcessSync):
    """Wants to stop from step 6 on; what processes wish for themselves it overrules."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, frozenset[str]]] = []

    def reduce_requests(self, step: int, requests: frozenset[str]) -> frozenset[str]:
        self.requests.append((step, requests))
        return frozenset({"stop:preempted"} if step >= 6 else ())


@pytest.mark.parametrize("steps_per_execution", [1, 8])
def test_process_sync_decides_for_all_processes(steps_per_execution: int) -> None:
    sync = Preempting()
    ends: list[int] = []
    by_clock = Act(fg.EverySeconds(1e-9), lambda run: ends.append(run.step))
    agreeing = plugin("agreeing", sharding_strategy=lambda self: fg.SingleDevice(sync))
    result = engine(
        agreeing, by_clock, steps=20, steps_per_execution=steps_per_execution, log_every=None
    ).fit(Counting(), numbers(*[[0.0]] * 20))
    # 20 steps are divided into dispatches of 7, 7 and 6.
    end = 7 if steps_per_execution == 8 else 6
    assert (result.stop_reason, int(result.state.step)) == ("preempted", end)
    assert not ends
    steps = {step for step, _ in sync.requests if step}
    assert steps == ({7} if steps_per_execution == 8 else set(range(1, 7)))
    assert all("action:act.act" in requests for step, requests in sync.requests if step)


def test_optimizers_of_a_plugin_replace_those_of_the_module() -> None:
    thrice = plugin(
        "thrice", configure_optimizers=lambda self: {"default": fg.OptimizerSpec(optax.sgd(3.0))}
    )
    assert float(engine(thrice, steps=4).fit(Counting(), numbers([0])).module.weight) == -12


def test_an_optimizer_may_update_a_part_of_the_module() -> None:
    """What is not selected gets no gradient, no weight decay and no memory."""

    class Pair(fg.Module):
        first: jax.Array
        second: jax.Array

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(jnp.sum(self.first**2) + jnp.sum(self.second**2))

        def configure_optimizers(self) -> Any:
            return {"default": fg.OptimizerSpec(optax.adamw(0.1, weight_decay=0.5), "second")}

    grads = plugin(
        "grads", step_metrics=lambda self, grads: {"leaves": float(len(jax.tree.leaves(grads)))}
    )
    result = engine(grads, steps=3).fit(Pair(jnp.ones(3), jnp.ones(2)), numbers([0]))
    assert result.module.first.tolist() == [1, 1, 1] and result.module.second[0] < 0.9
    assert [leaf.shape for leaf in jax.tree.leaves(result.state.opt_state)] == [(), (2,), (2,)]
    assert result.metrics["train"]["grads/leaves"] == 1
    missing = plugin(
        "missing",
        configure_optimizers=lambda self: {"default": fg.OptimizerSpec(optax.sgd(0.1), "third")},
    )
    with pytest.raises(PathError, match="'third' selects no array"):
        engine(missing, steps=3).fit(Pair(jnp.ones(3), jnp.ones(2)), numbers([0]))


def test_plugin_may_leave_optimizers_to_the_module() -> None:
    assert (
        float(
            engine(plugin("shy", configure_optimizers=lambda self: None), steps=4)
            .fit(Counting(), numbers([0]))
            .module.weight
        )
        == -4
    )


def test_evaluators_are_run_by_name() -> None:
    calls: list[Any] = []
    answers: list[Any] = []
    spec = fg.Evaluation("test", numbers([2, 4], [9]), metrics={"mean": lambda preds, batch: preds})
    evaluators = plugin(
        "evaluating",
        register_evaluators=lambda self: [
            spec,
            fg.Evaluation("short", numbers([2, 4], [9]), num_batches=1, metrics=spec.metrics),
        ],
        on_evaluate_end=lambda self, run, name, metrics: calls.append((run.step, name, metrics)),
    )

    def evaluate(run: fg.Run) -> None:
        answers.extend([run.evaluate("test"), run.evaluate("short")])

    result = engine(evaluators, Act(fg.At(3), evaluate, "evaluate"), steps=4).fit(
        Counting(), numbers([0])
    )
    assert answers == [{"mean": 5.0}, {"mean": 3.0}]
    assert calls == [(3, "test", answers[0]), (3, "short", answers[1])]
    assert result.metrics["test"] == answers[0]
    assert result.history["test/mean"].tolist() == [5]
    assert result.history.steps("short/mean").tolist() == [3]


@pytest.mark.parametrize(
    ("order", "weight"), [(("scale", "clip"), -6.0), (("clip", "scale"), -30.0)]
)
def test_gradient_transforms_are_chained_before_the_optimizer(
    order: tuple[str, ...], weight: float
) -> None:
    """The gradient is 1: scaled to 10 and clipped to 2, or clipped to 1 and scaled to 10."""
    names: list[str] = []

    def giving(transform: optax.GradientTransformation) -> Any:
        return lambda self, optimizer: (names.append(optimizer), transform)[1]

    transforms = {"scale": optax.scale(10.0), "clip": optax.clip(2.0)}
    plugins = [plugin(name, gradient_transform=giving(transforms[name])) for name in order]
    result = engine(*plugins, plugin("shy", gradient_transform=lambda self: None), steps=3).fit(
        Counting(), numbers([0])
    )
    assert float(result.module.weight) == weight
    assert names == ["default", "default"]


@pytest.mark.full
def test_gradient_transforms_have_keys_of_their_own() -> None:
    """The noise of one is that of optax with its key: another one for each plugin and seed, the
    same in each run."""
    keys: dict[tuple[int, str], Any] = {}

    def weight(seed: int) -> float:
        def noise(self: Any, key: Any) -> optax.GradientTransformation:
            keys[seed, self.plugin_name] = key
            return optax.add_noise(1.0, 0.55, key)

        plugins = [plugin(name, gradient_transform=noise) for name in ("one", "other")]
        return float(
            engine(*plugins, steps=3, seed=seed).fit(Counting(), numbers([0])).module.weight
        )

    weights = weight(0), weight(1), weight(0)
    assert weights[0] == weights[2] != weights[1]
    assert len({jax.random.key_data(key).tobytes() for key in keys.values()}) == 4
    expected, transform = (
        0.0,
        optax.chain(*(optax.add_noise(1.0, 0.55, keys[0, name]) for name in ("one", "other"))),
    )
    state = transform.init(jnp.zeros(()))
    for _ in range(3):
        update, state = transform.update(jnp.ones(()), state)
        expected -= np.asarray(update).item()
    assert weights[0] == pytest.approx(expected, rel=1e-5)


# --- traced, with state of their own --------------------------------------------------------------


@dataclass(frozen=True)
class Averaging:
    """An exponential moving average of the weights."""

    decay: float = 0.9

    @fg.hookimpl
    def init_plugin_state(self, module: Linear) -> Any:
        return {"average": module}

    @fg.hookimpl
    def after_update(self, module: Linear, plugin_state: Any) -> Any:
        average = jax.tree.map(
            lambda old, new: self.decay * old + (1 - self.decay) * new,
            plugin_state["average"],
            module,
        )
        return module, {"average": average}

    @fg.hookimpl
    def module_views(self, state: fg.TrainState) -> dict[str, Any]:
        return {"averaged": state.plugin_states["averaging"]["average"]}


def averaged_by_hand(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights and their average after that many steps of gradient descent, in float64."""
    weight, average = np.zeros(3), np.zeros(3)
    batches = [batch for _ in range(steps) for batch in regression(24, 8)][:steps]
    for batch in batches:
        x, y = batch["x"].astype(np.float64), batch["y"].astype(np.float64)
        weight = weight - 0.1 * 2 * x.T @ (x @ weight - y) / len(y)
        average = 0.9 * average + 0.1 * weight
    return weight, average


@pytest.mark.parametrize("steps_per_execution", [1, 8])
def test_weight_averages_equal_numpy(steps_per_execution: int) -> None:
    result = engine(
        Averaging(), steps=11, steps_per_execution=steps_per_execution, log_every=5
    ).fit(Linear(), regression(24, 8))
    weight, average = averaged_by_hand(11)
    np.testing.assert_allclose(result.module.weight, weight, rtol=1e-5)
    np.testing.assert_allclose(
        result.state.plugin_states["averaging"]["average"].weight, average, rtol=1e-5
    )


def test_averaging_does_not_change_training() -> None:
    with_, without = (
        engine(*plugins, steps=11).fit(Linear(), regression(24, 8))
        for plugins in ([Averaging()], [])
    )
    assert_same_bits(trained(with_.state), trained(without.state))


def test_module_views_are_evaluated_by_name() -> None:
    data = regression(24, 8)
    spec = fg.Evaluation("averaged", data, module_view="averaged")
    evaluating = plugin("evaluating", register_evaluators=lambda self: [spec])
    answers: list[Any] = []
    act = Act(fg.At(6), lambda run: answers.append(run.evaluate("averaged")))
    engine(Averaging(), evaluating, act, steps=9).fit(Linear(), data)
    x, y = (np.concatenate([batch[name] for batch in data]) for name in ("x", "y"))
    assert answers[0]["error"] == pytest.approx(
        float(np.mean((x @ averaged_by_hand(6)[1] - y) ** 2)), rel=1e-5
    )


def test_a_view_of_a_result_is_evaluated_as_it_is() -> None:
    data = regression(24, 8)
    trainer = engine(Averaging(), steps=6)
    result = trainer.fit(Linear(), data)
    x, y = (np.concatenate([batch[name] for batch in data]) for name in ("x", "y"))
    metrics = trainer.evaluate(result.view("averaged"), data)
    by_hand = float(np.mean((x @ averaged_by_hand(6)[1] - y) ** 2))
    assert metrics["error"] == pytest.approx(by_hand, rel=1e-5)
    assert metrics != trainer.evaluate(result, data)
    with pytest.raises(PluginError, match="Did you mean 'averaged'"):
        result.view("averagde")


def test_unknown_view_is_an_error_naming_the_available_ones() -> None:
    trainer = engine(Averaging(), steps=1)
    state = trainer.init_state(Linear(), regression())
    np.testing.assert_array_equal(trainer.get_module_view(state, "averaged").weight, np.zeros(3))
    with pytest.raises(
        PluginError, match=r"no plugin provides the weights 'averagde'. Did you mean 'averaged'\?"
    ):
        trainer.get_module_view(state, "averagde")


@dataclass(frozen=True)
class Tally:
    """Adds the batch's number to its own slice."""

    factor: float
    instance: str

    @fg.hookimpl
    def init_plugin_state(self) -> Any:
        return {"total": jnp.zeros(())}

    @fg.hookimpl
    def after_update(self, module: Any, plugin_state: Any, output: fg.Output) -> Any:
        return module, {"total": plugin_state["total"] + self.factor * output.preds.sum()}


def test_each_plugin_has_its_own_state() -> None:
    result = engine(Tally(1.0, "one"), Tally(10.0, "ten"), steps=3).fit(
        Counting(), numbers([1], [2], [3])
    )
    assert jax.tree.map(float, result.state.plugin_states) == {
        "tally:one": {"total": 6.0},
        "tally:ten": {"total": 60.0},
    }


def test_stateless_plugin_gets_none_and_cannot_return_state() -> None:
    observed: list[Any] = []
    looks = plugin(
        "looks",
        after_update=lambda self, module, plugin_state: (
            observed.append(plugin_state),
            (module, plugin_state),
        )[1],
    )
    assert engine(looks, steps=1).fit(Counting(), numbers([0])).state.plugin_states == {}
    assert set(observed) == {None}
    makes = plugin("makes", after_update=lambda self, module: (module, jnp.zeros(())))
    with pytest.raises(ModelError, match=r"plugin 'makes'.*after_update.*structure"):
        engine(makes, steps=1).fit(Counting(), numbers([0]))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda total: total[:2], r"total.* from float32\[3\] to float32\[2\]"),
        (lambda total: total.astype(jnp.int32), r"total.* from float32\[3\] to int32\[3\]"),
        (lambda total: (total, total), r"structure.*total"),
    ],
)
def test_plugin_state_keeps_its_structure_shapes_and_dtypes(change: Any, expected: str) -> None:
    changing = plugin(
        "changing",
        init_plugin_state=lambda self: {"total": jnp.zeros(3)},
        after_update=lambda self, module, plugin_state: (
            module,
            {"total": change(plugin_state["total"])},
        ),
    )
    with pytest.raises(ModelError, match=f"plugin 'changing'.*after_update.*{expected}"):
        engine(changing, steps=1).fit(Counting(), numbers([0]))


@pytest.mark.parametrize("leaf", [1.0, "text", jnp.tanh])
def test_plugin_state_holds_only_arrays(leaf: Any) -> None:
    careless = plugin("careless", init_plugin_state=lambda self: {"average": leaf, "none": None})
    with pytest.raises(
        PluginError,
        match=(
            "plugin 'careless', hook init_plugin_state: average is .*; a plugin's state holds "
            "nothing but arrays"
        ),
    ):
        engine(careless, steps=1).fit(Counting(), numbers([0]))


def test_module_keeps_its_shapes() -> None:
    changing = plugin(
        "changing",
        after_update=lambda self, module, plugin_state: (
            jax.tree.map(lambda x: x[None], module),
            plugin_state,
        ),
    )
    with pytest.raises(
        ModelError,
        match=r"plugin 'changing'.*after_update.*weight from float32\[\] to float32\[1\]",
    ):
        engine(changing, steps=1).fit(Counting(), numbers([0]))


def test_after_update_returns_a_pair() -> None:
    with pytest.raises(
        PluginError,
        match=r"hook after_update returns a tuple or None, not Counting",
    ):
        engine(plugin("single", after_update=lambda self, module: module), steps=1).fit(
            Counting(), numbers([0])
        )


@dataclass(frozen=True)
class Noise:
    """Draws in every traced hook, and once for its own slice."""

    instance: str

    @fg.hookimpl
    def init_plugin_state(self, key: Any) -> Any:
        return jax.random.uniform(key, (2,))

    @fg.hookimpl
    def after_update(self, module: Any, plugin_state: Any, ctx: fg.Context) -> Any:
        return module, plugin_state + jax.random.uniform(ctx.key(), (2,))

    @fg.hookimpl
    def step_metrics(self, ctx: fg.Context) -> dict[str, Any]:
        return {"drawn": fg.metrics.LastValue.from_values(jax.random.uniform(ctx.key()))}


class Blurred(Linear):
    """Learns from inputs with noise, drawn from the stream `default`."""

    def __init__(self, *, key: Any) -> None:
        self.weight = jax.random.normal(key, (3,))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        keys = ctx.keys("default", len(batch["y"]))
        noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)
        return super().training_step({"x": batch["x"] + noise, "y": batch["y"]}, ctx)


@pytest.mark.full
def test_adding_a_plugin_changes_no_other_random_number() -> None:
    settings = {"steps": 4, "seed": 3, "log_every": 1}
    alone = engine(**settings).fit(Blurred, regression())
    single = engine(Noise("a"), **settings).fit(Blurred, regression())
    two = engine(Noise("b"), Noise("a"), **settings).fit(Blurred, regression())
    for result in (single, two):
        assert_same_bits(trained(result.state), trained(alone.state))
        assert result.history["train/loss"].tobytes() == alone.history["train/loss"].tobytes()
    assert_same_bits(single.state.plugin_states["noise:a"], two.state.plugin_states["noise:a"])
    assert (
        single.history["train/noise:a/drawn"].tobytes()
        == two.history["train/noise:a/drawn"].tobytes()
    )
    drawn = [*two.history["train/noise:a/drawn"], *two.history["train/noise:b/drawn"]]
    assert len(set(drawn)) == 8
    assert not np.array_equal(
        two.state.plugin_states["noise:a"], two.state.plugin_states["noise:b"]
    )


def test_key_of_a_plugin_state_is_its_own() -> None:
    def slices(*plugins: Any) -> dict[str, Any]:
        return engine(*plugins).init_state(Linear(), regression()).plugin_states

    both, alone = slices(Noise("b"), Noise("a")), slices(Noise("a"))
    assert_same_bits(both["noise:a"], alone["noise:a"])
    assert not np.array_equal(both["noise:a"], both["noise:b"])


@pytest.mark.full
def test_traced_hooks_behave_the_same_in_fused_steps() -> None:
    plugins = [
        Noise("a"),
        Averaging(),
        plugin("l2", loss_terms=lambda self, module: {"l2": jnp.sum(module.weight**2)}),
    ]
    single, fused, split = (
        engine(
            *plugins, *others, steps=19, steps_per_execution=steps_per_execution, log_every=6
        ).fit(Blurred, regression(80, 4))
        for steps_per_execution, others in (
            (1, []),
            (8, []),
            (8, [Act(fg.Every(5), lambda run: None)]),
        )
    )
    assert_same_bits(fused.state, split.state)
    assert_close(
        (trained(single.state), single.state.plugin_states),
        (trained(fused.state), fused.state.plugin_states),
    )
    for name in single.history:
        np.testing.assert_allclose(single.history[name], fused.history[name], rtol=1e-5)


# --- traced ---------------------------------------------------------------------------------------


class Seeing(Counting):
    """Logs the batch that the step gets."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return (
            super()
            .training_step(batch, ctx)
            .replace(metrics={"seen": jnp.mean(batch)}, preds=batch)
        )


def test_transform_batch_is_folded_in_training_alone() -> None:
    double = plugin("double", transform_batch=lambda self, batch: 2 * batch)
    increment = plugin("increment", transform_batch=lambda self, batch: batch + 1)
    data = numbers([1, 3], [5, 7])
    both = engine(double, increment, steps=2, log_every=1)
    result = both.fit(Seeing, data)
    assert result.history["train/seen"].tolist() == [5, 13]
    assert both.predict(result, data).tolist() == [1, 3, 5, 7]


def test_transform_batch_that_forgets_to_return_is_an_error() -> None:
    with pytest.raises(
        PluginError, match="plugin 'careless', hook transform_batch: return the batch, not None"
    ):
        engine(plugin("careless", transform_batch=lambda self, batch: None), steps=1).fit(
            Counting(), numbers([0])
        )


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_traced_hooks_see_their_own_state_before_the_step(steps_per_execution: int) -> None:
    def terms(self: Any, ctx: fg.Context) -> Any:
        assert ctx.training == (ctx.plugin_state is not None)
        return {self.plugin_name: 1.0 * ctx.plugin_state} if ctx.training else {}

    def batch(self: Any, batch: Any, ctx: fg.Context) -> Any:
        return batch + ctx.plugin_state

    def counting(name: str, start: int) -> Any:
        hooks = {
            "loss_terms": terms,
            "transform_batch": batch,
            "step_metrics": lambda self, ctx: {"own": 1.0 * ctx.plugin_state},
        }
        count = {
            "init_plugin_state": lambda self: jnp.int32(start),
            "after_update": lambda self, module, plugin_state: (module, plugin_state + 1),
        }
        return plugin(name, **hooks, **count)

    class Fed(Counting):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(self.weight * 1.0, metrics={"batch": batch.mean()})

    plugins = [
        counting("low", 0),
        counting("high", 10),
        plugin("none", loss_terms=lambda self, ctx: {"no": float(ctx.plugin_state is None)}),
    ]
    engine = fg.Engine(
        plugins=plugins,
        steps=3,
        log_every=1,
        steps_per_execution=steps_per_execution,
        autoload=False,
    )
    result = engine.fit(Fed, numbers([0.0]))
    assert (
        result.history["train/low"].tolist()
        == result.history["train/low/own"].tolist()
        == [0, 1, 2]
    )
    assert result.history["train/high"].tolist() == [10, 11, 12] and result.history[
        "train/no"
    ].tolist() == [1, 1, 1]
    assert result.history["train/batch"].tolist() == [10, 12, 14]
    assert engine.evaluate(result, numbers([0.0]))["no"] == 1


def test_loss_terms_are_part_of_the_loss() -> None:
    decay = plugin("decay", loss_terms=lambda self, module: {"l2": 0.5 * jnp.sum(module.weight**2)})
    pull = plugin(
        "pull", loss_terms=lambda self, module, output: {"pull": module.weight[0] + 0 * output.loss}
    )
    settings = engine(decay, pull, steps=6, log_every=1)
    result = settings.fit(Linear(), regression(24, 8))
    weight, losses, terms = np.zeros(3), [], []
    for batch in [*regression(24, 8)] * 2:
        x, y = batch["x"].astype(np.float64), batch["y"].astype(np.float64)
        terms.append(0.5 * weight @ weight)
        losses.append(np.mean((x @ weight - y) ** 2) + terms[-1] + weight[0])
        weight = weight - 0.1 * (2 * x.T @ (x @ weight - y) / len(y) + weight + [1, 0, 0])
    np.testing.assert_allclose(result.module.weight, weight, rtol=1e-5)
    np.testing.assert_allclose(result.history["train/loss"], losses, rtol=1e-5)
    np.testing.assert_allclose(result.history["train/l2"], terms, rtol=1e-5)
    evaluated = settings.evaluate(result, regression(24, 8))
    assert evaluated["l2"] == pytest.approx(0.5 * weight @ weight, rel=1e-5)
    assert evaluated["loss"] == pytest.approx(
        evaluated["error"] + evaluated["l2"] + evaluated["pull"], rel=1e-5
    )


def test_a_loss_term_may_be_a_python_number() -> None:
    constant = plugin("constant", loss_terms=lambda self: {"constant": 2.0})
    result = engine(constant, steps=1).fit(Counting(), numbers([0]))
    assert (result.metrics["train"]["loss"], result.metrics["train"]["constant"]) == (2, 2)
    assert float(result.module.weight) == -1


def test_after_update_is_folded_over_the_module() -> None:
    """Each step: minus 1, plus 0.5, times 2."""
    shift = plugin(
        "shift",
        after_update=lambda self, module, plugin_state: (
            jax.tree.map(lambda x: x + 0.5, module),
            plugin_state,
        ),
    )
    double = plugin(
        "double",
        after_update=lambda self, module, plugin_state: (
            jax.tree.map(lambda x: x * 2, module),
            plugin_state,
        ),
    )
    assert float(engine(shift, double, steps=3).fit(Counting(), numbers([0])).module.weight) == -7
    assert (
        float(engine(double, shift, steps=3).fit(Counting(), numbers([0])).module.weight) == -10.5
    )


def test_step_metrics_are_prefixed_with_the_name_of_the_plugin() -> None:
    """The gradient is 1 before the plugins, 3 as the optimizer gets it, and the learning rate 1."""
    scale = plugin("scale", gradient_transform=lambda self: optax.scale(3.0))

    def step_metrics(
        self: Any, output: fg.Output, grads: Any, updates: Any, ctx: fg.Context
    ) -> dict[str, Any]:
        return {
            "gradient": grads.weight,
            "update": fg.metrics.Min.from_values(updates.weight),
            "step": fg.metrics.LastValue.from_values(ctx.step),
            "loss": fg.metrics.Sum.from_values(jnp.asarray(output.loss)),
        }

    result = engine(scale, plugin("norms", step_metrics=step_metrics), steps=4, log_every=2).fit(
        Counting(), numbers([0])
    )
    assert result.history["train/norms/gradient"].tolist() == [3, 3]
    assert result.history["train/norms/update"].tolist() == [-3, -3]
    assert result.history["train/norms/step"].tolist() == [1, 3]
    assert result.history["train/norms/loss"].tolist() == [0 - 3, -6 - 9]


class Share(fg.metrics.Metric):
    """With a number of Python's among its fields, as whoever counts examples writes it."""

    hits: jax.Array
    count: Any

    def merge(self, other: Any) -> Any:
        return type(self)(self.hits + other.hits, self.count + other.count)

    def compute(self) -> Any:
        return self.hits / self.count


class Lost(Share):
    def merge(self, other: Any) -> Any:
        return self.hits + other.hits


class Worded(Share):
    def compute(self) -> Any:
        return "many"


def test_metric_may_hold_python_numbers_and_a_broken_one_is_an_error() -> None:
    def fit(metric: Any) -> fg.FitResult:
        shares = plugin("shares", step_metrics=lambda self: {"hits": metric})
        return fg.Engine(plugins=[shares], steps=3, log_every=3, autoload=False).fit(
            Counting(), numbers([0])
        )

    assert fit(Share(jnp.float32(1), 4)).metrics["train"]["shares/hits"] == 0.25
    with pytest.raises(
        ModelError, match="metric 'shares/hits' became .* when merged: it must stay Lost as it was"
    ):
        fit(Lost(jnp.float32(1), 4))
    with pytest.raises(
        ModelError, match="metric 'shares/hits' computed 'many': compute gives a number"
    ):
        fit(Worded(jnp.float32(1), 4))
    with pytest.raises(
        ModelError, match="metric 'shares/hits' holds 'four': the fields of a metric are arrays"
    ):
        fit(Share(jnp.float32(1), "four"))


def test_step_metrics_do_not_see_the_state_of_another_plugin() -> None:
    observed: list[list[str]] = []
    looking = {
        "init_plugin_state": lambda self: jnp.zeros(1),
        "step_metrics": lambda self, state: observed.append(list(state.plugin_states)),
    }
    engine(plugin("a", **looking), plugin("b", **looking), steps=1).fit(Counting(), numbers([0]))
    assert observed[:2] == [["a"], ["b"]]


def test_step_metrics_see_the_batch_of_the_step() -> None:
    double = plugin("double", transform_batch=lambda self, batch: 2 * batch)
    mean = plugin("mean", step_metrics=lambda self, batch: {"batch": jnp.mean(batch)})
    result = engine(double, mean, steps=2, log_every=1).fit(Counting(), numbers([3], [4]))
    assert result.history["train/mean/batch"].tolist() == [6, 8]


class Echo(Counting):
    """Measures and predicts its batch."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight * 1.0, metrics={"batch": jnp.mean(batch)})

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(metrics={"batch": jnp.mean(batch)})

    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        return batch


def test_around_forward_is_nested_wherever_the_module_runs() -> None:
    """The first plugin is outermost, so the step gets (3 + 1) * 2."""
    keys: list[Any] = []

    def add(self: Any, call: Any, module: Any, batch: Any, ctx: fg.Context) -> Any:
        keys.append(ctx.rng_path[-1][0])
        return call(module, batch + 1)

    def double(self: Any, call: Any, module: Any, batch: Any) -> Any:
        return call(module, 2 * batch)

    run = engine(
        plugin("add", around_forward=add), plugin("double", around_forward=double), steps=1
    )
    data = numbers([3])
    result = run.fit(Echo, data)
    assert result.metrics["train"]["batch"] == 8
    assert run.evaluate(result, data)["batch"] == 8
    assert run.predict(result, data).tolist() == [8]
    assert set(keys) == {"plugin:add"}


def test_a_result_of_around_forward_that_is_no_output_is_an_error() -> None:
    silent = plugin("silent", around_forward=lambda self, call, module, batch: None)
    with pytest.raises(ModelError, match=r"returned NoneType: return fg\.Output"):
        engine(silent, steps=1).fit(Counting(), numbers([0]))


def test_plugins_measure_evaluations() -> None:
    """The mean over the examples of both batches, (1 + 2 + 6) / 3."""

    def evaluation_metrics(self: Any, batch: Any, ctx: fg.Context) -> dict[str, Any]:
        return {"mean": fg.metrics.Mean.from_values(batch, ctx.mask)}

    run = engine(plugin("batches", evaluation_metrics=evaluation_metrics), steps=1)
    data = [np.array([1.0, 2.0], np.float32), np.array([6.0], np.float32)]
    assert run.evaluate(Counting(), data) == {"updates": 0, "batches/mean": 3}


class Weighing(Counting):
    """Its loss is not finite where the batch is not."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight * jnp.mean(batch))


def test_a_plugin_state_that_is_kept_on_skip_sees_skipped_steps() -> None:
    counting = {
        "init_plugin_state": lambda self: jnp.zeros(()),
        "after_update": lambda self, module, plugin_state: (module, plugin_state + 1),
    }
    all_steps = plugin("all_steps", **counting)
    type(all_steps).kept_on_skip = True
    good_steps = plugin("good_steps", **counting)
    data = numbers([1], [float("nan")], [1])
    result = engine(all_steps, good_steps, steps=3, on_nonfinite="skip").fit(Weighing, data)
    states = {name: float(value) for name, value in result.state.plugin_states.items()}
    assert states == {"all_steps": 3, "good_steps": 2}
    assert float(result.module.weight) == -2


# --- events ---------------------------------------------------------------------------------------


def test_on_fit_start_and_on_fit_end_enclose_a_fit() -> None:
    calls: list[Any] = []
    ends: list[fg.FitResult] = []

    def on_fit_end(self: Any, run: fg.Run, result: fg.FitResult) -> None:
        calls.append(("end", run.step, float(run.state.module.weight)))
        ends.append(result)

    def on_fit_start(self: Any, run: fg.Run) -> None:
        calls.append(("start", run.step, run.step_range))

    both = engine(plugin("told", on_fit_start=on_fit_start, on_fit_end=on_fit_end), steps=4)
    first = both.fit(Counting(), numbers([0]))
    second = both.fit(data=numbers([0]), state=first.state, steps=2)
    assert calls == [
        ("start", 0, fg.StepRange(0, 4)),
        ("end", 4, -4.0),
        ("start", 4, fg.StepRange(4, 6)),
        ("end", 6, -6.0),
    ]
    assert [id(result) for result in ends] == [id(first), id(second)]


def test_fit_context_encloses_a_fit_and_what_ends_it() -> None:
    events: list[str] = []

    def make_context(name: str) -> Any:
        @contextmanager
        def fit_context(self: Any, run: fg.Run) -> Iterator[None]:
            events.append(f"enter {name} at {run.step}")
            try:
                yield
            finally:
                events.append(f"leave {name} at {run.step}")

        return fit_context

    def fail(run: fg.Run) -> None:
        raise RuntimeError("on purpose")

    outer = plugin("outer", fit_context=make_context("outer"))
    inner = plugin(
        "inner",
        fit_context=make_context("inner"),
        on_fit_start=lambda self, run: events.append("start"),
        on_fit_end=lambda self, run: events.append("end"),
        on_exception=lambda self, run, exception: events.append("exception"),
    )
    engine(outer, inner, steps=2).fit(Counting(), numbers([0]))
    enters = ["enter outer at 0", "enter inner at 0", "start"]
    assert events == [*enters, "end", "leave inner at 2", "leave outer at 2"]
    events.clear()
    with pytest.raises(RuntimeError, match="on purpose"):
        engine(outer, inner, Act(1, fail), steps=2).fit(Counting(), numbers([0]))
    assert events == [*enters, "exception", "leave inner at 1", "leave outer at 1"]


def test_around_fit_encloses_the_start_of_a_fit_even_if_it_fails() -> None:
    events: list[Any] = []

    @contextmanager
    def around_fit(self: Any, timings: fg.Timings) -> Iterator[None]:
        events.append(("enter", list(timings.active_names), dict(timings.seconds)))
        try:
            yield
        finally:
            events.append(("leave", timings.calls["start"]))

    @contextmanager
    def fit_context(self: Any, run: fg.Run) -> Iterator[None]:
        events.append("open")
        yield
        events.append("close")

    def data() -> Iterator[Any]:
        events.append("read")
        yield from numbers([0], [0])

    outer = plugin("outer", around_fit=around_fit)
    silent = plugin("silent", around_fit=lambda self: None)
    inner = plugin("inner", fit_context=fit_context)
    trained = engine(inner, outer, silent, steps=2)
    trained.fit(Counting(), fg.DataSource(data(), prefetch=0))
    assert events == [("enter", [], {}), "read", "open", "close", ("leave", 1)]
    events.clear()
    with pytest.raises(DataError):
        trained.fit(Counting(), fg.DataSource([], prefetch=0))
    assert events == [("enter", [], {}), ("leave", 1)]


@pytest.mark.parametrize("hook", ["on_fit_end", "fit_context", "around_fit"])
def test_what_fails_after_the_last_step_names_its_plugin_and_hands_the_result_on(hook: str) -> None:
    """An error of a step before stays as it is."""

    def end(self: Any) -> None:
        raise OSError("the disk is gone")

    @contextmanager
    def context(self: Any) -> Iterator[None]:
        yield
        raise OSError("the disk is gone")

    def fail(run: fg.Run) -> None:
        raise RuntimeError("on purpose")

    failing = plugin("failing", **{hook: end if hook == "on_fit_end" else context})
    with pytest.raises(SaveError, match=rf"OSError: the disk is gone.*'failing'.*{hook}") as caught:
        engine(failing, steps=2).fit(Counting(), numbers([0]))
    assert float(caught.value.result.module.weight) == -2
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(RuntimeError, match="on purpose"):
        engine(failing, Act(1, fail), steps=2).fit(Counting(), numbers([0]))


def test_run_directory_that_no_plugin_opens_is_an_error(tmp_path: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"no plugin writes there: install fulgurite-"):
        engine(steps=1, run_dir=tmp_path).fit(Counting(), numbers([0]))


@pytest.mark.parametrize("steps_per_execution", [1, 8])
def test_on_epoch_end_comes_at_the_last_batch(steps_per_execution: int) -> None:
    calls: list[Any] = []
    listener = plugin(
        "told",
        on_epoch_end=lambda self, run, epoch: calls.append(
            (epoch, run.step, run.step_range.epoch_ends)
        ),
    )
    engine(listener, steps=8, steps_per_execution=steps_per_execution).fit(
        Counting(), numbers([0], [0], [0])
    )
    assert calls == [(0, 3, (3,)), (1, 6, (3, 6))]


@dataclass(frozen=True)
class Compilations:
    """Keeps what `on_compile` tells."""

    calls: list[Any] = field(default_factory=list)
    programs: list[str] = field(default_factory=list)

    @fg.hookimpl
    def on_compile(
        self, run: fg.Run | None, name: str, batch_spec: Any, compiled: Any, jaxpr: Any
    ) -> None:
        self.calls.append((run, name, batch_spec, compiled))
        self.programs.append(str(jaxpr))


def test_on_compile_gets_cost_and_memory() -> None:
    listener = Compilations()
    engine(listener, steps=4).fit(Linear(), regression(20, 8))
    shapes = [jax.tree.map(lambda leaf: leaf.shape, spec) for _, _, spec, _ in listener.calls]
    assert shapes == [{"x": (8, 3), "y": (8,)}, {"x": (4, 3), "y": (4,)}]
    for run, name, _, compiled in listener.calls:
        assert isinstance(run, fg.Run) and name == "step"
        assert compiled.cost_analysis()["flops"] > 0
        assert compiled.memory_analysis().argument_size_in_bytes > 0
    for program in listener.programs:
        assert "dot_general" in program


def test_on_compile_has_no_run_outside_of_a_fit() -> None:
    listener = Compilations()
    stepping = engine(listener, steps=2)
    state = stepping.init_state(Counting(), numbers([0]))
    state, _ = stepping.step(state, numbers([0])[0])
    assert [run for run, *_ in listener.calls] == [None]
    stepping.fit(Counting(), numbers([0]), steps_per_execution=2)
    stepping.step(state, numbers([0, 0])[0])
    assert [run is None for run, *_ in listener.calls] == [True, False, True]
