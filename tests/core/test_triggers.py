import importlib.util
import json
import math

import pytest
from fulgurite import (
    At,
    AtEnd,
    AtStart,
    EvenlySpaced,
    Every,
    EveryEpoch,
    EverySeconds,
    Exponential,
    FirstSteps,
    FirstStepsAfterStart,
    StepRange,
    Trigger,
)
from fulgurite._src import triggers
from fulgurite._src.triggers import TriggerState
from fulgurite.errors import ConfigurationError
from fulgurite.plugins import Or, as_trigger, is_exact
from hypothesis import given, strategies as st


def collect_steps(
    trigger: Trigger, step_range: StepRange, after: int | None = None, until: int = 10_000
) -> list[int]:
    """The steps that asking again and again gives; a fresh fit unless `after` says where it was
    resumed."""
    steps: list[int] = []
    step = step_range.start - 1 if after is None else after
    while (step := trigger.next(step, step_range)) is not None and step <= until:
        steps.append(step)
    return steps


def simulate(
    trigger: Trigger,
    step_range: StepRange,
    begin: int | None = None,
    step_time: float = 1.0,
    action_time: float = 0.0,
) -> list[tuple[int, float]]:
    """(step, time) of each action in a loop whose clock starts at 0, asked at every step
    boundary."""
    now, steps = 0.0, []
    begin = step_range.start if begin is None else begin
    armed = TriggerState(trigger, begin, now)
    assert step_range.stop is not None
    for step in range(begin + 1, step_range.stop + 1):
        now += step_time
        if armed.is_due(step, step_range, now):
            steps.append((step, now))
            now += action_time
            armed.mark_done(step, now)
    return steps


def test_every_counts_absolute_steps() -> None:
    assert collect_steps(Every(20), StepRange(0, 110), after=50) == [60, 80, 100]
    assert collect_steps(Every(20), StepRange(50, 110)) == [60, 80, 100]


def test_evenly_spaced_keeps_its_steps_after_a_resume() -> None:
    assert collect_steps(EvenlySpaced(5), StepRange(0, 103)) == [21, 42, 62, 83, 103]
    assert collect_steps(EvenlySpaced(5), StepRange(0, 103), after=50) == [62, 83, 103]


def test_evenly_spaced_in_short_ranges_and_in_a_second_fit() -> None:
    assert collect_steps(EvenlySpaced(1000), StepRange(0, 100)) == list(range(1, 101))
    assert collect_steps(EvenlySpaced(1), StepRange(0, 50)) == [50]
    assert collect_steps(EvenlySpaced(5), StepRange(103, 206)) == [124, 145, 165, 186, 206]


def test_evenly_spaced_doubles_until_the_end_is_known() -> None:
    assert collect_steps(EvenlySpaced(5), StepRange(0), until=1100) == [128, 256, 512, 1024]
    assert collect_steps(EvenlySpaced(5), StepRange(1000), until=2100) == [1128, 1256, 1512, 2024]
    assert EvenlySpaced(3).next(300, StepRange(0, 300)) is None
    assert collect_steps(EvenlySpaced(3), StepRange(0, 900), after=256) == [300, 600, 900]


def test_exponential_fires_at_powers() -> None:
    assert collect_steps(Exponential(100, 1.2), StepRange(0, 2000)) == [
        100,
        220,
        364,
        537,
        745,
        995,
        1295,
        1655,
    ]


def test_exponential_keeps_its_grid() -> None:
    expected = [1295, 1655, 2087, 2605]
    assert (
        collect_steps(Exponential(start=100, factor=1.2), StepRange(0, 3000), after=1000)
        == expected
    )
    assert collect_steps(Exponential(100, 1.2), StepRange(1000, 3000)) == expected


