"""Scheduled actions: their order at a step, what they return, what the traced step knows of them,
what they cost."""

import math
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import pytest
from fulgurite.errors import ConfigurationError, ModelError, PluginError, StateError
from models import Act, Counting, Linear, assert_same_bits, numbers, regression, trained

PHASES = ("evaluate", "decide", "log", "act", "save")


def engine(*plugins: Any, **settings: Any) -> fg.Engine:
    return fg.Engine(plugins=plugins, autoload=False, **settings)


@dataclass(frozen=True, eq=False)
class Schedule:
    """A plugin with the actions that it is given."""

    scheduled: list[fg.ScheduledAction]
    instance: str | None = None

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return self.scheduled


@dataclass(frozen=True)
class Noted:
    """Makes actions that note that they ran."""

    ran: list[str] = field(default_factory=list)

    def action(
        self, name: str, trigger: Any = 1, stage: Any = "act", **order: Any
    ) -> fg.ScheduledAction:
        return fg.ScheduledAction(name, trigger, lambda run: self.ran.append(name), stage, **order)


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.hook("register_actions")
def test_actions_run_by_stage_in_a_fixed_order() -> None:
    noted = Noted()
    actions = [noted.action(phase, 2, phase) for phase in reversed(PHASES)]
    engine(Schedule(actions), steps=2, log_every=None).fit(Counting(), numbers([0]))
    assert noted.ran == list(PHASES)


def test_the_window_is_closed_in_the_stage_log() -> None:
    """What `decide` sees is the window before, what `act` sees is that of this step."""
    observed: list[Any] = []

    def look(name: str) -> Any:
        return lambda run: observed.append(
            (name, run.step, run.metrics.get("train", {}).get("weight"))
        )

    actions = [
        fg.ScheduledAction(phase, 2, look(phase), phase) for phase in ("decide", "act", "save")
    ]
    engine(Schedule(actions), steps=4, log_every=2).fit(Counting(), numbers([0]))
    assert observed[0] == ("decide", 2, None)
    assert observed[3] == ("decide", 4, -1.0)
    assert [(name, step) for name, step, _ in observed] == [
        (name, step) for step in (2, 4) for name in ("decide", "act", "save")
    ]


def test_after_and_before_order_within_a_stage() -> None:
    noted = Noted()
    first = [noted.action("a", after=("c",)), noted.action("b")]
    second = [
        noted.action("c"),
        noted.action("d", before=("first.b",)),
        noted.action("e", stage="decide"),
    ]
    engine(named("first", first), named("second", second), steps=1).fit(Counting(), numbers([0]))
    assert noted.ran == ["e", "c", "a", "d", "b"]


def named(name: str, scheduled: list[fg.ScheduledAction]) -> Any:
    return type(name, (Schedule,), {"plugin_name": name})(scheduled)


def test_ties_go_by_the_order_of_plugins() -> None:
    noted = Noted()
    first, second = named("first", [noted.action("x")]), named("second", [noted.action("y")])
    type(first).after = ("second",)
    engine(first, second, steps=1).fit(Counting(), numbers([0]))
    assert noted.ran == ["y", "x"]


def test_a_cycle_of_actions_is_an_error() -> None:
    noted = Noted()
    with pytest.raises(PluginError, match=r"actions cannot be ordered.*schedule\.a.*schedule\.b"):
        engine(Schedule([noted.action("a", after=("b",)), noted.action("b", after=("a",))]))


