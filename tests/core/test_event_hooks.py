"""Events of a fit, contexts around it, and what happens where one of them fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import fulgurite as fg
import jax
import pytest
from fulgurite.errors import ConfigurationError, DataError, SaveError
from hook_plugins import engine, plugin
from models import Act, Counting, Linear, numbers, regression


@pytest.mark.hook("on_fit_start", "on_fit_end")
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


@pytest.mark.hook("fit_context")
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


@pytest.mark.hook("around_fit")
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


@pytest.mark.variants("full")
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


@pytest.mark.hook("on_epoch_end")
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


def test_actions_are_ordered_around_on_epoch_end() -> None:
    calls: list[str] = []
    actions = [
        fg.ScheduledAction(
            "later", fg.EveryEpoch(), lambda run: calls.append("later"), after=("epoch_end",)
        ),
        fg.ScheduledAction("earlier", "epoch_end", lambda run: calls.append("earlier")),
    ]
    listener = plugin(
        "told",
        register_actions=lambda self: actions,
        on_epoch_end=lambda self: calls.append("epoch end"),
    )
    engine(listener, epochs=2).fit(Counting(), numbers([0], [0]))
    assert calls == 2 * ["earlier", "epoch end", "later"]


@pytest.mark.hook("on_replace_state")
def test_on_replace_state_comes_with_the_new_state() -> None:
    calls: list[Any] = []

    def double(run: fg.Run) -> fg.ReplaceState:
        state = run.state
        return fg.ReplaceState(state.replace(module=jax.tree.map(lambda x: 2 * x, state.module)))

    listener = plugin(
        "told",
        register_actions=lambda self: [
            fg.ScheduledAction("nothing", 1, lambda run: None),
            fg.ScheduledAction("double", fg.At(3), double),
        ],
        on_replace_state=lambda self, run: calls.append((run.step, float(run.state.module.weight))),
    )
    result = engine(listener, steps=4).fit(Counting(), numbers([0]))
    # One is taken away at each step, from 0.
    assert calls == [(3, -6.0)]
    assert float(result.module.weight) == -7.0


def test_an_action_may_come_before_or_after_all_others_of_its_stage() -> None:
    calls: list[str] = []

    def schedule(name: str, **order: Any) -> fg.ScheduledAction:
        return fg.ScheduledAction(name, fg.At(1), lambda run: calls.append(name), **order)

    plugins = [
        plugin("a", register_actions=lambda self: [schedule("last", after=("*",))]),
        plugin("b", register_actions=lambda self: [schedule("second"), schedule("third")]),
        plugin("c", register_actions=lambda self: [schedule("first", before=("*",))]),
    ]
    engine(*plugins, steps=1).fit(Counting(), numbers([0]))
    assert calls == ["first", "second", "third", "last"]


@dataclass(frozen=True)
class Compilations:
    """Keeps what `on_compile` tells."""

    calls: list[Any] = field(default_factory=list)
    programs: list[str] = field(default_factory=list)

    @fg.hookimpl
    def on_compile(
        self,
        run: fg.Run | None,
        name: str,
        batch_spec: Any,
        compiled: Any,
        jaxpr: Any,
        lowered: Any,
    ) -> None:
        self.calls.append((run, name, batch_spec, compiled))
        assert "stablehlo.dot_general" in lowered.as_text()
        self.programs.append(str(jaxpr))


@pytest.mark.hook("on_compile")
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


@pytest.mark.full
def test_on_compile_has_no_run_outside_of_a_fit() -> None:
    listener = Compilations()
    stepping = engine(listener, steps=2)
    state = stepping.init_state(Counting(), numbers([0]))
    state, _ = stepping.step(state, numbers([0])[0])
    assert [run for run, *_ in listener.calls] == [None]
    stepping.fit(Counting(), numbers([0]), steps_per_execution=2)
    stepping.step(state, numbers([0, 0])[0])
    assert [run is None for run, *_ in listener.calls] == [True, False, True]