def test_exponential_intervals_grow_by_one_at_least_and_round_half_up() -> None:
    # gaps 1, 2, 3, …: a factor of 1.2 would leave a gap of 1 where it is
    assert collect_steps(Exponential(1, 1.2), StepRange(0, 21)) == [1, 3, 6, 10, 15, 21]
    # gaps 5, 7.5 -> 8, 12, 18: half to even would give 8 as well, but 3 · 1.5 = 4.5 -> 5 tells them
    # apart
    assert collect_steps(Exponential(3, 1.5), StepRange(0, 30)) == [3, 8, 16, 28]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Exponential(0, 1.2),
        lambda: Exponential(100, 1),
        lambda: Exponential(100, 0.5),
        lambda: Exponential(100, math.nan),
        lambda: Exponential(100, math.inf),
        lambda: Every(0),
        lambda: Every(-1),
        lambda: Every(True),
        lambda: EvenlySpaced(0),
        lambda: EvenlySpaced(False),
        lambda: FirstSteps(0),
        lambda: FirstStepsAfterStart(0),
        lambda: EveryEpoch(0),
        lambda: At(),
        lambda: At(3, 0),
        lambda: EverySeconds(0),
        lambda: EverySeconds(-1),
        lambda: EverySeconds(math.inf),
        lambda: EverySeconds(True),
        lambda: as_trigger(0),
    ],
)
def test_bad_arguments_are_errors_at_construction(make) -> None:
    with pytest.raises(ConfigurationError, match=r"must be|give at least one"):
        make()


def test_wrong_types_are_configuration_errors() -> None:
    # under another name, the import hook that checks annotations in the tests leaves the module as
    # users have it
    spec = importlib.util.spec_from_file_location("unchecked_triggers", triggers.__file__)
    assert spec is not None and spec.loader is not None
    unchecked = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unchecked)
    for name, arguments in [
        ("Every", (2.0,)),
        ("Every", ("2",)),
        ("EvenlySpaced", (None,)),
        ("Exponential", (1.5, 2)),
        ("Exponential", (1, "2")),
        ("EverySeconds", ("10",)),
        ("as_trigger", ("10",)),
    ]:
        with pytest.raises(ConfigurationError, match="must be a positive"):
            getattr(unchecked, name)(*arguments)


def test_first_steps_and_first_steps_after_start() -> None:
    assert collect_steps(FirstSteps(5), StepRange(0, 200)) == [1, 2, 3, 4, 5]
    assert collect_steps(FirstSteps(5), StepRange(0, 200), after=100) == []
    assert [
        step for step, _ in simulate(FirstStepsAfterStart(5), StepRange(0, 200), begin=100)
    ] == [
        101,
        102,
        103,
        104,
        105,
    ]
    assert [step for step, _ in simulate(FirstStepsAfterStart(5), StepRange(0, 200))] == [
        1,
        2,
        3,
        4,
        5,
    ]

    armed = TriggerState(FirstStepsAfterStart(2) | At(150), 100, 0.0)
    step_range = StepRange(0, 200)
    assert [armed.next_step(after, step_range) for after in (99, 100, 101, 102, 150)] == [
        101,
        101,
        102,
        150,
        None,
    ]


def test_the_clock_restarts_when_the_action_has_ended() -> None:
    assert simulate(EverySeconds(10), StepRange(0, 40)) == [(10, 10), (20, 20), (30, 30), (40, 40)]
    # 10 s after the action of 10 … 15 is 25, when step 20 ends; that action ends at 30
    assert simulate(EverySeconds(10), StepRange(0, 40), action_time=5.0) == [
        (10, 10),
        (20, 25),
        (30, 40),
        (40, 55),
    ]


@pytest.mark.parametrize("trigger", [Every(4) | EverySeconds(10), EverySeconds(10) | Every(4)])
def test_each_part_keeps_its_own_clock(trigger: Trigger) -> None:
    steps = [step for step, _ in simulate(trigger, StepRange(0, 40))]
    assert steps == [4, 8, 10, 12, 16, 20, 24, 28, 30, 32, 36, 40]


def test_at_start_fires_only_in_a_new_fit() -> None:
    step_range = StepRange(50, 60)
    assert collect_steps(AtStart() | Every(4), step_range) == [50, 52, 56, 60]
    assert collect_steps(AtStart() | Every(4), step_range, after=50) == [52, 56, 60]
    armed = TriggerState(AtStart(), 50, 0.0)
    assert armed.next_step(49, step_range) == 50
    assert armed.is_due(50, step_range, 0.0)
    assert not armed.is_due(51, step_range, 1.0)