def test_two_actions_of_one_name_are_an_error() -> None:
    noted = Noted()
    with pytest.raises(PluginError, match=r"two scheduled actions are called 'schedule\.a'"):
        engine(Schedule([noted.action("a"), noted.action("a", 2)]))
    engine(Schedule([noted.action("a")], "left"), Schedule([noted.action("a")], "right"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("a", 1, None, "act"), "an action is called with the run; not None"),
        (("a", 0, print, "act"), "must be a positive integer"),
        (("", 1, print, "act"), "name is ''; it must be a non-empty string"),
        ((None, 1, print, "act"), "name is None; it must be a non-empty string"),
        (("a", 1, "stop"), "an action is called with the run; not 'stop'"),
        (("a", 1, print, "act", "bb"), "after must be a tuple of names, not 'bb'"),
        (("a", 1, print, "act", (), "bb"), "before must be a tuple of names, not 'bb'"),
    ],
)
def test_invalid_action_is_an_error(arguments: Any, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        fg.ScheduledAction(*arguments)


def test_register_actions_returns_actions() -> None:
    class Loose:
        @fg.hookimpl
        def register_actions(self) -> Any:
            return [print]

    with pytest.raises(
        PluginError, match=r"hook register_actions: return a list of ScheduledAction"
    ):
        engine(Loose())


@pytest.mark.parametrize("steps_per_execution", [1, 8])
def test_actions_run_exactly_where_their_triggers_say(steps_per_execution: int) -> None:
    ran: list[tuple[str, int]] = []
    triggers = {
        "every": fg.Every(3),
        "at": fg.At(4, 5),
        "start": fg.AtStart(),
        "end": fg.AtEnd(),
        "epoch": fg.EveryEpoch(2),
        "both": fg.Every(5) | fg.FirstSteps(1),
    }
    actions = [
        fg.ScheduledAction(name, trigger, lambda run, name=name: ran.append((name, run.step)))
        for name, trigger in triggers.items()
    ]
    engine(Schedule(actions), steps=10, steps_per_execution=steps_per_execution).fit(
        Counting(), numbers([0], [0], [0])
    )
    by_name = {name: [step for other, step in ran if other == name] for name in triggers}
    assert by_name == {
        "every": [3, 6, 9],
        "at": [4, 5],
        "start": [0],
        "end": [10],
        "epoch": [6],
        "both": [1, 5, 10],
    }
    assert [step for _, step in ran] == sorted(step for _, step in ran)


# --- what an action returns -----------------------------------------------------------------------


@dataclass(frozen=True)
class CountingTrigger(fg.Trigger):
    """Fires at step 1 and notes when it is asked."""

    requests: list[int] = field(default_factory=list, compare=False)

    def _next_after(self, after: int, step_range: fg.StepRange) -> int | None:
        self.requests.append(after)
        return 1 if after < 1 else None


def test_many_actions_at_one_step_are_not_looked_up_for_one_another() -> None:
    triggers = [CountingTrigger() for _ in range(20)]
    schedule = Schedule(
        [
            fg.ScheduledAction(f"act{place}", trigger, lambda run: None)
            for place, trigger in enumerate(triggers)
        ]
    )
    fg.Engine(steps=1, plugins=[schedule]).fit(Counting(), numbers([0]))
    requests = {len(trigger.requests) for trigger in triggers}
    assert len(requests) == 1 and requests.pop() < 20


@pytest.mark.parametrize("steps_per_execution", [1, 8])
def test_a_stop_makes_this_step_the_end(steps_per_execution: int) -> None:
    """What waits for the end runs at this step, in its phase, and the engine closes its last
    window."""
    noted, steps = Noted(), []
    actions = [
        fg.ScheduledAction("stop", fg.At(5), lambda run: fg.StopTraining("good enough"), "decide"),
        noted.action("end", fg.AtEnd()),
        noted.action("early", fg.AtEnd(), "evaluate"),
        fg.ScheduledAction(
            "save",
            fg.AtEnd(),
            lambda run: steps.append((run.step, run.step_range.stop, run.stop_reason)),
            "save",
        ),
    ]
    result = engine(
        Schedule(actions), steps=100, steps_per_execution=steps_per_execution, log_every=50
    ).fit(Counting(), numbers(*[[0.0]] * 40))
    assert (result.stop_reason, float(result.module.weight)) == ("good enough", -5)
    assert sorted(noted.ran) == ["early", "end"]
    assert steps == [(5, 5, "good enough")]
    assert result.history.steps("train/weight").tolist() == [5]


def test_every_stop_gives_its_reason() -> None:
    stops = [
        Act(2, lambda run, why=why: fg.StopTraining(why), "decide", why)
        for why in ("first", "second")
    ]
    assert engine(*stops, steps=9).fit(Counting(), numbers([0])).stop_reason == "first; second"


@pytest.mark.parametrize("reason", ["", None, 3])
def test_a_stop_has_a_reason(reason: Any) -> None:
    for stops in (lambda run: fg.StopTraining(reason), lambda run: run.request_stop(reason)):
        with pytest.raises(ConfigurationError, match="the reason to stop is"):
            engine(Act(1, stops), steps=2).fit(Counting(), numbers([0]))


def test_a_run_that_reaches_its_end_was_not_stopped() -> None:
    assert engine(steps=3).fit(Counting(), numbers([0])).stop_reason is None


@pytest.mark.parametrize("steps_per_execution", [1, 8])
def test_replaced_state_is_used_and_seen_by_the_next_action(steps_per_execution: int) -> None:
    observed: list[float] = []

    def replace(run: fg.Run) -> fg.ReplaceState:
        state = run.state
        return fg.ReplaceState(
            state.replace(
                module=eqx.tree_at(lambda module: module.weight, state.module, jnp.float32(50))
            )
        )

    look = Act(3, lambda run: observed.append(float(run.state.module.weight)), "save", "look")
    result = engine(
        Act(fg.At(3), replace), look, steps=6, steps_per_execution=steps_per_execution
    ).fit(Counting(), numbers(*[[0.0]] * 9))
    assert observed == [50, 47]
    assert float(result.module.weight) == 47
    assert int(result.state.step) == 6


def test_a_replaced_state_must_fit() -> None:
    def replace(run: fg.Run) -> fg.ReplaceState:
        return fg.ReplaceState(run.state.replace(plugin_states={"act": jnp.zeros(())}))

    with pytest.raises(ModelError, match=r"act\.act.*structure"):
        engine(Act(fg.At(3), replace), steps=6).fit(Counting(), numbers([0]))


@pytest.mark.parametrize("answer", [True, "stop", 0.5, Counting()])
def test_anything_else_that_an_action_returns_is_an_error(answer: Any) -> None:
    with pytest.raises(
        PluginError, match=r"returns None, fg.StopTraining\(reason\) or fg.ReplaceState\(state\)"
    ) as caught:
        engine(Act(fg.At(2), lambda run: answer), steps=3).fit(Counting(), numbers([0]))
    note, _ = caught.value.__notes__
    assert note.startswith("plugin 'act' (") and note.endswith("), action act, step 2")


def test_run_is_valid_only_during_the_call() -> None:
    runs: list[fg.Run] = []
    engine(Act(fg.At(1), runs.append), steps=2).fit(Counting(), numbers([0]))
    with pytest.raises(StateError, match="only during the call"):
        _ = runs[0].state


# --- clocks ---------------------------------------------------------------------------------------

ALWAYS = fg.EverySeconds(1e-9)


@pytest.mark.parametrize("steps_per_execution", [1, 8])
def test_time_driven_actions_run_between_steps(steps_per_execution: int) -> None:
    steps: list[int] = []
    result = engine(
        Act(ALWAYS, lambda run: steps.append(run.step)),
        steps=16,
        steps_per_execution=steps_per_execution,
        log_every=None,
    ).fit(Counting(), numbers(*[[0.0]] * 16))
    assert steps == list(range(steps_per_execution, 17, steps_per_execution))
    assert float(result.module.weight) == -16
    assert result.messages == []


def test_a_clock_that_is_never_due_does_nothing() -> None:
    steps: list[int] = []
    engine(Act(fg.EverySeconds(1e9), lambda run: steps.append(run.step)), steps=9).fit(
        Counting(), numbers([0])
    )
    assert steps == []


@dataclass(frozen=True, eq=False)
class Texts:
    """Keeps the text and scalar records."""

    records: list[fg.Record] = field(default_factory=list)

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind in ("scalars", "text"):
            self.records.append(record)


@pytest.mark.parametrize("trigger", [ALWAYS, fg.FirstStepsAfterStart(1), fg.Every(2) | ALWAYS])
def test_time_driven_windows_are_telemetry_and_the_run_says_so(trigger: fg.Trigger) -> None:
    texts = Texts()
    result = engine(texts, Act(trigger, None, "log"), steps=4, log_every=2).fit(
        Counting(), numbers([0])
    )
    (notice,) = result.messages
    assert "act.act runs by the clock or by process: what it logs is telemetry" in notice
    message = texts.records[0]
    assert (message.kind, message.stream, message.step, message.values) == (
        "text",
        "telemetry",
        0,
        {"message": notice},
    )
    windows = [record for record in texts.records if record.source == "train"]
    assert windows and {record.stream for record in windows} == {"telemetry"}
    assert result.history.names() == []
    assert result.metrics["train"]["weight"] == -3


def test_time_driven_evaluation_is_telemetry_and_the_run_says_so() -> None:
    result = engine(Act(ALWAYS, lambda run: None, "evaluate"), steps=2).fit(
        Counting(), numbers([0])
    )
    assert len(result.messages) == 1 and "act.act" in result.messages[0]
    assert result.history["train/weight"].tolist() == [-1]


# --- ctx.is_due -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watching:
    """Keeps in its slice at which steps the traced step was told that `name` is due."""

    name: str
    instance: str

    @fg.hookimpl
    def init_plugin_state(self) -> Any:
        return jnp.zeros(13, bool)

    @fg.hookimpl
    def after_update(self, module: Any, plugin_state: Any, ctx: fg.Context) -> Any:
        return module, plugin_state.at[ctx.step + 1].set(ctx.is_due(self.name))


@pytest.mark.full
@pytest.mark.parametrize("steps_per_execution", [1, 8])
def test_traced_step_knows_which_actions_are_due(steps_per_execution: int) -> None:
    noted = Noted()
    watching = [
        Watching("log", "log"),
        Watching("schedule.look", "look"),
        Watching("schedule.window", "window"),
    ]
    actions = [
        noted.action("look", fg.At(3, 7)),
        fg.ScheduledAction("window", fg.At(8), None, "log"),
    ]
    result = engine(
        *watching, Schedule(actions), steps=12, steps_per_execution=steps_per_execution, log_every=5
    ).fit(Counting(), numbers(*[[0.0]] * 12))
    due = {
        name.partition(":")[2]: jnp.flatnonzero(plugin_state).tolist()
        for name, plugin_state in result.state.plugin_states.items()
    }
    assert due == {"log": [5, 8, 10, 12], "look": [3, 7], "window": [8]}
    assert noted.ran == ["look", "look"]


def test_is_due_of_an_unscheduled_action_is_an_error() -> None:
    with pytest.raises(
        PluginError, match=r"no scheduled action is called 'act\.atc'. Did you mean 'act\.act'\?"
    ):
        engine(Watching("act.atc", "x"), Act(1, lambda run: None), steps=1).fit(
            Counting(), numbers([0])
        )


@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(8, marks=pytest.mark.full)])
def test_one_executable_whatever_is_due(steps_per_execution: int) -> None:
    """Every kind of traced hook, every phase, three cadences: one compilation, and the same
    bits."""
    states = []
    for cadence in (1, 3, 7):
        compilations = Compilations()
        actions = [fg.ScheduledAction(phase, cadence, lambda run: None, phase) for phase in PHASES]
        plugins = [Everything(), Schedule(actions), compilations]
        states.append(
            engine(*plugins, steps=14, steps_per_execution=steps_per_execution, log_every=cadence)
            .fit(Linear(), regression(64))
            .state
        )
        assert compilations.names == ["step"]
    for state in states[1:]:
        assert_same_bits(trained(state), trained(states[0]))


