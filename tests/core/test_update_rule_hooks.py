"""Update rules of plugins: one in the place of the core's, and those that wrap another."""

import gc
import weakref
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite.errors import NonFiniteError, PluginError
from hook_plugins import engine, plugin
from models import Act, Counting, Events, numbers


class Adding(fg.UpdateRule):
    """Adds 2 to the weight and counts."""

    def init(self, module: Any) -> Any:
        return jnp.zeros((), int)

    def __call__(self, forward: Any, state: fg.TrainState, batch: Any, ctx: fg.Context) -> Any:
        module = jax.tree.map(lambda weight: weight + 2, state.module)
        return state.replace(module=module, opt_state=state.opt_state + 1), forward(
            state.module, batch, ctx
        )


@pytest.mark.hook("make_update_rule")
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


@pytest.mark.hook("wrap_update_rule")
def test_wrap_update_rule_is_folded_over_the_rule() -> None:
    shy = plugin("shy", wrap_update_rule=lambda self: None)
    wrapped = [scaled("double", 2.0, until=99), shy, scaled("thrice", 3.0, until=99)]
    assert float(engine(*wrapped, steps=4).fit(Counting(), numbers([0])).module.weight) == -24


def test_what_is_not_an_update_rule_is_an_error() -> None:
    with pytest.raises(PluginError, match="wrap_update_rule returns an UpdateRule or None, not 3"):
        engine(plugin("careless", wrap_update_rule=lambda self: 3), steps=1).fit(
            Counting(), numbers([0])
        )


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


class Tenfold(fg.UpdateRuleWrapper):
    """Updates ten times as far, and has nothing but that."""

    def __call__(self, forward: Any, state: fg.TrainState, batch: Any, ctx: fg.Context) -> Any:
        new, output = self.update_rule(forward, state, batch, ctx)
        module = jax.tree.map(
            lambda old, new_leaf: old + 10 * (new_leaf - old), state.module, new.module
        )
        return new.replace(module=module), output


def test_a_wrapper_without_an_init_is_put_around_the_next_rule() -> None:
    tenfold = plugin("tenfold", wrap_update_rule=lambda self, update_rule: Tenfold(update_rule))
    parts = [scaled("double", 2.0, until=3), tenfold, Act(fg.At(3), lambda run: None)]
    result = engine(*parts, steps=5).fit(Counting(), numbers([0]))
    assert float(result.module.weight) == -(20 * 3 + 10 * 2)


def test_a_wrapper_that_cannot_be_put_around_the_next_rule_is_refused_at_the_start() -> None:
    class Manifold(Tenfold):
        def __init__(self, update_rule: fg.UpdateRule, factor: int) -> None:
            super().__init__(update_rule)
            self.factor = factor

    steps: list[int] = []
    manifold = plugin(
        "manifold", wrap_update_rule=lambda self, update_rule: Tenfold(Manifold(update_rule, 3))
    )
    watch = Act(fg.Every(1), lambda run: steps.append(run.step))
    with pytest.raises(PluginError, match=r"Manifold has an __init__ .*rewrap\(") as caught:
        engine(scaled("double", 2.0, until=3), manifold, watch, steps=5).fit(
            Counting(), numbers([0])
        )
    assert any(
        note.startswith("plugin 'manifold'") and "hook wrap_update_rule" in note
        for note in caught.value.__notes__
    )
    assert not steps


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