def test_at_end_follows_the_stop_of_the_range() -> None:
    assert AtEnd().next(5, StepRange(0)) is None
    assert AtEnd().next(5, StepRange(0, 9)) == 9
    assert AtEnd().next(9, StepRange(0, 9)) is None
    assert AtEnd().next(-1, StepRange(0, 0)) is None
    # stopped at 7 by a plugin: the loop asks with the step range that now ends there
    assert TriggerState(AtEnd(), 0, 0.0).is_due(7, StepRange(0, 7), 0.0)


def test_every_epoch_counts_the_known_ends_from_the_first() -> None:
    step_range = StepRange(0, 50, (10, 22, 30, 40, 50))
    assert collect_steps(EveryEpoch(), step_range) == [10, 22, 30, 40, 50]
    assert collect_steps(EveryEpoch(2), step_range) == [22, 40]
    assert collect_steps(EveryEpoch(2), step_range, after=22) == [40]
    assert collect_steps(EveryEpoch(2), step_range, after=23) == [40]
    assert EveryEpoch().next(50, StepRange(0, None, (10, 50))) is None


def test_at_sorts_its_steps() -> None:
    assert collect_steps(At(9, 3, 9), StepRange(0, 10)) == [3, 9]
    assert repr(At(9, 3, 9)) == "At(3, 9)"
    assert At(1, 2) == At(2, 1)


def test_step_range_survives_json() -> None:
    for step_range in (StepRange(3, None), StepRange(0, 30, (10, 20, 30))):
        assert StepRange.from_json(json.loads(json.dumps(step_range.to_json()))) == step_range


def test_or_flattens_and_shows_its_parts() -> None:
    trigger = (Every(4) | EverySeconds(10)) | (At(1) | Or((AtEnd(), AtStart())))
    assert trigger.parts == (Every(4), EverySeconds(10), At(1), AtEnd(), AtStart())
    assert repr(Every(4) | At(1)) == "Every(n=4) | At(1)"
    assert as_trigger(7) == Every(7)
    assert as_trigger(trigger) is trigger


@pytest.mark.parametrize("step", [3, 2, 3.5, "4"])
def test_a_rule_that_returns_no_later_step_is_an_error(step) -> None:
    class Stuck(Trigger):
        def _next_after(self, after: int, step_range: StepRange) -> int:
            return step

    with pytest.raises(
        ConfigurationError, match="as the next step after 3; return a later one or None"
    ):
        Stuck().next(3, StepRange(0, 9))


def test_a_rule_that_depends_on_its_argument_is_an_error() -> None:
    class Later(Trigger):
        def _next_after(self, after: int, step_range: StepRange) -> int:
            return after + 3

    with pytest.raises(
        ConfigurationError,
        match="returned 6 as the next step after 3, and 8 as that after 5; give the",
    ):
        Later().next(3, StepRange(0, 9))


def test_triggers_on_clocks_and_processes_are_not_exact() -> None:
    assert is_exact(Every(4) | At(1) | AtStart() | EvenlySpaced(3))
    assert not is_exact(Every(4) | EverySeconds(10))
    assert not is_exact(FirstStepsAfterStart(3))


def test_the_loop_knows_the_earliest_deadline() -> None:
    step_range = StepRange(0, 100)
    armed = TriggerState(EverySeconds(10) | EverySeconds(4) | Every(50), 0, now=100.0)
    assert armed.deadline() == 104
    assert not armed.is_due(1, step_range, 103.9)
    assert armed.is_due(2, step_range, 104.0)
    armed.mark_done(2, 105.0)
    assert armed.deadline() == 109
    assert armed.is_due(3, step_range, 110.0)  # both clocks
    armed.mark_done(3, 111.0)
    assert armed.deadline() == 115
    assert armed.is_due(50, step_range, 112.0)  # the step rule alone: no clock restarts
    armed.mark_done(50, 113.0)
    assert armed.deadline() == 115

    steps_alone = TriggerState(Every(4), 0, 0.0)
    assert steps_alone.deadline() is None