@dataclass(frozen=True, eq=False)
class Compilations:
    names: list[str] = field(default_factory=list)

    @fg.hookimpl
    def on_compile(self, name: str) -> None:
        self.names.append(name)


class Everything:
    """Has every traced hook, and work that is done only where something is logged."""

    @fg.hookimpl
    def transform_batch(self, batch: Any) -> Any:
        return {**batch, "x": batch["x"] * 1.5}

    @fg.hookimpl
    def loss_terms(self, module: Any) -> dict[str, Any]:
        return {
            "l2": sum(
                jnp.sum(leaf**2)
                for leaf in jax.tree.leaves(eqx.filter(module, eqx.is_inexact_array))
            )
        }

    @fg.hookimpl
    def after_update(self, module: Any, plugin_state: Any) -> Any:
        return (
            jax.tree.map(
                lambda leaf: jnp.clip(leaf, -1, 1) if eqx.is_array(leaf) else leaf, module
            ),
            plugin_state,
        )

    @fg.hookimpl
    def step_metrics(self, grads: Any, ctx: fg.Context) -> dict[str, Any]:
        norm = jax.lax.cond(ctx.is_due("log"), lambda: global_norm(grads), lambda: jnp.float32(0))
        return {"norm": fg.metrics.LastValue.from_values(norm)}


