"""An instance of a plugin serves one fit at a time, and what it keeps begins with each fit."""

import re
import threading
from dataclasses import dataclass
from typing import Any

import fulgurite as fg
import pytest
from fulgurite.errors import FulguriteError, PluginError, SaveError
from models import Act, Counting, numbers

DATA = numbers([0], [0])


@dataclass(frozen=True)
class Count:
    """Counts the actions of a fit, and asks to stop after `limit` of them."""

    limit: int = 10**9
    steps = fg.PerFit[list[int]](list)

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("count", 10, self.count)]

    def count(self, run: fg.Run) -> fg.StopTraining | None:
        self.steps.append(run.step)
        return fg.StopTraining("counted") if len(self.steps) == self.limit else None


def make_engine(*plugins: Any, steps: int = 50, **settings: Any) -> fg.Engine:
    return fg.Engine(steps=steps, plugins=plugins, autoload=False, log_every=None, **settings)


def fit(*plugins: Any, **settings: Any) -> int:
    """Return the number of updates, which the weight counts downwards."""
    return -int(make_engine(*plugins, **settings).fit(Counting, DATA).module.weight)


def test_an_instance_in_an_inner_fit_is_refused_by_name_and_both_fits_are_named() -> None:
    count = Count(limit=3)

    def fit_within(run: fg.Run) -> None:
        message = (
            f"plugin 'count' (module {__name__}): this instance is in use by the fit of "
            "50 steps (no run_dir, thread 'MainThread'), so the fit of 20 steps (run_dir "
            "'runs/inner', thread 'MainThread') cannot use it at the same time: what it holds "
            "would mix. Give each engine an instance of its own, Count(...)"
        )
        context = fg.LambdaPlugin("context", fit_context=lambda run: None)
        with pytest.raises(PluginError, match=f"^{re.escape(message)}"):
            fit(count, context, steps=20, run_dir="runs/inner")
        assert fit(Count(limit=1), steps=20) == 10

    assert fit(count, Act(20, fit_within)) == 30
    assert count.steps == [10, 20, 30]
    # It is free again.
    assert fit(count, steps=20) == 20
    assert count.steps == [10, 20]


def test_a_per_fit_attribute_needs_a_dictionary_of_attributes() -> None:
    @dataclass(frozen=True, slots=True)
    class Slotted:
        limit: int = 3
        count = fg.PerFit(int)

        @fg.hookimpl
        def on_fit_start(self) -> None: ...

    with pytest.raises(PluginError, match=r"Slotted has an fg\.PerFit, .*slots=True"):
        make_engine(Slotted())

    @dataclass(frozen=True, slots=True)
    class Derived(fg.Plugin):
        count = fg.PerFit(int)

        @fg.hookimpl
        def on_fit_start(self) -> None:
            object.__setattr__(self, "count", self.count + 1)

    derived = Derived()
    assert fit(derived, steps=2) == 2
    assert derived.count == 1


def test_an_instance_in_a_fit_of_another_thread_is_refused() -> None:
    count = Count(limit=3)
    is_running, may_continue = threading.Event(), threading.Event()

    def wait(run: fg.Run) -> None:
        is_running.set()
        assert may_continue.wait(60)

    updates: list[int] = []
    waits = Act(fg.At(15), wait)
    thread = threading.Thread(target=lambda: updates.append(fit(count, waits)), name="first")
    thread.start()
    try:
        assert is_running.wait(60)
        with pytest.raises(PluginError, match=r"'count'.* thread 'first'\), so .*'MainThread'"):
            fit(count)
    finally:
        may_continue.set()
        thread.join()
    assert updates == [30]
    assert count.steps == [10, 20, 30]


@pytest.mark.full
def test_an_engine_in_its_own_fit_evaluates_and_steps_but_does_not_fit() -> None:
    done: list[str] = []
    timings: list[fg.Timings] = []

    def use(run: fg.Run) -> None:
        assert engine.evaluate(Counting(), DATA)["updates"] == 0
        assert len(engine.predict(Counting(), DATA)) == 2
        state, _ = engine.step(engine.init_state(Counting, DATA), DATA[0])
        assert int(state.step) == 1
        with pytest.raises(PluginError, match="^the engine is in use by the fit of 50 steps"):
            engine.fit(Counting, DATA, steps=1)
        done.append("all")
        timings.append(engine.plugins.timings)

    engine = make_engine(Act(20, use))
    result = engine.fit(Counting, DATA)
    assert float(result.module.weight) == -50.0
    assert done == ["all", "all"]
    assert timings[0] is timings[1] is result.timings


def raise_error(run: Any = None) -> None:
    raise ValueError("on purpose")


@pytest.mark.variants("full")
@pytest.mark.parametrize(
    "failing",
    [
        fg.LambdaPlugin(around_fit=lambda: raise_error()),
        fg.LambdaPlugin(fit_context=raise_error),
        fg.LambdaPlugin(on_fit_start=raise_error),
        fg.LambdaPlugin(every={15: raise_error}),
    ],
    ids=["around_fit", "fit_context", "on_fit_start", "action"],
)
def test_however_a_fit_ends_its_instances_are_free_and_begin_anew(failing: Any) -> None:
    count = Count(limit=3)
    count.steps.append(-1)
    with pytest.raises(ValueError, match="on purpose"):
        fit(count, failing)
    count.steps.append(-2)
    assert fit(count) == 30
    assert count.steps == [10, 20, 30]


def test_per_fit_attributes_belong_to_the_instance_and_are_inherited() -> None:
    class More(Count):
        others = fg.PerFit(dict)

    first, second = More(), More()
    first.steps.append(1)
    object.__setattr__(first, "others", {"a": 1})
    assert second.steps == [] and second.others == {}
    assert fit(first, steps=10) == 10
    assert first.steps == [10] and first.others == {}


class FailAtEnd:
    @fg.hookimpl
    def on_fit_end(self) -> None:
        raise OSError("the disk is gone")


@pytest.mark.parametrize("trigger", [fg.At(2), fg.AtEnd()])
def test_what_an_inner_fit_has_trained_is_not_handed_on_as_the_result_of_the_outer_one(
    trigger: fg.Trigger,
) -> None:
    def train(run: fg.Run) -> None:
        inner = fg.Engine(steps=7, plugins=[FailAtEnd()], autoload=False)
        inner.fit(Counting(), numbers([0]))

    # Of the stage `save` are actions after which only ends are left.
    outer = Act(trigger, train, "save")
    engine = fg.Engine(steps=3, plugins=[outer], autoload=False)
    with pytest.raises(
        FulguriteError, match="training has ended at step 7.*disk is gone"
    ) as caught:
        engine.fit(Counting(), numbers([0]))
    cause = caught.value.__cause__
    assert isinstance(cause, SaveError) and float(cause.result.module.weight) == -7
    if isinstance(trigger, fg.AtEnd):
        assert isinstance(caught.value, SaveError)
        assert float(caught.value.result.module.weight) == -3
    else:
        assert isinstance(caught.value, PluginError)
        assert "a fit within this one failed after its last step" in str(caught.value)