def test_a_clock_waits_for_the_first_update() -> None:
    armed = TriggerState(EverySeconds(1), 20, now=0.0)
    assert not armed.is_due(20, StepRange(20, 30), 5.0)
    assert armed.is_due(21, StepRange(20, 30), 5.0)


counts = st.integers(1, 300)
any_trigger = st.one_of(
    counts.map(Every),
    counts.map(EvenlySpaced),
    counts.map(FirstSteps),
    counts.map(EveryEpoch),
    counts.map(FirstStepsAfterStart),
    st.lists(st.integers(1, 1000), min_size=1, max_size=5).map(lambda steps: At(*steps)),
    st.builds(Exponential, counts, st.floats(1.01, 4)),
    st.just(AtStart()),
    st.just(AtEnd()),
    st.floats(0.5, 100).map(EverySeconds),
)


origins = st.integers(0, 500)
lengths = st.none() | st.integers(0, 500)
epochs = st.lists(st.integers(1, 100), max_size=6)


def build_range(origin: int, length: int | None, epochs: list[int]) -> StepRange:
    ends = tuple(origin + sum(epochs[: count + 1]) for count in range(len(epochs)))
    return StepRange(origin, None if length is None else origin + length, ends)


@given(any_trigger, origins, lengths, epochs, st.integers(-1, 1000))
def test_next_is_pure_and_returns_a_later_step_within_the_range(
    trigger: Trigger, origin: int, length: int | None, epochs: list[int], after: int
) -> None:
    step_range = build_range(origin, length, epochs)
    step = trigger.next(after, step_range)
    assert trigger.next(after, step_range) == step
    if step is not None:
        assert step > after
        assert step >= origin if isinstance(trigger, AtStart) else step > origin
        assert step_range.stop is None or step <= step_range.stop
        # it is the first: asking from any place before it gives the same
        assert {
            trigger.next(between, step_range) for between in range(max(after, step - 50), step)
        } == {step}


@given(
    st.lists(any_trigger, min_size=1, max_size=4), origins, st.integers(0, 300), epochs, st.data()
)
def test_or_does_not_depend_on_order_or_grouping(
    parts: list[Trigger], origin: int, length: int, epochs: list[int], data: st.DataObject
) -> None:
    step_range = build_range(origin, length, epochs)
    first, *others = data.draw(st.permutations(parts))
    nested = first
    for part in others:
        nested = part | nested
    assert collect_steps(Or(parts), step_range) == collect_steps(nested, step_range)
    assert collect_steps(nested, step_range) == sorted(
        {step for part in parts for step in collect_steps(part, step_range)}
    )
    assert simulate(Or(parts), step_range) == simulate(nested, step_range)


@given(st.integers(1, 400), st.integers(0, 1000), st.integers(1, 400))
def test_evenly_spaced_gives_n_steps_and_the_end(n: int, origin: int, length: int) -> None:
    steps = collect_steps(EvenlySpaced(n), StepRange(origin, origin + length))
    assert len(steps) == min(n, length)
    assert steps[-1] == origin + length
    gaps = [after - before for before, after in zip([origin, *steps], steps, strict=False)]
    assert max(gaps) - min(gaps) <= 1


def test_an_answer_of_a_trigger_holds_until_its_step_and_for_its_fit():
    """A thousand actions are not asked again at each step; another end of the fit asks again."""
    questions: list[int] = []

    class Tenth(Trigger):
        def _next_after(self, after: int, step_range: StepRange) -> int | None:
            questions.append(after)
            step = after - after % 10 + 10
            return step if step_range.stop is None or step <= step_range.stop else None

    state = TriggerState(Tenth(), 0, 0.0)
    fit = StepRange(0, 100)
    assert [state.next_step(step, fit) for step in range(10)] == [10] * 10
    assert len(questions) == 2  # each answer is asked for twice, to see that the rule is fixed
    assert state.is_due(10, fit, 0.0)
    assert state.next_step(10, fit) == 20
    assert state.next_step(4, fit) == 10
    assert state.next_step(4, StepRange(0, 8)) is None
    assert state.next_step(4, fit) == 10