def global_norm(grads: Any) -> Any:
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads)))


# --- accounts -------------------------------------------------------------------------------------


def test_timings_say_where_the_time_went() -> None:
    class Busy:
        @fg.hookimpl
        def on_fit_start(self) -> None:
            sum(range(1000))

        @fg.hookimpl
        def log_record(self, record: fg.Record) -> None:
            if record.kind != "scalars":
                return
            sum(range(1000))

        @fg.hookimpl
        def register_evaluations(self) -> list[fg.Evaluation]:
            return [fg.Evaluation("test", numbers([0]))]

        @fg.hookimpl
        def on_evaluate_end(self) -> None:
            sum(range(1000))

        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [
                fg.ScheduledAction("look", 2, lambda run: None),
                fg.ScheduledAction("test", 4, self.test, "evaluate"),
            ]

        def test(self, run: fg.Run) -> None:
            run.evaluate("test")

    accounts = (
        engine(Busy(), steps=8, log_every=None).fit(Counting(), numbers(*[[0.0]] * 8)).timings
    )
    calls = {
        "start": 1,
        "data": 8,
        "dispatch": 8,
        # The step and the evaluation.
        "compile": 2,
        "busy.on_fit_start": 1,
        "busy.look": 4,
        "busy.test": 2,
        "evaluate.test": 2,
        "busy.on_evaluate_end": 2,
        "busy.log_record": 2,
    }
    assert {name: accounts.calls[name] for name in calls} == calls
    assert accounts.calls["wait"] >= 8
    assert all(accounts.seconds[name] > 0 for name in [*calls, "wait"])
    assert sum(accounts.seconds.values()) <= accounts.total
    assert math.isfinite(accounts.median_step) and accounts.median_step > 0
    assert all(name in repr(accounts) for name in calls)


@pytest.mark.full
@pytest.mark.parametrize(("log_every", "reads"), [(1, False), (None, True)])
def test_waiting_for_the_device_is_timed_separately(
    log_every: int | None, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a record's values, and for a finite state that an action asks for. Each look at the clock
    is a second."""
    monkeypatch.setattr("fulgurite._src.timing.perf_counter", count().__next__)
    waiting = engine(
        Act(1 if reads else 100, lambda run: run.state and None), steps=20, log_every=log_every
    )
    accounts = waiting.fit(Linear, regression()).timings
    assert accounts.seconds["wait"] >= 20
    assert accounts.median_step >= 1


def test_each_fit_has_its_own_timings() -> None:
    both = engine(Act(2, lambda run: None), steps=4)
    first = both.fit(Counting(), numbers([0]))
    second = both.fit(data=numbers([0]), state=first.state, steps=2)
    assert (first.timings.calls["act.act"], second.timings.calls["act.act"]) == (2, 1)
    assert second.timings.calls["compile"] == 0


def test_an_action_runs_with_another_one() -> None:
    """With the log, and with an action of another plugin; the name of none is an error."""
    steps: list[tuple[str, int]] = []

    class Follower:
        def __init__(self, leader: str) -> None:
            self.leader = leader

        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            def note(run: fg.Run) -> None:
                steps.append((self.leader, run.step))

            return [fg.ScheduledAction("note", self.leader, note)]

    class Leader:
        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("lead", fg.At(3), lambda run: None)]

    for leader, plugins in (("log", []), ("leader.lead", [Leader()])):
        engine(Follower(leader), *plugins, steps=4, log_every=2).fit(Counting, numbers([0]))
    assert steps == [("log", 2), ("log", 4), ("leader.lead", 3)]
    with pytest.raises(ConfigurationError, match="'follower.note' runs with the action 'leader.l"):
        engine(Follower("leader.leed"), Leader(), steps=1)
    with pytest.raises(ConfigurationError, match="which only an engine knows"):
        fg.ActionSchedule([fg.ScheduledAction("note", "log", print)])
